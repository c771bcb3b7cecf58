"""The files of a table: which there are, what they hold, and one block of them at a time.

A *block* is what is read at once: a row group of a Parquet file, a record batch of an Arrow file. Blocks are numbered
through the files, which are taken in the order of their paths. Files lie on a disk or in an object store.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.data import problems
from lockstep.data.file_locations import DataLocation, StoredFile, find, one_line, retried
from lockstep.data.snapshots import Snapshot
from lockstep.data.table_columns import nulls_error
from lockstep.errors import nearest

PARQUET = (".parquet", ".pq")
ARROW = (".arrow", ".feather", ".ipc")

FOOTERS_AT_ONCE = 8

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Snapshot
"""Where the rows of a table are."""


@dataclass(frozen=True)
class DataFile:
    """One file. `rows` of each of its blocks; `keys` are what its path says (`year=2024`), or the table's log, by name."""

    path: str
    name: str
    """The path below the table's folder, by which a person knows the file."""
    size: int
    schema: pa.Schema
    rows: tuple[int, ...]
    keys: Mapping[str, str | None]
    metadata: pq.FileMetaData | None = field(compare=False)

    def chunks(self, group: int, columns: Collection[str]) -> Iterator[pq.ColumnChunkMetaData]:
        """What a row group's footer says of these columns: one chunk for a flat one, one for each leaf of a nested one.

        They are found by their position, for a column may be named `x.item` as a leaf of the column `x` is.
        """
        assert self.metadata is not None
        row_group = self.metadata.row_group(group)
        return (row_group.column(i) for i, owner in enumerate(self._owners) if owner in columns)

    @cached_property
    def _owners(self) -> list[str]:
        """The column of each leaf."""
        return [field.name for field in self.schema for _ in range(_leaves(field.type))]


