"""The four orders: each a permutation (G2), read at any position, that depends on nothing but seed and epoch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset, DistributedSampler

from lockstep.data import order as order_module
from lockstep.data import problems
from lockstep.data.order import Bijection, Shuffle, epoch_order
from lockstep.data.sampler import MicroBatchSampler
from lockstep.plan import Plan
from tests.raised import raises

ORDERS: list[Shuffle] = ["full", "hashed", "blocks", "none"]
SEED = 11


def sizes(samples: int, largest: int) -> list[int]:
    """Rows of the blocks of a data set: unlike ones, as files end with short row groups."""
    draw = random.Random(samples)
    cuts = [0]
    while cuts[-1] < samples:
        cuts.append(min(samples, cuts[-1] + draw.randint(1, largest)))
    return [b - a for a, b in pairwise(cuts)]


class Rows(Dataset[int]):
    """Samples that are their own ids, in blocks."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.block_sizes = sizes(samples, largest=7)

    def __len__(self) -> int:
        return self.samples


def whole(samples: int, shuffle: Shuffle, epoch: int = 0, **more: Any) -> list[int]:
    blocks = sizes(samples, largest=7)
    return epoch_order(SEED, epoch, samples, shuffle, blocks=blocks, **more)[0:samples].tolist()


@pytest.mark.parametrize("shuffle", ORDERS)
def test_every_id_is_visited_once_an_epoch(shuffle: Shuffle) -> None:
    """G2"""
    for samples in [*range(1, 70), 1000]:
        for epoch in range(2):
            for window in (1, 3, 100):
                assert sorted(whole(samples, shuffle, epoch, window=window)) == list(range(samples))


@pytest.mark.parametrize("shuffle", ORDERS)
def test_an_order_can_be_read_at_any_position(shuffle: Shuffle) -> None:
    """Any slice, strided as micro-batches are, gives what the whole epoch has there."""
    samples = 103
    every = np.array(whole(samples, shuffle, window=3))
    order = epoch_order(SEED, 0, samples, shuffle, blocks=sizes(samples, largest=7), window=3)
    for start in range(0, samples, 5):
        for stop in (start, start + 1, start + 40, samples):
            for step in (1, 2, 7):
                asked = slice(start, min(stop, samples), step)
                assert order[asked].tolist() == every[asked].tolist()


@pytest.mark.parametrize("shuffle", ["full", "hashed", "blocks"])
def test_orders_differ_by_seed_and_by_epoch(shuffle: Shuffle) -> None:
    blocks = sizes(200, largest=7)
    orders = {
        tuple(epoch_order(seed, epoch, 200, shuffle, blocks=blocks)[0:200].tolist())
        for seed in (100, 200)
        for epoch in range(3)
    }
    assert len(orders) == 6


