"""The arithmetic of a run, tried exhaustively for small numbers and at random for large ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from itertools import chain, combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler

from lockstep.plan import Plan, Position
from lockstep.reduction_tree import (
    _fewest_sums,
    are_siblings,
    clip,
    evaluation_ranges,
    nodes,
    worker_ranges,
)

SAMPLES = range(1, 41)
BATCHES = [(size, micro) for size in range(1, 13) for micro in range(1, size + 1) if size % micro == 0]


def plans(samples: int, *, epochs: int = 1) -> Iterator[Plan]:
    """Every plan over `samples` samples that has a step at all."""
    for size, micro in BATCHES:
        for drop_last in (True, False):
            if samples >= size or not drop_last:
                yield Plan.of(samples, size, micro, drop_last=drop_last, epochs=epochs)


def taken(plan: Plan, position: Position, m: int) -> range:
    """Positions of the epoch's permutation that micro-batch `m` takes."""
    return range(plan.samples)[plan.sample_slice(position, m)]


# --- which samples make which step ------------------------------------------------------------------------


@pytest.mark.parametrize("samples", SAMPLES)
def test_every_sample_is_seen_once_an_epoch_on_any_number_of_workers(samples: int) -> None:
    """G2: each position of the permutation once, less the tail that `drop_last` drops, for every W of 1 … M."""
    for plan in plans(samples):
        kept = samples - samples % plan.global_batch if plan.drop_last else samples
        for workers in range(1, plan.micro_batches + 1):
            seen = [
                i
                for own in plan.ranges(workers)
                for position in plan.positions()
                for m in clip(own, position.micro_batches)
                for i in taken(plan, position, m)
            ]
            assert sorted(seen) == list(range(kept)), (plan, workers)


@pytest.mark.parametrize("samples", SAMPLES)
def test_the_samples_of_a_step_are_the_same_on_any_number_of_workers(samples: int) -> None:
    """G1: in a step the workers together run micro-batches 0 … K-1 in order, whatever their number."""
    for plan in plans(samples):
        for position in plan.positions():
            steps = {
                tuple(chain.from_iterable(clip(own, position.micro_batches) for own in plan.ranges(workers)))
                for workers in range(1, plan.micro_batches + 1)
            }
            assert steps == {tuple(range(position.micro_batches))}


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("samples", SAMPLES)
def test_micro_batch_m_is_what_distributed_sampler_gives_replica_m(samples: int, shuffle: bool) -> None:
    """G2: one logical rank per micro-batch, wherever DistributedSampler neither pads nor keeps a part of a step."""
    generator = torch.Generator().manual_seed(17 + 3)
    order = torch.randperm(samples, generator=generator).tolist() if shuffle else list(range(samples))
    for plan in plans(samples):
        if not plan.drop_last and samples % plan.micro_batches:
            continue  # it would pad
        positions = list(plan.positions())
        for m in range(plan.micro_batches):
            replica = DistributedSampler(
                range(samples),  # type: ignore[arg-type]
                num_replicas=plan.micro_batches,
                rank=m,
                shuffle=shuffle,
                seed=17,
                drop_last=plan.drop_last,
            )
            replica.set_epoch(3)
            expected = list(BatchSampler(replica, plan.micro_batch, drop_last=plan.drop_last))
            assert [order[plan.sample_slice(position, m)] for position in positions] == expected, (plan, m)


@pytest.mark.parametrize("samples", SAMPLES)
def test_positions_of_a_micro_batch_are_those_of_the_definition(samples: int) -> None:
    """Micro-batch m of step t takes positions `m + M*(t*micro + j)` of the epoch, as far as there are any."""
    for plan in plans(samples):
        M, micro = plan.micro_batches, plan.micro_batch
        for position in plan.positions():
            for m in range(M):
                defined = [m + M * (position.index * micro + j) for j in range(micro)]
                assert list(taken(plan, position, m)) == [i for i in defined if i < samples]


@pytest.mark.parametrize("samples", SAMPLES)
def test_a_ragged_step_is_shared_evenly_and_its_empty_micro_batches_come_last(samples: int) -> None:
    for plan in plans(samples):
        for position in plan.positions():
            sizes = [plan.micro_batch_size(position, m) for m in range(plan.micro_batches)]
            assert sizes == [len(taken(plan, position, m)) for m in range(plan.micro_batches)]
            assert max(sizes) - min(sizes) <= 1
            assert sum(sizes) == position.samples
            assert [size > 0 for size in sizes] == [
                m < position.micro_batches for m in range(plan.micro_batches)
            ]
            assert position.samples == plan.global_batch or (position.ends_epoch and not plan.drop_last)


