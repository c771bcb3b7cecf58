"""The arithmetic of a run: which samples make which step, and which worker runs which micro-batch.

Everything here is a pure function of whole numbers, without torch. Two facts carry the design:

* Micro-batch m of step t takes positions `t*global + m, t*global + m + M, …` of the epoch's permutation:
  what `torch.utils.data.DistributedSampler(num_replicas=M, rank=m)` gives replica m as its t-th batch.
* A step's gradients are summed along one binary tree over its non-empty micro-batches. Leaves pair up
  from the left and an odd node is promoted, so the tree depends on their number alone, never on workers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Position:
    """One step's place in a run, every number counted from 0.

    `step` of the whole run, `epoch`, `index` within the epoch, `start` of its samples in the epoch's order, `samples` in the
    global batch, `micro_batches` that are not empty (the first ones, K of M), `full` that a whole step of its size has (M).
    """

    step: int
    epoch: int
    index: int
    start: int
    samples: int
    micro_batches: int
    full: int
    ends_epoch: bool

    @property
    def number(self) -> int:
        """The step's number as people and the record count it: from 1."""
        return self.step + 1


def is_due(position: Position, *, steps: int | None, epochs: int | None = None) -> bool:
    """Whether something that is due every `steps` steps, or every `epochs` epochs, is due after the step at `position`."""
    if steps is not None:
        return position.number % steps == 0
    return epochs is not None and position.ends_epoch and (position.epoch + 1) % epochs == 0


