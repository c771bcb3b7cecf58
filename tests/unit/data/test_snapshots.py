"""Delta, Iceberg and Lance tables as the source of a `Table`: the rows of one version, in one order, and refusals."""

from __future__ import annotations

import base64
import json
import re
import shutil
import struct
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from lockstep.data import Delta, Iceberg, Lance, Table, problems
from lockstep.data.arrow_cache import BLOCK_BYTES, even_batches, materialized, materialized_by_content
from lockstep.data.table_pins import pinned, pins_of
from tests import lake
from tests.raised import raises


def labels(table: Table, name: str = "label") -> list[float]:
    return table.__getitems__(np.arange(len(table)))[name].tolist()


@pytest.mark.every(3)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", lake.FORMATS)
def test_the_newest_version_is_looked_up_once(tmp_path: Path, kind: str) -> None:
    """What is opened later in the run, and what goes on with it, reads the same version; a run of its own the newer one."""
    lake.append(kind, tmp_path, lake.points(20, 1))
    with pinned({}) as pins:
        first = Table(lake.source(kind, tmp_path))
        lake.append(kind, tmp_path, lake.points(20, 2))
        assert len(Table(lake.source(kind, tmp_path))) == len(first) == 20
    fields = pins.fields()
    assert list(fields) == [f"data.snapshot.{'db.points' if kind == 'iceberg' else 'points'}"]
    with pinned(pins_of(fields)), pinned({}):
        again = Table(lake.source(kind, tmp_path))
    newest = Table(lake.source(kind, tmp_path))
    assert (again.fingerprint(), labels(again)) == (first.fingerprint(), labels(first))
    assert len(newest) == 40
    named = Table(lake.source(kind, tmp_path, int(next(iter(fields.values())))))
    assert named.fingerprint() == first.fingerprint() != newest.fingerprint()


def test_tables_of_one_name_have_a_version_each(tmp_path: Path) -> None:
    for name, versions in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        for seed in range(versions):
            lake.append("delta", tmp_path / name, lake.points(5, seed))
    with pinned({}) as pins:
        for name in ("a", "b", "a"):
            Table(lake.source("delta", tmp_path / name))
    assert pins.fields() == {"data.snapshot.points": "0", "data.snapshot.points.2": "1"}


# --- versions that are gone ---


def test_a_vacuumed_delta_version_is_told(tmp_path: Path) -> None:
    from deltalake import DeltaTable, write_deltalake

    lake.append("delta", tmp_path, lake.points(20, 1))
    write_deltalake(str(tmp_path / "points"), lake.points(20, 2), mode="overwrite")
    assert len(Table(lake.source("delta", tmp_path, 0))) == 20
    DeltaTable(str(tmp_path / "points")).vacuum(0, dry_run=False, enforce_retention_duration=False)
    gone = re.compile(r"^its file '.*\.parquet' is not there any more$")
    with raises(problems.NO_VERSION, version=0, format="Delta", path=tmp_path / "points", got=gone):
        Table(lake.source("delta", tmp_path, 0))
    with raises(problems.NO_VERSION, version=7, format="Delta", path=tmp_path / "points"):
        Table(lake.source("delta", tmp_path, 7))


def test_an_expired_iceberg_snapshot_is_told(tmp_path: Path) -> None:
    lake.append("iceberg", tmp_path, lake.points(20, 1))
    table = lake.iceberg_catalog(tmp_path).load_table("db.points")
    first = table.current_snapshot().snapshot_id
    table.append(lake.points(20, 2))
    table.maintenance.expire_snapshots().by_id(first).commit()
    gone = "the table has no snapshot of this id"
    with raises(problems.NO_VERSION, version=first, format="Iceberg", path="db.points", got=gone):
        Table(lake.source("iceberg", tmp_path, first))


@pytest.mark.scenario
def test_a_cleaned_lance_version_is_told(tmp_path: Path) -> None:
    for seed in (1, 2):
        lake.append("lance", tmp_path, lake.points(20, seed))
    lake.run_lance(
        "import datetime; lance.dataset('points').cleanup_old_versions(datetime.timedelta(0), delete_unverified=True)",
        tmp_path,
    )
    with raises(problems.NO_VERSION, version=1, format="Lance", path=tmp_path / "points"):
        Table(lake.source("lance", tmp_path, 1))


