"""G2 in practice: which ids the workers fetch, counted, and held against torch's DistributedSampler."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler

from lockstep.data.loader import Loader
from lockstep.data.micro_batches import MicroBatches
from lockstep.data.order import epoch_order
from lockstep.data.sampler import FirstUse, LeftOut, MicroBatch, MicroBatchSampler
from lockstep.plan import Plan

SIZES = [
    pytest.param(size, marks=[] if size % 4 == 3 or size < 3 else [pytest.mark.scenario])
    for size in range(1, 41)
]
BATCHES = [(size, micro) for size in range(1, 9) for micro in range(1, size + 1) if size % micro == 0]
EPOCHS = 2
SEED = 7
CPU = torch.device("cpu")


class Ids(Dataset[int]):
    """Samples that are their own ids."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def plans(size: int) -> Iterator[Plan]:
    for global_batch, micro in BATCHES:
        for drop_last in (True, False):
            if size >= global_batch or not drop_last:
                yield Plan.of(size, global_batch, micro, drop_last=drop_last, epochs=EPOCHS)


def sampler(
    plan: Plan, own: range, *, shuffle: Literal["full", "none"] = "full", start: int = 0
) -> MicroBatchSampler:
    return MicroBatchSampler(Ids(plan.samples), plan, own, seed=SEED, shuffle=shuffle, start=start)


def distributed(plan: Plan, m: int, epoch: int, *, shuffle: bool = True) -> list[list[int]]:
    """What DistributedSampler gives replica m, in batches of `micro`, without what it pads with.

    With `drop_last` it drops less than we do (down to a whole number of rounds), so only whole batches are taken.
    """
    whole = DistributedSampler(
        Ids(plan.samples),
        num_replicas=plan.micro_batches,
        rank=m,
        seed=SEED,
        shuffle=shuffle,
        drop_last=False,
    )
    whole.set_epoch(epoch)
    real = range(m, plan.samples, plan.micro_batches)
    ids = [sample for sample, _ in zip(whole, real, strict=False)]
    size = plan.micro_batch
    batches = [ids[i : i + size] for i in range(0, len(ids), size)]
    return batches[: plan.steps_per_epoch]


