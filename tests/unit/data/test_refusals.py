"""What data are refused for is told as the problem that it is."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import TensorDataset

from lockstep.data import problems
from lockstep.data.arrow_cache import materialized_by_content
from lockstep.data.file_locations import DataLocation, retried
from lockstep.data.images import opened_image
from lockstep.data.indexed_shards import LitShards
from lockstep.data.node_folder import NodeFolder
from lockstep.data.table_files import TableFiles
from lockstep.data.tar_shards import TarShards
from lockstep.training.job_data import lengths_of
from tests.distributed.small_jobs import Plain
from tests.raised import Refusal, check_refusal, each_refusal, raises

ROWS = pa.table({"x": [1.0]})
LONG = "x" * 300
"""A name that no file system takes."""


def two_kinds(folder: Path) -> None:
    pq.write_table(ROWS, folder / "a.parquet")
    pyarrow.feather.write_feather(ROWS, str(folder / "b.arrow"))
    TableFiles(str(folder))


def sparse(folder: Path) -> None:
    """A shard with a member that GNU tar has written without its holes."""
    with tarfile.open(folder / "shard.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        member = tarfile.TarInfo("0.txt")
        member.type = tarfile.GNUTYPE_SPARSE
        tar.addfile(member)
    TarShards(str(folder))


class Lengthy(Plain):
    """A job that gives other lengths than there are samples."""

    def lengths(self, dataset: Any) -> Any:
        return [3, -1]


def lengths(_: Path) -> None:
    lengths_of(Lengthy(Plain.Params()), TensorDataset(torch.zeros(2)), 2)


def streamed(url: str | None, folder: Path) -> Any:
    return LitShards(SimpleNamespace(input_dir=SimpleNamespace(path=str(folder), url=url)))


CALLS: list[Refusal] = [
    (lambda folder: DataLocation(str(folder / LONG), (".x",)).files(), problems.CANNOT_LIST, {}),
    (lambda folder: DataLocation(str(folder / LONG), (".x",)).folders(), problems.CANNOT_LIST, {}),
    (lambda folder: DataLocation(str(folder), (".x",)).named([LONG]), problems.CANNOT_LOOK, {}),
    (lambda _: DataLocation("nosuch://bucket/rows", (".x",)).files(), problems.CANNOT_OPEN, {"path": "nosuch://bucket/rows"}),
    (lambda folder: retried((folder / "gone").read_bytes, "a shard"), problems.FILE_GONE, {"what": "a shard"}),
    (lambda folder: streamed("s3://bucket/rows", folder), problems.STREAMED, {"folder": "s3://bucket/rows"}),
    (lambda folder: streamed(None, folder), problems.STREAMED, {}),
    (lambda _: NodeFolder("rows", 1).file("x", lambda aside: Path("/dev/full").write_bytes(b"x") and None), problems.MEMORY_UNWRITABLE, {"got": "No space left on device"}),
    (two_kinds, problems.SEVERAL_KINDS, {"got": ".arrow, .parquet"}),
    (sparse, problems.SPARSE_MEMBER, {"name": "0.txt"}),
    (lengths, problems.LENGTHS_FORM, {"shape": (2,), "least": -1, "samples": 2}),
]  # fmt: skip


@each_refusal(CALLS)
def test_a_refusal_is_told_as_its_problem(refusal: Refusal, tmp_path: Path) -> None:
    check_refusal(refusal, tmp_path)


def test_rows_that_no_folder_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "full"))
    with raises(problems.ROWS_UNWRITABLE, got="Not a directory"):
        materialized_by_content([ROWS])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert materialized_by_content([ROWS]).exists()


def test_images_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with raises(problems.PILLOW_MISSING):
        opened_image(b"", "a.png")
