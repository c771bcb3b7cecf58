"""How many sets of gradients a worker holds: those of the tree and the buckets, and none that is done with."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

import lockstep.training.step.reduction as reduction
from lockstep.training.step.optimizer_step import Stepper
from tests.distributed.pool import Pool
from tests.distributed.training import Document, train_sending


def document() -> Document:
    return {
        "job": {"use": "tests.distributed.real_jobs:Digits", "params": {"width": 8}},
        "length": {"steps": 3},
        "batch": {"global": 56, "micro": 8},
        "workers": {"bucket_mb": 0.004},
        "record": {"uri": "off"},
    }


def held(document: Document, keep: bool) -> list[tuple[list[int], int]]:
    """For each step: gradients of this rank's own partial sums alive as each bucket leaves, and once the step is done.

    `keep` is the control: the hook copies what it needs and lets go of nothing.
    """
    alive: list[weakref.ref[Tensor]] = []
    during: list[int] = []
    steps: list[tuple[list[int], int]] = []
    begin, sent, step = reduction.Reduction.begin, reduction.Reduction._sent, Stepper.__call__

    def living() -> int:
        return sum(one() is not None for one in alive)

    def begins(self: Any, position: Any, folded: Any, apart: Any) -> None:
        alive[:] = [weakref.ref(gradient) for total in [*folded, *apart] for gradient in total]
        during.clear()
        begin(self, position, folded, apart)

    def sends(self: Any, buffer: Tensor, indices: list[int]) -> Any:
        entry = sent(self, buffer, indices)
        during.append(living())
        return entry

    def steps_on(self: Any, *args: Any, **more: Any) -> Any:
        result = step(self, *args, **more)
        steps.append((list(during), living()))
        return result

    taken = reduction.Reduction._taken

    def takes(self: Any, total: list[Tensor], indices: list[int]) -> list[Tensor]:
        return taken(self, list(total) if keep else total, indices)

    with (
        mock.patch.object(reduction.Reduction, "begin", begins),
        mock.patch.object(reduction.Reduction, "_sent", sends),
        mock.patch.object(reduction.Reduction, "_taken", takes),
        mock.patch.object(Stepper, "__call__", steps_on),
    ):
        train_sending(document, 0)
    return steps


@pytest.mark.scenario
def test_partial_sums_are_let_go_of_bucket_by_bucket(pool: Pool) -> None:
    """Seven micro-batches on two workers: both hold sums that are folded in, one of them sums that stay apart."""
    for steps in pool.run(2, held, document(), False):
        during, after = steps[-1]
        assert len(during) > 1
        assert during == sorted(set(during), reverse=True)
        assert (during[-1], after) == (0, 0)


def test_a_hook_that_lets_go_of_nothing_holds_them_all_to_the_last_bucket(pool: Pool) -> None:
    for steps in pool.run(2, held, document(), True):
        during, _ = steps[-1]
        assert len(set(during)) == 1
        assert during[0] > 0
