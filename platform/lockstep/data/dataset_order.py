"""The order of a dataset that orders itself, checked: it gives an id for each position, and the same ids whenever it is asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

import numpy as np
import torch

from lockstep.data import problems
from lockstep.data.dataset import OrdersItself, optional, orders_itself
from lockstep.data.mixture import MixtureOrder
from lockstep.data.order import Ids, Order, Shuffle
from lockstep.randomness import epoch_order_key, seed_all

Guard = Callable[[str], AbstractContextManager[None]]
"""Makes what the job's own code raises in a block an error that names the given place."""

InAnotherProcess = Callable[[Callable[[], list[Ids]]], list[Ids] | None]
"""Calls a function in a process of its own, so that nothing of it stays here; None where no process can."""

ASKED_AGAIN_WITHIN_S = 0.5
"""How long the first order may take for a second epoch to be looked at as well."""

PROBED = 1 << 12
"""Positions that are asked for at the beginning, at the end and over all of an order that is not an array."""


def number_of_ids(dataset: Any) -> int:
    """How many samples there are to be named by an id, counted from 0. An epoch may have fewer: a mixture draws from its sources.

    It is the dataset's length, unless it has an order of its own and says another number, as `id_count`.
    """
    id_count = optional(dataset, "id_count") if orders_itself(dataset) else None
    return len(dataset) if id_count is None else int(id_count)


def says_of_neighbours(dataset: Any) -> bool | None:
    """Whether neighbours in the order of a dataset that orders itself share a micro-batch; None where it does not say."""
    declared = optional(dataset, "neighbours_together") if orders_itself(dataset) else None
    return None if declared is None else bool(declared)


def own_order(
    dataset: OrdersItself, seed: int, epoch: int, shuffle: Shuffle, samples: int, guard: Guard
) -> Order:
    """The dataset's order of an epoch. What it draws from the default generators is keyed by the seed and the epoch.

    Raises JobError for what does not give an id for each of `samples` positions; where it is no array, at the slice that does not.
    """
    label = f"epoch_order of {type(dataset).__name__}, epoch {epoch}"
    seed_all(epoch_order_key(seed, epoch))
    with guard(f"in {label}"):
        order = dataset.epoch_order(seed, epoch, shuffle)
        ids = number_of_ids(dataset)
    if isinstance(order, MixtureOrder):
        return order
    if isinstance(order, list | tuple | torch.Tensor | np.ndarray):
        return _array(order, samples, ids, f"data: {label}", "epoch")
    if not hasattr(order, "__getitem__"):
        raise problems.ORDER_KIND(what=label, got=type(order).__name__, samples=samples)
    return _Sliced(order, label, ids, guard)


def check_own_order(
    dataset: OrdersItself,
    seed: int,
    epochs: int,
    shuffle: Shuffle,
    samples: int,
    guard: Guard,
    elsewhere: InAnotherProcess | None = None,
) -> None:
    """Refuse an order that is another one when it is asked for again. Raises JobError.

    The orders of epochs 0 and 1 are asked for in turn, twice; of epoch 0 alone where one takes long. Where `elsewhere` calls in another process, that
    of epoch 1 is asked for first, as by a run that is resumed there.
    """

    def asked(epoch: int) -> Order:
        return own_order(dataset, seed, epoch, shuffle, samples, guard)

    def resumed() -> list[Ids]:
        return probed(asked(1), samples)

    alone = elsewhere(resumed) if elsewhere is not None and epochs > 1 else None
    began = time.perf_counter()
    orders = [asked(0)]
    probes = [probed(orders[0], samples)]
    if epochs > 1 and time.perf_counter() - began < ASKED_AGAIN_WITHIN_S:
        orders.append(asked(1))
        probes.append(probed(orders[1], samples))
    for epoch, order in enumerate(orders):
        # The first of it as well, before it is asked again: one that follows what was asked last gives another epoch's ids by now.
        if not (
            agree(probes[epoch], probed(order, samples))
            and agree(probes[epoch], probed(asked(epoch), samples))
        ):
            raise problems.ORDER_CHANGES(dataset=type(dataset).__name__, epoch=epoch)
    if alone is not None and len(probes) > 1 and not agree(probes[1], alone):
        raise problems.ORDER_FOLLOWS_ASKING(dataset=type(dataset).__name__)


def probed(order: Order, samples: int) -> list[Ids]:
    """What is compared of an order: of an array all of it; of any other order the ids at the probed positions, at the first ones also in steps of two."""
    if isinstance(order, np.ndarray):
        return [order]
    most = min(PROBED, samples)
    slices = [
        slice(0, most, 1), slice(samples - most, samples, 1), slice(0, samples, -(-samples // PROBED) if samples else 1), slice(0, most, 2)
    ]  # fmt: skip
    return [np.array(order[positions]) for positions in slices]


def agree(first: list[Ids], second: list[Ids]) -> bool:
    """Whether the probes of two orders are equal, and those of one that is no array agree with each other."""
    agree = len(first) == len(second) and all(map(np.array_equal, first, second))
    return agree and (len(first) == 1 or np.array_equal(first[0][::2], first[3]))


class _Sliced:
    """An order that computes the ids of a slice when it is asked for it, each slice checked."""

    def __init__(self, order: Any, label: str, ids: int, guard: Guard) -> None:
        self._order, self._label, self._ids, self._guard = order, label, ids, guard

    def __getitem__(self, positions: slice) -> Ids:
        try:
            ids = self._order[positions]
        except (Exception, SystemExit):
            with self._guard(f"in {self._label}"):
                raise
            raise
        count = len(range(positions.start, positions.stop, positions.step or 1))
        return _array(ids, count, self._ids, f"data: {self._label}", "slice")


def _array(order: Any, count: int, ids: int, label: str, of: str) -> Ids:
    """The ids as an int64 array. JobError unless they are `count` whole numbers of 0 … ids - 1."""
    try:
        raw = np.asarray(order)
    except (ValueError, TypeError, RuntimeError) as error:  # lists of unlike lengths; a tensor on a GPU
        raise problems.ORDER_NO_ARRAY(what=label, got=error, count=count) from error
    if raw.ndim != 1 or (raw.dtype.kind not in "iu" and raw.size):
        raise problems.ORDER_SHAPE(what=label, dtype=raw.dtype, shape=raw.shape, count=count)
    if len(raw) != count:
        raise problems.ORDER_COUNT(what=label, got=len(raw), count=count, of=of)
    # The dataset may write into its array again, while the ids of this epoch are still used.
    array: Ids = raw.astype(np.int64, copy=raw.flags.writeable and not isinstance(order, list | tuple))
    # As unsigned numbers those below 0 are large: one pass.
    if count and int(np.ascontiguousarray(array).view(np.uint64).max()) >= ids:
        strange = next(islice((int(i) for i in array if not 0 <= i < ids), 1))
        raise problems.ORDER_ID(what=label, got=strange, last=ids - 1)
    return array