class TableFiles:
    """All files of a table, whose schemas agree in every column that is asked for."""

    def __init__(self, source: Source, columns: Sequence[str] | None = None) -> None:
        """`columns` are those that will be read, where that is known before the files are opened."""
        self.snapshot = source.opened(columns) if isinstance(source, Snapshot) else None
        self._stored = find(source, PARQUET + ARROW) if self.snapshot is None else list(self.snapshot.stored)  # type: ignore[arg-type]
        kinds = {PurePosixPath(stored.path).suffix.lower() for stored in self._stored}
        self.is_arrow = kinds <= set(ARROW)
        if not self.is_arrow and not kinds <= set(PARQUET):
            raise problems.SEVERAL_KINDS(path=self._stored[0].location.shown, got=", ".join(sorted(kinds)))
        with ThreadPoolExecutor(FOOTERS_AT_ONCE) as pool:
            self.files = list(pool.map(self._opened, self._stored, self._keys()))
        every = [(f, b) for f, file in enumerate(self.files) for b in range(len(file.rows))]
        self._blocks = [(f, b) for f, b in every if self.files[f].rows[b]]
        self.block_sizes = [self.files[f].rows[b] for f, b in self._blocks]

    @property
    def is_local(self) -> bool:
        """Whether all files lie on a disk of this machine."""
        return all(stored.location.is_local for stored in self._stored)

    def columns(self, names: Iterable[str]) -> dict[str, pa.DataType]:
        """The types of these columns. DataError where a file lacks one, or has another type than the first file."""
        first = self.files[0]
        types: dict[str, pa.DataType] = {}
        for name in names:
            for file in self.files:
                column_type = self._type(file, name)
                if column_type != types.setdefault(name, column_type):
                    raise problems.OTHER_SCHEMA(
                        column=name, got=column_type, file=file.name, wanted=types[name], first=first.name
                    )
        return types

    def all_columns(self) -> list[str]:
        """The columns of the first file, and those that the paths give."""
        return [
            *self.files[0].schema.names,
            *(k for k in self.files[0].keys if k not in self.files[0].schema.names),
        ]

    def known_nulls(self, column: str) -> None:
        """DataError for nulls that Parquet's statistics show, before anything is read.

        Of flat columns and of lists of one fixed size: in lists of any length, an empty one counts as a null.
        """
        for file in self.files:
            if column in file.schema.names and _any_length(file.schema.field(column).type):
                continue
            for group in range(file.metadata.num_row_groups if file.metadata else 0):
                for chunk in file.chunks(group, {column}):
                    statistics = chunk.statistics
                    if statistics is not None and statistics.has_null_count and statistics.null_count:
                        raise nulls_error(column, statistics.null_count, file.name, group)

    def where(self, block: int) -> str:
        """A block in words."""
        f, b = self._blocks[block]
        return f"{self._stored[f].shown!r}, {'record batch' if self.is_arrow else 'row group'} {b}"

    def names(self, block: int) -> tuple[str, int]:
        """The name of the block's file and the number of the block in it."""
        f, b = self._blocks[block]
        return self.files[f].name, b

    def stored_bytes(self, block: int, columns: Sequence[str]) -> int:
        """Bytes of these columns before compression, as the file states them."""
        f, b = self._blocks[block]
        if self.files[f].metadata is None:
            return self.files[f].size // max(1, len(self.files[f].rows))
        return sum(chunk.total_uncompressed_size for chunk in self.files[f].chunks(b, columns))

    def read(self, block: int, columns: Sequence[str]) -> pa.Table:
        """These columns of a block. A read that fails is tried again; its error names the file and the block."""
        f, b = self._blocks[block]
        file = self.files[f]
        stored = [name for name in columns if name in file.schema.names]

        def once() -> pa.Table:
            with self._stored[f].location.open(file.path) as source:
                try:
                    if self.is_arrow:
                        return pa.Table.from_batches([_arrow_reader(source, stored).get_batch(b)])
                    reader = pq.ParquetFile(source, metadata=file.metadata, pre_buffer=True)
                    return _row_group(reader, b, stored, self.where(block))
                finally:  # another file is why it cannot be read, or what was read
                    self._stored[f].check(source)

        table = retried(once, self.where(block))
        for name in columns:
            if name not in stored:
                constant = pa.array([file.keys[name]] * file.rows[b], pa.string()).cast(
                    self._type(file, name)
                )
                table = table.append_column(name, constant)
        return table.select(columns)

    def mapped(self, columns: Sequence[str]) -> list[pa.Table] | None:
        """Every block without a copy, its memory that of the files; None where that cannot be (Parquet, compression)."""
        if not (self.is_arrow and self.is_local) or any(file.keys for file in self.files):
            return None
        tables = []
        for f, b in self._blocks:
            mapped_file = pa.memory_map(self.files[f].path)
            memory = mapped_file.read_buffer()
            mapped_file.seek(0)
            table = pa.Table.from_batches([pa.ipc.open_file(mapped_file).get_batch(b)]).select(columns)
            if not all(_lies_in(buffer, memory) for buffer in _buffers(table)):
                return None
            tables.append(table)
        return tables

    def identity(self, file: int) -> tuple[Any, ...]:
        """Values that change with a file: of one on a disk also where its size and time were set back."""
        return self._stored[file].identity

    def pieces(self, file: int, spans: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """Bytes of a file at (offset, length) spans."""
        return self._stored[file].pieces(spans)

    def _keys(self) -> Sequence[Mapping[str, str | None]]:
        """The columns of each file that its path gives, or the log of its table."""
        if self.snapshot is not None:
            return self.snapshot.partitions or [{}] * len(self._stored)
        pairs = [
            [part.split("=", 1) for part in PurePosixPath(stored.name).parts[:-1] if "=" in part]
            for stored in self._stored
        ]
        return [{name: unquote(value) for name, value in of_file} for of_file in pairs]

    def _type(self, file: DataFile, name: str) -> pa.DataType:
        if name in file.schema.names:
            return file.schema.field(name).type
        if self.snapshot is not None and name in file.keys:
            return self.snapshot.types[name]
        if name in file.keys:
            return pa.int64() if all(_is_int64(other.keys.get(name)) for other in self.files) else pa.string()
        raise problems.NO_COLUMN(
            file=file.name, column=name, hint=nearest(name, [*file.schema.names, *file.keys])
        )

    def _opened(self, stored: StoredFile, keys: Mapping[str, str | None]) -> DataFile:
        path, location, label = stored.path, stored.location, repr(stored.shown)
        metadata: pq.FileMetaData | None = None
        if self.is_arrow:
            schema, rows = retried(lambda: _arrow_layout(location, path), label)
        else:
            metadata = retried(lambda: _footer(location, path), label)
            schema = metadata.schema.to_arrow_schema()
            rows = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
        return DataFile(
            path,
            stored.name,
            stored.size,
            schema,
            rows,
            keys,
            metadata,
        )


def _is_int64(text: str | None) -> bool:
    return bool(re.fullmatch("-?[0-9]+", text or "")) and -(2**63) <= int(text or "") < 2**63


# --- formats ----------------------------------------------------------------------------------------------


def _footer(location: DataLocation, path: str) -> pq.FileMetaData:
    with location.open(path) as source:
        return pq.ParquetFile(source).metadata


def _row_group(reader: pq.ParquetFile, group: int, columns: Sequence[str], where: str) -> pa.Table:
    """These columns of a row group. An error names the column that cannot be read."""
    try:
        return reader.read_row_group(group, columns=columns)
    except pa.ArrowInvalid:
        for name in columns:
            try:
                reader.read_row_group(group, columns=[name])
            except pa.ArrowInvalid as error:
                raise problems.COLUMN_UNREADABLE(column=name, where=where, got=one_line(error)) from error
        raise


def _leaves(kind: pa.DataType) -> int:
    """Columns that Parquet keeps for a column of this type."""
    if isinstance(kind, pa.BaseExtensionType):
        return _leaves(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _leaves(kind.value_type)
    return sum(_leaves(kind.field(i).type) for i in range(kind.num_fields)) or 1


def _any_length(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _arrow_layout(location: DataLocation, path: str) -> tuple[pa.Schema, tuple[int, ...]]:
    """Schema and rows of each record batch; only the first column is read for them."""
    with location.open(path) as source:
        reader = pa.ipc.open_file(source)
        schema = reader.schema
        source.seek(0)
        narrow = _arrow_reader(source, schema.names[:1])
        return schema, tuple(narrow.get_batch(i).num_rows for i in range(narrow.num_record_batches))


def _arrow_reader(source: pa.NativeFile, columns: Sequence[str]) -> Any:
    schema = pa.ipc.open_file(source).schema
    source.seek(0)
    chosen = sorted(schema.get_field_index(name) for name in columns)
    return pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=chosen))


def _buffers(table: pa.Table) -> Iterator[pa.Buffer]:
    for column in table.columns:
        for chunk in column.chunks:
            yield from (buffer for buffer in chunk.buffers() if buffer is not None)


def _lies_in(buffer: pa.Buffer, memory: pa.Buffer) -> bool:
    start = memory.address
    return bool(buffer.size == 0 or start <= buffer.address < start + memory.size)
