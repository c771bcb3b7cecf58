"""Which ids a worker fetches, in which order: DistributedSampler at M logical ranks, for any number of workers.

There is no state to save. The micro-batches from step t on are a pure function of (seed, epoch, t) and of
the worker's range, so seeking is arithmetic and a resume on other workers needs nothing but the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset, DistributedSampler, Subset

from lockstep.data import problems
from lockstep.data.dataset import checks_order, is_blocked, orders_itself, reads_ahead, takes_arrays
from lockstep.data.dataset_order import (
    ASKED_AGAIN_WITHIN_S,
    Guard,
    InAnotherProcess,
    agree,
    check_own_order,
    own_order,
    probed,
    says_of_neighbours,
)
from lockstep.data.mixture import Mixture
from lockstep.data.order import WINDOW, BlockOrder, Ids, Order, Shuffle, epoch_order
from lockstep.plan import Plan, Position
from lockstep.reduction_tree import clip
from lockstep.spec.id_ranges import parse

EVALUATION = -1
"""Stands for the step in micro-batches of held-out data, which are the same in every evaluation."""


class MicroBatch(NamedTuple):
    """What a worker fetches at once: the samples `ids` of one micro-batch of one step, both from 0; EVALUATION for a step.

    A dataset that `takes_arrays`, as a table does, is given its ids as an int64 array, any other as a list. One with
    `read_ahead` is told the blocks that are `due` meanwhile, for micro-batches to come.
    """

    step: int
    micro_batch: int
    ids: list[int] | Ids
    due: Sequence[int] = ()

    @property
    def step_number(self) -> int:
        """The step's number as people and the record count it: from 1."""
        return self.step + 1


_AT_ONCE = 1 << 20
"""Positions whose ids are asked for at once where a whole epoch is looked through."""


class FirstUse(NamedTuple):
    """The step, from 0, in which one of some samples is used first; how many of them are used at all."""

    step: int
    sample: int
    used: int


class LeftOut:
    """The ids that a spec leaves out, kept as ranges."""

    def __init__(self, without: str | None) -> None:
        ranges = [] if without is None else parse(without)
        self.count = sum(map(len, ranges))
        self.last = max((interval.stop - 1 for interval in ranges), default=-1)
        self._edges = np.array(
            [edge for interval in ranges for edge in (interval.start, interval.stop)], np.int64
        )

    def has(self, ids: Ids) -> NDArray[np.bool_]:
        """Which of `ids` are left out, as a mask."""
        mask: NDArray[np.bool_] = np.searchsorted(self._edges, ids, side="right") % 2 == 1
        return mask

    def has_one(self, index: int) -> bool:
        """Whether this id is left out."""
        return bool(self.has(np.array([index], np.int64))[0])

    def remaining(self, ids: Ids) -> Ids:
        """Those of `ids` that are not left out."""
        return ids[~self.has(ids)] if self.count else ids


