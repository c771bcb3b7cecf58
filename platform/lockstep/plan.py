"""The arithmetic of a run: which samples make which step, and which worker runs which micro-batch.

Everything here is a pure function of whole numbers, without torch. Two facts carry the design:

* Micro-batch m of step t takes positions `t*global + m, t*global + m + M, …` of the epoch's permutation:
  what `torch.utils.data.DistributedSampler(num_replicas=M, rank=m)` gives replica m as its t-th batch.
* A step's gradients are summed along one binary tree over its non-empty micro-batches (`reduction_tree`), whoever computes them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from lockstep.reduction_tree import clip, worker_ranges


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
            steps = count if each.is_last else min(count, each.steps_left(step, trained))
            result.append(Stretch(step, epoch, index, start, each.size, steps, 1, steps == count))
            step += steps
            if steps == count:
                trained, epoch, index, start = trained + samples, epoch + 1, 0, 0
            else:
                trained, index, start = (
                    trained + steps * each.size,
                    index + steps,
                    start + steps * each.size,
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

    def largest(self) -> Sequence[Any]:
        """The ids of each micro-batch that may take the most memory; which does is the model's affair."""

    def bounds(self, epoch: int) -> Any:
        """Where the micro-batches of an epoch begin in its order, `count` + 1 positions, where tokens bound them."""

    def order(self, epoch: int, in_full_steps: int) -> Any:
        """The order of an epoch, of which the first `in_full_steps` samples make full steps."""


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
    _ranges: dict[tuple[int, int | None], tuple[range, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """What `ranges` has given: every step asks for its own several times."""

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
        first, end = self.steps_before(epoch), self.steps_before(epoch + 1)
        return 0 if first is None or end is None else end - first

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
        end = self.steps_before(epoch + 1)
        if end is None:  # the run ends in it
            return self.samples
        last = self.position(end - 1)
        is_full = last.samples == last.full * self.micro_batch
        return last.start + last.samples if is_full else last.start

    def step_at(self, epoch: int, index: int) -> int | None:
        """The step, from 0, that takes the sample at `index` in the order of an epoch; None where the run takes it in none."""
        first = self.steps_before(epoch)
        if first is None:
            return None
        steps = range(first, min(first + self.steps_in_epoch(epoch), self.total_steps))
        candidate = bisect_right(steps, index, key=lambda step: self.position(step).start) - 1
        if candidate < 0:
            return None
        position = self.position(steps[candidate])
        return position.step if index < position.start + position.samples else None

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
            return min(int(end - start) for start, end in pairwise(self._bounds(0)))
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
        known = self._ranges.get((workers, count))
        if known is not None:
            return known
        if not 1 <= workers <= self.micro_batches:
            raise ValueError(
                f"{workers} workers for {self.micro_batches} micro-batches: each needs at least one"
            )
        full = tuple(sorted({each.size // self.micro_batch for each in self.sizes}))
        ranges = _ranges(full, workers, self.micro_batches if count is None else count, self.in_passes)
        self._ranges[workers, count] = ranges
        return ranges

    def passes(self, position: Position, assigned: range) -> tuple[range, ...]:
        """The micro-batches of each pass of a step over all workers, where they go `in_passes`. `assigned` is any worker's range."""
        count, workers = position.micro_batches, assigned.step
        return tuple(range(first, min(first + workers, count)) for first in range(0, count, workers))


def _ranges(full: tuple[int, ...], workers: int, count: int, in_passes: bool) -> tuple[range, ...]:
    """`Plan.ranges` for steps of `full` micro-batches, in rising order. Where a step has fewer than there are workers, the last ones have none."""
    if in_passes:
        return tuple(range(rank, count, workers) for rank in range(workers))
    size = next(each for each in full if each >= count)
    busy = worker_ranges(size, min(workers, size))
    return tuple(clip(assigned, count) for assigned in (*busy, *[range(size, size)] * (workers - len(busy))))
