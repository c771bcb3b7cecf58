"""The same storage on a disk and in an object store: whole files, one-line errors, no credentials told."""

from __future__ import annotations

import hashlib
import pickle
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.checkpoint import problems
from lockstep.checkpoint.errors import (
    BadCheckpointError,
    LostFileError,
    OtherFormatError,
    StaleAttemptError,
    TakenError,
)
from lockstep.checkpoint.storage import local, object_store
from lockstep.checkpoint.storage.interface import PIECE, Item, Storage
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.errors import StorageError
from tests.raised import raises
from tests.silent import silent_store
from tests.unit.checkpoint.states import everywhere

FOLDER, OWNER = "run/attempt-0001", "token"
STAGING = f"{FOLDER}/{OWNER}"


@pytest.fixture
def storage(uri: str) -> Storage:
    storage = open_storage(uri)
    storage.begin_staging(FOLDER, OWNER)
    return storage


@everywhere
def test_what_is_written_is_read_and_hashed(storage: Storage) -> None:
    pieces = [b"a" * (PIECE + 3), memoryview(bytearray(b"bc")), b""]
    content = b"".join(bytes(piece) for piece in pieces)
    written = storage.write("run/x/file", pieces, staging=STAGING)
    assert written == (len(content), hashlib.sha256(content).hexdigest())
    assert storage.read("run/x/file") == content
    with storage.open("run/x/file") as file:
        buffer = bytearray(len(content))
        got = 0
        while portion := file.readinto(memoryview(buffer)[got:]):
            got += portion
    assert bytes(buffer) == content


@everywhere
def test_a_range_is_read_by_itself(storage: Storage) -> None:
    content = bytes(range(256)) * 20
    storage.write("run/x/file", [content], staging=STAGING)
    for start, size in ((0, 7), (1000, 3001), (5119, 1), (5120, 0)):
        buffer = bytearray(size)
        storage.fill("run/x/file", start, memoryview(buffer))
        assert bytes(buffer) == content[start : start + size]
    with raises(problems.FILE_SHORT, path=re.compile("run/x/file$"), missing=1):
        storage.fill("run/x/file", 5118, memoryview(bytearray(3)))
    with raises(problems.LOST, verb="read", path=re.compile("run/x/none$")):
        storage.fill("run/x/none", 0, memoryview(bytearray(3)))


@everywhere
def test_a_file_that_is_too_large_for_one_read_is_refused(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (local, object_store):
        monkeypatch.setattr(kind, "LARGEST_READ", 3)
    storage.write("run/x/file", [b"123"], staging=STAGING)
    assert storage.read("run/x/file") == b"123"
    storage.write("run/x/file", [b"1234"], staging=STAGING)
    with raises(problems.TOO_LARGE, path=re.compile("run/x/file$"), wanted=3):
        storage.read("run/x/file")


@everywhere
def test_a_file_takes_the_place_of_another(storage: Storage) -> None:
    storage.write("run/file", [b"old, longer"], staging=STAGING)
    storage.write("run/file", [b"new"], staging=STAGING)
    assert storage.read("run/file") == b"new"


@everywhere
def test_a_folder_lists_what_is_in_it(storage: Storage) -> None:
    assert storage.list("run/none") == []
    storage.write("run/x/b", [b"12"], staging=STAGING)
    storage.write("run/x/a", [b"1"], staging=STAGING)
    storage.write("run/x/sub/c", [b"1"], staging=STAGING)
    assert storage.list("run/x") == [Item("a", False, 1), Item("b", False, 2), Item("sub", True, 0)]
    assert storage.exists("run/x/a") and storage.exists("run/x") and not storage.exists("run/y")


@everywhere
def test_deleting_leaves_nothing(storage: Storage) -> None:
    storage.write("run/x/a", [b"1"], staging=STAGING)
    storage.write("run/x/b", [b"1"], staging=STAGING)
    storage.delete_folder("run/x")  # not empty: stays
    storage.delete("run/x/a")
    storage.delete("run/x/b", staging=STAGING)
    assert storage.exists("run/x")
    storage.delete_folder("run/x")
    storage.delete_folder("run/x")
    assert not storage.exists("run/x")
    assert storage.list(STAGING) == []


@everywhere
def test_a_new_file_is_created_once(storage: Storage) -> None:
    storage.create("run/owner", b"me")
    with raises(problems.TAKEN, path=re.compile("run/owner$")):
        storage.create("run/owner", b"you")
    assert storage.read("run/owner") == b"me"
    assert [item.name for item in storage.list("run") if not item.is_folder] == ["owner"]


@everywhere
def test_a_missing_file_is_named(storage: Storage) -> None:
    for missing in (
        lambda: storage.read("run/none"),
        lambda: storage.delete("run/none"),
        lambda: storage.delete("run/none", staging=STAGING),
        lambda: storage.open("run/none").__enter__(),
    ):
        with raises(problems.LOST, path=re.compile("run/none$")) as raised:
            missing()
        assert "\n" not in str(raised.value) and "secret" not in str(raised.value)


@everywhere
def test_a_write_that_fails_leaves_what_was_there(storage: Storage) -> None:
    storage.write("run/file", [b"old"], staging=STAGING)

    def broken() -> Iterator[bytes]:
        yield b"new"
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError):
        storage.write("run/other", broken(), staging=STAGING)
    assert [item.name for item in storage.list("run") if not item.is_folder] == ["file"]
    assert storage.list(STAGING) == []


