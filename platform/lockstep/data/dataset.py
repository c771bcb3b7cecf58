"""What Lockstep asks of a dataset, and what a dataset may offer beyond that.

Any map-style dataset will do: `__len__` and `__getitem__`. Each protocol here is one thing more that a dataset may have. A
`lockstep.data.Table` has all but an order of its own, which a `lockstep.data.Mixture` has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeGuard

import numpy as np
from torch.utils.data import Subset

from lockstep.data import problems
from lockstep.errors import LockstepError, first_line
from lockstep.job.frames import place_in_job

if TYPE_CHECKING:
    from lockstep.data.tables import Table


class Batched(Protocol):
    """Fetches the samples of a whole micro-batch at once: a list of them, or a mapping that is a micro-batch already."""

    def __getitems__(self, ids: Any) -> Any: ...


class Fingerprinted(Protocol):
    """Says by itself what its data are: fields that differ where the data do."""

    def fingerprint(self) -> Mapping[str, Any]: ...


class FingerprintedBySamples(Protocol):
    """Reads samples to say what its data are, and is told which ids are left out of training."""

    def fingerprint(self, left_out: Callable[[int], bool]) -> Mapping[str, Any]: ...


class Blocked(Protocol):
    """Lies in blocks that are read whole; `block_sizes` are their rows. The order `blocks` needs it."""

    block_sizes: Sequence[int]


class ReadsAhead(Protocol):
    """Reads blocks before they are needed."""

    def read_ahead(self, blocks: Sequence[int]) -> None: ...


class ChecksOrder(Protocol):
    """Refuses an order that it could not serve. Raises SpecError."""

    def check_order(self, shuffle: str, window: int) -> None: ...


class OrdersItself(Protocol):
    """Has an order of its own: the ids at the positions of an epoch, a pure function of seed, epoch and position.

    With an attribute `neighbours_together` that is true, neighbours in this order share a micro-batch.
    """

    def epoch_order(self, seed: int, epoch: int, shuffle: str) -> Any: ...


class TakesArrays(Protocol):
    """Gets ids as an int64 array rather than as a list, where `takes_arrays` is true."""

    takes_arrays: bool


class DrawsNothing(Protocol):
    """Draws no random number in a fetch, where `draws_nothing` is true: a thread may fetch ahead of time.

    An attribute or a property of the class that fetches, or of a subclass.
    """

    @property
    def draws_nothing(self) -> bool: ...


class Resident(Protocol):
    """Says where its samples are: in memory, in files that are mapped into it, or in blocks that are read when needed."""

    @property
    def residence(self) -> Literal["memory", "mapped", "blocks"]: ...


def optional(dataset: Any, name: str) -> Any:
    """What a dataset has by a name, None where it has nothing. Raises JobError where it fails to say.

    A `__getattr__` that looks the name up in a mapping, and lets the KeyError out, says that it has nothing.
    """
    try:
        return getattr(dataset, name, None)
    except LockstepError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, LookupError) and getattr_static(dataset, name, None) is None:
            return None
        raise problems.ATTRIBUTE_FAILED(
            dataset=type(dataset).__name__,
            name=name,
            location=place_in_job(error),
            got=first_line(error),
        ) from error


def is_map_style(dataset: object) -> bool:
    """Whether samples are fetched by index. Text and dicts, which can be indexed too, are no datasets."""
    if isinstance(dataset, dict | str):
        return False
    return hasattr(type(dataset), "__getitem__") or hasattr(type(dataset), "__getitems__")


def dataset_lengths(dataset: Any) -> Any:
    """The length of each sample, where the dataset has them as `lengths`; of a `Subset` those of its samples. None where it has none."""
    if isinstance(dataset, Subset):
        lengths = dataset_lengths(dataset.dataset)
        return None if lengths is None else np.asarray(lengths)[np.asarray(dataset.indices, np.int64)]
    lengths = optional(dataset, "lengths")
    return lengths() if callable(lengths) else lengths


def expects_epochs(dataset: object) -> bool:
    """Whether it has a `set_epoch`, as a dataset for torch's loop may have. Lockstep does not call it."""
    return callable(optional(dataset, "set_epoch"))


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
    return callable(optional(dataset, "fingerprint"))


def reads_samples(dataset: Fingerprinted) -> TypeGuard[FingerprintedBySamples]:
    """Whether its fingerprint reads samples, and takes which are left out. A subclass may have one that does not."""
    code = getattr(getattr(dataset.fingerprint, "__func__", None), "__code__", None)
    return code is not None and "left_out" in code.co_varnames[: code.co_argcount]


def is_blocked(dataset: Any) -> TypeGuard[Blocked]:
    """Whether it lies in blocks."""
    return optional(dataset, "block_sizes") is not None


def reads_ahead(dataset: Any) -> TypeGuard[ReadsAhead]:
    """Whether it reads blocks before they are needed."""
    return callable(optional(dataset, "read_ahead"))


def checks_order(dataset: Any) -> TypeGuard[ChecksOrder]:
    """Whether it may refuse an order."""
    return callable(optional(dataset, "check_order"))


def takes_arrays(dataset: Any) -> TypeGuard[TakesArrays]:
    """Whether ids are given as an int64 array rather than as a list."""
    return bool(optional(dataset, "takes_arrays"))


def draws_nothing(dataset: Any) -> TypeGuard[DrawsNothing]:
    """Whether no fetch draws a random number, so that a thread may do it ahead of time.

    A class promises it for what it fetches itself or inherits: neither for a subclass that fetches in another way, as one that
    augments what it gets, nor for a wrapper whose `__getattr__` leads to what it wraps.
    """
    for kind in type(dataset).__mro__:
        if "draws_nothing" in vars(kind):
            return bool(optional(dataset, "draws_nothing"))
        if not vars(kind).keys().isdisjoint({"__getitem__", "__getitems__"}):
            return False
    return False


def in_memory(dataset: Any) -> TypeGuard[Resident]:
    """Whether all samples are in memory, so that fetching ahead would gain nothing on the processor."""
    return bool(optional(dataset, "residence") == "memory")


def is_table(dataset: Any) -> TypeGuard[Table]:
    """Whether this is a `lockstep.data.Table`, found without importing pyarrow: where there is one, its module is imported."""
    return _is_a(dataset, "lockstep.data.tables", "Table")


def is_hub_dataset(dataset: object) -> bool:
    """Whether this is a `datasets.Dataset` of Hugging Face. As for a table, its library is not imported to ask."""
    return _is_a(dataset, "datasets.arrow_dataset", "Dataset")


def is_ray_dataset(dataset: object) -> bool:
    """Whether this is a `ray.data.Dataset`."""
    return _is_a(dataset, "ray.data", "Dataset")


def is_lit_dataset(dataset: object) -> bool:
    """Whether this is a `litdata.StreamingDataset`."""
    return _is_a(dataset, "litdata", "StreamingDataset")


def is_mosaic_dataset(dataset: object) -> bool:
    """Whether this is a `streaming.LocalDataset` of MosaicML Streaming, which is read by index as it is."""
    return _is_a(dataset, "streaming", "LocalDataset")


def _is_a(dataset: object, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(dataset, kind)


def fetch_one(dataset: Any, index: int) -> Any:
    """One sample the way that training fetches it, as a micro-batch of one where the dataset fetches many at once."""
    return dataset.__getitems__([index]) if is_batched(dataset) else dataset[index]
