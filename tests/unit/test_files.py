"""Files that survive a loss of power, locks on file systems that lack some, and what other users can see."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep import files, problems
from lockstep.data.node_folder import NodeFolder
from lockstep.data.problems import NO_LOCKS
from lockstep.errors import RecordError
from lockstep.record.events.union import Finished, Started
from lockstep.record.ledger import journal_file
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.journal_file import NAME
from lockstep.record.mirror.database_lock import database_lock
from lockstep.record.recorder import Recorder
from lockstep.spec.loading import load_spec
from tests.raised import raises

PLATFORM = Path(files.__file__).parents[1]


class Calls:
    """What was flushed and renamed, in order, by the paths at that moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, str]] = []
        synced, replaced = os.fsync, os.replace

        def fsync(descriptor: int) -> None:
            synced(descriptor)
            self.made.append(("flushed", Path(f"/proc/self/fd/{descriptor}").readlink().name))

        def replace(path: Any, target: Any) -> None:
            replaced(path, target)
            self.made.append(("renamed", Path(target).name))

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "replace", replace)


def test_a_file_is_flushed_before_it_has_its_name_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    files.write_text(tmp_path / "new" / "a.txt", "text")
    assert calls.made == [
        ("flushed", tmp_path.name),
        ("flushed", f".a.txt.{os.getpid()}.partial"),
        ("renamed", "a.txt"),
        ("flushed", "new"),
    ]
    assert (tmp_path / "new" / "a.txt").read_text() == "text"


def test_a_file_that_cannot_be_flushed_does_not_get_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write_text(tmp_path / "a.txt", "before")

    def fails(descriptor: int) -> None:
        raise OSError(errno.EIO, "an error of the disk")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="an error of the disk"):
        files.write_text(tmp_path / "a.txt", "after")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "before"


def test_no_file_gets_its_name_in_another_way() -> None:
    """Only the store of checkpoints, which stages what it writes, and what is no file of a run, rename by themselves."""
    renames = re.compile(r"\b(aside|new|files|ended|target|note)\.(replace|rename)\(|os\.replace|os\.rename")
    found = {
        path.relative_to(PLATFORM / "lockstep").as_posix()
        for path in (PLATFORM / "lockstep").rglob("*.py")
        if renames.search(path.read_text())
    }
    assert found == {
        "files.py",
        "calls/starter.py",
        "checkpoint/storage/local.py",
        "checkpoint/runs/run_checkpoints.py",  # a folder of files that were flushed
        "clusters/local_cluster.py",  # what is gone after a loss of power in any case
        "data/arrow_cache.py",  # flushed before it gets its name
        "data/node_folder.py",  # memory
        "export/publication.py",  # flushed, and put back by its own journal
        "record/runs/heartbeat.py",  # what a reader saw; it is seen again
    }


# --- locks ------------------------------------------------------------------------------------------------

HOLDER = """
import errno, fcntl, os, sys
from pathlib import Path
def flock(*_): raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
fcntl.flock = flock
from lockstep.record.ledger.journal import Journal
journal = Journal(Path(sys.argv[1]))
Path(sys.argv[1], "journal.jsonl").read_bytes()  # opened and closed: the lock stays
print("held", flush=True)
input()
"""


def no_flock(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A file system without `flock`, such as Lustre mounted without it."""

    def fails(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fails)


@pytest.mark.every(3)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_another_lock_is_taken_where_flock_is_missing(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps other processes out, and this one; it stays when the file is read meanwhile; it ends with its process."""
    no_flock(monkeypatch, number)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PYTHONPATH": str(PLATFORM)},
    ) as holder:  # fmt: skip
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(RecordError, match="another process records it now"):
            Journal(tmp_path)
        holder.kill()
    journal = Journal(tmp_path)
    with pytest.raises(RecordError, match="another process records it now"):
        Journal(tmp_path)
    (tmp_path / NAME).read_bytes()
    with pytest.raises(RecordError, match="another process records it now"):
        Journal(tmp_path)
    journal.close()
    Journal(tmp_path).close()


@pytest.fixture
def started() -> Iterator[Callable[[], None]]:
    """Starts a process that has a copy of each descriptor, as one has until it executes its program."""
    children = list[int]()
    read, write = os.pipe()

    def start() -> None:
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        children.append(child)

    yield start
    os.close(write)
    for child in children:
        os.waitpid(child, 0)
    os.close(read)


@pytest.mark.parametrize("kind", ["flock", "ranges"])
def test_a_process_that_is_being_started_keeps_no_lock(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Callable[[], None]
) -> None:
    if kind == "ranges":
        no_flock(monkeypatch, errno.ENOLCK)
    journal = Journal(tmp_path)
    started()
    journal.close()
    Journal(tmp_path).close()


