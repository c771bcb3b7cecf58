"""What a trial leaves to the next one in the same processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from lockstep.spec.loading import load_spec
from lockstep.sweeps import trial as trial_module
from lockstep.sweeps.trial import Training, Trial


def raising(error: Exception) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise error

    return call


class Next(Trial):
    """A trial whose training has ended, with peers that are names."""

    def __init__(self, *, all_there: bool) -> None:
        self._training: Any = SimpleNamespace(leave=lambda: all_there)
        self._peers, self.ended = ["first"], list[str]()
        self._sweep, self._folder, self._source = SimpleNamespace(base=None), "", None

    def _end_peers(self) -> None:
        self.ended = self._peers


@pytest.mark.parametrize("all_there", [True, False])
def test_the_peers_of_a_trial_take_the_next_one_unless_one_of_them_was_lost(
    all_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_module, "start_peers", lambda *_: ["second"])
    trial = Next(all_there=all_there)
    assert trial.reset_config({"trial": 7})
    assert (trial._peers, trial.ended) == ((["first"], []) if all_there else (["second"], ["first"]))
    assert trial._config == {"trial": 7} and trial._training is None


def test_a_trial_without_other_ranks_leaves_all_there(tmp_path: Path) -> None:
    """Also where it has failed before it began: here nobody answers for its recorder."""
    spec = load_spec(
        {
            "job": {"use": "jobs.digits.job:Digits"},
            "length": {"steps": 1},
            "checkpoint": {"storage": str(tmp_path)},
        }
    )
    calls = {
        "begun": raising(ValueError("no answer")),
        "run_id": raising(ray.exceptions.RayError()),
        "end_trial": lambda *_: None,
    }
    nobody = SimpleNamespace(**{name: SimpleNamespace(remote=call) for name, call in calls.items()})
    training = Training(spec, 1, "sweep", nobody, [], tmp_path, None, may_reuse=False)
    assert training.next_result()["status"] == "failed"
    assert training.leave() is True
