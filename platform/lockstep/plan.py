"""The arithmetic of a run: which samples make which step, and which worker runs which micro-batch.

Everything here is a pure function of whole numbers; nothing knows of torch. Two facts carry the design:

* Micro-batch m of step t takes positions `t*global + m, t*global + m + M, …` of the epoch's permutation:
  what `torch.utils.data.DistributedSampler(num_replicas=M, rank=m)` gives replica m as its t-th batch.
* A step's gradients are summed along one binary tree over its non-empty micro-batches. Leaves pair up
  from the left and an odd node is promoted, so the tree depends on their number alone, never on workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Position:
    """One step's place in a run, every number counted from 0.

    `step` of the whole run, `epoch`, `index` within the epoch, `samples` in the global batch,
    `micro_batches` that are not empty (the first ones, K of M).
    """

    step: int
    epoch: int
    index: int
    samples: int
    micro_batches: int
    ends_epoch: bool

    @property
    def number(self) -> int:
        """The step's number as people and the record count it: from 1."""
        return self.step + 1


def is_due(position: Position, *, steps: int | None, epochs: int | None) -> bool:
    """Whether something that comes each so many steps, or each so many epochs, comes after the step at `position`."""
    if steps is not None:
        return position.number % steps == 0
    return epochs is not None and position.ends_epoch and (position.epoch + 1) % epochs == 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The arithmetic of one run over `samples` training samples."""

    samples: int
    global_batch: int
    micro_batch: int
    drop_last: bool
    total_steps: int

    @classmethod
    def of(
        cls,
        samples: int,
        global_batch: int,
        micro_batch: int,
        *,
        drop_last: bool,
        epochs: int | None = None,
        steps: int | None = None,
    ) -> Plan:
        """The plan for whole epochs or for a number of steps. ValueError where an epoch holds no step."""
        whole, tail = divmod(samples, global_batch)
        steps_per_epoch = whole + (1 if tail and not drop_last else 0)
        if steps_per_epoch == 0:
            raise ValueError(f"{samples} samples give no step of batch.global = {global_batch}")
        total = steps if steps is not None else (epochs or 1) * steps_per_epoch
        return cls(samples, global_batch, micro_batch, drop_last, total)

    @property
    def micro_batches(self) -> int:
        """M, the micro-batches of a full step."""
        return self.global_batch // self.micro_batch

    @property
    def steps_per_epoch(self) -> int:
        whole, tail = divmod(self.samples, self.global_batch)
        return whole + (1 if tail and not self.drop_last else 0)

    def position(self, step: int) -> Position:
        """Where step number `step` of the run stands."""
        epoch, index = divmod(step, self.steps_per_epoch)
        samples = min(self.global_batch, self.samples - index * self.global_batch)
        return Position(
            step=step,
            epoch=epoch,
            index=index,
            samples=samples,
            micro_batches=min(self.micro_batches, samples),
            ends_epoch=index == self.steps_per_epoch - 1,
        )

    def positions(self, start: int = 0) -> Iterator[Position]:
        """The steps of the run from `start` to its end."""
        return (self.position(step) for step in range(start, self.total_steps))

    def sample_slice(self, position: Position, m: int) -> slice:
        """The positions of the epoch's permutation that make micro-batch `m`."""
        first = position.index * self.global_batch
        return slice(first + m, first + position.samples, self.micro_batches)

    def micro_batch_size(self, position: Position, m: int) -> int:
        """Samples in micro-batch `m`; in a ragged step the sizes differ by at most one."""
        return len(range(m, position.samples, self.micro_batches))

    @property
    def smallest_micro_batch(self) -> int:
        """Samples in the smallest non-empty micro-batch that the run meets."""
        last = self.position(self.steps_per_epoch - 1)
        reached = self.total_steps >= self.steps_per_epoch
        return self.micro_batch_size(last, last.micro_batches - 1) if reached else self.micro_batch

    def ranges(self, workers: int) -> tuple[range, ...]:
        """Micro-batches of each worker in a full step; a ragged step clips them (`clip`)."""
        return worker_ranges(self.micro_batches, workers)


def clip(micro_batches: range, count: int) -> range:
    """The part of a worker's range that a step of `count` non-empty micro-batches has."""
    return range(min(micro_batches.start, count), min(micro_batches.stop, count))


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
def nodes(micro_batches: range, leaves: int) -> tuple[range, ...]:
    """The fewest tree nodes that make up a range of leaves: the partial sums that a worker sends."""
    found: list[range] = []
    for leaf in micro_batches:
        node = range(leaf, leaf + 1)
        while found and are_siblings(found[-1], node, leaves):
            node = range(found.pop().start, node.stop)
        found.append(node)
    return tuple(found)


_SEARCHED = 500_000
"""Choices that `worker_ranges` looks through, about a second; beyond it the ranges are just even."""


@lru_cache(maxsize=256)
def worker_ranges(micro_batches: int, workers: int) -> tuple[range, ...]:
    """Contiguous ranges, one a worker, each of 1 … ceil(M/W) micro-batches, that send the fewest partial sums.

    The largest number that any worker sends decides the exchange's time, so it is minimised first and
    their sum second. ValueError where there are more workers than micro-batches.
    """
    if not 1 <= workers <= micro_batches:
        raise ValueError(f"{workers} workers for {micro_batches} micro-batches: each needs at least one")
    most = -(-micro_batches // workers)
    slack = most * workers - micro_batches
    if workers * (slack + 1) * min(most, slack + 1) > _SEARCHED:
        return _even(micro_batches, workers)
    # best[end]: (largest k, sum of k, balance, starts) over the ways to give the first workers the first `end` micro-batches
    best: dict[int, tuple[int, int, int, tuple[int, ...]]] = {0: (0, 0, 0, ())}
    for worker in range(workers):
        left = workers - worker - 1
        reached: dict[int, tuple[int, int, int, tuple[int, ...]]] = {}
        for start, (largest, total, balance, starts) in best.items():
            for size in range(max(1, most - slack), most + 1):
                end = start + size
                if not left <= micro_batches - end <= left * most:
                    continue
                k = len(nodes(range(start, end), micro_batches))
                cost = (max(largest, k), total + k, balance + size * size, (*starts, start))
                if end not in reached or cost < reached[end]:
                    reached[end] = cost
        best = reached
    starts = (*best[micro_batches][3], micro_batches)
    return tuple(range(a, b) for a, b in pairwise(starts))
