"""The most memory that a worker takes for gradients: at most 2 + log2(its micro-batches) sets of them.

A set is as many bytes as the model's parameters. What is counted is every block of torch's allocator, from the end of
the second step (DDP lays its buckets out anew in it) to the end of the run; the model is deep and narrow and a micro-batch one sample, so that activations are
next to nothing, and SGD without momentum keeps no state.
"""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import lockstep.training.step.reduction as reduction
from lockstep.communication.group import Group
from lockstep.job.loading import load_job
from lockstep.record.events.union import Event
from lockstep.record.ledger.rows import StepRow
from lockstep.reduction_tree import worker_ranges
from lockstep.spec.loading import load_spec
from lockstep.training.driver_requests import NoRequests
from lockstep.training.loop import fit
from tests.distributed.pool import Pool
from tests.distributed.small_jobs import Plain
from tests.distributed.training import Document
from tests.live_bytes import LiveBytes, counted

LAYERS, WIDTH = 32, 128
SET = LAYERS * WIDTH * WIDTH * 4


class Deep(Plain):
    """Layers of one size, each a bucket."""

    def model(self) -> nn.Module:
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        return nn.Sequential(nn.ZeroPad1d((0, WIDTH - 8)), *layers)


def document(micro_batches: int, reduction: str = "exact") -> Document:
    return {
        "job": {"use": "tests.distributed.test_peak_memory:Deep"},
        "length": {"steps": 4},
        "batch": {"global": micro_batches, "micro": 1},
        "optimizer": {"name": "sgd"},
        "workers": {"bucket_mb": WIDTH * WIDTH * 4 / 2**20},
        "reduction": reduction,
        "rehearsal": "off",
    }


class Counting(NoRequests):
    """Begins to count after the second step."""

    def __init__(self, device: str) -> None:
        self.context = counted(device)
        self.found = LiveBytes()

    def tell(self, event: Event) -> None:
        if isinstance(event, StepRow) and event.step == 2:
            self.found = self.context.__enter__()


def peak(document: Document, kept: bool = False, device: str = "cpu") -> float:
    """Sets of gradients that this worker has at the most, DDP's buckets among them.

    `kept` is the control: partial sums of a step stay alive until the next one.
    """
    spec, record = load_spec(document), Counting(device)
    job, group = load_job(spec.job.use, spec.job.params), Group.join(torch.device(device))
    begin = reduction.Reduction.begin

    def keeping(self: Any, position: Any, folded: Any, apart: Any) -> None:
        self.kept = [list(total) for total in [*folded, *apart]]
        begin(self, position, folded, apart)

    with mock.patch.object(reduction.Reduction, "begin", keeping if kept else begin):
        fit(spec, job, group, record.tell, record)
    record.context.__exit__(None, None, None)
    # There before: the buckets, and on CUDA, where what is freed is counted, also a single worker's gradients.
    before = 1 if group.size > 1 or device == "cuda" else 0
    return record.found.peak / SET + before


def check(pool: Pool, workers: int, micro_batches: int) -> None:
    found = pool.run(workers, peak, document(micro_batches))
    for assigned, sets in zip(worker_ranges(micro_batches, workers), found, strict=True):
        assert 1.0 <= sets <= 2 + math.log2(len(assigned)), (workers, assigned, sets)


@pytest.mark.every(2)
@pytest.mark.parametrize(("workers", "micro_batches"), [(2, 16), (3, 7)])
def test_a_worker_holds_two_sets_of_gradients_and_a_logarithm(
    pool: Pool, workers: int, micro_batches: int
) -> None:
    check(pool, workers, micro_batches)


@pytest.mark.exact
@pytest.mark.parametrize(
    ("workers", "micro_batches"), [(1, 8), (2, 2), (2, 7), (2, 16), (3, 12), (4, 5), (4, 8)]
)
def test_a_worker_holds_two_sets_of_gradients_and_a_logarithm_in_full(
    pool: Pool, workers: int, micro_batches: int
) -> None:
    check(pool, workers, micro_batches)


@pytest.mark.scenario
def test_the_peak_does_not_depend_on_when_threads_get_their_turn(pool: Pool) -> None:
    """What the backend has sent is let go of at once: the peak is the same in every run, on a busy machine too."""
    assert len({tuple(pool.run(3, peak, document(7))) for _ in range(4)}) == 1


def test_partial_sums_that_outlive_their_step_are_above_that(pool: Pool) -> None:
    """The control: eight micro-batches a worker have three sums to fold in."""
    assert min(pool.run(2, peak, document(16), True)) > 2 + math.log2(8)
