"""What Lockstep asks of a dataset, and what a dataset may offer beyond that.

Any map-style dataset will do: `__len__` and `__getitem__`. Each protocol here is one thing more that a dataset may have;
a `lockstep.data.Table` has all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard


class Batched(Protocol):
    """Fetches the samples of a whole micro-batch at once: a list of them, or a mapping that is a micro-batch already."""

    def __getitems__(self, ids: Any) -> Any: ...


class Fingerprinted(Protocol):
    """Says by itself what its data are: fields that differ where the data do."""

    def fingerprint(self) -> Mapping[str, Any]: ...


class Blocked(Protocol):
    """Lies in blocks that are read whole; `block_sizes` are their rows. The order `blocks` needs it."""

    block_sizes: Sequence[int]


class ReadsAhead(Protocol):
    """Can be told the blocks that will be wanted soon."""

    def read_ahead(self, blocks: Sequence[int]) -> None: ...


class ChecksOrder(Protocol):
    """Refuses an order that it could not serve. Raises SpecError."""

    def check_order(self, shuffle: str, window: int) -> None: ...


class OrdersItself(Protocol):
    """Has an order of its own: the ids at the positions of an epoch, a pure function of seed, epoch and position."""

    def epoch_order(self, seed: int, epoch: int, shuffle: str) -> Any: ...


def orders_itself(dataset: Any) -> TypeGuard[OrdersItself]:
    """Whether it has an order of its own."""
    return callable(getattr(type(dataset), "epoch_order", None))


def is_batched(dataset: Any) -> TypeGuard[Batched]:
    """Whether it fetches many samples at once. A wrapper whose `__getattr__` leads to what it wraps does not: that would
    pass by its own `__getitem__`.
    """
    return callable(getattr(type(dataset), "__getitems__", None))


def is_fingerprinted(dataset: Any) -> TypeGuard[Fingerprinted]:
    """Whether it says by itself what its data are."""
    return callable(getattr(dataset, "fingerprint", None))


def is_blocked(dataset: Any) -> TypeGuard[Blocked]:
    """Whether it lies in blocks."""
    return getattr(dataset, "block_sizes", None) is not None


def reads_ahead(dataset: Any) -> TypeGuard[ReadsAhead]:
    """Whether it can be told what will be wanted."""
    return callable(getattr(dataset, "read_ahead", None))


def checks_order(dataset: Any) -> TypeGuard[ChecksOrder]:
    """Whether it has a say in the order."""
    return callable(getattr(dataset, "check_order", None))


def takes_arrays(dataset: Any) -> bool:
    """Whether ids are given as an int64 array rather than as a list."""
    return bool(getattr(dataset, "takes_arrays", False))


def draws_nothing(dataset: Any) -> bool:
    """Whether no fetch draws a random number, so that a thread may do it ahead of time."""
    return bool(getattr(dataset, "draws_nothing", False))


def in_memory(dataset: Any) -> bool:
    """Whether all samples are in memory, so that fetching ahead would gain nothing on the processor."""
    return bool(getattr(dataset, "residence", None) == "memory")


def is_table(dataset: Any) -> bool:
    """Whether this is a `lockstep.data.Table`, told without importing pyarrow, which a table has imported."""
    return hasattr(dataset, "decoders") and is_batched(dataset)


def fetch_one(dataset: Any, index: int) -> Any:
    """One sample the way that training fetches it, as a micro-batch of one where the dataset fetches many at once."""
    return dataset.__getitems__([index]) if is_batched(dataset) else dataset[index]
