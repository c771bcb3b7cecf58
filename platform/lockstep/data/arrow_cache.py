"""Rows that no file holds in the form that is read, written once as Arrow into the user's cache, under a key of what they are made of.

The file is the same for the same rows, however the library cut them into parts: its record batches have a number of
rows that follows from the rows themselves.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from lockstep import files
from lockstep.data import problems
from lockstep.data.user_cache import cache_path
from lockstep.errors import StorageError

KIND = "tables"
BLOCK_BYTES = 8 << 20
"""About the size of a record batch, which is what is read at once where rows are visited by block."""
FIRST_ROWS = 256
"""Rows by which the size of all is judged."""
MOST_ROWS = 1 << 16


def materialized(key: str, parts: Callable[[], Iterable[pa.Table]]) -> Path:
    """The file with the rows of `parts`, which are read where no process of this user has written them under this `key` before.

    The key changes with all that the rows are made of. Raises StorageError where the cache cannot be written.
    """
    folder = cache_path(KIND, key)
    path = folder / "rows.arrow"
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "making").open("w") as making:
            files.lock(making.fileno(), wait=True)
            if not path.exists():
                with files.replaced(path) as aside:
                    _write(aside, parts())
    except OSError as error:
        raise _no_room(folder, error) from error
    return path


def materialized_by_content(parts: Iterable[pa.Table]) -> Path:
    """The file with these rows, which nothing but their content names."""
    root = cache_path(KIND, "")
    aside = root.parent / f".{os.getpid()}.{id(parts):x}.aside"
    try:
        aside.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write(aside, parts)
            with aside.open("rb") as file:
                folder = cache_path(KIND, f"content {hashlib.file_digest(file, 'sha256').hexdigest()}")
            path = folder / "rows.arrow"
            folder.mkdir(exist_ok=True)
            if not path.exists():
                files.flush(aside)
                aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise _no_room(root.parent, error) from error
    return path


def _no_room(folder: Path, error: OSError) -> StorageError:
    return problems.ROWS_UNWRITABLE(folder=str(folder), got=error.strerror or error)


def _write(path: Path, parts: Iterable[pa.Table]) -> None:
    with path.open("wb") as file:
        writer = None
        for batch in even_batches(parts):
            if writer is None:
                writer = pa.ipc.new_file(file, batch.schema)
            writer.write_batch(batch)
        assert writer is not None, "even no rows are a batch"
        writer.close()
        file.flush()
        os.fsync(file.fileno())


def even_batches(parts: Iterable[pa.Table]) -> Iterator[pa.RecordBatch]:
    """The rows of `parts` in record batches whose lengths do not depend on the parts."""
    pending: pa.Table | None = None
    length = 0
    for part in parts:
        plain = _plain(part)
        pending = plain if pending is None else pa.concat_tables([pending, plain])
        if not length and pending.num_rows >= FIRST_ROWS:
            length = _batch_length(pending)
        while length and pending.num_rows >= length:
            yield _batch(pending.slice(0, length))
            pending = pending.slice(length)
    assert pending is not None, "a table has a schema, and so at least one part"
    if pending.num_rows or not length:
        yield _batch(pending)


def _batch_length(rows: pa.Table) -> int:
    """A power of two of rows, by the size of the first ones: the same however they came."""
    first = pa.Table.from_batches([_batch(rows.slice(0, FIRST_ROWS))]).nbytes
    fitting: int = BLOCK_BYTES * FIRST_ROWS // max(1, first)
    return max(1, min(MOST_ROWS, 1 << (fitting.bit_length() - 1)))


def _batch(rows: pa.Table) -> pa.RecordBatch:
    """Rows as one batch, in memory of their own."""
    columns = [
        pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
        for column in rows.columns
    ]
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema)


def _plain(part: pa.Table) -> pa.Table:
    """The columns without dictionaries, tensor types and metadata, which belong to how the rows were stored."""
    columns = [_plain_column(column) for column in part.columns]
    fields = [pa.field(name, column.type) for name, column in zip(part.column_names, columns, strict=True)]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _plain_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        storage = pa.chunked_array([chunk.storage for chunk in column.chunks], kind.storage_type)
        return _plain_column(storage if (vectors := _vector_type(kind)) is None else storage.cast(vectors))
    if pa.types.is_dictionary(kind):
        return column.cast(kind.value_type)
    if pa.types.is_string_view(kind):
        return column.cast(pa.string())
    if pa.types.is_binary_view(kind):
        return column.cast(pa.binary())
    return column


def _vector_type(kind: Any) -> pa.DataType | None:
    """The type of a vector for Ray's tensors of one shape, which it stores as lists; None for any other type."""
    shape, storage = getattr(kind, "shape", None), kind.storage_type
    if shape is None or not (pa.types.is_list(storage) or pa.types.is_large_list(storage)):
        return None
    if pa.types.is_nested(storage.value_type):
        return None
    return pa.list_(storage.value_type, math.prod(shape))
