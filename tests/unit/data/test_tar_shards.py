"""Tar shards by an index: the samples of the files, whoever opens them; an index that is made once; damage that is told."""

from __future__ import annotations

import gzip
import io
import json
import multiprocessing
import shutil
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from pyarrow.fs import FileSystem

from lockstep.data import TarShards, problems, tar_shards
from lockstep.data.fingerprint import fingerprint
from lockstep.errors import DataError, Problem
from tests.raised import raises
from tests.unit.data.conftest import Faults, past


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def write(path: Path, numbers: range, form: int = tarfile.PAX_FORMAT) -> Path:
    """A shard with a sample for each number: text of some length, a class, and a name that takes a header of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        add(tar, "._hidden", b"what macOS puts there")
        folder = tarfile.TarInfo("long")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for i in numbers:
            key = f"{'long' * 40}/{i:05}" if i % 3 == 0 else f"{i:05}"
            add(tar, f"{key}.txt", b"x" * (i * 97 % 1500))
            add(tar, f"{key}.Seg.cls", str(i % 4).encode())
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards of 7, 0 and 5 samples, one of them in a folder below."""
    write(tmp_path / "shards" / "a.tar", range(7))
    write(tmp_path / "shards" / "b" / "b.tar", range(0))
    write(tmp_path / "shards" / "c.tar", range(7, 12), tarfile.GNU_FORMAT)
    return tmp_path / "shards"


def test_samples_are_those_of_the_files_in_order(folder: Path) -> None:
    data = TarShards(folder, {"seg.cls": int})
    assert len(data) == 12
    assert data.block_sizes == [7, 5]
    for i in range(12):
        key = f"{'long' * 40}/{i:05}" if i % 3 == 0 else f"{i:05}"
        assert data[i] == {"__key__": key, "txt": b"x" * (i * 97 % 1500), "seg.cls": i % 4}
    with pytest.raises(IndexError):
        data[12]
    assert TarShards([folder / "c.tar", folder / "a.tar"])[0]["__key__"] == data[0]["__key__"]


def test_the_index_is_made_once_and_anew_for_another_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = TarShards(folder)
    with monkeypatch.context() as patched:
        patched.setattr(tar_shards, "_index", lambda file: pytest.fail(f"{file} is indexed again"))
        assert TarShards(folder)[11] == first[11]
    write(folder / "a.tar", range(20, 29))
    data = TarShards(folder)
    assert [data[i]["__key__"] for i in (0, 13)] == ["00020", "00011"]


def opened(folder: str, start: Any, found: Any) -> None:
    start.wait()
    data = TarShards(folder)
    found.put(([data[i] for i in range(len(data))], data.fingerprint()))


def test_processes_that_begin_at_once_see_the_same(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    start, found = context.Event(), context.Queue()
    processes = [context.Process(target=opened, args=(str(folder), start, found)) for _ in range(4)]
    for process in processes:
        process.start()
    start.set()
    answers = [found.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    data = TarShards(folder)
    assert answers == [([data[i] for i in range(12)], data.fingerprint())] * 4


def test_the_fingerprint_is_that_of_names_sizes_and_contents(folder: Path, tmp_path: Path) -> None:
    before = fingerprint(TarShards(folder), 12, 0)
    assert list(before) == ["shard.a.tar", "shard.b/b.tar", "shard.c.tar"]
    moved = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    assert fingerprint(TarShards(moved), 12, 0) == before
    content = bytearray((moved / "c.tar").read_bytes())
    content[content.index(b"xxxx")] = ord("y")
    (moved / "c.tar").write_bytes(content)
    after = fingerprint(TarShards(moved), 12, 0)
    assert [name for name in before if before[name] != after[name]] == ["shard.c.tar"]


def test_a_large_shard_is_covered_whole_where_that_is_asked_for(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "large.tar", "w") as tar:
        add(tar, "0.bin", bytes(2 << 20))
    first = [
        TarShards(tmp_path / "large.tar", content=content).fingerprint() for content in ("sampled", "full")
    ]  # type: ignore[arg-type]
    content = bytearray((tmp_path / "large.tar").read_bytes())
    content[100_000] = 1  # between the spans that are looked at
    (tmp_path / "large.tar").write_bytes(content)
    again = [
        TarShards(tmp_path / "large.tar", content=content).fingerprint() for content in ("sampled", "full")
    ]  # type: ignore[arg-type]
    assert [a == b for a, b in zip(first, again, strict=True)] == [True, False]


@pytest.mark.parametrize("left", [0.2, 0.5, 0.9, 1.0])
def test_a_shard_that_is_cut_short_is_told_by_its_name(folder: Path, left: float) -> None:
    """In a header, in the data of a member, and just before the end mark."""
    content = (folder / "a.tar").read_bytes().rstrip(b"\0")
    (folder / "a.tar").write_bytes(
        content[: int(len(content) * left) // 512 * 512 + (0 if left == 0.5 else 100)]
    )
    with raises(problems.NO_TAR, file=folder / "a.tar") as raised:
        TarShards(folder)
    assert "\n" not in str(raised.value)


def rewritten(path: Path, numbers: range, **more: Any) -> None:
    """Another file takes its place."""
    write(path.with_suffix(".new"), numbers, **more).rename(path)


@pytest.mark.parametrize(
    ("change", "how"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:4000]), "it has 4000 bytes"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"x", b"y")), "it was written at"),
        (lambda path: rewritten(path, range(7, 12), form=tarfile.GNU_FORMAT), "it was written at"),
        (lambda path: rewritten(path, range(7, 32)), "it has \\d+ bytes"),
    ],
)
def test_a_shard_that_changes_in_a_run_is_told(folder: Path, change: Any, how: str) -> None:
    """Whether it becomes shorter, longer or neither, in its place or by another file."""
    data = TarShards(folder)
    before = [data[i] for i in range(12)]
    time.sleep(0.01)  # a tick of the file system's clock
    change(folder / "c.tar")
    assert [data[i] for i in range(7)] == before[:7]
    with pytest.raises(
        DataError, match=rf"^data: '.*/c\.tar' has changed since it was opened \({how}"
    ) as told:
        data[11]
    assert "\n" not in str(told.value)


