"""Iceberg tables: the Parquet files of a snapshot, as pyiceberg reads them from the table's metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from lockstep.data.arrow_cache import materialized
from lockstep.data.snapshots import Snapshot, SnapshotFiles, contents_digest, in_path_order, selected_columns


@dataclass(frozen=True)
class Iceberg(Snapshot):
    """An Iceberg table, in its current snapshot at the beginning of the run or in the `snapshot` that is given, by its id.

    `table` is its name in a `catalog` ("db.orders"), which pyiceberg knows by its configuration and `properties`; or the path
    or URI of a metadata file (`….metadata.json`), without a catalog. Where rows are deleted beside their files, or columns have been renamed or
    have changed their type, the rows are written once as pyiceberg reads them.
    """

    table: str
    snapshot: int | None = None
    catalog: str = "default"
    properties: Mapping[str, str] = field(default_factory=dict, repr=False)

    format = "Iceberg"
    extra = "iceberg"

    @property
    def location(self) -> str:
        return self.table

    @property
    def named_version(self) -> str | None:
        return None if self.snapshot is None else str(self.snapshot)

    def newest(self) -> str:
        with self.reading():
            current = self._table().current_snapshot()
            if current is None:
                raise ValueError("it has no snapshot: nothing was written into it yet")
            return str(current.snapshot_id)

    def files(self, version: str, columns: Sequence[str] | None) -> SnapshotFiles:
        with self.reading(version):
            table = self._table()
            snapshot = table.snapshot_by_id(int(version))
            if snapshot is None:
                raise ValueError("the table has no snapshot of this id")
            scan = table.scan(snapshot_id=int(version))
            tasks = list(scan.plan_files())
            schema = scan.projection()
            root = table.location().removeprefix("file://").rstrip("/")
        paths = [task.file.file_path.removeprefix("file://") for task in tasks]
        order = in_path_order(paths)
        tasks, paths = [tasks[i] for i in order], [paths[i] for i in order]
        stored = self.stored_files(version, root, paths)
        deletes = [sorted(file.file_path for file in task.delete_files) for task in tasks]
        contents = contents_digest(
            (file.name, file.size, files) for file, files in zip(stored, deletes, strict=True)
        )
        direct = all(task.file.file_format == "PARQUET" for task in tasks) and _has_stable_names(
            table, schema
        )
        if direct and stored and not any(deletes):
            return SnapshotFiles(version, stored, contents)
        selected = selected_columns(columns, [column.name for column in schema.fields])

        def parts() -> Iterator[pa.Table]:
            from pyiceberg.expressions import AlwaysTrue
            from pyiceberg.io.pyarrow import ArrowScan, schema_to_pyarrow

            projected = schema.select(*selected)
            with self.reading(version):
                yield schema_to_pyarrow(projected, include_field_ids=False).empty_table()
                for task in tasks:  # one at a time: in their order
                    scan = ArrowScan(table.metadata, table.io, projected, AlwaysTrue())
                    yield scan.to_table([task]).select([field.name for field in projected.fields])

        path = materialized(f"iceberg {self.location} {version} {contents} {selected}", parts)
        return SnapshotFiles(version, self.stored_files(version, str(path.parent), [str(path)]), contents)

    def _table(self) -> Any:
        if self.table.endswith(".metadata.json"):
            from pyiceberg.table import StaticTable

            return StaticTable.from_metadata(self.table, dict(self.properties))
        from pyiceberg.catalog import load_catalog

        return load_catalog(self.catalog, **self.properties).load_table(self.table)


def _has_stable_names(table: Any, schema: Any) -> bool:
    """Whether each name has been that of one column of one type in all schemas that the table ever had: then files can be read by the names in them."""
    meanings: dict[str, tuple[int, str]] = {}
    for each in (*table.metadata.schemas, schema):
        for column in each.fields:
            meaning = (column.field_id, str(column.field_type))
            if meanings.setdefault(column.name, meaning) != meaning:
                return False
    ids = [field_id for field_id, _ in meanings.values()]
    return len(ids) == len(set(ids))