@pytest.mark.parametrize("kind", ["delta", "lance"])
def test_a_table_that_is_not_there_is_told(tmp_path: Path, kind: str) -> None:
    with raises(problems.NO_TABLE, format=kind.capitalize(), path=tmp_path / "points"):
        Table(lake.source(kind, tmp_path))


@pytest.mark.parametrize(
    ("source", "library", "extra"),
    [
        (Delta("t"), "deltalake", "delta"),
        (Iceberg("db.t"), "pyiceberg", "iceberg"),
        (Lance("t"), "lance", "lance"),
    ],
)
def test_a_library_that_is_not_installed_is_told(
    monkeypatch: pytest.MonkeyPatch, source: Delta, library: str, extra: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)  # type: ignore[arg-type]
    with raises(problems.TABLE_LIBRARY, format=type(source).__name__, got=re.compile(library), extra=extra):
        Table(source)


# --- what is not as it is in the files ---


def test_the_columns_that_partition_a_delta_table_are_those_of_its_log(tmp_path: Path) -> None:
    from deltalake import write_deltalake

    rows = pa.table(
        {
            "label": np.arange(6, dtype=np.float32),
            "year": np.array([2024, 2025] * 3),
            "town": ["a b", "ü/1"] * 3,
        }
    )
    write_deltalake(str(tmp_path / "t"), rows, partition_by=["year", "town"])
    batch = Table(Delta(tmp_path / "t")).__getitems__(range(6))
    assert sorted(zip(batch["label"].tolist(), batch["year"].tolist(), batch["town"], strict=True)) == sorted(
        zip(*(rows.column(name).to_pylist() for name in ("label", "year", "town")), strict=True)
    )


def test_columns_that_a_delta_table_maps_are_read_under_their_names(tmp_path: Path) -> None:
    from deltalake import write_deltalake

    rows = pa.table({"label": np.arange(6, dtype=np.float32), "part": ["a", "b"] * 3})
    write_deltalake(
        str(tmp_path / "t"), rows, partition_by=["part"], configuration={"delta.columnMapping.mode": "name"}
    )
    batch = Table(Delta(tmp_path / "t")).__getitems__(range(6))
    assert sorted(zip(batch["label"].tolist(), batch["part"], strict=True)) == list(
        zip(rows.column("label").to_pylist(), ["a", "b"] * 3, strict=True)
    )


def test_rows_that_a_delta_table_marks_as_deleted_are_left_out(tmp_path: Path) -> None:
    """Vectors of deleted rows, which other writers than deltalake leave, as the protocol has them."""
    from deltalake import write_deltalake

    configuration = {"delta.enableDeletionVectors": "true"}
    write_deltalake(
        str(tmp_path / "t"), pa.table({"label": np.arange(6, dtype=np.float32)}), configuration=configuration
    )
    with pinned({}):
        assert labels(Table(Delta(tmp_path / "t"))) == [0, 1, 2, 3, 4, 5]
    log = tmp_path / "t" / "_delta_log"
    first = [json.loads(line) for line in (log / f"{0:020}.json").read_text().splitlines()]
    add = next(action["add"] for action in first if "add" in action)
    remove = {"path": add["path"], "deletionTimestamp": 1, "dataChange": True}
    add = {**add, "deletionVector": deletion_vector([1, 4])}
    (log / f"{1:020}.json").write_text(f"{json.dumps({'remove': remove})}\n{json.dumps({'add': add})}\n")
    assert labels(Table(Delta(tmp_path / "t"))) == [0, 2, 3, 5]
    assert labels(Table(Delta(tmp_path / "t", version=0))) == [0, 1, 2, 3, 4, 5]


def deletion_vector(rows: list[int]) -> dict[str, object]:
    """Inline: the magic number, one bitmap with the key 0, in Z85."""
    from pyroaring import BitMap

    content = struct.pack("<IQI", 1681511377, 1, 0) + BitMap(rows).serialize()
    content += bytes(-len(content) % 4)
    return {
        "storageType": "i",
        "pathOrInlineDv": z85(content),
        "sizeInBytes": len(content),
        "cardinality": len(rows),
    }


