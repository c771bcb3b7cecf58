"""The files of a table: which there are, what they hold, and one block of them at a time.

A *block* is what is read at once: a row group of a Parquet file, a record batch of an Arrow file. Blocks are numbered
through the files, which are taken in the order of their paths. Files lie on a disk or in an object store.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from lockstep.data.table_columns import nulls
from lockstep.errors import DataError, nearest

PARQUET = (".parquet", ".pq")
ARROW = (".arrow", ".feather", ".ipc")

PAUSES_S = (0.1, 0.5, 2.0)
"""Before a read is tried again; what has failed once more after the last of them is told."""

FOOTERS_AT_ONCE = 8

T = TypeVar("T")


@dataclass(frozen=True)
class DataFile:
    """One file. `rows` of each of its blocks; `keys` are what its path says (`year=2024`), by name."""

    path: str
    name: str
    """The path below the table's folder, by which a person knows the file."""
    size: int
    changed_ns: int
    schema: pa.Schema
    rows: tuple[int, ...]
    keys: dict[str, str]
    metadata: pq.FileMetaData | None = field(compare=False)


class TableFiles:
    """All files of a table, whose schemas agree in every column that is asked for."""

    def __init__(self, source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> None:
        sources = [source] if isinstance(source, str | os.PathLike) else list(source)
        self._places = [_Place(os.fspath(one)) for one in sources]
        found = sorted(
            ((f.path, place, f) for place in self._places for f in place.files()), key=lambda x: x[0]
        )
        if not found:
            wanted = ", ".join(place.shown for place in self._places)
            raise DataError(
                f"data: there is no file for {wanted!r}; wanted {', '.join(PARQUET + ARROW)}, in a folder or by a glob"
            )
        kinds = {PurePosixPath(path).suffix for path, _, _ in found}
        self.is_arrow = kinds <= set(ARROW)
        if not self.is_arrow and not kinds <= set(PARQUET):
            raise DataError(
                f"data: {self._places[0].shown!r} holds files of several kinds ({', '.join(sorted(kinds))}); "
                "wanted Parquet or Arrow alone"
            )
        with ThreadPoolExecutor(FOOTERS_AT_ONCE) as pool:
            self.files = list(pool.map(lambda x: self._opened(*x), found))
        self._of = [place for _, place, _ in found]
        every = [(f, b) for f, file in enumerate(self.files) for b in range(len(file.rows))]
        self._blocks = [(f, b) for f, b in every if self.files[f].rows[b]]
        self.block_sizes = [self.files[f].rows[b] for f, b in self._blocks]

    @property
    def is_local(self) -> bool:
        """Whether all files lie on a disk of this machine."""
        return all(place.is_local for place in self._places)

    def columns(self, wanted: Iterable[str]) -> dict[str, pa.DataType]:
        """The types of these columns. DataError where a file lacks one, or has another type than the first file."""
        first = self.files[0]
        types: dict[str, pa.DataType] = {}
        for name in wanted:
            for file in self.files:
                found = self._type(file, name)
                if found != types.setdefault(name, found):
                    raise DataError(
                        f"data: column {name!r} is {found} in {file.name!r} and {types[name]} in {first.name!r}; "
                        "write all files of a table with one schema"
                    )
        return types

    def all_columns(self) -> list[str]:
        """The columns of the first file, and those that the paths give."""
        return [
            *self.files[0].schema.names,
            *(k for k in self.files[0].keys if k not in self.files[0].schema.names),
        ]

    def known_nulls(self, column: str) -> None:
        """DataError for nulls that Parquet's statistics tell, before anything is read.

        Of flat columns and of lists of one fixed size: in lists of any length, an empty one counts as a null.
        """
        for file in self.files:
            if column in file.schema.names and _any_length(file.schema.field(column).type):
                continue
            for group in range(file.metadata.num_row_groups if file.metadata else 0):
                chunks = file.metadata.row_group(group)  # type: ignore[union-attr]
                for i in range(chunks.num_columns):
                    chunk = chunks.column(i)
                    if chunk.path_in_schema.partition(".")[0] != column or chunk.statistics is None:
                        continue
                    if chunk.statistics.has_null_count and chunk.statistics.null_count:
                        raise nulls(column, chunk.statistics.null_count, file.name, group)

    def where(self, block: int) -> str:
        """A block in words."""
        f, b = self._blocks[block]
        return f"{self._shown(f)!r}, {'record batch' if self.is_arrow else 'row group'} {b}"

    def names(self, block: int) -> tuple[str, int]:
        """The name of the block's file and the number of the block in it."""
        f, b = self._blocks[block]
        return self.files[f].name, b

    def stored_bytes(self, block: int, columns: Sequence[str]) -> int:
        """Bytes of these columns before compression, as the file tells them."""
        f, b = self._blocks[block]
        metadata = self.files[f].metadata
        if metadata is None:
            return self.files[f].size // max(1, len(self.files[f].rows))
        group = metadata.row_group(b)
        chunks = (group.column(i) for i in range(group.num_columns))
        return sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.partition(".")[0] in columns)

    def read(self, block: int, columns: Sequence[str]) -> pa.Table:
        """These columns of a block. A read that fails is tried again, and then told with its file and block."""
        f, b = self._blocks[block]
        file = self.files[f]
        stored = [name for name in columns if name in file.schema.names]

        def once() -> pa.Table:
            if not self.is_arrow:
                with self._of[f].open(file.path) as source:
                    reader = pq.ParquetFile(source, metadata=file.metadata, pre_buffer=True)
                    return _row_group(reader, b, stored, self.where(block))
            with self._of[f].open(file.path) as source:
                return pa.Table.from_batches([_arrow_reader(source, stored).get_batch(b)])

        table = retried(once, self.where(block))
        for name in columns:
            if name not in stored:
                constant = pa.array([file.keys[name]] * file.rows[b]).cast(self._type(file, name))
                table = table.append_column(name, constant)
        return table.select(columns)

    def mapped(self, columns: Sequence[str]) -> list[pa.Table] | None:
        """Every block without a copy, its memory that of the files; None where that cannot be (Parquet, compression)."""
        if not (self.is_arrow and self.is_local) or any(file.keys for file in self.files):
            return None
        tables = []
        for f, b in self._blocks:
            whole = pa.memory_map(self.files[f].path)
            memory = whole.read_buffer()
            whole.seek(0)
            table = pa.Table.from_batches([pa.ipc.open_file(whole).get_batch(b)]).select(columns)
            if not all(_lies_in(buffer, memory) for buffer in _buffers(table)):
                return None
            tables.append(table)
        return tables

    def identity(self, file: int) -> tuple[Any, ...]:
        """What changes with a file; of one on a disk, though its size and its time were set back."""
        found = self.files[file]
        status = Path(found.path).stat() if self._of[file].is_local else None
        return (found.path, found.size, found.changed_ns, status and (status.st_ino, status.st_ctime_ns))

    def pieces(self, file: int, spans: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """Bytes of a file at (offset, length) spans."""
        path = self.files[file].path
        with self._of[file].open(path) as source:
            for offset, length in spans:
                yield retried(lambda o=offset, n=length: source.read_at(n, o), repr(self._shown(file)))  # type: ignore[misc]

    def _shown(self, file: int) -> str:
        place = self._of[file]
        return self.files[file].path if place.is_local else f"{place.scheme}://{self.files[file].path}"

    def _type(self, file: DataFile, name: str) -> pa.DataType:
        if name in file.schema.names:
            return file.schema.field(name).type
        if name in file.keys:
            whole = all(other.keys.get(name, "").lstrip("-").isdigit() for other in self.files)
            return pa.int64() if whole else pa.string()
        raise DataError(
            f"data: {file.name!r} has no column {name!r}{nearest(name, [*file.schema.names, *file.keys])}"
        )

    def _opened(self, path: str, place: _Place, info: pafs.FileInfo) -> DataFile:
        name = place.below(path)
        keys = dict(part.split("=", 1) for part in PurePosixPath(name).parts[:-1] if "=" in part)
        what = repr(path if place.is_local else f"{place.scheme}://{path}")
        metadata: pq.FileMetaData | None = None
        if self.is_arrow:
            schema, rows = retried(lambda: _arrow_layout(place, path), what)
        else:
            metadata = retried(lambda: _footer(place, path), what)
            schema = metadata.schema.to_arrow_schema()
            rows = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
        changed = info.mtime_ns or 0
        return DataFile(
            path, name, info.size, changed, schema, rows, {k: unquote(v) for k, v in keys.items()}, metadata
        )


def retried(read: Callable[[], T], what: str) -> T:
    """What `read` gives, tried again after a failure of the disk or the network; DataError in the end."""
    for pause_s in (*PAUSES_S, None):
        try:
            return read()
        except FileNotFoundError as error:
            raise DataError(f"data: {what} is not there: {_one_line(error)}") from error
        except OSError as error:
            if pause_s is None:
                raise DataError(
                    f"data: cannot read {what}, tried {len(PAUSES_S) + 1} times: {_one_line(error)}; "
                    "the storage is not well, or the file is damaged"
                ) from error
            time.sleep(pause_s)
        except (pa.ArrowException, EOFError) as error:
            raise DataError(
                f"data: cannot read {what}: {_one_line(error)}; the file is damaged, cut short, or of another kind"
            ) from error
    raise AssertionError("the last try returns or raises")


# --- places -----------------------------------------------------------------------------------------------


class _Place:
    """Where a path, a glob or a URI leads: a file system and what to look for in it."""

    def __init__(self, given: str) -> None:
        self._given = given
        self._process = os.getpid()
        self.is_local = "://" not in given or given.startswith("file://")
        self.scheme = given.partition("://")[0] if not self.is_local else ""
        parts = urlsplit(given)
        self.shown = (
            given if self.is_local else f"{self.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        )
        self._files, self._path = self._open()
        parts_of_path = PurePosixPath(self._path).parts
        plain = next((i for i, part in enumerate(parts_of_path) if _is_glob(part)), len(parts_of_path))
        self._base = str(PurePosixPath(*parts_of_path[:plain]))
        self._pattern = parts_of_path[plain:]

    def files(self) -> list[pafs.FileInfo]:
        """The data files of this place, as the file system tells them; those that begin with `_` or `.` are left out."""
        try:
            info = self._files.get_file_info(self._base)
            if info.type == pafs.FileType.File and not self._pattern:
                self._base = str(PurePosixPath(self._base).parent)
                return [info]
            if info.type == pafs.FileType.NotFound and self.is_local:
                raise DataError(f"data: there is no file or folder {self._base!r}")
            selector = pafs.FileSelector(self._base, recursive=True, allow_not_found=True)
            every = self._files.get_file_info(selector)
        except OSError as error:
            raise DataError(f"data: cannot list {self.shown!r}: {_one_line(error)}") from error
        return [file for file in every if file.type == pafs.FileType.File and self._wanted(file.path)]

    def below(self, path: str) -> str:
        """A path from this place on."""
        return str(PurePosixPath(path).relative_to(self._base))

    def open(self, path: str) -> pa.NativeFile:
        """A file to read from anywhere; a forked process opens the file system anew, for clients of object stores do not survive a fork."""
        if self._process != os.getpid():
            self._files, _ = self._open()
            self._process = os.getpid()
        return self._files.open_input_file(path)

    def _wanted(self, path: str) -> bool:
        parts = PurePosixPath(path).relative_to(self._base).parts
        if self._pattern:
            return len(parts) == len(self._pattern) and all(map(fnmatchcase, parts, self._pattern))
        return PurePosixPath(path).suffix in PARQUET + ARROW and not any(
            p.startswith(("_", ".")) for p in parts
        )

    def _open(self) -> tuple[pafs.FileSystem, str]:
        if self.is_local:
            path = unquote(urlsplit(self._given).path) if "://" in self._given else self._given
            return pafs.LocalFileSystem(), str(Path(path).expanduser().absolute())
        try:
            files, path = pafs.FileSystem.from_uri(self._given)
        except (OSError, ValueError, pa.ArrowException) as error:
            reason = _one_line(error).replace(self._given, self.shown)
            raise DataError(f"data: cannot open {self.shown!r}: {reason}") from None
        return files, path.rstrip("/")


def _is_glob(part: str) -> bool:
    return any(sign in part for sign in "*?[")


# --- formats ----------------------------------------------------------------------------------------------


def _footer(place: _Place, path: str) -> pq.FileMetaData:
    with place.open(path) as source:
        return pq.ParquetFile(source).metadata


def _row_group(reader: pq.ParquetFile, group: int, columns: Sequence[str], where: str) -> pa.Table:
    """These columns of a row group. What cannot be read is told by its column."""
    try:
        return reader.read_row_group(group, columns=columns)
    except pa.ArrowInvalid:
        for name in columns:
            try:
                reader.read_row_group(group, columns=[name])
            except pa.ArrowInvalid as error:
                raise DataError(
                    f"data: cannot read column {name!r} of {where}: {_one_line(error)}; a list of a fixed size is null, "
                    "or the file is damaged: write the column without nulls"
                ) from error
        raise


def _any_length(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _arrow_layout(place: _Place, path: str) -> tuple[pa.Schema, tuple[int, ...]]:
    """Schema and rows of each record batch; only the first column is read for them."""
    with place.open(path) as source:
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


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