@dataclass(frozen=True, slots=True)
class BatchSize:
    """A size of the global batch, in samples: until the run has taken `until_steps` steps or trained on `until_samples` samples, else to its end."""

    size: int
    until_steps: int | None = None
    until_samples: int | None = None

    @property
    def is_last(self) -> bool:
        """Whether it holds to the end of the run."""
        return self.until_steps is None and self.until_samples is None

    def steps_left(self, step: int, trained: int) -> int:
        """Steps that it holds for after `step` steps on `trained` samples, as if each were full; 0 or less where it is over."""
        if self.until_steps is not None:
            return self.until_steps - step
        assert self.until_samples is not None
        return -(-(self.until_samples - trained) // self.size)

    def epochs_left(self, step: int, trained: int, steps: int, samples: int) -> int:
        """Whole epochs of `steps` steps on `samples` samples each, of which every step still begins with this size."""
        if self.until_steps is not None:
            return (self.until_steps - step) // steps
        assert self.until_samples is not None
        before_last = (steps - 1) * self.size
        return (self.until_samples - trained - before_last - 1) // samples + 1


class Stretch(NamedTuple):
    """Consecutive steps of one size: whole epochs, or a part of one epoch. `step` and `epoch` are its first, from 0.

    `index_in_epoch` and `start` are where its first step lies in its epoch. It has `per_epoch` steps in each of `epochs` epochs, None for all that follow.
    """

    step: int
    epoch: int
    index_in_epoch: int
    start: int
    size: int
    per_epoch: int
    epochs: int | None
    ends_epoch: bool


@lru_cache(maxsize=256)
def stretches(units: int, sizes: tuple[BatchSize, ...], drop_last: bool) -> tuple[tuple[Stretch, ...], int]:
    """The stretches of a run whose epochs have `units` units: samples, or micro-batches where tokens bound them. `sizes` count in units as well.

    The second value is 0; or, where an epoch holds no step of some size, that size: the run ends before it.
    """
    result: list[Stretch] = []
    step = trained = epoch = index = start = 0
    for each in sizes:
        while each.is_last or each.steps_left(step, trained) > 0:
            full, tail = divmod(units - start, each.size)
            count = full + (1 if tail and not drop_last else 0)
            if count == 0 and start == 0:
                return tuple(result), each.size
            if count == 0:  # what is left of the epoch fills no step of this size
                result[-1] = result[-1]._replace(ends_epoch=True)
                epoch, index, start = epoch + 1, 0, 0
                continue
            samples = full * each.size if drop_last else units - start
            if start == 0:
                epochs = None if each.is_last else each.epochs_left(step, trained, count, samples)
                if epochs is None or epochs > 0:
                    result.append(Stretch(step, epoch, 0, 0, each.size, count, epochs, True))
                    if epochs is None:
                        return tuple(result), 0
                    epoch, step, trained = epoch + epochs, step + epochs * count, trained + epochs * samples
                    continue
            taken = count if each.is_last else min(count, each.steps_left(step, trained))
            result.append(Stretch(step, epoch, index, start, each.size, taken, 1, taken == count))
            step += taken
            if taken == count:
                trained, epoch, index, start = trained + samples, epoch + 1, 0, 0
            else:
                trained, index, start = (
                    trained + taken * each.size,
                    index + taken,
                    start + taken * each.size,
                )
    return tuple(result), 0


class ByLength(Protocol):
    """How samples are grouped by their lengths: the order of an epoch, and its micro-batches where tokens bound them."""

    @property
    def count(self) -> int | None:
        """Micro-batches of an epoch, the same of each; None where samples bound them."""

    @property
    def longest(self) -> int:
        """The largest length of a sample."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """What of it belongs to the identity."""

    def largest(self) -> Any:
        """The ids of a micro-batch that takes as much memory as any."""

    def bounds(self, epoch: int) -> Any:
        """Where the micro-batches of an epoch begin in its order, `count` + 1 positions, where tokens bound them."""

    def order(self, epoch: int, whole: int) -> Any:
        """The order of an epoch, of which the first `whole` samples make full steps."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The arithmetic of one run over `samples` training samples."""

    samples: int
    sizes: tuple[BatchSize, ...]
    """The sizes of the global batch in turn, one where it stays the same; where tokens bound the micro-batches, their number in a step times `micro_batch`."""
    micro_batch: int
    drop_last: bool
    total_steps: int
    in_passes: bool = False
    """Whether the workers go through a step together, one micro-batch each at a time: in pass j worker r of W has micro-batch j·W + r."""
    group: int = 1
    """So many neighbours in the order share a micro-batch, which they divide; more than 1 leaves `neighbours` the only cut."""
    tokens: int | None = None
    """The most padded tokens of a micro-batch, which then has at most `micro_batch` samples."""
    by_length: ByLength | None = field(default=None, compare=False)
    """The samples by their lengths, where the order goes by them."""

    @classmethod
    def of(
        cls,
        samples: int,
        global_batch: int | Sequence[BatchSize],
        micro_batch: int,
        *,
        drop_last: bool,
        epochs: int | None = None,
        steps: int | None = None,
        group: int = 1,
        tokens: int | None = None,
        by_length: ByLength | None = None,
    ) -> Plan:
        """The plan for whole epochs or for a number of steps. ValueError where an epoch holds no step."""
        sizes = (BatchSize(global_batch),) if isinstance(global_batch, int) else tuple(global_batch)
        plan = cls(samples, sizes, micro_batch, drop_last, 0, group=group, tokens=tokens, by_length=by_length)
        total = plan.steps_before(epochs or 1) if steps is None else steps
        if total is None or not plan.has_step(total - 1):
            raise ValueError(plan._no_step())
        return replace(plan, total_steps=total)

    def _no_step(self) -> str:
        size = self._stretches[1]
        if self.tokens is None:
            return f"{self.samples} samples give no step of batch.global = {size}"
        return f"{self.samples} samples make {self._units} micro-batches of batch.tokens = {self.tokens}, and a step has {size}"

    @property
    def _units(self) -> int:
        """What an epoch is cut from: samples, or micro-batches where tokens bound them."""
        if self.tokens is None:
            return self.samples
        assert self.by_length is not None and self.by_length.count is not None
        return self.by_length.count

    @property
    def _stretches(self) -> tuple[tuple[Stretch, ...], int]:
        sizes = self.sizes
        if self.tokens is not None:
            sizes = tuple(replace(each, size=each.size // self.micro_batch) for each in sizes)
        return stretches(self._units, sizes, self.drop_last)

    @property
    def global_batch(self) -> int:
        """The largest size of the global batch."""
        return max(each.size for each in self.sizes)

    @property
    def is_constant(self) -> bool:
        """Whether the global batch has one size, so that all epochs have the same number of steps."""
        return len(self.sizes) == 1

    @property
    def micro_batches(self) -> int:
        """M, the micro-batches of a full step; of the largest where their number changes."""
        return self.global_batch // self.micro_batch

    @property
    def evaluation_micro_batch(self) -> int:
        """Samples of an evaluation's micro-batches. Where tokens bound those of training, so many that the longest training samples keep the bound."""
        if self.tokens is None or self.by_length is None:
            return self.micro_batch
        return max(1, min(self.micro_batch, self.tokens // self.by_length.longest))

    def steps_before(self, epoch: int) -> int | None:
        """Steps before the first one of an epoch, from 0; None where the run's sizes do not lead so far."""
        if epoch == 0:
            return 0
        every = self._stretches[0]
        stretch = next((each for each in reversed(every) if each.epoch < epoch), None)
        if stretch is None:
            return None
        ahead = epoch - stretch.epoch
        if stretch.epochs is not None and ahead > stretch.epochs:
            return None
        return stretch.step + ahead * stretch.per_epoch

    def has_step(self, step: int) -> bool:
        """Whether the sizes lead to step number `step`: always, unless an epoch holds no step of one of them."""
        every, impossible = self._stretches
        if not impossible:
            return True
        last = every[-1] if every else None
        return last is not None and step < last.step + (last.epochs or 0) * last.per_epoch

    def steps_in_epoch(self, epoch: int) -> int:
        """Steps of an epoch that the sizes lead to, whether the run takes all of them or not."""
        before, after = self.steps_before(epoch), self.steps_before(epoch + 1)
        return 0 if before is None or after is None else after - before

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the first epoch, and of each one where the global batch has one size."""
        return self.steps_in_epoch(0)

    @property
    def epochs(self) -> int:
        """Epochs that the run begins."""
        return self.position(self.total_steps - 1).epoch + 1

    def position(self, step: int) -> Position:
        """The position of step number `step` of the run."""
        every = self._stretches[0]
        stretch = every[bisect_right(every, step, key=lambda each: each.step) - 1]
        ahead, within = divmod(step - stretch.step, stretch.per_epoch)
        epoch, start = stretch.epoch + ahead, stretch.start + within * stretch.size
        units = min(stretch.size, self._units - start)
        ends = stretch.ends_epoch and within == stretch.per_epoch - 1
        index = stretch.index_in_epoch + within
        if self.tokens is not None:
            bounds = self._bounds(epoch)
            first, end = int(bounds[start]), int(bounds[start + units])
            return Position(step, epoch, index, first, end - first, units, stretch.size, ends)
        full = stretch.size // self.micro_batch
        return Position(step, epoch, index, start, units, min(full, -(-units // self.group)), full, ends)

    def changes(self) -> Iterator[tuple[int, int, int]]:
        """The sizes of the global batch that the run has, in samples, each with the first step and epoch of it, from 0."""
        size = 0
        scale = 1 if self.tokens is None else self.micro_batch
        for stretch in self._stretches[0]:
            if stretch.size != size and stretch.step < self.total_steps:
                size = stretch.size
                yield size * scale, stretch.step, stretch.epoch

    def _bounds(self, epoch: int) -> Any:
        assert self.by_length is not None
        return self.by_length.bounds(epoch)

    def positions(self, start: int = 0) -> Iterator[Position]:
        """The steps of the run from `start` to its end."""
        return (self.position(step) for step in range(start, self.total_steps))

    def whole_steps(self, epoch: int) -> int:
        """Samples of an epoch that make full steps: what comes after them is its ragged step, or is left out."""
        before = self.steps_before(epoch + 1)
        if before is None:  # the run ends in it
            return self.samples
        last = self.position(before - 1)
        is_full = last.samples == last.full * self.micro_batch
        return last.start + last.samples if is_full else last.start

    def step_at(self, epoch: int, place: int) -> int | None:
        """The step, from 0, that takes the sample at `place` in the order of an epoch; None where the run takes it in none."""
        first = self.steps_before(epoch)
        if first is None:
            return None
        steps = range(first, min(first + self.steps_in_epoch(epoch), self.total_steps))
        found = bisect_right(steps, place, key=lambda step: self.position(step).start) - 1
        if found < 0:
            return None
        position = self.position(steps[found])
        return position.step if place < position.start + position.samples else None

    def sample_slice(self, position: Position, m: int) -> slice:
        """The positions of the epoch's permutation that make micro-batch `m`."""
        return slice(position.start + m, position.start + position.samples, position.full)

    def neighbours(self, position: Position, m: int) -> slice:
        """The positions of micro-batch `m` where neighbours share one; it has as many as `sample_slice` gives, or as tokens allow."""
        if self.tokens is not None:
            bounds = self._bounds(position.epoch)
            at = bisect_right(bounds, position.start) - 1 + m
            return slice(int(bounds[at]), int(bounds[at + 1]), 1)
        first = position.start + sum(self.micro_batch_size(position, i) for i in range(m))
        return slice(first, first + self.micro_batch_size(position, m), 1)

    def micro_batch_size(self, position: Position, m: int) -> int:
        """Samples in micro-batch `m`; in a ragged step the sizes differ by at most one group, whose last one may be short."""
        if self.tokens is not None:
            places = self.neighbours(position, m)
            return int(places.stop - places.start)
        groups = -(-position.samples // self.group)
        size = len(range(m, groups, position.full)) * self.group
        short = groups * self.group - position.samples
        return size - short if m == position.micro_batches - 1 else size

    @property
    def smallest_micro_batch(self) -> int:
        """Samples in the smallest non-empty micro-batch of the run."""
        if self.tokens is not None:
            return min(int(after - before) for before, after in pairwise(self._bounds(0)))
        smallest = self.micro_batch
        for stretch in self._stretches[0]:
            last = stretch.step + stretch.per_epoch - 1
            if stretch.ends_epoch and last < self.total_steps:
                position = self.position(last)
                sizes = [self.micro_batch_size(position, m) for m in {0, position.micro_batches - 1}]
                smallest = min(smallest, *sizes)
        return smallest

    def ranges(self, workers: int, count: int | None = None) -> tuple[range, ...]:
        """Micro-batches of each worker in a step of `count` non-empty ones; in the largest full step where none is given.

        A ragged step has those of the next larger full step, as far as they exist. ValueError for more workers than a step ever has micro-batches.
        """
        if not 1 <= workers <= self.micro_batches:
            raise ValueError(
                f"{workers} workers for {self.micro_batches} micro-batches: each needs at least one"
            )
        full = tuple(sorted({each.size // self.micro_batch for each in self.sizes}))
        return _ranges(full, workers, self.micro_batches if count is None else count, self.in_passes)

    def passes(self, position: Position, assigned: range) -> tuple[range, ...]:
        """The micro-batches of each pass of a step over all workers, where they go `in_passes`. `assigned` is any worker's range."""
        count, workers = position.micro_batches, assigned.step
        return tuple(range(first, min(first + workers, count)) for first in range(0, count, workers))


@lru_cache(maxsize=256)
def _ranges(full: tuple[int, ...], workers: int, count: int, in_passes: bool) -> tuple[range, ...]:
    """`Plan.ranges` for steps of `full` micro-batches, in rising order. Where a step has fewer than there are workers, the last ones have none."""
    if in_passes:
        return tuple(range(rank, count, workers) for rank in range(workers))
    size = next(each for each in full if each >= count)
    busy = worker_ranges(size, min(workers, size))
    return tuple(clip(assigned, count) for assigned in (*busy, *[range(size, size)] * (workers - len(busy))))


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

    def place(self, rank: int) -> int:
        """The place of a rank among its peers, which is also the index of the slice that it keeps."""
        return self.block(rank) % self.ways

    def peers(self, rank: int) -> list[int]:
        """The ranks that hold the same slice, including this one, from left to right in the tree."""
        first = rank - self.place(rank) * self.stride
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
