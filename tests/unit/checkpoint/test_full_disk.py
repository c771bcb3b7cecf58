"""G5: a disk that is full fails a save, not the run: what was saved before stands, and the next save goes well."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.checkpoint import problems
from lockstep.checkpoint.reader import Checkpoint, load
from lockstep.checkpoint.runs.run_folder import RunFolder
from lockstep.checkpoint.saver import AsyncSaver
from lockstep.checkpoint.storage.local import LocalStorage
from tests.raised import raises
from tests.unit.checkpoint.one_process import newest_good, write_checkpoint
from tests.unit.checkpoint.states import same, state

ITEMS = 60_000  # of 4 bytes: 0.75 MB a checkpoint


class SmallDisk:
    """A file system of two megabytes that can be filled up."""

    told = "No space left on device"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def full(self) -> Iterator[None]:
        junk = self.folder / "junk"
        with junk.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                pass  # full
            file.truncate(file.tell() - 300_000)
        yield
        junk.unlink()


class SmallFiles:
    """For who may not mount: no file may grow beyond a limit while the disk is `full`."""

    told = "File too large"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def full(self) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        yield
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(params=[SmallDisk, SmallFiles])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallDisk | SmallFiles]:
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "lockstep-test", str(tmp_path)]
    mounted = request.param is SmallDisk and not subprocess.run(command, capture_output=True).returncode
    yield SmallDisk(tmp_path) if mounted else SmallFiles(tmp_path)
    if mounted:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_fails_the_save_and_keeps_what_was_saved(disk: SmallDisk | SmallFiles) -> None:
    run = RunFolder.create(LocalStorage(disk.folder), "run-a")
    attempt = run.claim()
    write_checkpoint(attempt, 1, state(1, ITEMS))
    with (
        disk.full(),
        raises(problems.FAILED, verb="write", got=disk.told) as raised,
    ):
        write_checkpoint(attempt, 2, state(2, ITEMS))
    assert "\n" not in str(raised.value)
    assert newest_good(run, pytest.fail) == Checkpoint.of(run, 1)
    assert list((disk.folder / attempt.staging).iterdir()) == [], "no part of a file takes up room"
    write_checkpoint(attempt, 2, state(2, ITEMS))
    assert newest_good(run, pytest.fail) == Checkpoint.of(run, 2)


def test_a_full_disk_does_not_end_the_saving(disk: SmallDisk | SmallFiles) -> None:
    run = RunFolder.create(LocalStorage(disk.folder), "run-a")
    saver = AsyncSaver(run.claim(), tries=2, pause_s=0.01)
    saver.save(1, state(1, ITEMS))
    saver.wait()
    with disk.full():
        saver.save(2, state(2, ITEMS))
        saver.wait()
    assert saver.failure is not None and saver.failure.error.facts["got"] == disk.told
    assert (saver.failure.step, saver.failure.tries) == (2, 2)
    assert newest_good(run, pytest.fail) == Checkpoint.of(run, 1)
    saver.save(3, state(3, ITEMS))
    saver.close()
    assert saver.failure is None and saver.last is not None and saver.last.step == 3
    assert not (disk.folder / "run-a" / "step-000000002").exists(), "what the failed save left is cleared"
    found = load(Checkpoint.of(run, 3))
    assert same(found.sections["model"], state(3, ITEMS)["model"])