@pytest.mark.parametrize("samples", SAMPLES)
def test_steps_count_on_through_the_epochs(samples: int) -> None:
    for plan in plans(samples, epochs=3):
        positions = list(plan.positions())
        assert [position.step for position in positions] == list(range(plan.total_steps))
        assert [(p.epoch, p.index) for p in positions] == [
            (epoch, index) for epoch in range(3) for index in range(plan.steps_per_epoch)
        ]
        assert [p.ends_epoch for p in positions] == [p.index == plan.steps_per_epoch - 1 for p in positions]
        for start in range(plan.total_steps + 1):
            assert list(plan.positions(start)) == positions[start:]


@pytest.mark.parametrize("samples", SAMPLES)
def test_smallest_micro_batch_is_the_smallest_that_the_run_meets(samples: int) -> None:
    for size, micro in BATCHES:
        for steps in (1, 2, 5, 50):
            plan = Plan.of(samples, size, micro, drop_last=False, steps=steps)
            met = [plan.micro_batch_size(p, m) for p in plan.positions() for m in range(p.micro_batches)]
            assert plan.smallest_micro_batch == min(met), plan


def test_a_run_may_end_within_an_epoch_or_go_through_several() -> None:
    plan = Plan.of(100, 16, 4, drop_last=True, steps=15)
    assert (plan.steps_per_epoch, plan.total_steps, plan.micro_batches) == (6, 15, 4)
    assert plan.position(14) == Position(
        step=14, epoch=2, index=2, start=32, samples=16, micro_batches=4, full=4, ends_epoch=False
    )
    assert Plan.of(100, 16, 4, drop_last=False, epochs=2).total_steps == 14


def test_an_epoch_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match=r"7 samples give no step of batch.global = 8"):
        Plan.of(7, 8, 2, drop_last=True, epochs=1)
    with pytest.raises(ValueError, match=r"0 samples give no step"):
        Plan.of(0, 8, 2, drop_last=False, epochs=1)
    assert Plan.of(7, 8, 2, drop_last=False, epochs=1).total_steps == 1


# --- evaluation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [0, *SAMPLES])
def test_evaluation_counts_every_sample_once_on_any_number_of_workers(samples: int) -> None:
    """G2: never a padded duplicate, and in the order of the micro-batches."""
    for micro in range(1, 13):
        for workers in range(1, 14):
            ranges = evaluation_ranges(samples, micro, workers)
            assert len(ranges) == workers
            counted = [i for own in ranges for b in own for i in range(samples)[b * micro : (b + 1) * micro]]
            assert counted == list(range(samples))
            assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


# --- the tree ---------------------------------------------------------------------------------------------

Tree = Any  # a leaf's number, or a pair of trees


