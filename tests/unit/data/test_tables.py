"""Tables: the rows that were written, the same bits wherever they are kept, errors that name file and column."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow.fs import FileSystem
from torch import Tensor
from torch.utils.data import Subset

import lockstep
from lockstep.data import Column, Table, file_locations, problems
from lockstep.data.loader import ALIGNMENT, Loader
from lockstep.data.micro_batches import MicroBatches
from lockstep.data.order import epoch_order
from lockstep.data.sampler import MicroBatch, MicroBatchSampler
from lockstep.data.table_files import TableFiles
from lockstep.errors import DataError, Problem
from lockstep.plan import Plan
from tests.raised import raises
from tests.unit.data.conftest import Faults, past

ROWS, BLOCK, WIDTH = 1000, 64, 8
DRAWN = np.random.default_rng(5)
X = DRAWN.standard_normal((ROWS, WIDTH), dtype=np.float32)
LENGTHS = DRAWN.integers(0, 6, ROWS)
TOKENS = [list(range(i, i + n)) for i, n in enumerate(LENGTHS.tolist())]
NAMES = [f"image {i} ".encode() * (i % 3) for i in range(ROWS)]
IDS = DRAWN.permutation(ROWS)[:333]


def written(rows: slice = slice(0, ROWS)) -> pa.Table:
    return pa.table(
        {
            "x": pa.FixedSizeListArray.from_arrays(pa.array(X[rows].ravel()), WIDTH),
            "vector": pa.array(X[rows].tolist(), pa.list_(pa.float32())),
            "y": pa.array(np.arange(ROWS)[rows] % 10),
            "price": pa.array(X[rows, 0].astype(np.float64)),
            "area": pa.array(X[rows, 1].astype(np.float64)),
            "flag": pa.array((np.arange(ROWS)[rows] % 3 == 0).tolist()),
            "tokens": pa.array(TOKENS[rows], pa.list_(pa.int64())),
            "image": pa.array(NAMES[rows], pa.binary()),
            "title": pa.array([f"ü{i}" for i in range(ROWS)[rows]]),
        }
    )


COLUMNS = {
    "x": "x",
    "vector": Column("vector", length=WIDTH),
    "y": "y",
    "pair": Column(("price", "area"), dtype="float32"),
    "flag": "flag",
    "tokens": Column("tokens", pad=-1),
    "image": "image",
    "title": "title",
}


def parquet(folder: Path) -> str:
    """Three files of unlike length, with row groups that end short."""
    for i, rows in enumerate((slice(0, 150), slice(150, 151), slice(151, ROWS))):
        pq.write_table(written(rows), folder / f"part-{i}.parquet", row_group_size=BLOCK)
    return str(folder)


def arrow(folder: Path) -> str:
    table = written()
    with pa.ipc.new_file(folder / "table.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=BLOCK)
    return str(folder)


def bits(batch: dict[str, Any]) -> dict[str, Any]:
    return {
        name: (value.dtype, tuple(value.shape), value.numpy().tobytes())
        if isinstance(value, Tensor)
        else value
        for name, value in batch.items()
    }


def wanted(ids: Any) -> dict[str, Any]:
    longest = int(LENGTHS[ids].max())
    return bits(
        {
            "x": torch.from_numpy(X[ids]),
            "vector": torch.from_numpy(X[ids]),
            "y": torch.from_numpy(ids % 10),
            "pair": torch.from_numpy(X[ids, :2].copy()),
            "flag": torch.from_numpy(ids % 3 == 0),
            "tokens": torch.tensor(
                [TOKENS[i] + [-1] * (longest - len(TOKENS[i])) for i in ids], dtype=torch.int64
            ),
            "tokens_lengths": torch.from_numpy(LENGTHS[ids]),
            "image": [NAMES[i] for i in ids],
            "title": [f"ü{i}" for i in ids],
        }
    )


@pytest.mark.parametrize("write", [parquet, arrow])
@pytest.mark.parametrize("memory_mb", [None, 0.03])
def test_a_batch_has_the_rows_that_were_written(
    write: Callable[[Path], str], memory_mb: float | None, tmp_path: Path
) -> None:
    """Every kind of column, in memory and by blocks, from Parquet and from Arrow."""
    table = Table(write(tmp_path), COLUMNS, memory_mb=memory_mb)
    assert table.residence == ("memory" if memory_mb is None else "blocks")
    assert len(table) == ROWS
    assert bits(table.__getitems__(IDS)) == wanted(IDS)
    assert bits(table.__getitems__(IDS.tolist())) == wanted(IDS)
    assert bits(table.__getitems__(IDS[:1])) == wanted(IDS[:1])


def test_a_wrong_row_is_seen() -> None:
    """What the tests here compare tells one row from another."""
    other = IDS.copy()
    other[[0, 1]] = other[[1, 0]]
    assert all(wanted(other)[name] != wanted(IDS)[name] for name in ("x", "tokens", "image"))


def test_arrow_on_disk_is_mapped_and_not_copied(tmp_path: Path) -> None:
    columns = {name: COLUMNS[name] for name in ("x", "y", "tokens")}
    table = Table(arrow(tmp_path), columns, memory_mb=0.01)
    before = pa.total_allocated_bytes()
    assert table.residence == "mapped"
    batch = bits(table.__getitems__(IDS))
    assert batch == {name: value for name, value in wanted(IDS).items() if name in batch}
    assert pa.total_allocated_bytes() == before


def test_compressed_arrow_is_read_by_blocks(tmp_path: Path) -> None:
    table = written().select(["x", "y"])
    with pa.ipc.new_file(
        tmp_path / "a.arrow", table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
    ) as f:
        f.write_table(table, max_chunksize=BLOCK)
    found = Table(tmp_path, memory_mb=0.02)
    assert found.residence == "blocks"
    assert bits(found.__getitems__(IDS))["x"] == wanted(IDS)["x"]


def test_batches_are_aligned_memory_of_their_own(tmp_path: Path) -> None:
    """A job may write to a batch; the table's own rows, and another batch, stay as they are."""
    table = Table(parquet(tmp_path), {"x": "x", "tokens": "tokens"})
    for ids in ([3, 4, 5], [7]):
        batch = table.__getitems__(ids)
        assert batch["x"].data_ptr() % ALIGNMENT == 0
        batch["x"].zero_()
        assert bits(table.__getitems__(ids))["x"] == wanted(np.array(ids))["x"]