def whole(dataset: Any) -> Any:
    """What a dataset is a part of, as `random_split` makes some; itself where it is none."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


class MicroBatchSampler(DistributedSampler[MicroBatch]):
    """Yields the micro-batches of one worker from step `start` to the end of the run.

    Replica m of a DistributedSampler with `num_replicas = M` is here micro-batch m; a worker stands in for the
    replicas `assigned` to it: those that a step of so many has, or by their number in a step. A dataset with `neighbours_together` has each global batch cut into neighbours instead. Nothing is padded: with `drop_last` off the last step of an epoch is ragged.
    The samples `without` (`spec.id_ranges`) are left out of the micro-batches that have them, which all else stays for: one may be
    left with none. `guard` makes what the dataset's own code raises, where it is asked for its order, an error that names the place.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        plan: Plan,
        assigned: range | Callable[[int], range],
        *,
        seed: int,
        shuffle: Shuffle,
        window: int = WINDOW,
        start: int = 0,
        without: str | None = None,
        guard: Guard = lambda where: nullcontext(),
    ) -> None:
        super().__init__(
            dataset,
            num_replicas=plan.micro_batches,
            rank=0,
            shuffle=shuffle != "none",
            seed=seed,
            drop_last=plan.drop_last,
        )
        read = whole(dataset)
        if isinstance(read, Mixture) and read is not dataset:
            raise problems.MIXTURE_SUBSET()
        if checks_order(read):
            read.check_order(shuffle, window)
        self.plan = plan
        self._assigned = assigned
        self.order = shuffle
        self.window = window
        self.start = start
        self.without = LeftOut(without)
        self.guard = guard
        self.takes_arrays: bool = takes_arrays(dataset)
        self.reads_ahead: bool = reads_ahead(dataset)
        by_length = plan.by_length is not None
        self.neighbours_together = by_length or plan.group > 1 or says_of_neighbours(dataset) is True
        self._last: tuple[int, Order] | None = None
        """The epoch of which `at` was last asked, and its order."""
        self._given: dict[int, list[Ids]] = {}
        """By epoch: what is compared of an order of the dataset's own in which micro-batches were given."""
        self._slow = False
        """Whether such an order takes long to make."""

    def __len__(self) -> int:
        positions = self.plan.positions(self.start)
        return sum(len(self._computed(position)) for position in positions)

    def __iter__(self) -> Iterator[MicroBatch]:
        epoch, order = -1, None
        for position in self.plan.positions(self.start):
            if position.epoch != epoch or order is None:
                epoch, began = position.epoch, time.perf_counter()
                order = self._order(epoch)
                self._slow = time.perf_counter() - began > ASKED_AGAIN_WITHIN_S
                if self.may_change:
                    self._given[epoch] = probed(order, self.plan.samples)
            for m in self._computed(position):
                key = self._micro_batch(order, position, m)
                if self.plan.in_passes and not len(
                    key.ids
                ):  # `without` left it no sample, and its worker computes all the same
                    others = (self._micro_batch(order, position, i) for i in range(position.micro_batches))
                    key = next((candidate for candidate in others if len(candidate.ids)), key)
                yield key

    def _computed(self, position: Position) -> Sequence[int]:
        """The micro-batches that the worker computes in a step: its own; in passes also the first of a pass in which it has none."""
        assignment, count = self._assigned, position.micro_batches
        assigned = assignment(count) if callable(assignment) else assignment
        if not self.plan.in_passes:
            return clip(assigned, count)
        rank = assigned.start
        passes = self.plan.passes(position, assigned)
        return [together[rank] if rank < len(together) else together[0] for together in passes]

    def first_use(self, targets: LeftOut) -> FirstUse | None:
        """The first use of any of the samples `targets` in the run, and how many of them it uses at all; None where it uses none."""
        plan, first, used = self.plan, None, set[int]()
        for epoch in range(plan.epochs):
            first_step, steps = plan.steps_before(epoch) or 0, plan.steps_in_epoch(epoch)
            last = plan.position(min(first_step + steps, plan.total_steps) - 1)
            order, end = self._order(epoch), last.start + last.samples
            for start in range(0, end, _AT_ONCE):
                ids = order[start : min(start + _AT_ONCE, end)]
                for at in np.flatnonzero(targets.has(ids)).tolist():
                    if first is None:
                        step = plan.step_at(epoch, start + at)
                        assert step is not None
                        first = FirstUse(step, int(ids[at]), 0)
                    used.add(int(ids[at]))
            if len(used) == targets.count:
                break
        return None if first is None else first._replace(used=len(used))

    def at(self, position: Position, m: int) -> MicroBatch:
        """Micro-batch `m` of the step at `position`, whoever it is assigned to."""
        return self._micro_batch(self._order_of(position), position, m)._replace(due=())

    def _order_of(self, position: Position) -> Order:
        if self._last is None or self._last[0] != position.epoch:
            self._last = position.epoch, self._order(position.epoch)
        return self._last[1]

    def places(self, position: Position) -> list[Ids]:
        """For each micro-batch of the step at `position`, the places of its samples among those of the step, in the order of the epoch, from 0."""
        slices = [self._slice(position, m) for m in range(position.micro_batches)]
        places = [np.arange(each.start, each.stop, each.step or 1) for each in slices]
        if self.without.count:
            order = self._order_of(position)
            places = [
                every[~self.without.has(order[each])] for each, every in zip(slices, places, strict=True)
            ]
        return [every - position.start for every in places]

    @property
    def may_change(self) -> bool:
        """Whether the dataset has an order of its own, which is code of the job: a mixture's is drawn here."""
        return orders_itself(self.dataset) and not isinstance(self.dataset, Mixture)

    def check_order(self, elsewhere: InAnotherProcess | None = None) -> None:
        """Refuse an order of the dataset's own that is another one when it is asked for again; `elsewhere` calls in another process. Raises JobError."""
        if orders_itself(self.dataset):
            check_own_order(
                self.dataset,
                self.seed,
                self.plan.epochs,
                self.order,
                self.plan.samples,
                self.guard,
                elsewhere if self.may_change else None,
            )

    def check_unchanged(self, key: MicroBatch, *, due: bool = False) -> None:
        """Refuse an order of the dataset's own that training has changed since this sampler gave micro-batches in it. Call it before `key` is computed.

        Asked anew where it is `due`, in the steps 1, 2, 4, 8 … after the first one, and in the last of each epoch, unless it takes long. Raises JobError.
        """
        position, done = self.plan.position(key.step), key.step - self.start
        for epoch in [epoch for epoch in self._given if epoch < position.epoch]:
            del self._given[epoch]
        due = due or (position.ends_epoch and not self._slow) or (done > 0 and not done & (done - 1))
        if not due or key.micro_batch != self._computed(position)[0]:
            return
        order = self._order(position.epoch)
        if not agree(self._given[position.epoch], probed(order, self.plan.samples)):
            raise problems.ORDER_FOLLOWS_TRAINING(
                dataset=type(self.dataset).__name__, epoch=position.epoch, step=position.number
            )

    def _order(self, epoch: int) -> Order:
        samples, by_length = self.plan.samples, self.plan.by_length
        if by_length is not None:
            order: Order = by_length.order(epoch, self.plan.whole_steps(epoch))
            return order
        if orders_itself(self.dataset):
            return own_order(self.dataset, self.seed, epoch, self.order, samples, self.guard)
        blocks = self._blocks() if self.order == "blocks" else None
        return epoch_order(self.seed, epoch, samples, self.order, blocks=blocks, window=self.window)

    def _blocks(self) -> Ids | None:
        """Rows of each block, None for data without blocks. JobError where they are not all of the samples."""
        name = type(self.dataset).__name__
        with self.guard(f"in block_sizes of {name}"):
            if not is_blocked(self.dataset):
                return None
            sizes = np.asarray(self.dataset.block_sizes)
        if sizes.ndim != 1 or sizes.dtype.kind not in "iu" or (sizes < 0).any():
            raise problems.BLOCK_SIZES(name=name)
        if (total := int(sizes.sum())) != self.plan.samples:
            raise problems.BLOCK_TOTAL(name=name, got=total, wanted=self.plan.samples)
        return sizes.astype(np.int64, copy=False)

    def _slice(self, position: Position, m: int) -> slice:
        """The positions in the epoch of the samples of a micro-batch."""
        return (self.plan.neighbours if self.neighbours_together else self.plan.sample_slice)(position, m)

    def _micro_batch(self, order: Order, position: Position, m: int) -> MicroBatch:
        places = self._slice(position, m)
        ids, due = self.without.remaining(order[places]), list[int]()
        if self.reads_ahead and isinstance(order, BlockOrder) and len(ids):
            due = order.due(places.start)
        return MicroBatch(position.step, m, ids if self.takes_arrays else ids.tolist(), due)