def test_a_staging_folder_that_has_ended_publishes_and_deletes_nothing(tmp_path: Path) -> None:
    """Even in the middle of a write: the rename at its end finds no way."""
    storage = open_storage(str(tmp_path))
    storage.begin_staging(FOLDER, OWNER)
    storage.write("run/file", [b"old"], staging=STAGING)

    def ended_meanwhile() -> Iterator[bytes]:
        yield b"new"
        storage.end_staging(FOLDER)

    with pytest.raises(LostFileError):
        storage.write("run/file", ended_meanwhile(), staging=STAGING)
    with pytest.raises(LostFileError):
        storage.delete("run/file", staging=STAGING)
    assert storage.read("run/file") == b"old"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["file"]


def test_where_there_are_no_links_a_new_file_is_created_once_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refused)
    storage = open_storage(str(tmp_path))
    storage.create("owner", b"me")
    with pytest.raises(TakenError):
        storage.create("owner", b"you")
    assert storage.read("owner") == b"me" and len(storage.list("")) == 1


def test_a_disk_is_told_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "a b").write_text("a file")
    for uri in (str(tmp_path / "a b"), f"file://{tmp_path}/a%20b"):
        with raises(problems.LOST, verb="read", path=tmp_path / "a b" / "x", got="Not a directory"):
            open_storage(uri).read("x")


def test_a_storage_of_another_kind_is_refused() -> None:
    with raises(problems.SCHEME, got="ftp"):
        open_storage("ftp://user:secret@host/x")


def test_an_object_store_that_is_not_there_is_told_without_credentials(s3: str) -> None:
    storage = open_storage(
        f"s3://key:secret@no-such-bucket/x?{s3.replace('creation=true', 'creation=false')}"
    )
    with raises(problems.FAILED, verb="write", path="s3://no-such-bucket/x/file") as raised:
        storage.write("file", [b"1"], staging="")
    assert "secret" not in str(raised.value) and "\n" not in str(raised.value)


def test_s3_without_boto3_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "find_spec", lambda name: None)
    with raises(problems.BOTO3_MISSING):
        open_storage("s3://bucket/x")


def test_a_key_that_leads_elsewhere_is_refused(s3: str) -> None:
    with raises(problems.KEY_LEADS_OUT):
        open_storage(f"s3://bucket/x?{s3}").read("../file")


def test_a_wrong_uri_is_told_without_credentials() -> None:
    with raises(problems.CANNOT_OPEN, storage="s3://bucket/x") as raised:
        open_storage("s3://key:secret@bucket/x?no_such_option=1")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "kind", [LostFileError, TakenError, StaleAttemptError, BadCheckpointError, OtherFormatError]
)
def test_errors_survive_the_way_between_processes(kind: type[StorageError]) -> None:
    copy = pickle.loads(pickle.dumps(kind("one line")))
    assert type(copy) is kind and str(copy) == "one line" and isinstance(copy, StorageError)


def test_a_store_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the limits as they are it takes a minute; without any, pyarrow waits for as long as the connection lives."""
    monkeypatch.setattr(object_store, "_SILENT_S", 1)
    monkeypatch.setattr(object_store, "_ATTEMPTS", 1)
    with silent_store() as store:
        storage = open_storage(store.uri)
        calls: list[tuple[str, Callable[[], object]]] = [
            ("write", lambda: storage.put("run/a", b"a")),
            ("create", lambda: storage.create("run/a", b"a")),
            ("list", lambda: storage.list("run")),
            ("read", lambda: storage.read("run/a")),
        ]
        for verb, call in calls:
            began = time.monotonic()
            with raises(problems.FAILED, verb=verb):
                call()
            assert time.monotonic() - began < 60.0


@pytest.mark.parametrize("uri", ["s3"], indirect=True)
@pytest.mark.parametrize("user", ["<redacted: AWS Access Key>:***", "key:***"])
def test_a_recorded_uri_without_its_credentials_takes_those_of_the_environment(
    uri: str, user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = f"s3://{user}@{uri.rpartition('@')[2].removeprefix('s3://')}"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    with raises(problems.CREDENTIALS_HIDDEN, got=recorded):
        open_storage(recorded)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    storage = open_storage(recorded)
    storage.create("run/a", b"a")
    assert storage.read("run/a") == b"a"