def test_a_shard_whose_names_are_not_utf_8_is_read(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "l.tar", "w", encoding="latin-1", format=tarfile.GNU_FORMAT) as tar:
        add(tar, "café.cls", b"1")
    for _ in range(2):  # the index is new, and then it is kept
        sample = TarShards(tmp_path / "l.tar", {"cls": int})[0]
        assert sample["__key__"].encode(errors="surrogateescape").decode("latin-1") == "café"
        assert sample["cls"] == 1
    with pytest.raises(DataError, match=r"^data: caf\\udce9\.cls in "):
        TarShards(tmp_path / "l.tar", {"cls": lambda content: content["a"]})[0]


def twice(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        add(tar, "a.txt", b"1")
        add(tar, "a.txt", b"2")


def packed(path: Path) -> None:
    path.write_bytes(gzip.compress(write(path.with_name("plain"), range(3)).read_bytes()))


@pytest.mark.parametrize(
    ("make", "problem", "facts"),
    [
        (twice, problems.MEMBER_TWICE, {"name": "a.txt"}),
        (packed, problems.NO_TAR, {}),
        (lambda path: path.write_bytes(b""), problems.NO_TAR, {}),
        (lambda path: None, problems.NO_FILE_OR_FOLDER, {}),
    ],
)
def test_what_is_no_shard_is_refused(
    tmp_path: Path, make: Any, problem: Problem[DataError], facts: dict[str, str]
) -> None:
    make(tmp_path / "s.tar")
    where = "path" if problem is problems.NO_FILE_OR_FOLDER else "file"
    with raises(problem, **{where: tmp_path / "s.tar"}, **facts):
        TarShards(tmp_path / "s.tar")


def test_what_cannot_be_decoded_is_told_with_sample_and_shard(folder: Path) -> None:
    with raises(
        problems.MEMBER_UNDECODABLE,
        sample="00004", extension="txt", file=folder / "a.tar", kind="JSONDecodeError",
    ):  # fmt: skip
        TarShards(folder, {"txt": json.loads})[4]


@pytest.mark.exact  # it starts a server
def test_shards_in_an_object_store_are_read_by_ranges(folder: Path, s3_query: str, faults: Faults) -> None:
    """The same samples, and a read that fails once is tried again."""
    files, root = FileSystem.from_uri(f"s3://key:secret@tables/shards?{past(s3_query, faults)}")
    for name in ("a.tar", "c.tar"):
        with files.open_output_stream(f"{root}/{name}") as out:
            out.write((folder / name).read_bytes())
    data, local = TarShards(f"s3://key:secret@tables/shards?{s3_query}"), TarShards(folder)
    faults.fail("c.tar", 1)
    assert [data[i] for i in range(12)] == [local[i] for i in range(12)]
    assert faults.failed == 1
    time.sleep(3.1)  # a store's clock ticks in seconds
    with files.open_output_stream(f"{root}/c.tar") as out:
        out.write((folder / "c.tar").read_bytes())
    with pytest.raises(
        DataError, match=r"^data: 's3://tables/shards/c\.tar' has changed since it was opened"
    ):
        data[11]
    data = TarShards(f"s3://key:secret@tables/shards?{s3_query}")
    shards = local.fingerprint()
    assert data.fingerprint() == {name: shards[name] for name in ("shard.a.tar", "shard.c.tar")}
