"""`--run NAME`: one command begins a run and later goes on with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep import train
from lockstep.calls import problems
from lockstep.calls.named_runs import train_named
from lockstep.checkpoint import problems as checkpoint_problems
from lockstep.checkpoint.runs.lease import leased
from lockstep.checkpoint.runs.names import give_name, run_of_name
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.driver.options import RunOptions
from lockstep.driver.result import Result
from lockstep.errors import SpecError
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec
from tests.raised import raises

OPTIONS = RunOptions(local=True, began_at=1.0)


def spec(folder: Path, **changes: Any) -> Spec:
    base = {
        "job": {"use": "jobs.digits.job:Digits", "params": {"width": 8}},
        "length": {"steps": 12},
        "batch": {"global": 128, "micro": 32},
        "checkpoint": {"storage": str(folder), "every": {"steps": 4}},
        "record": {"uri": "off"},
    }
    return load_spec({**base, **changes})


def named(folder: Path, name: str = "night", **changes: Any) -> Result:
    return train_named(OPTIONS, spec(folder, **changes), name)


@pytest.mark.scenario
def test_a_run_that_broke_is_resumed_under_its_name_with_the_bits_of_one_that_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jobs.digits.job import Digits

    loss, calls = Digits.loss, [0]

    def breaks(self: Digits, model: Any, batch: Any) -> Any:
        calls[0] += 1
        if calls[0] > 4 * 9 + 1:
            raise RuntimeError("the first try ends here")
        return loss(self, model, batch)

    monkeypatch.setattr(Digits, "loss", breaks)
    with pytest.raises(Exception, match="the first try ends here"):
        named(tmp_path / "a")
    monkeypatch.setattr(Digits, "loss", loss)
    run_id = run_of_name(open_storage(str(tmp_path / "a")), "night")
    second = named(tmp_path / "a")
    assert (second.run_id, second.attempts) == (run_id, 2)
    whole = train(spec(tmp_path / "b"), local=True)
    assert second.weights_digest == whole.weights_digest
    other = train(spec(tmp_path / "b", seed=1), local=True)
    assert other.weights_digest != whole.weights_digest


@pytest.mark.scenario
def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    first, second = named(tmp_path), named(tmp_path)
    assert (first.run_id, first.weights_digest) == (second.run_id, second.weights_digest)
    assert second.attempts == 1


@pytest.mark.scenario
def test_another_name_is_another_run_and_another_spec_is_refused(tmp_path: Path) -> None:
    first, other = named(tmp_path), named(tmp_path, "day")
    assert first.run_id != other.run_id
    with raises(problems.FIELD_CHANGED, field="seed", wanted=0):
        named(tmp_path, seed=3)
    with (
        leased(open_storage(str(tmp_path)), first.run_id, "the run") as hold,
        raises(problems.FIELD_CHANGED, field="seed", wanted=0),
    ):
        train_named(OPTIONS, spec(tmp_path, seed=3), "night", takeover=True)
    assert hold.taker is None, "who cannot go on with a run does not end it"


def test_a_name_is_given_once(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    assert run_of_name(storage, "night") is None
    give_name(storage, "night", "a" * 32)
    with pytest.raises(SpecError, match="which another command began"):
        give_name(storage, "night", "b" * 32)
    assert run_of_name(storage, "night") == "a" * 32


@pytest.mark.parametrize("name", ["", "../up", "a/b", "-x", "x" * 101])
def test_a_name_is_one_word(tmp_path: Path, name: str) -> None:
    with raises(problems.RUN_NAME):
        named(tmp_path, name)


def test_a_name_is_given_twice_to_one_run_and_once_to_another(tmp_path: Path) -> None:
    """An attempt whose answer was lost gives the name again."""
    storage = open_storage(str(tmp_path))
    give_name(storage, "night", "run-a")
    give_name(storage, "night", "run-a")
    with raises(checkpoint_problems.NAME_TAKEN, name="night", owner="run-a"):
        give_name(storage, "night", "run-b")
    assert run_of_name(storage, "night") == "run-a"
    storage.put("named-night/run_id", b"")
    with raises(checkpoint_problems.NAME_FILE, name="night", file=tmp_path / "named-night" / "run_id"):
        run_of_name(storage, "night")
