"""What the data are: the same for the same data wherever they lie, and another as soon as a byte is."""

from __future__ import annotations

import os
import random
import re
import threading
import time
import types
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import lockstep
from jobs.tabular.sample import write_sample
from lockstep.checks.dry_run import as_text, dry_run
from lockstep.data import Column, Mixture, Table, problems
from lockstep.data import fingerprint as fingerprint_module
from lockstep.data.fingerprint import check_repeats, fingerprint, leaves
from lockstep.data.leakage import find_leakage, leaked_rows
from lockstep.errors import DataError
from lockstep.randomness import fetch_key, seed_all
from lockstep.spec.loading import load_spec
from tests.raised import raises


def write(folder: Path, values: Any = range(100), file: str = "a.parquet", **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table({"a": list(values), "b": [float(v) for v in values]}), folder / file, **more)
    return folder


def of(folder: Path, columns: Any = None, **more: Any) -> dict[str, Any]:
    table = Table(folder, columns, **more)
    return fingerprint(table, len(table), seed=1)


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return sorted(name for name in {**before, **after} if before.get(name) != after.get(name))


def test_the_same_data_elsewhere_have_the_same_fingerprint(tmp_path: Path) -> None:
    assert of(write(tmp_path / "one")) == of(write(tmp_path / "two"))


def test_what_changed_is_told_by_file(tmp_path: Path) -> None:
    write(tmp_path / "t", file="b.parquet")
    before = of(write(tmp_path / "t"))
    assert before["file.a.parquet"].startswith("100 rows in 1 blocks, ")
    write(tmp_path / "t", [*range(99), 7])
    assert changed(before, of(tmp_path / "t")) == ["file.a.parquet"]
    write(tmp_path / "t")
    assert of(tmp_path / "t") == before
    write(tmp_path / "t", file="c.parquet")
    assert changed(before, of(tmp_path / "t")) == ["file.c.parquet"]
    (tmp_path / "t" / "c.parquet").unlink()
    assert changed(before, of(tmp_path / "t", {"a": "a"})) == ["columns"]
    assert changed(before, of(tmp_path / "t", {"a": "a", "b": Column("b", dtype="float32")})) == ["columns"]


def test_files_of_several_folders_have_their_order_in_the_fingerprint(tmp_path: Path) -> None:
    """Where the folders move, others may come first: each id would be another row, and a resume would train on other samples."""

    def moved(*folders: str) -> dict[str, Any]:
        parts = [write(tmp_path / one, range(i, 100), f"{'xy'[i]}.parquet") for i, one in enumerate(folders)]
        table = Table(parts)
        return {"first": int(table[0]["a"]), **fingerprint(table, len(table), seed=1)}

    before, alike, other = moved("a", "b"), moved("c", "d"), moved("f", "e")
    assert "file.x.parquet" in before
    assert (alike, other["first"]) == (before, 1)
    assert changed(before, other) == [
        "file.0.y.parquet",
        "file.1.x.parquet",
        "file.x.parquet",
        "file.y.parquet",
        "first",
    ]


def test_row_groups_count_since_an_order_depends_on_them(tmp_path: Path) -> None:
    assert changed(of(write(tmp_path / "one")), of(write(tmp_path / "two", row_group_size=10))) == [
        "file.a.parquet"
    ]


def test_one_changed_byte_is_seen_though_size_and_time_are_the_same(tmp_path: Path) -> None:
    """By a full hash anywhere in a large file; by samples at its ends."""
    large = np.random.default_rng(1).integers(0, 1 << 60, 400_000).tolist()
    folder = write(tmp_path / "t", large)
    file = folder / "a.parquet"
    before = {content: of(folder, content=content) for content in ("full", "sampled")}
    stat = file.stat()
    spans = fingerprint_module._spans(stat.st_size, "sampled")
    assert sum(length for _, length in spans) < stat.st_size / 3
    gap = spans[3][0] + spans[3][1] + 1000
    for place, seen_by in ((gap, ["full"]), (4, ["full", "sampled"])):
        content = bytearray(file.read_bytes())
        content[place] ^= 1
        with file.open("r+b") as out:
            out.write(content)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        now = {name: fingerprint(Unread(folder, content=name), 400_000, 1) for name in ("full", "sampled")}
        assert [name for name in now if now[name] != before[name]] == seen_by


class Unread(Table):
    """A table that is not decoded, for its pages are damaged."""

    def _row_store(self) -> Any:
        return None


