"""The one tree along which a step's partial sums are added, and which workers hold which part of it. Pure, without torch.

Leaves are the non-empty micro-batches of a step. They pair up from the left and an odd node is promoted, so the tree depends on their number
alone, never on workers. A worker has a range of leaves, and sends the sums of the fewest nodes that make it up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import prod

Ranges = Callable[[int], Sequence[range]]
"""The micro-batches of each worker in a step of so many."""


def clip(assigned: range, count: int) -> range:
    """The part of a worker's range that exists in a step of `count` non-empty micro-batches."""
    return range(min(assigned.start, count), min(assigned.stop, count), assigned.step)


def evaluation_ranges(samples: int, micro_batch: int, workers: int) -> tuple[range, ...]:
    """Evaluation micro-batches of each worker. Micro-batch i is samples `i*micro … (i+1)*micro - 1`, the last one short."""
    return _even(-(-samples // micro_batch), workers)


def _even(count: int, workers: int) -> tuple[range, ...]:
    return tuple(range(count * r // workers, count * (r + 1) // workers) for r in range(workers))


# --- the tree ---------------------------------------------------------------------------------------------


def are_siblings(left: range, right: range, leaves: int) -> bool:
    """Whether two neighbouring nodes of the tree over `leaves` leaves have the same parent.

    A node is the range of leaves below it: `i*2^l … min((i+1)*2^l, leaves)`.
    """
    width = right.start - left.start
    power_of_two = width > 0 and width & (width - 1) == 0
    return (
        power_of_two
        and left.stop == right.start
        and left.start % (2 * width) == 0
        and right.stop == min(left.start + 2 * width, leaves)
    )


@lru_cache(maxsize=65536)
def nodes(assigned: range, leaves: int) -> tuple[range, ...]:
    """The fewest tree nodes that make up a range of leaves: the partial sums that a worker sends. Leaves that are no neighbours stay leaves."""
    if assigned.step > 1:
        return tuple(range(leaf, leaf + 1) for leaf in assigned)
    tree_nodes: list[range] = []
    start, stop = assigned.start, assigned.stop
    while start < stop:
        width = start & -start or 1 << leaves.bit_length()  # the widest node that begins here
        while min(start + width, leaves) > stop:
            width //= 2
        tree_nodes.append(range(start, min(start + width, leaves)))
        start = tree_nodes[-1].stop
    return tuple(tree_nodes)


# --- how partial sums travel ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the exchange of a large bucket, in which `ways` ranks split the slice that each of them holds.

    The ranks of a stage are `stride` apart; `stride` neighbouring ranks hold slices of the same sums, and form a block.
    `nodes` has the tree nodes that each block holds, by block.
    """

    ways: int
    stride: int
    nodes: tuple[tuple[range, ...], ...]

    def block(self, rank: int) -> int:
        return rank // self.stride

    def position(self, rank: int) -> int:
        """The position of a rank among its peers, which is also the index of the slice that it keeps."""
        return self.block(rank) % self.ways

    def peers(self, rank: int) -> list[int]:
        """The ranks that hold the same slice, including this one, from left to right in the tree."""
        first = rank - self.position(rank) * self.stride
        return [first + i * self.stride for i in range(self.ways)]

    @property
    def sums(self) -> int:
        """The most partial sums that a rank sends."""
        return max(map(len, self.nodes))

    def sends_whole(self, size: int, latency: int) -> bool:
        """Whether to send the whole slice of `size` bytes to all peers, each of which adds it up: only in the last stage.

        That saves the round back. Between two ranks with one sum each it costs no extra bytes; otherwise it is worth `latency` bytes.
        """
        if len(self.nodes) != self.ways:
            return False
        return (self.ways, self.sums) == (2, 1) or self.sums * (self.ways - 1) * size <= latency


SLICE = 64
"""Slices begin at multiples of so many elements, where vectors begin: 64 bytes of fp32."""


def slices(length: int, ways: int) -> list[slice]:
    """A bucket or a slice of `length` elements cut into `ways` slices; the last ones may be shorter, or empty."""
    width = -(-length // (ways * SLICE)) * SLICE
    return [slice(min(i * width, length), min((i + 1) * width, length)) for i in range(ways)]


@lru_cache(maxsize=1024)
def stages(ranges: tuple[range, ...], leaves: int) -> tuple[Stage, ...]:
    """The stages in which workers with these ranges reduce a large bucket in a step of `leaves` micro-batches.

    They follow the prime factors of W, smallest first: two neighbours, then two pairs of them, and so on. From some factor on, all the
    others may form one stage, if sending partial sums of more ranges would cost more. Fewest bytes count first, then messages.
    """
    factors = _prime_factors(len(ranges))
    every = []
    for i in range(len(factors) + 1):
        remaining = prod(factors[i:])
        candidate = _stages((*factors[:i], remaining) if remaining > 1 or not i else factors, ranges, leaves)
        sent, part = Fraction(), Fraction(1)
        for stage in candidate:
            part /= stage.ways
            sent += stage.sums * (stage.ways - 1) * part
        every.append((sent, sum(stage.ways - 1 for stage in candidate), i, candidate))
    return min(every)[3]


def _stages(ways: Sequence[int], ranges: Sequence[range], leaves: int) -> tuple[Stage, ...]:
    blocks, stride = [clip(assigned, leaves) for assigned in ranges], 1
    result = []
    for each in ways:
        result.append(Stage(each, stride, tuple(nodes(block, leaves) for block in blocks)))
        blocks = [range(blocks[i].start, blocks[i + each - 1].stop) for i in range(0, len(blocks), each)]
        stride *= each
    return tuple(result)


def _prime_factors(number: int) -> tuple[int, ...]:
    factors, factor = [], 2
    while number > 1:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return tuple(factors)


# --- which worker runs which micro-batch ------------------------------------------------------------------

_SEARCHED = 500_000
"""The most choices that `worker_ranges` searches, about a second; beyond that the ranges are just even."""

_LONGER = 8
"""A range may be longer than M/W by one part in so many, where that saves partial sums. For M = 64, three workers then have halves,
quarters and eighths of the tree: k = 2 instead of 4, for at most an eighth more computation."""


@lru_cache(maxsize=256)
def worker_ranges(micro_batches: int, workers: int) -> tuple[range, ...]:
    """Contiguous ranges, one per worker, each of at least one micro-batch, that send the fewest partial sums.

    The largest number that any worker sends decides the exchange's time, so it is minimised first, then the longest
    range, then the sum of what they send. The longest range has ceil(M/W) micro-batches, or at most an eighth more than M/W where
    that saves partial sums. ValueError for more workers than micro-batches.
    """
    if not 1 <= workers <= micro_batches:
        raise ValueError(f"{workers} workers for {micro_batches} micro-batches: each needs at least one")
    candidates, unit = [], 1
    # Ranges of whole subtrees of 2, 4, 8 … micro-batches send fewer sums, and there are fewer of them to search.
    while (units := -(-micro_batches // unit)) >= workers:
        longest = -(-units // workers) * unit
        if unit > 1 and longest * workers * _LONGER > micro_batches * (_LONGER + 1):
            break
        ranges = tuple(
            range(r.start * unit, min(r.stop * unit, micro_batches)) for r in _fewest_sums(units, workers)
        )
        sums = [len(nodes(assigned, micro_batches)) for assigned in ranges]
        candidates.append((max(sums), max(map(len, ranges)), sum(sums), unit, ranges))
        unit *= 2
    return min(candidates)[-1]


def _fewest_sums(micro_batches: int, workers: int) -> tuple[range, ...]:
    """Ranges of 1 … ceil(M/W) micro-batches that send the fewest partial sums: first by the most that any worker sends, then by the total."""
    most = -(-micro_batches // workers)
    slack = most * workers - micro_batches
    if workers * (slack + 1) * min(most, slack + 1) > _SEARCHED:
        return _even(micro_batches, workers)
    # best[end]: (largest k, sum of k, balance, starts) over the ways to give the first workers the first `end` micro-batches
    best: dict[int, tuple[int, int, int, tuple[int, ...]]] = {0: (0, 0, 0, ())}
    for worker in range(workers):
        remaining_workers = workers - worker - 1
        reached: dict[int, tuple[int, int, int, tuple[int, ...]]] = {}
        for start, (largest, total, balance, starts) in best.items():
            for size in range(max(1, most - slack), most + 1):
                end = start + size
                if not remaining_workers <= micro_batches - end <= remaining_workers * most:
                    continue
                k = len(nodes(range(start, end), micro_batches))
                cost = (max(largest, k), total + k, balance + size * size, (*starts, start))
                if end not in reached or cost < reached[end]:
                    reached[end] = cost
        best = reached
    starts = (*best[micro_batches][3], micro_batches)
    return tuple(range(a, b) for a, b in pairwise(starts))