def fixed_tree(leaves: int) -> Tree:
    """The tree as it is defined, level by level: neighbours pair up from the left, an odd node is promoted."""
    level: list[Tree] = list(range(leaves))
    while len(level) > 1:
        pairs = [(left, right) for left, right in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[2 * len(pairs) :]
    return level[0]


def leaves_of(tree: Tree) -> list[int]:
    return leaves_of(tree[0]) + leaves_of(tree[1]) if isinstance(tree, tuple) else [tree]


def subtrees(tree: Tree) -> Iterator[Tree]:
    yield tree
    if isinstance(tree, tuple):
        yield from subtrees(tree[0])
        yield from subtrees(tree[1])


def span(tree: Tree) -> range:
    below = leaves_of(tree)
    return range(below[0], below[-1] + 1)


def merged(parts: Iterable[tuple[range, Tree]], leaves: int) -> list[tuple[range, Tree]]:
    """Parts in order, siblings added as soon as they meet: what a worker does, and what is done over workers."""
    found: list[tuple[range, Tree]] = []
    for node, tree in parts:
        while found and are_siblings(found[-1][0], node, leaves):
            left, left_tree = found.pop()
            node, tree = range(left.start, node.stop), (left_tree, tree)
        found.append((node, tree))
    return found


def executed(leaves: int, ranges: Iterable[range]) -> list[tuple[range, Tree]]:
    """A step of `leaves` non-empty micro-batches as workers of these ranges add it up."""
    sent = []
    for own in ranges:
        clipped = clip(own, leaves)
        partial = merged(((range(m, m + 1), m) for m in clipped), leaves)
        assert tuple(node for node, _ in partial) == nodes(clipped, leaves)
        sent += partial
    return merged(sent, leaves)


@pytest.mark.parametrize("micro_batches", range(1, 21))
def test_gradients_are_added_along_one_tree_whatever_the_workers(micro_batches: int) -> None:
    """G1: for every W of 1 … M and every ragged step of K of M micro-batches the sum has the same brackets."""
    for workers in range(1, micro_batches + 1):
        ranges = worker_ranges(micro_batches, workers)
        for leaves in range(1, micro_batches + 1):
            assert executed(leaves, ranges) == [(range(leaves), fixed_tree(leaves))], (workers, leaves)


@settings(max_examples=100)
@given(st.data())
def test_gradients_are_added_along_one_tree_for_any_contiguous_ranges(data: st.DataObject) -> None:
    """G1: the tree does not lean on how `worker_ranges` chooses; workers without a micro-batch add nothing."""
    micro_batches = data.draw(st.integers(1, 300))
    leaves = data.draw(st.integers(1, micro_batches))
    cuts = sorted(data.draw(st.lists(st.integers(0, micro_batches), max_size=12)))
    ranges = [range(a, b) for a, b in pairwise([0, *cuts, micro_batches])]
    assert executed(leaves, ranges) == [(range(leaves), fixed_tree(leaves))]


def test_the_tree_of_five_promotes_the_odd_one() -> None:
    assert fixed_tree(5) == (((0, 1), (2, 3)), 4)
    assert fixed_tree(7) == (((0, 1), (2, 3)), ((4, 5), 6))


def test_adding_one_after_the_other_gives_another_tree() -> None:
    """The control: a left fold has the tree's brackets up to three leaves and never again."""
    for leaves in range(1, 33):
        fold = reduce(lambda total, m: (total, m), range(1, leaves), 0)
        assert (fold == fixed_tree(leaves)) == (leaves <= 3)


def test_one_partial_sum_a_worker_would_depend_on_the_workers() -> None:
    """The control: where a worker of an unaligned range sends a single sum, the brackets are not the tree's."""
    ranges = [range(3), range(3, 6), range(6, 8)]
    single = [reduce(lambda total, m: (total, m), own) for own in map(list, ranges)]
    assert reduce(lambda total, part: (total, part), single) != fixed_tree(8)
    assert executed(8, ranges) == [(range(8), fixed_tree(8))]


@pytest.mark.parametrize("leaves", range(1, 25))
def test_nodes_are_the_fewest_subtrees_that_make_up_a_range(leaves: int) -> None:
    spans = {span(tree) for tree in subtrees(fixed_tree(leaves))}
    for start in range(leaves):
        fewest = {start: 0}
        for stop in range(start + 1, leaves + 1):
            fewest[stop] = min(fewest[a] + 1 for a in range(start, stop) if range(a, stop) in spans)
            found = nodes(range(start, stop), leaves)
            assert list(chain.from_iterable(found)) == list(range(start, stop))
            assert set(found) <= spans
            assert len(found) == fewest[stop]


@pytest.mark.parametrize("leaves", range(1, 25))
def test_siblings_are_the_two_halves_of_a_subtree(leaves: int) -> None:
    siblings = {(span(t[0]), span(t[1])) for t in subtrees(fixed_tree(leaves)) if isinstance(t, tuple)}
    neighbours = [(range(a, b), range(b, c)) for a, b, c in combinations(range(leaves + 1), 3)]
    assert siblings == {pair for pair in neighbours if are_siblings(*pair, leaves)}


def test_an_empty_range_has_no_nodes() -> None:
    assert nodes(clip(range(5, 8), 3), 3) == ()


# --- which worker runs which micro-batch ------------------------------------------------------------------


def partial_sums(ranges: Iterable[range], micro_batches: int) -> tuple[int, int]:
    """The most that any worker sends, and what all send together."""
    counts = [len(nodes(own, micro_batches)) for own in ranges]
    return max(counts), sum(counts)


def assert_fair(ranges: tuple[range, ...], micro_batches: int, workers: int) -> None:
    assert len(ranges) == workers
    assert list(chain.from_iterable(ranges)) == list(range(micro_batches))
    most = max(-(-micro_batches // workers), micro_batches * 9 // (8 * workers))
    assert all(1 <= len(own) <= most for own in ranges)


@pytest.mark.parametrize("micro_batches", range(1, 11))
def test_worker_ranges_send_the_fewest_partial_sums_of_all_choices(micro_batches: int) -> None:
    for workers in range(1, micro_batches + 1):
        most = -(-micro_batches // workers)
        choices = [
            [range(a, b) for a, b in pairwise([0, *cuts, micro_batches])]
            for cuts in combinations(range(1, micro_batches), workers - 1)
        ]
        fair = [choice for choice in choices if max(map(len, choice)) <= most]
        found = worker_ranges(micro_batches, workers)
        assert_fair(found, micro_batches, workers)
        assert partial_sums(found, micro_batches) == min(partial_sums(c, micro_batches) for c in fair)


@pytest.mark.parametrize(
    ("micro_batches", "workers", "longest", "sums"),
    [
        (256, 7, 40, 3),
        (64, 7, 10, 3),
        (64, 6, 12, 2),
        (64, 5, 14, 3),
        (64, 3, 24, 2),
        (256, 3, 96, 2),
        (64, 8, 8, 1),
    ],
)
def test_a_slightly_longer_range_saves_partial_sums(
    micro_batches: int, workers: int, longest: int, sums: int
) -> None:
    """Even ranges of 256 micro-batches on seven workers are at most 37 long and send six sums, 3.5 times what one costs."""
    ranges = worker_ranges(micro_batches, workers)
    assert_fair(ranges, micro_batches, workers)
    assert (max(map(len, ranges)), partial_sums(ranges, micro_batches)[0]) == (longest, sums)


def test_a_range_is_no_longer_where_that_saves_nothing() -> None:
    """The control: only fewer partial sums are worth more computation."""
    for micro_batches in range(1, 65):
        for workers in range(1, micro_batches + 1):
            ranges = worker_ranges(micro_batches, workers)
            longest, most = max(map(len, ranges)), -(-micro_batches // workers)
            if longest > most:
                even = _fewest_sums(micro_batches, workers)
                assert max(map(len, even)) == most
                assert partial_sums(ranges, micro_batches)[0] < partial_sums(even, micro_batches)[0]


@settings(max_examples=100)
@given(st.integers(1, 200).flatmap(lambda m: st.tuples(st.just(m), st.integers(1, m))))
def test_worker_ranges_are_contiguous_and_none_has_much_more_than_its_share(numbers: tuple[int, int]) -> None:
    assert_fair(worker_ranges(*numbers), *numbers)


def test_ranges_beyond_the_search_are_even() -> None:
    ranges = worker_ranges(20_000, 3_000)
    assert_fair(ranges, 20_000, 3_000)
    assert {len(own) for own in ranges} == {6, 7}


def test_powers_of_two_send_one_partial_sum_each() -> None:
    for micro_batches in (2, 4, 8, 16, 32, 64):
        for workers in (w for w in (1, 2, 4, 8, 16, 32, 64) if w <= micro_batches):
            assert partial_sums(worker_ranges(micro_batches, workers), micro_batches) == (1, workers)


@pytest.mark.parametrize("group", [2, 3, 4, 6])
def test_groups_of_neighbours_share_a_micro_batch(group: int) -> None:
    """Each position once and in order; no group is cut, the sizes of micro-batches differ by one group, and the empty ones come last."""
    for samples in range(1, 60):
        for parts, of_micro in ((1, 1), (2, 1), (3, 2), (4, 1)):
            micro = group * of_micro
            plan = Plan.of(samples, micro * parts, micro, drop_last=False, epochs=1, group=group)
            met: list[int] = []
            for position in plan.positions():
                first = position.index * plan.global_batch
                sizes = [plan.micro_batch_size(position, m) for m in range(position.micro_batches)]
                assert sum(sizes) == position.samples and all(sizes)
                assert [size % group for size in sizes[:-1]] == [0] * (len(sizes) - 1)
                assert max(sizes) - min(sizes) <= 2 * group - 1
                assert plan.smallest_micro_batch <= min(sizes)
                for m, size in enumerate(sizes):
                    positions = range(samples)[plan.neighbours(position, m)]
                    assert len(positions) == size
                    assert (positions[0] - first) % group == 0
                    met += positions
            assert met == list(range(samples))
    assert Plan.of(20, 8, 4, drop_last=False, epochs=1, group=1) == Plan.of(
        20, 8, 4, drop_last=False, epochs=1
    )


@pytest.mark.parametrize("workers", [0, -1, 5])
def test_a_worker_without_a_micro_batch_is_refused(workers: int) -> None:
    with pytest.raises(ValueError, match=f"^{workers} workers for 4 micro-batches: each needs at least one$"):
        worker_ranges(4, workers)


def test_neighbours_share_micro_batches_of_the_usual_sizes() -> None:
    """Each position of an epoch once and in order, ragged steps among them."""
    for samples in (24, 25, 29, 31):
        plan = Plan.of(samples, 12, 3, drop_last=False, epochs=1, steps=None)
        met = []
        for position in plan.positions():
            for m in range(position.micro_batches):
                positions = range(samples)[plan.neighbours(position, m)]
                assert len(positions) == plan.micro_batch_size(position, m)
                met += positions
        assert met == list(range(samples))


def test_leaves_that_are_no_neighbours_travel_as_leaves() -> None:
    """A worker of passes has every third micro-batch: no two of them have a sum of their own in the tree."""
    assert nodes(range(1, 8, 3), 8) == (range(1, 2), range(4, 5), range(7, 8))