def test_a_file_is_hashed_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "t")
    before = of(folder)
    assert len(list(cache.rglob("fingerprints/*"))) == 1
    monkeypatch.setattr("lockstep.data.table_files.TableFiles.pieces", lambda *_: pytest.fail("read again"))
    assert of(folder) == before


def test_a_cache_that_cannot_be_written_costs_time_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    folder = write(tmp_path / "t")
    before = of(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert of(folder) == before


def test_many_files_are_one_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.data.tables.FILES", 2)
    for name in "abc":
        write(tmp_path / "t", range(5), file=f"{name}.parquet")
    before = of(tmp_path / "t")
    assert before.keys() == {"columns", "files"}
    write(tmp_path / "t", range(1, 6), file="c.parquet")
    assert changed(before, of(tmp_path / "t")) == ["files"]


def test_other_datasets_are_known_by_samples() -> None:
    x = torch.arange(1000.0)
    before = fingerprint(TensorDataset(x), 1000, 1)
    assert fingerprint(TensorDataset(x.clone()), 1000, 1) == before
    assert fingerprint(TensorDataset(x + 1), 1000, 1) != before
    assert fingerprint(TensorDataset(x.double()), 1000, 1) != before
    assert fingerprint([], 0, 1) == fingerprint([], 0, 1)


def test_a_dataset_may_say_what_it_is() -> None:
    class Own(list[int]):
        def fingerprint(self) -> Any:
            return {"version": 3} if self else "three"

    assert fingerprint(Own([1]), 1, 1) == {"version": 3}
    with raises(problems.FINGERPRINT_KIND, dataset="Own", got="str"):
        fingerprint(Own(), 0, 1)


class Said(list[int]):
    """A dataset that says of itself what it is given."""

    said: Any = None

    def fingerprint(self) -> Any:
        return {"what": self.said}


def said(value: Any) -> Any:
    data = Said([1])
    data.said = value
    return fingerprint(data, 1, 1)["what"]


LABELS = np.arange(4096)
SPOILT = np.where((LABELS >= 100) & (LABELS < 4000), -7, LABELS)


@pytest.mark.parametrize(
    "made", [np.array, torch.tensor, pd.Series, lambda x: pd.DataFrame({"x": x}), lambda x: [{"labels": x}]]
)
def test_what_a_dataset_says_of_itself_counts_to_its_last_value(made: Any) -> None:
    assert said(made(LABELS)) == said(made(LABELS.copy()))
    assert said(made(LABELS)) != said(made(SPOILT))


@pytest.mark.parametrize(
    ("value", "tree"),
    [
        (3, 3),
        ("3", "3"),
        (True, True),
        ([1, {"a": (2.5, "b")}], [1, {"a": {"$tuple": [2.5, "b"]}}]),
        (np.float32(0.1), {"$numpy.float32": "0.1"}),
        (date(2026, 1, 2), {"$datetime.date": "2026-01-02"}),
    ],
)
def test_text_and_numbers_are_told_as_they_are(value: Any, tree: Any) -> None:
    """With their kinds: 3 is another version than "3"."""
    assert said(value) == tree
    assert type(said(value)) is type(tree)


def test_what_cannot_be_looked_into_is_refused_in_one_line() -> None:
    assert said(object()) == said(object())  # which has nothing that could differ
    with raises(problems.FINGERPRINT_CONTENT, dataset="Said", name="what", kind="_thread.lock"):
        said(threading.Lock())


class Failing(list[int]):
    """Sample 3 cannot be fetched the first `failures` times."""

    failures = 0

    def __getitem__(self, index: Any) -> Any:
        if index == 3 and self.failures:
            self.failures -= 1
            raise ConnectionError("reset by peer")
        return super().__getitem__(index)


def test_a_sample_that_fails_once_is_fetched_again_and_one_that_stays_away_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lockstep.data.fingerprint.PAUSES_S", (0.0, 0.0, 0.0))
    data = Failing(range(16))
    whole = fingerprint(data, 16, 1)
    data.failures = 3
    assert fingerprint(data, 16, 1) == whole
    data.failures = 5
    with pytest.raises(DataError) as raised:  # the problem's own kind is JobError
        fingerprint(data, 16, 1)
    told = {"what": "sample 3", "tries": "4", "samples": "16", "name": "Failing"}
    assert raised.value.code == problems.FINGERPRINT_SAMPLE.code
    assert raised.value.facts.items() >= {**told, "got": "ConnectionError: reset by peer"}.items()
    assert data.failures == 1
    left_out = fingerprint(data, 16, 1, lambda index: index == 3)
    assert left_out != whole
    assert data.failures == 1


# --- a micro-batch, twice ---------------------------------------------------------------------------------


def twice(fetch: Any) -> None:
    fetched = []
    for _ in range(2):
        seed_all(fetch_key(3, "data", 0, 0))
        fetched.append(fetch())
    check_repeats(*fetched)


def test_what_draws_under_its_seed_repeats() -> None:
    twice(
        lambda: {
            "x": torch.randn(3),
            "y": [np.random.rand(), lockstep.rng().random(), float("nan"), b"a", None],
        }
    )


def test_what_does_not_repeat_is_refused_with_its_place() -> None:
    own, count = np.random.default_rng(1), iter(range(9))
    with raises(problems.FETCHES_DIFFER, location=" in batch['x'][1]"):
        twice(lambda: {"x": (torch.zeros(2), own.random())})
    with raises(problems.FETCHES_DIFFER, location=""):
        twice(lambda: torch.full((2,), float(next(count))))
    with raises(problems.FETCHES_DIFFER, location=" in batch[0]"):
        twice(lambda: [0] * next(count) and [torch.zeros(next(count))])


def test_leaves_tell_zero_from_minus_zero_and_shapes_apart() -> None:
    values = [
        torch.zeros(2),
        -torch.zeros(2),
        torch.zeros(2, 1),
        torch.zeros(2).double(),
        torch.zeros(()),
        0.0,
        -0.0,
        0,
    ]
    assert len({tuple(leaves(value)) for value in values}) == len(values)
    assert list(leaves(torch.arange(6).view(2, 3).t())) == list(
        leaves(torch.arange(6).view(2, 3).t().contiguous())
    )


# --- leakage ----------------------------------------------------------------------------------------------


def rows(folder: Path, numbers: Any, *, shift: float = 0.0) -> Table:
    folder.mkdir()
    x = np.random.default_rng(1).standard_normal((3000, 5))[list(numbers)].astype(np.float32) + np.float32(
        shift
    )
    table = pa.table(
        {
            "x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 5),
            "l": [list(range(i % 4)) for i in numbers],
            "t": [f"t{i}" for i in numbers],
            "label": [i % 2 == 0 for i in numbers],
        }
    )
    pq.write_table(table, folder / "a.parquet", row_group_size=500)
    return Table(folder)


def test_rows_in_both_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.data.leakage.ROWS", 700)
    train = rows(tmp_path / "train", range(2000))
    clean = rows(tmp_path / "clean", range(2000, 3000))
    leaky = rows(tmp_path / "leaky", [*range(2500, 2600), 1234, *range(2600, 2700), 77])
    assert leaked_rows(train, clean)[:3] == (0, None, None)
    assert leaked_rows(train, leaky)[:3] == (2, 100, 1234)
    assert leaked_rows(train, train)[:3] == (2000, 0, 0)


def test_rows_that_differ_in_one_bit_are_no_duplicates(tmp_path: Path) -> None:
    train, other = rows(tmp_path / "train", range(500)), rows(tmp_path / "other", range(500), shift=1e-3)
    assert leaked_rows(train, other).rows == 0


class Labelled(Table):
    """Gives its rows in a form of its own."""

    def __getitems__(self, ids: Any) -> Any:
        found = super().__getitems__(ids)
        return {"inputs": found["x"], "labels": found["label"]}


def test_rows_of_a_table_that_makes_something_else_of_them_are_compared(tmp_path: Path) -> None:
    for name, of in (("train", range(500)), ("eval", [*range(700, 710), 3])):
        rows(tmp_path / name, of)
    found = find_leakage(Labelled(tmp_path / "train"), Labelled(tmp_path / "eval"), 1)
    assert found is not None
    assert found[:3] == (1, 10, 3)


class Decoded(Dataset[Any]):
    """Like a table by its attributes, and none."""

    decoders = ("wav", "flac")

    def __len__(self) -> int:
        return 20

    def __getitems__(self, ids: Any) -> Any:
        return [torch.full((3,), float(i)) for i in ids]


def test_a_dataset_with_decoders_of_its_own_is_no_table() -> None:
    found = find_leakage(Decoded(), Decoded(), 1)
    assert found is not None
    assert found.rows == 20


def test_a_dry_run_tells_of_rows_in_both(tmp_path: Path) -> None:
    write_sample(tmp_path / "train", 300, 4)
    write_sample(tmp_path / "eval", 40, 4, start=9)
    document = {
        "job": {
            "use": "jobs.tabular.job:Tabular",
            "params": {"train": f"{tmp_path}/train", "evaluation": f"{tmp_path}/eval", "inputs": 4},
        }
    }
    report = dry_run(load_spec(document))
    assert report["plan"]["leakage"] == {"rows": 0}
    assert "leakage" not in as_text(report)
    both = [pq.read_table(tmp_path / "eval"), pq.read_table(tmp_path / "train").slice(123, 2)]
    pq.write_table(pa.concat_tables(both), tmp_path / "eval" / "part-00009.parquet")
    report = dry_run(load_spec(document))
    assert report["plan"]["leakage"] == {"rows": 2, "eval_row": 40, "train_row": 123}
    assert (
        "leakage           2 of 42 evaluation samples are training samples too: the first is evaluation sample 40, training sample 123"
        in as_text(report)
    )


def test_the_plan_of_a_job_without_evaluation_says_nothing_of_leakage() -> None:
    report = dry_run(load_spec({"job": {"use": "tests.distributed.small_jobs:Plain"}}))
    assert report["plan"]["leakage"] is None
    assert "leakage" not in as_text(report)


class Pairs(torch.utils.data.Dataset[Any]):
    """Samples of a mapping and an object, some of which are varied at random; each fetch takes `seconds`."""

    def __init__(self, numbers: Any, *, varied: bool = False, seconds: float = 0.0) -> None:
        self.numbers, self.varied, self.seconds = list(numbers), varied, seconds

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        noise = torch.rand(3) + random.random() if self.varied else torch.zeros(3)
        return {"x": noise + self.numbers[index], "name": types.SimpleNamespace(n=self.numbers[index])}


def test_samples_in_both_are_found_in_any_dataset() -> None:
    clean, leaky = Pairs(range(100, 130)), Pairs([*range(100, 115), 42, *range(115, 120), 7])
    for train in (Pairs(range(100)), TensorSamples(range(100))):
        wrap = type(train)
        assert find_leakage(train, wrap(clean.numbers), 1, 60) == (0, None, None, None, None)
        assert find_leakage(train, wrap(leaky.numbers), 1, 60) == (2, 15, 42, None, None)


class TensorSamples(TensorDataset):
    def __init__(self, numbers: Any) -> None:
        super().__init__(torch.tensor(list(numbers)), torch.zeros(len(numbers)))


def test_samples_that_are_varied_at_random_are_found_as_well() -> None:
    """Both are fetched under one seed, so one sample is varied alike in both."""
    found = find_leakage(Pairs(range(50), varied=True), Pairs([60, 3], varied=True), 1, 60)
    assert found is not None
    assert found[:3] == (1, 1, 3)


def test_a_large_dataset_is_looked_through_for_a_while_and_the_line_says_so() -> None:
    """A split that leaks everywhere is found at once, whatever the size."""
    whole = Pairs(range(10**6), seconds=0.001)
    began = time.perf_counter()
    found = find_leakage(whole, Pairs(range(10**6), seconds=0.001), 1, within_s=0.5)
    assert time.perf_counter() - began < 5
    assert found is not None
    assert found.eval_looked_at is not None and found.train_looked_at is not None and not found.whole
    assert 0 < found.rows <= found.eval_looked_at  # one order is drawn for both
    assert re.fullmatch(
        r"at least \d+ of \d+ looked at, of 1000000 evaluation samples are training samples too: .*",
        found.described(10**6),
    )


def test_all_samples_of_a_mixture_are_looked_at_however_short_its_epoch() -> None:
    """As many as its ids name, which may be more than an epoch has, or fewer."""
    sources: Any = {"web": Pairs(range(100)), "code": Pairs(range(100, 200))}
    for samples in (20, 100, 500):
        mixture = Mixture(sources, {"web": 1, "code": 1}, samples=samples)
        assert find_leakage(mixture, Pairs(range(190, 210)), 1, 60) == (10, 0, 190, None, None)
        assert find_leakage(mixture, Pairs(range(200, 210)), 1, 60) == (0, None, None, None, None)


def test_samples_that_cannot_be_looked_into_are_not_compared() -> None:
    locked = [threading.Lock()] * 3
    assert find_leakage(locked, locked, 1) is None
