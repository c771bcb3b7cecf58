"""When a state is saved that is due every so many seconds, whoever comes and goes meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.communication.group import Group
from lockstep.record.events.union import tell_nobody
from lockstep.spec.loading import load_spec
from lockstep.training.checkpoints import Checkpoints
from lockstep.training.driver_requests import NoRequests
from lockstep.training.run import Run
from lockstep.training.state import Counters


@pytest.fixture
def clock() -> Iterator[SimpleNamespace]:
    now = SimpleNamespace(s=0.0)
    with mock.patch("time.monotonic", lambda: now.s):
        yield now


def run(storage: Path) -> Run:
    spec = load_spec(
        {"job": {"use": "a:B"}, "checkpoint": {"every": {"seconds": 300}, "storage": str(storage)}}
    )
    step: Any = SimpleNamespace(digests=SimpleNamespace(for_checkpoint=dict))
    state: Any = SimpleNamespace(counters=Counters(step=1))
    nothing: Any = None
    group = Group(0, 1, torch.device("cpu"))
    return Run(spec, nothing, nothing, group, state, step, None, nothing, {}, None, nothing, nothing)


def of(run: Run) -> Checkpoints:
    return run.checkpoints(tell_nobody, NoRequests(), AttemptOrigin())


def test_a_group_that_forms_anew_puts_no_save_off(clock: Any, tmp_path: Path) -> None:
    before = run(tmp_path)
    clock.s = 200.0
    assert not of(before).wanted()
    after = of(replace(before, group=Group(0, 1, torch.device("cpu"))))
    assert not after.wanted()
    clock.s = 310.0
    assert after.wanted()


@pytest.mark.parametrize("done", [True, False])
def test_a_save_that_is_given_up_does_not_count(clock: Any, tmp_path: Path, done: bool) -> None:
    before = run(tmp_path)
    clock.s = 310.0
    saving = of(before)
    saver: Any = mock.Mock(failure=None, wait=mock.Mock(return_value=done))
    with (
        mock.patch.object(Checkpoints, "_open", return_value=saver),
        mock.patch("lockstep.training.checkpoints.check_facts", side_effect=InterruptedError),
        pytest.raises(InterruptedError),
    ):
        saving.save()
    saving.leave()
    assert of(before).wanted() is not done


@pytest.mark.parametrize(("fork", "saves"), [(None, True), (True, True), (False, False)])
def test_a_resumed_run_has_the_checkpoint_that_it_starts_from(
    tmp_path: Path, fork: bool | None, saves: bool
) -> None:
    """It does not save that state again. A fork has none of its own yet."""
    checkpoint = SimpleNamespace(checkpoint=SimpleNamespace(shown="there"))
    start: Any = None if fork is None else SimpleNamespace(fork=fork, loaded=checkpoint)
    checkpoints = of(replace(run(tmp_path), start=start))
    assert checkpoints.newest == (None if saves else "there")
    with mock.patch.object(Checkpoints, "_open", return_value=None) as opened:
        checkpoints.save()
    assert opened.called is saves
