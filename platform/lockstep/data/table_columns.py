"""From columns of a table to tensors: what may be declared, how a block is decoded, how rows become a batch.

Three kinds. *Dense*: numbers, or lists that all have one length, give a tensor [rows, …]. *Ragged*: lists of numbers of
any length give a padded tensor [rows, longest] and their lengths. *Bytes*: binary or text gives a list, for the job
to decode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from lockstep.data import problems
from lockstep.errors import DataError

Array = NDArray[Any]


@dataclass(frozen=True)
class Column:
    """One entry of a batch: the column it comes from, or several columns of numbers side by side (a tuple of names).

    `dtype` ("float32") converts the values. `length` says that all lists of the column have that length; each becomes a vector.
    `pad` fills up shorter lists if their lengths differ.
    """

    source: str | tuple[str, ...]
    dtype: str | None = None
    length: int | None = None
    pad: float = 0

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the columns it is made of."""
        return (self.source,) if isinstance(self.source, str) else tuple(self.source)


class Parts(NamedTuple):
    """A decoded column of some rows. Dense: `values` [rows, …]. Else `values` end to end, row i from ends[i] to ends[i+1]."""

    values: Array
    ends: Array | None = None


class Piece(NamedTuple):
    """Rows of one decoded block, and their places in the batch; None where they are all of it, in order."""

    columns: Mapping[str, Parts]
    rows: Array
    places: Array | None