def test_one_row_is_a_sample(tmp_path: Path) -> None:
    table = Table(parquet(tmp_path), COLUMNS)
    row = table[7]
    assert torch.equal(row["x"], torch.from_numpy(X[7]))
    assert row["tokens"].tolist() == TOKENS[7]
    assert row["image"] == NAMES[7]
    with pytest.raises(IndexError, match="table of 1000 rows"):
        table[ROWS]
    with pytest.raises(IndexError, match="-1"):
        table[-1]


def test_without_columns_all_of_them_are_read(tmp_path: Path) -> None:
    assert list(Table(parquet(tmp_path))[0]) == [
        "x", "vector", "vector_lengths", "y", "price", "area", "flag", "tokens", "tokens_lengths", "image", "title",
    ]  # fmt: skip


def test_blocks_are_row_groups_and_record_batches(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert Table(parquet(tmp_path / "a"), {"y": "y"}).block_sizes == [64, 64, 22, 1, *[64] * 13, 17]
    assert Table(arrow(tmp_path / "b"), {"y": "y"}).block_sizes == [*[64] * 15, 40]


def test_the_bound_on_memory_is_held(tmp_path: Path) -> None:
    """What is held of blocks stays under the bound, while all of the table passes through it."""
    table = Table(parquet(tmp_path), {"x": "x", "y": "y"}, memory_mb=0.02)
    table_cache: Any = table._cache
    most, seen = 0, set()
    for start in range(0, ROWS, 20):
        table.__getitems__(np.arange(start, start + 20))
        most = max(most, sum(size for _, size in table_cache._resident.values()))
        seen |= set(table_cache._resident)
        on_disk = sum(f.stat().st_size for f in table_cache._folder.path.rglob("*.values"))
        assert on_disk <= table.bound
    assert len(seen) == len(table.block_sizes)
    assert table.bound / 2 < most <= table.bound


@pytest.mark.parametrize("ahead", [True, False])
def test_a_window_is_read_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """By the time that its first batch is fetched; the negative control is not told what is due."""
    table = Table(parquet(tmp_path), {"x": "x", "y": "y"}, memory_mb=0.02)
    whole = MicroBatches(table, dict, seed=3, purpose="data")
    plan = Plan.of(ROWS, 20, 10, drop_last=False, epochs=1)
    window = 3
    table.check_order("blocks", window)
    ids = MicroBatchSampler(table, plan, range(2), seed=3, shuffle="blocks", window=window)
    fetching, waited = False, list[int]()
    read = TableFiles.read

    def watched(self: TableFiles, block: int, columns: Any) -> Any:
        if fetching:
            waited.append(block)
        return read(self, block, columns)

    monkeypatch.setattr(TableFiles, "read", watched)
    table_cache: Any = table._cache
    for batch in ids:
        fetching = True
        table.__getitems__(batch.ids)
        fetching = False
        if ahead:
            whole.fetched(batch)  # of what it holds already, then what is due
        assert sum(size for _, size in table_cache._resident.values()) <= table.bound
    first_window = set(epoch_blocks(table, window)[:window])
    if ahead:
        assert set(waited) == first_window
    else:
        assert len(waited) == len(table.block_sizes)


def epoch_blocks(table: Table, window: int) -> list[int]:
    order: Any = epoch_order(3, 0, ROWS, "blocks", blocks=table.block_sizes, window=window)
    return list(order._blocks)


def test_what_cannot_be_read_ahead_is_told_when_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(parquet(tmp_path), {"x": "x"}, memory_mb=0.02)
    monkeypatch.setattr(file_locations, "PAUSES_S", ())
    (tmp_path / "part-0.parquet").write_bytes(b"")
    table.read_ahead([0])
    with pytest.raises(DataError, match=r"part-0.parquet' has changed since it was opened \(it has 0 bytes"):
        table.__getitems__([0])


@pytest.mark.parametrize("write", [parquet, arrow])
def test_a_file_that_changes_in_a_run_is_told(write: Callable[[Path], str], tmp_path: Path) -> None:
    """Where the table is read by block. The new file is as good as the old one."""
    columns = {"x": "x", "pair": COLUMNS["pair"]}
    table = Table(write(tmp_path), columns, memory_mb=0.02)
    assert table.residence == "blocks"
    before = bits(table.__getitems__([999]))
    time.sleep(0.01)  # a tick of the file system's clock
    write(tmp_path)
    assert bits(table.__getitems__([999])) == before  # a block that is held
    with pytest.raises(DataError, match=r"^data: '.*' has changed since it was opened \(it was written at"):
        table.__getitems__([0])
    assert Table(tmp_path, columns, memory_mb=0.02).__getitems__([0])


def test_memory_of_a_table_is_not_that_of_a_file_it_was_replaced_by(tmp_path: Path) -> None:
    """Another process may still hold the rows of the old file; the new one has its size and its time."""
    file = tmp_path / "a.parquet"
    held = []
    for value in (1.0, 2.0):
        pq.write_table(pa.table({"x": np.full(3, value)}), file, use_dictionary=False, compression="none")
        os.utime(file, ns=(10**18, 10**18))
        held.append((Table(file), file.stat().st_size))
    assert held[0][1] == held[1][1]
    assert [table[0]["x"].item() for table, _ in held] == [1.0, 2.0]


# --- where files are --------------------------------------------------------------------------------------


def test_sources_are_a_file_a_folder_a_glob_or_a_list(tmp_path: Path) -> None:
    parquet(tmp_path)
    (tmp_path / "_metadata").write_bytes(b"no data")
    files = [tmp_path / f"part-{i}.parquet" for i in range(3)]
    for source in (tmp_path, str(tmp_path), f"{tmp_path}/part-*.parquet", files, f"file://{tmp_path}"):
        assert bits(Table(source, COLUMNS).__getitems__(IDS)) == wanted(IDS)
    assert len(Table(files[0], {"y": "y"})) == 150
    assert len(Table(f"{tmp_path}/part-[01].parquet", {"y": "y"})) == 151


def test_hive_partitions_are_columns(tmp_path: Path) -> None:
    for year, country, rows in ((2023, "at", slice(0, 10)), (2024, "de", slice(10, 30))):
        folder = tmp_path / f"year={year}" / f"country={country}"
        folder.mkdir(parents=True)
        pq.write_table(written(rows).select(["y"]), folder / "a.parquet")
    table = Table(tmp_path)
    batch = table.__getitems__([0, 9, 10, 29])
    assert batch["year"].tolist() == [2023, 2023, 2024, 2024]
    assert batch["country"] == ["at", "at", "de", "de"]
    assert batch["y"].tolist() == [0, 9, 0, 9]


@pytest.mark.parametrize("value", ["9223372036854775808", "²", "٣", "--5", "1-"])
def test_a_partition_that_is_no_whole_number_of_64_bits_is_text(tmp_path: Path, value: str) -> None:
    for key in (value, "-3"):
        (tmp_path / f"id={key}").mkdir()
        pq.write_table(written(slice(0, 1)).select(["y"]), tmp_path / f"id={key}" / "a.parquet")
    assert set(Table(tmp_path).__getitems__([0, 1])["id"]) == {value, "-3"}


def uploaded(folder: Path, query: str, name: str, faults: Faults) -> str:
    files, root = FileSystem.from_uri(f"s3://key:secret@tables/{name}?{past(query, faults)}")
    for path in folder.glob("*"):
        with files.open_output_stream(f"{root}/{path.name}") as out:
            out.write(path.read_bytes())
    return f"s3://key:secret@tables/{name}?{query}"


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize("memory_mb", [None, 0.03])
def test_tables_are_read_from_an_object_store(
    tmp_path: Path, s3_query: str, faults: Faults, memory_mb: float | None
) -> None:
    """With the same bits and the same fingerprint as from the disk, by a glob too, in loader processes too."""
    local = Table(parquet(tmp_path), COLUMNS)
    uri = uploaded(tmp_path, s3_query, f"read-{memory_mb}", faults)
    for source in (uri, uri.replace("?", "/part-*.parquet?", 1)):
        table = Table(source, COLUMNS, memory_mb=memory_mb)
        assert bits(table.__getitems__(IDS)) == wanted(IDS)
        assert table.fingerprint() == local.fingerprint()
    keys = [MicroBatch(0, m, IDS[100 * m : 100 * m + 100]) for m in range(3)]
    for processes in (0, 2):
        assert [bits(batch) for batch in loaded(table, keys, processes)] == [wanted(key.ids) for key in keys]


def test_a_read_that_fails_is_tried_again(
    tmp_path: Path, s3_query: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_locations, "PAUSES_S", (0.01, 0.01, 0.01))
    parquet(tmp_path)
    table = Table(uploaded(tmp_path, s3_query, "flaky", faults), COLUMNS, memory_mb=0.03)
    faults.fail("part-2.parquet", 5)  # more than the client itself tries again
    assert bits(table.__getitems__(IDS)) == wanted(IDS)
    assert faults.failed == 5


@pytest.mark.scenario  # the object store's client tries again for seconds
def test_a_read_that_keeps_failing_names_file_and_row_group(
    tmp_path: Path, s3_query: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_locations, "PAUSES_S", (0.01, 0.01))
    parquet(tmp_path)
    table = Table(uploaded(tmp_path, s3_query, "broken", faults), COLUMNS, memory_mb=0.03)
    faults.fail("part-2.parquet", 10_000)
    try:
        what = "'s3://tables/broken/part-2.parquet', row group 0"
        with raises(problems.UNREADABLE_STORAGE, what=what, tries=3) as info:
            table.__getitems__([160])
    finally:
        faults.fail("", 0)
    assert "secret" not in str(info.value)


# --- bad input --------------------------------------------------------------------------------------------


def test_a_missing_column_is_told_with_its_file_and_the_nearest_name(tmp_path: Path) -> None:
    parquet(tmp_path)
    hint = "; did you mean 'price'?"
    with raises(problems.NO_COLUMN, file="part-0.parquet", column="prise", hint=hint):
        Table(tmp_path, {"p": "prise"})
    pq.write_table(written().drop(["price"]), tmp_path / "part-3.parquet")
    with raises(problems.NO_COLUMN, file="part-3.parquet", column="price"):
        Table(tmp_path, {"p": "price"})


def test_nulls_are_told_before_training_from_the_statistics(tmp_path: Path) -> None:
    good = pa.table({"a": pa.array([1.0, 2.0])})
    pq.write_table(good, tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": pa.array([1.0, None, None])}), tmp_path / "b.parquet", row_group_size=2)
    with raises(problems.NULLS, column="a", count=1, plural="", file="b.parquet", block=0):
        Table(tmp_path, memory_mb=0.00001)


@pytest.mark.parametrize("values", [[[1.0], [None]], [[1.0], None]])
def test_nulls_in_lists_of_one_size_are_told_before_training(tmp_path: Path, values: Any) -> None:
    column = pa.array(values, pa.list_(pa.float64(), 1))
    pq.write_table(pa.table({"b": [1, 2], "a": column}), tmp_path / "a.parquet")
    for more in ({}, {"memory_mb": 0.00001}):  # nothing is read in the second case
        with raises(problems.NULLS, column="a", count=1, file="a.parquet", block=0):
            Table(tmp_path, **more)


def test_a_null_list_of_one_size_is_told_by_its_column_without_statistics(tmp_path: Path) -> None:
    """Parquet's reader refuses it for all columns at once."""
    column = pa.array([[1.0], None], pa.list_(pa.float64(), 1))
    table = pa.table({"b": [1, 2], "a": column})
    pq.write_table(table, tmp_path / "a.parquet", write_statistics=False)
    where = f"'{tmp_path}/a.parquet', row group 0"
    with raises(problems.COLUMN_UNREADABLE, column="a", where=where):
        Table(tmp_path)
    assert len(Table(tmp_path, {"b": "b"})) == 2


@pytest.mark.parametrize(
    "values",
    [
        pa.array([[1.0], None], pa.list_(pa.float64())),
        pa.array([[1.0], [None]], pa.list_(pa.float64())),
        pa.array([b"a", None]),
    ],
)
def test_nulls_in_lists_and_bytes_are_told_when_they_are_read(tmp_path: Path, values: pa.Array) -> None:
    pq.write_table(pa.table({"a": values}), tmp_path / "a.parquet")
    with raises(problems.NULLS, column="a", count=1, file="a.parquet", block=0):
        Table(tmp_path)


def test_files_of_unlike_schemas_are_told(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array([1.0])}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": pa.array([1])}), tmp_path / "b.parquet")
    files = {"file": "b.parquet", "first": "a.parquet"}
    with raises(problems.OTHER_SCHEMA, column="a", got="int64", wanted="double", **files):
        Table(tmp_path)


@pytest.mark.parametrize("kept", [0, 3, 4000])
def test_a_truncated_file_is_told(tmp_path: Path, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_locations, "PAUSES_S", ())
    parquet(tmp_path)
    cut = tmp_path / "part-2.parquet"
    cut.write_bytes(cut.read_bytes()[:kept])
    with raises(problems.DAMAGED, what=re.compile(f"^'{re.escape(str(cut))}'")):
        Table(tmp_path)


def test_a_file_damaged_inside_is_told_with_its_row_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_locations, "PAUSES_S", (0.0,))
    parquet(tmp_path)
    file = tmp_path / "part-1.parquet"
    content = bytearray(file.read_bytes())
    content[4:60] = b"\xff" * 56  # the first page's header
    file.write_bytes(content)
    with raises(problems.UNREADABLE_STORAGE, what=f"'{file}', row group 0", tries=2):
        Table(tmp_path)


def test_an_empty_folder_and_a_missing_one_are_told(tmp_path: Path) -> None:
    with raises(problems.NO_FILES, path=tmp_path, wanted=re.compile(r"^\.parquet, ")):
        Table(tmp_path)
    with raises(problems.NO_FILE_OR_FOLDER, path=tmp_path / "no"):
        Table(tmp_path / "no")
    with raises(problems.NO_FILES):
        Table(f"{tmp_path}/*.parquet")


def test_an_empty_prefix_of_an_object_store_is_told(s3_query: str) -> None:
    with raises(problems.NO_FILES, path="s3://tables/nothing"):
        Table(f"s3://key:secret@tables/nothing?{s3_query}")


@pytest.mark.parametrize(
    ("columns", "problem", "facts"),
    [
        ({"t": "day"}, problems.COLUMN_KIND, {"column": "day", "got": "date32[day]"}),
        ({"m": ["price", "title"]}, problems.COLUMN_KIND, {"column": "price + title", "got": "string"}),
        (
            {"p": Column("price", dtype="int64")},
            problems.LOSSY,
            {"column": "p", "got": "float64", "wanted": "int64"},
        ),
        (
            {"p": Column("price", dtype="floaty")},
            problems.NO_DTYPE,
            {"column": "p", "got": "data type 'floaty' not understood"},
        ),
        ({"t": Column("tokens", length=3)}, problems.LIST_LENGTH, {"column": "tokens", "wanted": 3}),
        (
            {"x": Column("x", length=5)},
            problems.LENGTH_GIVEN,
            {"column": "x", "got": 5, "source": "x", "wanted": 8},
        ),
        (
            {"t": "tokens", "t_lengths": "y"},
            problems.NAME_TWICE,
            {"column": "t_lengths", "source": "t"},
        ),
    ],
)
def test_a_declaration_that_does_not_fit_is_told(
    tmp_path: Path, columns: Any, problem: Problem[Any], facts: dict[str, object]
) -> None:
    table = written().append_column("day", pa.array([0] * ROWS, pa.date32()))
    pq.write_table(table, tmp_path / "a.parquet")
    with raises(problem, **facts):
        Table(tmp_path, columns)


@pytest.mark.parametrize(
    ("stored", "values", "dtype", "row", "value"),
    [
        (pa.int64(), [1, 300, -5000], "int8", 1, "300"),
        (pa.int64(), [1, 2, -5], "uint8", None, ""),  # numpy refuses it by its types
        (pa.int64(), [1, 2**40 + 7], "int32", 1, "1099511627783"),
        (pa.int64(), [127, -128, 0], "int8", None, ""),
        (pa.uint64(), [5, 2**63], "uint32", 1, "9223372036854775808"),
        (pa.float64(), [1.0, 1e6], "float16", 1, "1000000.0"),
        (pa.float64(), [1e39, 1.0], "float32", 0, "1e+39"),
        (pa.float64(), [float("inf"), float("-inf"), float("nan"), 0.1, 1e-300], "float32", None, ""),
        (pa.int64(), [7, 70000], "float16", 1, "70000"),
        (pa.int64(), [2**62 + 1], "float32", None, ""),  # precision alone
        (pa.list_(pa.int64()), [[1], [], [2, 300]], "int8", 2, "300"),
        (pa.list_(pa.int64(), 2), [[1, 2], [-129, 3]], "int8", 1, "-129"),
    ],
)
def test_values_that_a_type_does_not_hold_are_told(
    tmp_path: Path, stored: Any, values: Any, dtype: str, row: int | None, value: str
) -> None:
    pq.write_table(pa.table({"x": pa.array(values, stored)}), tmp_path / "a.parquet")
    columns = {"x": Column("x", dtype=dtype)}
    if row is not None:
        with raises(
            problems.VALUE_LOST, column="x", got=value, row=row, file="a.parquet", block=0, dtype=dtype
        ):
            Table(tmp_path, columns)
    elif np.can_cast(np.dtype(stored.to_pandas_dtype()), dtype, "same_kind"):
        found = Table(tmp_path, columns).__getitems__(range(len(values)))["x"]
        assert found.numpy().tobytes() == np.array(values).astype(dtype).tobytes()
    else:
        with raises(problems.LOSSY, column="x"):
            Table(tmp_path, columns)


def test_a_null_is_told_of_the_column_that_has_it(tmp_path: Path) -> None:
    """Names with dots look like the leaves of a list."""
    table = pa.table({"x": [1.0, 2.0], "x.1": [3.0, None], "l": [[1], [2]], "l.list": pa.array([1, None])})
    pq.write_table(table, tmp_path / "a.parquet")
    found = Table(tmp_path, {"x": "x", "l": "l"})
    assert found.__getitems__([0, 1])["x"].tolist() == [1.0, 2.0]
    for name in ("x.1", "l.list"):
        with raises(problems.NULLS, column=name, count=1):
            Table(tmp_path, {"a": name}, memory_mb=0.00001)


@pytest.mark.parametrize(
    ("pad", "dtype", "fits"),
    [
        (-1, None, False), (300, None, False), (0.5, None, False), (float("nan"), None, False), ("a", None, False),
        (255, None, True), (7.0, None, True), (-1, "int16", True), (0.5, "float32", True), (float("nan"), "float32", True),
        (1e39, "float32", False), (0.1, "float16", True), (float("-inf"), "float32", True),
    ],
)  # fmt: skip
def test_a_pad_that_a_type_does_not_hold_is_refused(
    tmp_path: Path, pad: Any, dtype: str | None, fits: bool
) -> None:
    pq.write_table(pa.table({"x": pa.array([[1, 2], [3]], pa.list_(pa.uint8()))}), tmp_path / "a.parquet")
    columns = {"x": Column("x", dtype=dtype, pad=pad)}
    if fits:
        padded = Table(tmp_path, columns).__getitems__([0, 1])["x"]
        np.testing.assert_array_equal(padded[1, 1].numpy(), np.array(pad, padded.numpy().dtype))
    else:
        with raises(problems.PAD, column="x", got=repr(pad), dtype=dtype or "uint8"):
            Table(tmp_path, columns)


def test_a_type_that_torch_does_not_have_is_refused(tmp_path: Path) -> None:
    parquet(tmp_path)
    with raises(problems.OTHER_DTYPE, column="p"):
        Table(tmp_path, {"p": Column("price", dtype="longdouble")})


def test_a_part_of_a_table_is_refused_as_the_table_is(tmp_path: Path) -> None:
    table = Table(parquet(tmp_path), {"x": "x"}, memory_mb=0.02)
    plan = Plan.of(800, 16, 8, drop_last=True, epochs=1)
    part = Subset(Subset(table, range(900)), range(800))
    with raises(problems.TABLE_SHUFFLE, got="full", table=re.compile("^a table of ")):
        MicroBatchSampler(part, plan, range(2), seed=0, shuffle="full")
    MicroBatchSampler(part, plan, range(2), seed=0, shuffle="none")
    MicroBatchSampler(Subset(Table(tmp_path, {"x": "x"}), range(800)), plan, range(2), seed=0, shuffle="full")


@pytest.mark.parametrize("shuffle", ["full", "hashed"])
def test_an_order_that_would_read_everything_for_each_batch_is_refused(tmp_path: Path, shuffle: str) -> None:
    table = Table(parquet(tmp_path), {"x": "x"}, memory_mb=0.02)
    with raises(problems.TABLE_SHUFFLE, got=shuffle, table=re.compile("^a table of ")):
        table.check_order(shuffle, 4)
    with raises(problems.WINDOW, window=8):
        table.check_order("blocks", 8)
    table.check_order("blocks", 4)
    table.check_order("none", 8)
    Table(parquet(tmp_path), {"x": "x"}).check_order(shuffle, 8)


# --- the way to the step ----------------------------------------------------------------------------------


def loaded(
    table: Any, keys: list[MicroBatch], processes: int, collate: Callable[[Any], Any] | None = None
) -> list[Any]:
    whole = MicroBatches(table, collate or lockstep.Job(None).collate, seed=3, purpose="data")
    loader = Loader(whole, keys, torch.device("cpu"), processes)
    try:
        return list(loader)
    finally:
        loader.close()


class Unthreaded(Table):
    """A table whose batches the training thread fetches."""

    draws_nothing = False


@pytest.mark.scenario
def test_a_thread_or_processes_change_no_bit(tmp_path: Path) -> None:
    """G1: with a collation that draws, too: it stays in the training thread, under the micro-batch's seed."""

    def noisy(batch: Any) -> Any:
        return {**batch, "noise": torch.randn(len(batch["x"])), "more": lockstep.rng().random()}

    source = parquet(tmp_path)
    keys = [MicroBatch(step, m, IDS[20 * step + 10 * m :][:10]) for step in range(8) for m in range(2)]
    plain = loaded(Unthreaded(source, COLUMNS), keys, 0, noisy)
    assert len({batch["noise"].sum().item() for batch in plain}) == len(keys)
    for processes in (0, 1, 2):
        for memory_mb in (None, 0.03):
            ahead = loaded(Table(source, COLUMNS, memory_mb=memory_mb), keys, processes, noisy)
            assert [bits(batch) for batch in ahead] == [bits(batch) for batch in plain]


@pytest.mark.parametrize(("processes", "memory_mb"), [(0, None), (0, 0.03), (2, None)])
def test_an_error_ahead_of_time_comes_at_its_own_micro_batch(
    tmp_path: Path, processes: int, memory_mb: float | None
) -> None:
    table = Table(parquet(tmp_path), COLUMNS, memory_mb=memory_mb)
    keys = [
        MicroBatch(0, 0, np.array([1])),
        MicroBatch(1, 0, np.array([5, 4000])),
        MicroBatch(2, 0, np.array([2])),
    ]
    whole = MicroBatches(table, lockstep.Job(None).collate, seed=3, purpose="data")
    loader = Loader(whole, keys, torch.device("cpu"), processes)
    assert next(loader)["y"].tolist() == [1]
    facts = {"what": "samples 5, 4000", "where": "step 2, micro-batch 0", "location": ""}
    with raises(problems.FETCH_FAILED, **facts, kind="IndexError", got=re.compile("^an id of 5 … 4000")):
        next(loader)
    loader.close()


@pytest.mark.parametrize(("memory_mb", "residence", "threads"), [(0.03, "blocks", 1), (None, "memory", 0)])
def test_a_thread_reads_what_is_not_in_memory_and_ends_on_close(
    tmp_path: Path, memory_mb: float | None, residence: str, threads: int
) -> None:
    before = set(threading.enumerate())
    table = Table(parquet(tmp_path), COLUMNS, memory_mb=memory_mb)
    assert table.residence == residence
    whole = MicroBatches(table, dict, seed=3, purpose="data")
    loader = Loader(whole, [MicroBatch(i, 0, IDS[:5]) for i in range(50)], torch.device("cpu"))
    next(loader)
    own = [thread.name for thread in set(threading.enumerate()) - before]
    assert sum(name.startswith("lockstep-data") for name in own) == threads
    loader.close()
    assert not [
        thread for thread in set(threading.enumerate()) - before if thread.name.startswith("lockstep-data")
    ]
