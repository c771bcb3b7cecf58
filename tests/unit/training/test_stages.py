"""The exchange of a large bucket in one process: the same bits for every W, and what is sent for it (G1)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import lockstep.training.step.reduction as reduction
from lockstep.communication.group import Group
from lockstep.plan import Plan
from lockstep.reduction_tree import SLICE, clip, nodes, slices, stages, worker_ranges
from lockstep.training.step.reduction import TreeReduction, TreeSum

NUMBERS = 4 * SLICE + 24
"""So many that slices have a ragged end, and on six workers or more some are empty."""


class Post:
    """Delivers what is passed on between ranks of one process, in the order in which a pair sent it."""

    def __init__(self) -> None:
        self.rank = 0
        self.boxes: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self.sent: dict[int, list[int]] = defaultdict(list)

    def pass_on(self, outgoing: Any, incoming: Any) -> Callable[[], None]:
        here = self.rank
        for peer, part in outgoing:
            if part.numel():
                self.boxes[here, peer].append(part.clone())
                self.sent[here].append(part.numel())

        def receive() -> None:
            for peer, part in incoming:
                if part.numel():
                    part.copy_(self.boxes[peer, here].popleft())

        return receive


def partial_sums(leaves: int, own: range, every: list[Tensor]) -> list[Tensor]:
    tree = TreeSum(leaves)
    for m in own:
        tree.add(range(m, m + 1), [every[m].clone()])
    return [total for _, (total,) in tree.sums]


def reduced(
    plan: Plan, workers: int, leaves: int, every: list[Tensor], latency: int, piece_bytes: int = 1 << 20
) -> tuple[list[Tensor], Post]:
    """The buckets of all ranks after their stages, all ranks taken round by round, and piece by piece."""
    post, ranks = Post(), []
    for rank in range(workers):
        group = Group(rank, workers, torch.device("cpu"), object())
        hook = TreeReduction(group, plan, [], None)  # type: ignore[arg-type]
        hook._leaves, hook._nodes = hook._tree(SimpleNamespace(micro_batches=leaves))  # type: ignore[arg-type]
        sums = partial_sums(leaves, plan.ranges(workers, leaves)[rank], every)
        buffer = sums[-1] if sums else torch.zeros(NUMBERS)
        with mock.patch.object(reduction, "PIECE_BYTES", piece_bytes):
            alone = workers == 2 and max(map(len, hook._nodes)) == 1  # they swap their buckets
            pieces = [hook._in_stages(buffer, sums)] if alone else hook._large(buffer, sums)
        ranks.append((rank, buffer, chain(*pieces)))
    with (
        mock.patch.object(Group, "pass_on", lambda _group, *messages: post.pass_on(*messages)),
        mock.patch.object(reduction, "LATENCY_BYTES", latency),
    ):
        waiting: dict[int, Callable[[], None]] = {rank: lambda: None for rank, _, _ in ranks}
        while waiting:
            assert (
                len(waiting) == workers
            )  # all take as many rounds, or messages of several buckets would cross
            for rank, _, rounds in ranks:
                if rank not in waiting:
                    continue
                waiting[rank]()
                post.rank = rank
                wait = next(rounds, None)
                if wait is None:
                    del waiting[rank]
                else:
                    waiting[rank] = wait
    assert not any(post.boxes.values())
    return [buffer for _, buffer, _ in ranks], post


def gradients(leaves: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(leaves)
    return [torch.randn(NUMBERS, generator=generator) * 10.0 ** ((7 * m) % 5) for m in range(leaves)]


def in_one_process(leaves: int) -> Tensor:
    (total,) = partial_sums(leaves, range(leaves), gradients(leaves))
    return total


def cases(micro_batches: int) -> Iterator[tuple[int, int]]:
    """Workers, and the micro-batches of a step, ragged ones among them."""
    for workers in range(2, min(8, micro_batches) + 1):
        for leaves in range(1, micro_batches + 1):
            yield workers, leaves


@pytest.mark.every(15)
@pytest.mark.thinned(14)
@pytest.mark.parametrize("micro_batches", range(2, 17))
def test_every_rank_has_the_bits_of_one_process(micro_batches: int) -> None:
    plan = Plan.of(micro_batches, micro_batches, 1, drop_last=False)
    for workers, leaves in cases(micro_batches):
        wanted = in_one_process(leaves)
        for latency, piece_bytes in ((0, 1 << 20), (600, 1 << 20), (1 << 19, 1 << 20), (0, 400)):
            for bucket in reduced(plan, workers, leaves, gradients(leaves), latency, piece_bytes)[0]:
                assert torch.equal(bucket, wanted), (workers, leaves, latency, piece_bytes)


def test_a_stage_that_adds_in_another_order_gives_other_bits() -> None:
    """The control: peers taken from right to left."""
    plan = Plan.of(8, 8, 1, drop_last=False)
    backwards = TreeReduction._added

    def added(self: Any, owned: Any, sums: Any) -> Any:
        with mock.patch.object(reduction, "are_siblings", lambda left, right, leaves: True):
            return backwards(self, owned[::-1], sums[::-1])

    with mock.patch.object(TreeReduction, "_added", added):
        found, _ = reduced(plan, 3, 8, gradients(8), 0)
    assert not torch.equal(found[0], in_one_process(8))


@pytest.mark.parametrize("workers", [4, 8])
def test_a_power_of_two_sends_a_logarithm_of_messages_and_the_bytes_of_a_ring(workers: int) -> None:
    """Halves of k = 1, the last of them swapped whole: log2(W) messages out and log2(W) - 1 back."""
    plan = Plan.of(16, 16, 1, drop_last=False)
    with mock.patch(f"{__name__}.NUMBERS", SLICE * workers):
        _, post = reduced(plan, workers, 16, gradients(16), 0)
    steps = workers.bit_length() - 1
    for rank in range(workers):
        assert len(post.sent[rank]) == 2 * steps - 1
        assert sum(post.sent[rank]) == 2 * SLICE * (workers - 1)


@pytest.mark.parametrize(
    ("workers", "micro_batches", "ways"),
    [(2, 8, (2,)), (4, 8, (2, 2)), (8, 8, (2, 2, 2)), (6, 6, (2, 3)), (6, 8, (2, 3)), (7, 7, (7,)), (12, 48, (2, 2, 3)), (4, 5, (4,))],
)  # fmt: skip
def test_stages_are_the_factors_of_the_workers(
    workers: int, micro_batches: int, ways: tuple[int, ...]
) -> None:
    """Five micro-batches on four workers do not fit: two pairs of ranges would be two sums each."""
    found = stages(worker_ranges(micro_batches, workers), micro_batches)
    assert tuple(stage.ways for stage in found) == ways


@pytest.mark.parametrize("micro_batches", range(1, 33))
def test_stages_pass_all_sums_on_and_never_cost_more_than_one_stage_for_all(micro_batches: int) -> None:
    for workers in range(2, micro_batches + 1):
        ranges = worker_ranges(micro_batches, workers)
        for leaves in (micro_batches, max(1, micro_batches - 3), 1):
            found = stages(ranges, leaves)
            k = max(len(nodes(clip(r, leaves), leaves)) for r in ranges)
            part, sent = 1.0, 0.0
            for stage in found:
                part /= stage.ways
                sent += stage.sums * (stage.ways - 1) * part
            assert sent <= k * (workers - 1) / workers + 1e-9
            assert sum(stage.ways - 1 for stage in found) <= workers - 1
            for rank in range(workers):
                met = {rank}
                for stage in found:
                    assert stage.peers(rank)[stage.position(rank)] == rank
                    met = {peer for one in met for peer in stage.peers(one)}
                assert met == set(range(workers))


def test_slices_make_up_the_bucket_and_begin_where_vectors_do() -> None:
    for length in range(10 * SLICE):
        for ways in range(1, 9):
            cuts = slices(length, ways)
            assert len(cuts) == ways
            assert [i for cut in cuts for i in range(length)[cut]] == list(range(length))
            assert all(cut.start % SLICE == 0 or cut.start == length for cut in cuts)
