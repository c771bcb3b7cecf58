"""What is read from a checkpoint is compared between the ranks before they train on."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.reader import SMALL_TENSOR
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
WIDE = {"width": SMALL_TENSOR // 8}
"""With a tensor that is left in its file where ranks take only their rows."""


class Two(Group):
    """A group in which the other rank has restored `store`, or the same as this one."""

    __slots__ = ()

    def gather(self, value: Any) -> list[Any]:
        return [value, self.store or value]


def restored(storage: Path, group: Any, **changed: Any) -> None:
    """Take up a run of one worker after two steps, as one of `group`."""
    document = {
        "job": {"use": "tests.distributed.small_jobs:Plain", "params": {"samples": 16, **WIDE}},
        "batch": {"global": 8, "micro": 4},
        "length": {"steps": 3},
        "rehearsal": "off",
        "record": {"uri": "off"},
        "checkpoint": {"storage": str(storage), "every": {"steps": 2}, "keep_last": 9},
        **changed,
    }
    train_attempt(document, "run", AttemptOrigin())
    spec = load_spec(document)
    start = find_start(spec, ALONE, AttemptOrigin("run", 2, 2), pytest.fail)
    assert start is not None
    with surroundings(spec):
        run = prepare(spec, load_job(spec.job.use, spec.job.params), ALONE, tell_nobody)
        history = restore_on_every_rank(start, spec, run.plan, run.state, group, None, pytest.fail)
    assert history.reached == run.state.counters.step == 2


@pytest.mark.parametrize("other", ["", "another state"])
def test_ranks_that_restore_different_states_do_not_train(tmp_path: Path, other: str) -> None:
    """G1. The control: two that hold the same."""
    differ = raises(problems.RESTORED_OTHERWISE, step=2, ranks=[1]) if other else nullcontext()
    with differ:
        restored(tmp_path, Two(0, 2, ALONE.device, store=other))


def test_a_worker_alone_takes_up_whole_tensors(tmp_path: Path) -> None:
    """Of a run whose workers leave the large ones in their files, each to read its rows."""
    restored(tmp_path, ALONE, sharding="full")
