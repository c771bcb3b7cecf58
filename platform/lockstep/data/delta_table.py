"""Delta tables: the Parquet files of a version, as deltalake reads them from the table's log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.data.arrow_cache import materialized
from lockstep.data.file_locations import StoredFile, retried
from lockstep.data.snapshots import (
    NumberedVersion,
    SnapshotFiles,
    contents_digest,
    in_path_order,
    selected_columns,
)

DELETED = "deletionVectors"
"""The feature of tables in which rows are deleted beside the files."""


@dataclass(frozen=True)
class Delta(NumberedVersion):
    """A Delta table at a path or a URI, in its newest version at the beginning of the run or in the `version` that is given.

    `storage_options` are deltalake's, for the table's log; files are opened as those of any table. Rows that are deleted beside
    their file, and columns that were renamed, are written once without the deleted rows and under their names.
    """

    format = "Delta"
    extra = "delta"

    def newest(self) -> str:
        with self.reading():
            return str(self._table(None).version())

    def files(self, version: str, columns: Sequence[str] | None) -> SnapshotFiles:
        with self.reading(version):
            table = self._table(int(version))
            actions = pa.table(table.get_add_actions(flatten=False))
            uris = table.file_uris()
            kept = _kept_rows(table, uris)
            renamed = _physical_names(table)
            keys = list(table.metadata().partition_columns)
            schema = pa.schema(table.schema().to_arrow())
            root = _plain(table.table_uri).rstrip("/")
        order = in_path_order(uris)
        values = actions.column("partition").to_pylist() if keys else [{}] * len(uris)
        partitions = [{name: _as_text(value) for name, value in values[i].items()} for i in order]
        stored = self.stored_files(version, root, [uris[i] for i in order])
        masks = [kept.get(uris[i]) for i in order]
        contents = contents_digest(
            (file.name, file.size, mask if mask is None else mask.tobytes(), keys_of_file)
            for file, mask, keys_of_file in zip(stored, masks, partitions, strict=True)
        )
        types = {name: schema.field(name).type for name in keys}
        if renamed is None and not kept and stored:
            return SnapshotFiles(version, stored, contents, partitions if keys else (), types)
        selected = selected_columns(columns, schema.names)

        def parts() -> Iterator[pa.Table]:
            yield schema.empty_table().select(selected)
            for file, mask, keys_of_file in zip(stored, masks, partitions, strict=True):
                rows = _rows(file, schema, keys_of_file, renamed or {})
                yield (rows if mask is None else rows.filter(pa.array(mask))).select(selected)

        path = materialized(f"delta {self.location} {version} {contents} {selected}", parts)
        return SnapshotFiles(version, self.stored_files(version, str(path.parent), [str(path)]), contents)

    def _table(self, version: int | None) -> Any:
        from deltalake import DeltaTable

        return DeltaTable(self.location, version=version, storage_options=self.options)


def _kept_rows(table: Any, uris: Sequence[str]) -> dict[str, np.ndarray[Any, np.dtype[np.bool_]]]:
    """For each file some of whose rows are deleted: which are kept."""
    if DELETED not in (table.protocol().reader_features or ()):
        return {}
    kept = {
        _plain(row["filepath"]): np.array(row["selection_vector"], np.bool_)
        for row in pa.table(table.deletion_vectors()).to_pylist()
    }
    strange = kept.keys() - set(uris)
    if strange:  # rows that are deleted would be trained on
        raise ValueError(f"rows are deleted in {min(strange)!r}, which is none of its files")
    return kept


def _plain(uri: str) -> str:
    """A file's path on a disk: deltalake gives it as a URI in one call and as a path in another."""
    return unquote(urlsplit(uri).path) if uri.startswith("file://") else uri


def _physical_names(table: Any) -> dict[str, str] | None:
    """The names of the columns in the files, where the table maps them; None where they are those of the table."""
    if table.metadata().configuration.get("delta.columnMapping.mode", "none") == "none":
        return None
    return {
        column.name: column.metadata.get("delta.columnMapping.physicalName", column.name)
        for column in table.schema().fields
    }


def _rows(
    file: StoredFile, schema: pa.Schema, keys: Mapping[str, str | None], physical: Mapping[str, str]
) -> pa.Table:
    """A file's rows, with the columns of the table; one that the file lacks is null, as Delta has it."""

    def read() -> pa.Table:
        with file.location.open(file.path) as source:
            rows = pq.ParquetFile(source).read()
            file.check(source)
            return rows

    stored = retried(read, repr(file.shown))
    columns = []
    for column in schema:
        name = physical.get(column.name, column.name)
        if column.name in keys or name in keys:
            value = keys.get(column.name, keys.get(name))
            columns.append(
                pa.chunked_array([pa.array([value] * stored.num_rows, pa.string()).cast(column.type)])
            )
        elif name in stored.schema.names:
            columns.append(stored.column(name).cast(column.type))
        else:
            columns.append(pa.chunked_array([pa.nulls(stored.num_rows, column.type)]))
    return pa.Table.from_arrays(columns, schema=schema)


def _as_text(value: Any) -> str | None:
    """A partition's value as text, from which it is cast to its type."""
    return None if value is None else str(value)