class Decoder:
    """One entry of a batch, its declaration checked against the types of its columns."""

    def __init__(self, name: str, declared: Column, types: Mapping[str, pa.DataType]) -> None:
        self.name = name
        self.declared = declared
        source_types = [types[source] for source in declared.sources]
        self.kind: Literal["dense", "ragged", "bytes"] = "dense"
        self.shape: tuple[int, ...] = ()
        self.is_text = False
        if len(source_types) > 1:
            self.shape = (len(source_types),)
            numbers = [self._number(kind) for kind in source_types]
        elif pa.types.is_fixed_size_list(source_types[0]):
            self.shape = (source_types[0].list_size,)
            if declared.length not in (None, source_types[0].list_size):
                raise problems.LENGTH_GIVEN(
                    column=name,
                    got=declared.length,
                    source=declared.sources[0],
                    wanted=source_types[0].list_size,
                )
            numbers = [self._number(source_types[0].value_type)]
        elif pa.types.is_list(source_types[0]) or pa.types.is_large_list(source_types[0]):
            numbers = [self._number(source_types[0].value_type)]
            self.kind = "ragged" if declared.length is None else "dense"
            self.shape = () if declared.length is None else (declared.length,)
        elif _is_bytes(source_types[0]):
            self.kind = "bytes"
            self.is_text = pa.types.is_string(source_types[0]) or pa.types.is_large_string(source_types[0])
            numbers = [np.dtype(np.uint8)]
        else:
            numbers = [self._number(source_types[0])]
        self.dtype = self._dtype(np.result_type(*numbers))
        if self.kind == "ragged":
            self._check_pad()
        self.keeps_memory = (
            self.kind != "bytes"
            and len(source_types) == 1
            and numbers[0] == self.dtype
            and self.dtype != np.bool_
        )
        """Whether what is decoded lies in the memory of what was read."""

    def _number(self, kind: Any) -> np.dtype[Any]:
        if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
            stored: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
            return stored
        raise problems.COLUMN_KIND(column=" + ".join(self.declared.sources), got=kind)

    def _dtype(self, stored: np.dtype[Any]) -> np.dtype[Any]:
        if self.declared.dtype is None:
            return stored
        try:
            dtype = np.dtype(self.declared.dtype)
        except TypeError as error:
            raise problems.NO_DTYPE(column=self.name, got=error) from error
        if dtype.name not in _TORCH:
            raise problems.OTHER_DTYPE(column=self.name, got=dtype)
        if self.kind == "bytes" or not np.can_cast(stored, dtype, "same_kind"):
            raise problems.LOSSY(
                column=self.name, got="bytes" if self.kind == "bytes" else stored, wanted=dtype
            )
        return dtype

    def _check_pad(self) -> None:
        """DataError for a pad that the column's type cannot hold."""
        pad = self.declared.pad
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                converted = (
                    np.array(pad).astype(self.dtype) if isinstance(pad, float) else np.array(pad, self.dtype)
                )
            fits = bool(np.isfinite(converted) or not np.isfinite(pad)) and (
                self.dtype.kind == "f" or converted == pad
            )
        except (OverflowError, TypeError, ValueError):
            fits = False
        if not fits:
            raise problems.PAD(column=self.name, got=repr(pad), dtype=self.dtype)

    @property
    def row_bytes(self) -> int | None:
        """Bytes of a decoded row; None where rows differ."""
        return (
            self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64)) if self.kind == "dense" else None
        )

    # --- a block ---

    def decode(self, table: pa.Table, file: str, block: int) -> Parts:
        """The column of a block. DataError for nulls, and for lists of another length than was declared."""
        if len(self.declared.sources) > 1:
            values = np.empty((table.num_rows, *self.shape), self.dtype)
            for i, source in enumerate(self.declared.sources):
                values[:, i] = self._numbers(_array(table, source), source, file, block)
            return Parts(values)
        source = self.declared.sources[0]
        array = _array(table, source)
        if self.kind == "bytes":
            return _bytes(_without_nulls(array, source, file, block))
        if not pa.types.is_nested(array.type):
            return Parts(self._numbers(array, source, file, block))
        within = _without_nulls(array, source, file, block).flatten()
        if pa.types.is_fixed_size_list(array.type):
            size = array.type.list_size
            flat = self._numbers(within, source, file, block, lambda i: i // size)
            return Parts(flat.reshape(len(array), *self.shape))
        lengths = pc.list_value_length(array).to_numpy().astype(np.int64)
        flat = self._numbers(
            within, source, file, block, lambda i: int(np.searchsorted(np.cumsum(lengths), i, side="right"))
        )
        if self.kind == "ragged":
            return Parts(flat, _ends(lengths))
        unlike = np.flatnonzero(lengths != self.shape[0])
        if unlike.size:
            raise problems.LIST_LENGTH(
                column=source,
                got=lengths[unlike[0]],
                row=unlike[0],
                file=file,
                block=block,
                wanted=self.shape[0],
            )
        return Parts(flat.reshape(len(array), *self.shape))

    def _numbers(
        self,
        array: pa.Array,
        source: str,
        file: str,
        block: int,
        row_of: Callable[[int], int] = lambda i: i,
    ) -> Array:
        """The numbers in the type of the column; `row_of` says in which row of the block one of them is. DataError for one that it does not hold."""
        values: Array = _without_nulls(array, source, file, block).to_numpy(zero_copy_only=False)
        with np.errstate(over="ignore"):  # told below
            numbers = np.ascontiguousarray(values, self.dtype)
        lost = _first_lost(values, numbers)
        if lost is not None:
            raise problems.VALUE_LOST(
                column=source, got=values[lost], row=row_of(lost), file=file, block=block, dtype=self.dtype
            )
        return numbers

    # --- a batch ---

    def batch(self, pieces: Sequence[Piece], rows: int) -> dict[str, Any]:
        """What a batch of so many rows holds under this name; a ragged column has `<name>_lengths` as well."""
        if self.kind == "dense":
            return {self.name: self._dense(pieces, rows)}
        if self.kind == "bytes":
            return {self.name: self._listed(pieces, rows)}
        padded, lengths = self._padded(pieces, rows)
        return {self.name: padded, f"{self.name}_lengths": lengths}

    def _dense(self, pieces: Sequence[Piece], rows: int) -> torch.Tensor:
        """A tensor of its own, in memory that torch has aligned. np.take needs a tenth of the time of torch's own indexing."""
        batch = self._empty((rows, *self.shape))
        view = batch.numpy()
        for piece in pieces:
            values = piece.columns[self.name].values
            if piece.places is None:
                np.take(values, piece.rows, axis=0, out=view, mode="clip")  # ids were checked
            else:
                view[piece.places] = np.take(values, piece.rows, axis=0)
        return batch

    def _padded(self, pieces: Sequence[Piece], rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = torch.empty(rows, dtype=torch.int64)
        for piece in pieces:
            begins, ends = _bounds(piece, self.name)
            lengths.numpy()[_all(piece)] = ends - begins
        longest = int(lengths.max()) if rows else 0
        padded = self._empty((rows, longest)).fill_(self.declared.pad)
        for piece in pieces:
            begins, ends = _bounds(piece, self.name)
            piece_rows = np.full((len(begins), longest), self.declared.pad, self.dtype)
            filled = np.arange(longest) < (ends - begins)[:, None]
            piece_rows[filled] = piece.columns[self.name].values[
                (begins[:, None] + np.arange(longest))[filled]
            ]
            padded.numpy()[_all(piece)] = piece_rows
        return padded, lengths

    def _listed(self, pieces: Sequence[Piece], rows: int) -> list[Any]:
        entries: list[Any] = [b""] * rows
        for piece in pieces:
            values = piece.columns[self.name].values
            places = np.arange(rows) if piece.places is None else piece.places
            for row, begin, end in zip(places.tolist(), *_bounds(piece, self.name), strict=True):
                entries[row] = values[begin:end].tobytes()
        return [value.decode() for value in entries] if self.is_text else entries

    def _empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=_TORCH[self.dtype.name])


def _first_lost(values: Array, converted: Array) -> int | None:
    """Where the first value is of which more than precision is lost: an integer that is another one, a finite number that is infinite."""
    source, target = values.dtype, converted.dtype
    if not values.size or np.can_cast(source, target, "safe"):
        return None
    if target.kind in "iu":
        limits = np.iinfo(target)
        if int(values.min()) >= limits.min and int(values.max()) <= limits.max:
            return None
        return next(i for i, value in enumerate(values.tolist()) if not limits.min <= value <= limits.max)
    if source.kind in "iu" and target != np.float16:  # the largest integer is far below the largest number
        return None
    if target == np.float16:  # by its bits: numpy computes with none of them
        lost = (converted.view(np.uint16) & np.uint16(0x7FFF)) == np.uint16(0x7C00)
    else:
        lost = np.isinf(converted)
    if lost.any():
        lost &= np.isfinite(values)
    return int(lost.argmax()) if lost.any() else None


_TORCH = {
    name: getattr(torch, name)
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    )
}  # fmt: skip