def test_nor_that_of_a_journal_whose_folder_cannot_be_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Callable[[], None]
) -> None:
    def refused(folder: Path) -> None:
        started()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched, pytest.raises(RecordError, match="Input/output error"):
        patched.setattr(journal_file, "flush", refused)
        Journal(tmp_path)
    Journal(tmp_path).close()


def test_a_forked_process_does_not_release_the_lock_of_its_parent(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    child = os.fork()
    if child == 0:
        journal.close()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(RecordError, match="another process records it now"):
        Journal(tmp_path)
    journal.close()


def test_a_file_system_without_any_lock_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_flock(monkeypatch, errno.ENOSYS)

    def fails(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "fcntl", fails)
    with pytest.raises(
        RecordError, match=r"^record\.folder: no file can be locked .*No locks available"
    ) as told:
        Journal(tmp_path)
    assert "\n" not in str(told.value)
    with (
        pytest.raises(RecordError, match=r"^record\.uri: no file can be locked"),
        database_lock(f"sqlite:///{tmp_path}/mlflow.db"),
    ):
        pass
    with raises(NO_LOCKS, got=re.compile("No locks available")):
        NodeFolder("key", 10)


def test_another_failure_of_a_lock_is_not_taken_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_flock(monkeypatch, errno.EIO)
    with pytest.raises(RecordError, match=r"record\.folder: cannot write .*Input/output error"):
        Journal(tmp_path)


# --- other users ------------------------------------------------------------------------------------------


def test_a_link_in_place_of_the_users_folder_is_not_followed(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    Path(tmp_path, f"lockstep-{os.getuid()}").symlink_to(theirs)
    folder = files.own_folder(tmp_path)
    assert folder == files.own_folder(tmp_path), "all processes of the user find it"
    with raises(problems.NO_FOLDER, folder=tmp_path / "nowhere"):
        files.own_folder(tmp_path / "nowhere")
    assert (folder.is_symlink(), stat.S_IMODE(folder.stat().st_mode)) == (False, 0o700)
    assert list(theirs.iterdir()) == []


def test_what_is_made_in_private_is_private_whatever_other_threads_do(tmp_path: Path) -> None:
    before = os.umask(0o022)
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with files.private(True):
            entered.set()
            leave.wait()
            files.write_text(tmp_path / "b" / "file", "")

    try:
        with files.private(True):
            thread = threading.Thread(target=other)
            thread.start()
            entered.wait()
            files.write_text(tmp_path / "a" / "file", "")
        leave.set()
        thread.join()
        with files.private(False):
            files.write_text(tmp_path / "c" / "file", "")
    finally:
        os.umask(before)
    modes = {
        name: (
            stat.S_IMODE((tmp_path / name).stat().st_mode),
            stat.S_IMODE((tmp_path / name / "file").stat().st_mode),
        )
        for name in "abc"
    }
    assert modes == {"a": (0o700, 0o600), "b": (0o700, 0o600), "c": (0o755, 0o644)}


@pytest.mark.parametrize(("private", "modes"), [(True, (0o700, 0o600)), (False, (0o755, 0o644))])
def test_a_private_run_is_its_users_alone(private: bool, modes: tuple[int, int], tmp_path: Path) -> None:
    """Its folder and every file of the record."""
    before = os.umask(0o022)
    document = {
        "job": {"use": "jobs.digits.job:Digits"},
        "record": {"uri": "off", "private": private},
        "checkpoint": {"storage": str(tmp_path)},
    }
    try:
        recorder = Recorder(load_spec(document))
        recorder.start()
        recorder.tell(Started({"identity": "abc", "environment": {"torch": "2"}}), Finished({}))
        recorder.close()
        folder = recorder.run_folder()
        made = [folder, *folder.rglob("*")]
    finally:
        assert os.umask(before) == 0o022
    assert {stat.S_IMODE(path.stat().st_mode) for path in made if path.is_dir()} == {modes[0]}
    assert {stat.S_IMODE(path.stat().st_mode) for path in made if path.is_file()} == {modes[1]}
    assert len(made) > 8


def test_what_a_file_that_failed_had_left_is_written_to_no_other(tmp_path: Path) -> None:
    """The next file that is opened has the descriptor of the one that failed."""
    held = []
    with pytest.raises(ValueError, match="no more"), files.replacing(tmp_path / "first") as file:
        held.append(file)
        file.write(b"of the first")
        raise ValueError("no more")
    others = [(tmp_path / f"other-{i}").open("wb") for i in range(5)]
    held.clear()
    del file
    gc.collect()
    for other in others:
        other.close()
    assert [path.read_bytes() for path in sorted(tmp_path.iterdir())] == [b""] * 5