def z85(content: bytes) -> str:
    digits = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    their = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
    return base64.b85encode(content).decode().translate(str.maketrans(their, digits))


def test_a_renamed_iceberg_column_is_the_same_column(tmp_path: Path) -> None:
    """Read by the names in the files, the old rows of `label` would be those of the new column of that name."""
    lake.append("iceberg", tmp_path, pa.table({"label": np.zeros(3, np.float32)}))
    table = lake.iceberg_catalog(tmp_path).load_table("db.points")
    with table.update_schema() as update:
        update.rename_column("label", "old")
    table.append(pa.table({"old": np.ones(2, np.float32)}))
    assert sorted(labels(Table(lake.source("iceberg", tmp_path)), "old")) == [0, 0, 0, 1, 1]


@pytest.mark.scenario
def test_rows_deleted_from_a_lance_table_are_left_out(tmp_path: Path) -> None:
    lake.append("lance", tmp_path, pa.table({"label": np.arange(6, dtype=np.float32)}))
    lake.run_lance("lance.dataset('points').delete('label = 1 or label = 4')", tmp_path)
    assert labels(Table(lake.source("lance", tmp_path))) == [0, 2, 3, 5]
    assert labels(Table(lake.source("lance", tmp_path, 1))) == [0, 1, 2, 3, 4, 5]


@pytest.mark.scenario
def test_a_lance_table_made_anew_is_not_the_old_one(tmp_path: Path) -> None:
    """Same place, same version: what was written for the old one is not taken for the new one."""
    for value in (1.0, 2.0):
        shutil.rmtree(tmp_path / "points", ignore_errors=True)
        lake.append("lance", tmp_path, pa.table({"label": np.full(3, value, np.float32)}))
        assert labels(Table(lake.source("lance", tmp_path))) == [value] * 3


@pytest.mark.scenario
def test_columns_of_a_lance_table_that_swap_their_names_are_not_the_old_ones(tmp_path: Path) -> None:
    """The new version has the same files and the same names."""
    lake.append("lance", tmp_path, pa.table({"x": np.zeros(3, np.float32), "y": np.ones(3, np.float32)}))
    old = Table(lake.source("lance", tmp_path))
    names = [("x", "z"), ("y", "x"), ("z", "y")]
    lake.run_lance(
        f"table = lance.dataset('points'); [table.alter_columns({{'path': a, 'name': b}}) for a, b in {names}]",
        tmp_path,
    )
    new = Table(lake.source("lance", tmp_path), {"x": "x", "y": "y"})
    assert [labels(table, "x") for table in (old, new)] == [[0, 0, 0], [1, 1, 1]]
    assert old.files.snapshot is not None
    assert new.files.snapshot is not None
    assert old.files.snapshot.contents != new.files.snapshot.contents


# --- rows written once ---


def test_what_is_written_does_not_depend_on_the_parts_that_it_came_in(cache: Path) -> None:
    rows = pa.table({"x": np.arange(3000), "text": [f"row {i}" for i in range(3000)]})
    encoded = rows.set_column(1, "text", rows.column("text").dictionary_encode())
    paths = {
        materialized_by_content(parts)
        for parts in (
            [rows],
            [rows.slice(0, 1), rows.slice(1)],
            [encoded.slice(i, 250) for i in range(0, 3000, 250)],
        )
    }
    assert len(paths) == 1
    assert materialized_by_content([rows.slice(1)]) not in paths
    assert not list((cache / "lockstep").glob(".*"))


def test_batches_have_about_the_size_of_a_block() -> None:
    wide = pa.table({"x": pa.FixedSizeListArray.from_arrays(np.zeros(600 * 8192, np.float32), 8192)})
    sizes = [batch.nbytes for batch in even_batches([wide])]
    assert BLOCK_BYTES // 2 <= sizes[0] <= BLOCK_BYTES
    assert [batch.num_rows for batch in even_batches([wide.slice(0, 0)])] == [0]


def test_rows_are_read_once(cache: Path) -> None:
    def never() -> list[pa.Table]:
        raise AssertionError

    path = materialized("key", lambda: [pa.table({"x": [1]})])
    assert materialized("key", never) == path
    with pytest.raises(AssertionError):
        materialized("another key", never)