@pytest.mark.parametrize("shared_from", [1, 1 << 20])
def test_full_is_the_permutation_of_distributed_sampler(
    shared_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the processes of a node share it or not."""
    monkeypatch.setattr(order_module, "SHARED_FROM", shared_from)
    for samples in (1, 2, 37, 5000):
        sampler = DistributedSampler(Rows(samples), num_replicas=1, rank=0, seed=SEED, shuffle=True)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            assert epoch_order(SEED, epoch, samples, "full")[0:samples].tolist() == list(sampler)


@pytest.mark.parametrize("shuffle", ORDERS)
@pytest.mark.parametrize("drop_last", [True, False])
def test_ids_do_not_depend_on_workers_or_on_where_a_run_resumes(shuffle: Shuffle, drop_last: bool) -> None:
    """G1, G2: each W, each first step, through the sampler."""
    plan = Plan.of(101, 24, 4, drop_last=drop_last, epochs=2)
    alone = list(MicroBatchSampler(Rows(101), plan, range(6), seed=SEED, shuffle=shuffle, window=3))
    kept = 96 if drop_last else 101
    assert [
        sum(len(key.ids) for key in alone if key.step // plan.steps_per_epoch == e) for e in range(2)
    ] == [
        kept,
        kept,
    ]
    assert len({i for key in alone for i in key.ids if key.step < plan.steps_per_epoch}) == kept
    for workers in range(1, 7):
        for start in range(plan.total_steps):
            shared = [
                key
                for own in plan.ranges(workers)
                for key in MicroBatchSampler(
                    Rows(101), plan, own, seed=SEED, shuffle=shuffle, window=3, start=start
                )
            ]
            assert sorted(shared) == [key for key in alone if key.step >= start]


def test_blocks_needs_data_that_have_blocks() -> None:
    with raises(problems.NO_BLOCKS):
        epoch_order(SEED, 0, 10, "blocks")


# --- hashed -----------------------------------------------------------------------------------------------


def test_bijection_of_every_size_up_to_5000() -> None:
    for size in range(1, 5001):
        images = Bijection(size, ("test", size))(np.arange(size))
        seen = np.zeros(size, bool)
        seen[images] = True  # an image out of range raises
        assert seen.all()
        assert images.min() == 0


def test_a_hash_that_is_no_bijection_is_found() -> None:
    """The same test on a keyed hash without the network fails."""
    images = np.array([hash((SEED, i)) % 1000 for i in range(1000)])
    assert len(set(images.tolist())) < 1000


@pytest.mark.parametrize("size", [10**11, 10**11 + 3])
def test_bijection_of_a_hundred_thousand_million(size: int) -> None:
    """Distinct, in range, spread over all of it; the walk back into the range is met."""
    numbers = np.unique(np.random.default_rng(1).integers(0, size, 200_000))
    images = Bijection(size, ("spot",))(numbers)
    assert len(np.unique(images)) == len(numbers)
    assert images.min() >= 0
    assert images.max() < size
    counts = np.histogram(images, bins=50, range=(0, size))[0]
    assert (
        20 < ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 100
    )  # chi square, 49 degrees of freedom
    assert abs(np.corrcoef(numbers, images)[0, 1]) < 0.01


def test_cycle_walking_is_exercised() -> None:
    """A size just above a square has a grid with almost a whole row too many."""
    bijection = Bijection(101 * 101 + 1, ("walk",))
    assert bijection._a * bijection._b > bijection.size + 90


@pytest.mark.parametrize("size", [60, 1000])
def test_hashed_mixes_as_a_random_permutation_does(size: int) -> None:
    """Over many keys: each id is equally likely at each place, and neighbours do not stay together."""
    keys = 2000
    every = np.stack([Bijection(size, ("mix", k))(np.arange(size)) for k in range(keys)])
    for column in (0, 1, size // 2, size - 1):
        counts = np.histogram(every[:, column], bins=10, range=(0, size))[0]
        assert ((counts - keys / 10) ** 2 / (keys / 10)).sum() < 40  # 9 degrees of freedom: 1 in 10^5
    displacement = np.abs(every - np.arange(size)).mean() / size
    assert abs(displacement - 1 / 3) < 0.01  # a random permutation's: (n² - 1) / 3n
    neighbours = (np.abs(np.diff(every, axis=1)) == 1).mean()
    assert neighbours < 1.3 * 2 / size


# --- blocks -----------------------------------------------------------------------------------------------


def test_blocks_reads_each_block_in_one_run() -> None:
    """Within a window of positions no more than `window` blocks are read, and each of them in that window alone."""
    rows, window = sizes(1000, largest=30), 4
    ids = epoch_order(SEED, 0, 1000, "blocks", blocks=rows, window=window)[0:1000]
    block = np.searchsorted(np.cumsum(rows), ids, side="right")
    starts = [0, *(np.flatnonzero(first_seen(block, window)) + 1).tolist(), 1000]
    per_window = [set(block[a:b].tolist()) for a, b in pairwise(starts)]
    assert sum(map(len, per_window)) == len(rows)
    assert max(map(len, per_window)) <= window


def first_seen(block: Any, window: int) -> Any:
    """Where a window's last row is: after it, none of its blocks comes again."""
    last = {int(b): i for i, b in enumerate(block)}
    ends, open_blocks = np.zeros(len(block), bool), set[int]()
    for i, b in enumerate(block.tolist()):
        open_blocks.add(b)
        if len(open_blocks) >= window and all(last[o] <= i for o in open_blocks):
            ends[i], open_blocks = True, set()
    return ends[:-1]


@pytest.mark.parametrize("window", [1, 4, 7])
def test_the_blocks_of_the_next_window_are_due_as_this_one_is_read(window: int) -> None:
    """In the order of the blocks, none before its share of the way, all of them before the window ends."""
    rows = sizes(500, largest=30)
    order: Any = epoch_order(SEED, 0, 500, "blocks", blocks=rows, window=window)
    block = np.searchsorted(np.cumsum(rows), order[0:500], side="right")
    starts = [0, *order._ends.tolist()]
    windows = [set(block[a:b].tolist()) for a, b in pairwise(starts)]
    for (start, end), after in zip(pairwise(starts), [*windows[1:], set()], strict=True):
        due = [order.due(position) for position in range(start, end)]
        assert all(later[: len(sooner)] == sooner for sooner, later in pairwise(due))
        assert set(due[-1]) == after
        assert all(len(d) <= len(after) * (i + 1) / len(due) + 1 for i, d in enumerate(due))


def displacement(ids: Sequence[int]) -> float:
    """How far ids are from their place in the data, on average, as a part of the data's length."""
    return float(np.abs(np.asarray(ids) - np.arange(len(ids))).mean() / len(ids))


def test_blocks_mixes_almost_as_far_as_a_full_shuffle() -> None:
    """The mean displacement that the docs state: one third of the data, as for a random permutation."""
    rows, samples = [100] * 200, 20_000
    found = np.mean(
        [
            displacement(epoch_order(SEED, e, samples, "blocks", blocks=rows)[0:samples].tolist())
            for e in range(30)
        ]
    )
    full = np.mean(
        [displacement(epoch_order(SEED, e, samples, "full")[0:samples].tolist()) for e in range(30)]
    )
    assert abs(full - 1 / 3) < 0.01
    assert abs(found - 1 / 3) < 0.02


def test_rows_of_a_window_are_mixed() -> None:
    """Negative control of the one above: with a window of one block, neighbours in the order share their block."""
    rows, samples = [100] * 200, 20_000
    together = {}
    for window in (1, 8):
        ids = epoch_order(SEED, 0, samples, "blocks", blocks=rows, window=window)[0:samples]
        together[window] = float((np.diff(ids // 100) == 0).mean())
    assert together[1] > 0.98
    assert abs(together[8] - 1 / 8) < 0.02