def _all(piece: Piece) -> Any:
    return slice(None) if piece.places is None else piece.places


def _bounds(piece: Piece, name: str) -> tuple[Array, Array]:
    """Where each row of a piece begins and ends."""
    ends = piece.columns[name].ends
    assert ends is not None
    return ends[piece.rows], ends[piece.rows + 1]


def _is_bytes(kind: pa.DataType) -> bool:
    return any(
        test(kind)
        for test in (
            pa.types.is_binary,
            pa.types.is_large_binary,
            pa.types.is_fixed_size_binary,
            pa.types.is_string,
            pa.types.is_large_string,
        )
    )


def _array(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _without_nulls(array: pa.Array, source: str, file: str, block: int) -> pa.Array:
    if array.null_count:
        raise nulls_error(source, array.null_count, file, block)
    return array


def nulls_error(column: str, count: int, file: str, block: int) -> DataError:
    """The error for nulls in a column that becomes a tensor."""
    return problems.NULLS(column=column, count=count, plural="s" if count > 1 else "", file=file, block=block)


def _bytes(array: pa.Array) -> Parts:
    if pa.types.is_fixed_size_binary(array.type):
        array = array.cast(pa.binary())
    is_text = pa.types.is_string(array.type) or pa.types.is_large_string(array.type)
    array = array.cast(pa.large_string() if is_text else pa.large_binary())
    _, offsets, data = array.buffers()
    bounds = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    values = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return Parts(values[bounds[0] : bounds[-1]], bounds - bounds[0])


def _ends(lengths: Array) -> Array:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def declared_columns(columns: Mapping[str, str | Sequence[str] | Column]) -> dict[str, Column]:
    """Declarations in full: a name stands for its column, a list for columns side by side."""
    return {
        name: declaration
        if isinstance(declaration, Column)
        else Column(declaration if isinstance(declaration, str) else tuple(declaration))
        for name, declaration in columns.items()
    }


def parts_bytes(columns: Mapping[str, Parts]) -> int:
    """Memory of decoded columns."""
    return sum(array.nbytes for parts in columns.values() for array in _arrays(parts))


def _arrays(parts: Parts) -> Iterator[Array]:
    yield parts.values
    if parts.ends is not None:
        yield parts.ends
