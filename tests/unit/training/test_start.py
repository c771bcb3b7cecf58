"""What is read from a checkpoint is compared between the ranks before they train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.communication.group import Group
from lockstep.job.loading import load_job
from lockstep.record.events.union import tell_nobody
from lockstep.spec.loading import load_spec
from lockstep.training import problems
from lockstep.training.loop import surroundings
from lockstep.training.setup import prepare
from lockstep.training.start import find_start, restore_on_every_rank
from tests.distributed.training import train_attempt
from tests.raised import raises

ALONE = Group(0, 1, torch.device("cpu"))


class Two(Group):
    """A group in which the other rank has restored `store`, or the same as this one."""

    __slots__ = ()

    def gather(self, value: Any) -> list[Any]:
        return [value, self.store or value]


@pytest.mark.parametrize("other", ["", "another state"])
def test_ranks_that_restore_different_states_do_not_train(tmp_path: Path, other: str) -> None:
    """G1. The control: two that hold the same."""
    document = {
        "job": {"use": "tests.distributed.small_jobs:Plain", "params": {"samples": 16}},
        "batch": {"global": 8, "micro": 4},
        "length": {"steps": 3},
        "rehearsal": "off",
        "record": {"uri": "off"},
        "checkpoint": {"storage": str(tmp_path), "every": {"steps": 2}, "keep_last": 9},
    }
    train_attempt(document, "run", AttemptOrigin())
    spec = load_spec(document)
    start = find_start(spec, ALONE, AttemptOrigin("run", 2, 2), pytest.fail)
    assert start is not None
    with surroundings(spec):
        run = prepare(spec, load_job(spec.job.use, spec.job.params), ALONE, tell_nobody)
        group: Any = Two(0, 2, ALONE.device, store=other)
        restore = (start, spec, run.plan, run.state, group, None, pytest.fail)
        if other:
            with raises(problems.RESTORED_OTHERWISE, step=2, ranks=[1]):
                restore_on_every_rank(*restore)
        else:
            assert restore_on_every_rank(*restore).reached == run.state.counters.step == 2