@pytest.mark.parametrize("size", SIZES)
def test_every_sample_is_fetched_once_an_epoch_by_any_number_of_workers(size: int) -> None:
    """G2, every (global, micro, W, drop_last), from the sampler through the loader."""
    for plan in plans(size):
        kept = size - size % plan.global_batch if plan.drop_last else size
        for workers in range(1, plan.micro_batches + 1):
            per_epoch: list[list[int]] = [[] for _ in range(EPOCHS)]
            for own in plan.ranges(workers):
                keys = sampler(plan, own)
                fetched = MicroBatches(Ids(size), list, seed=SEED, purpose="data")
                for key, ids in zip(keys, Loader(fetched, keys, CPU), strict=True):
                    per_epoch[key.step // plan.steps_per_epoch].extend(ids)
            for epoch, ids in enumerate(per_epoch):
                assert sorted(ids) == sorted(epoch_order(SEED, epoch, size, "full")[:kept].tolist()), (
                    plan,
                    workers,
                )
                assert len(set(ids)) == kept


@pytest.mark.parametrize("size", SIZES)
def test_micro_batches_are_the_replicas_of_distributed_sampler(size: int) -> None:
    for plan in plans(size):
        for shuffle in ("full", "none"):
            keys = list(sampler(plan, range(plan.micro_batches), shuffle=shuffle))
            for m in range(plan.micro_batches):
                own = [key.ids for key in keys if key.micro_batch == m]
                wanted = [
                    batch
                    for epoch in range(EPOCHS)
                    for batch in distributed(plan, m, epoch, shuffle=shuffle == "full")
                ]
                assert own == wanted, (plan, m, shuffle)


def test_workers_share_out_the_micro_batches_of_one() -> None:
    """Every micro-batch on exactly one worker, in the order of steps; its ids do not depend on W."""
    plan = Plan.of(43, 12, 2, drop_last=False, epochs=3)
    alone = list(sampler(plan, range(6)))
    for workers in range(1, 7):
        shared = [list(sampler(plan, own)) for own in plan.ranges(workers)]
        assert sorted(key for keys in shared for key in keys) == alone
        assert all(keys == sorted(keys) for keys in shared)


def test_a_run_that_starts_later_fetches_the_rest() -> None:
    """Seeking is arithmetic: the micro-batches from step t on are the same as those of a run from the start."""
    plan = Plan.of(43, 12, 2, drop_last=False, epochs=3)
    for own in plan.ranges(4):
        every = list(sampler(plan, own))
        for start in range(plan.total_steps + 1):
            rest = sampler(plan, own, start=start)
            assert list(rest) == [key for key in every if key.step >= start]
            assert len(rest) == len(list(rest))


def test_epochs_have_orders_of_their_own() -> None:
    plan = Plan.of(16, 8, 4, drop_last=True, epochs=3)
    epochs = [
        [i for key in keys for i in key.ids]
        for _, keys in groupby(sampler(plan, range(2)), key=lambda key: key.step // plan.steps_per_epoch)
    ]
    assert len({tuple(ids) for ids in epochs}) == 3
    assert [key.ids for key in sampler(plan, range(2), shuffle="none")][:2] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_order_draws_nothing_from_the_default_generator() -> None:
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    epoch_order(3, 1, 100, "full")
    assert torch.equal(torch.rand(3), wanted)


def test_a_sampler_without_a_rest_gives_nothing() -> None:
    """A worker that a short run's only, ragged step leaves without a micro-batch."""
    plan = Plan.of(3, 8, 2, drop_last=False, epochs=1)
    assert [len(sampler(plan, own)) for own in plan.ranges(4)] == [1, 1, 1, 0]
    assert list(sampler(plan, plan.ranges(4)[3])) == []


def test_micro_batch_is_a_plain_value() -> None:
    """It is sent to loader processes."""
    key: Any = MicroBatch(3, 1, [4, 5])
    assert key == (3, 1, [4, 5], ())


# --- samples that are left out ------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("shuffle", ["full", "hashed", "none"])
@pytest.mark.parametrize("text", ["0", "3-5,17", "20-22", "0-22"])
def test_samples_that_are_left_out_leave_all_others_where_they_are(
    shuffle: Literal["full", "hashed", "none"], drop_last: bool, text: str
) -> None:
    """And the first use of any of them is told as looking through the whole run tells it."""
    plan, left = Plan.of(23, 6, 2, drop_last=drop_last, steps=7), LeftOut(text)
    whole = MicroBatchSampler(Ids(23), plan, range(3), seed=SEED, shuffle=shuffle)
    rest = MicroBatchSampler(Ids(23), plan, range(3), seed=SEED, shuffle=shuffle, without=text)
    gone = {i for i in range(23) if left.has(np.array([i]))[0]}
    assert left.count == len(gone)
    assert list(rest) == [key._replace(ids=[i for i in key.ids if i not in gone]) for key in whole]
    uses = [(key.step, i) for key in whole for i in key.ids if i in gone]
    found = whole.first_use(left)
    if not uses:
        assert found is None
    else:
        assert found is not None
        assert found.step == uses[0][0]
        assert (found.step, found.sample) in uses
        assert found.used == len({i for _, i in uses})


def test_samples_that_the_run_does_not_reach_have_no_first_use() -> None:
    plan = Plan.of(23, 6, 2, drop_last=True, steps=2)
    every = MicroBatchSampler(Ids(23), plan, range(3), seed=SEED, shuffle="none")
    assert every.first_use(LeftOut("12-22")) is None
    assert every.first_use(LeftOut("11-22")) == FirstUse(1, 11, 1)
