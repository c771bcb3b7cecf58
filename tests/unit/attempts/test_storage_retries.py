"""The driver's own calls to storage outlive what passes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lockstep.attempts.storage_retries import PAUSES_S, patiently
from lockstep.driver.signals import StopSignal
from lockstep.errors import StorageError


class Storage:
    """Fails so many times, as a store does: with a StorageError from the kernel's error."""

    def __init__(self, number: int, times: int) -> None:
        self.number, self.left, self.calls = number, times, 0

    def __call__(self) -> str:
        self.calls += 1
        self.left -= 1
        if self.left >= 0:
            try:
                raise OSError(self.number, os.strerror(self.number))
            except OSError as error:
                raise StorageError(f"checkpoint: {error.strerror}") from error
        return "found"


def test_what_passes_is_waited_out_and_told() -> None:
    storage, waited, told = Storage(errno.ESTALE, 2), list[float](), list[str]()
    assert patiently(storage, waited.append, told.append) == "found"
    assert waited == [1.0, 2.0]
    assert told[0] == "StorageError: checkpoint: Stale file handle; tried again in 1 s"


def test_what_does_not_pass_is_raised_at_once() -> None:
    storage = Storage(errno.EACCES, 1)
    with pytest.raises(StorageError, match="Permission denied"):
        patiently(storage, lambda _: pytest.fail("waited"), str)
    assert storage.calls == 1


def test_what_goes_on_for_too_long_is_raised() -> None:
    storage, waited = Storage(errno.ENOSPC, 100), list[float]()
    with pytest.raises(StorageError, match="No space left"):
        patiently(storage, waited.append, str)
    assert tuple(waited) == PAUSES_S


def test_a_signal_ends_the_wait_and_what_failed_is_raised() -> None:
    storage, told, stop = Storage(errno.ENOSPC, 100), list[str](), StopSignal()
    stop.ask()
    with pytest.raises(StorageError, match="No space left"):
        patiently(storage, stop.wait, told.append)
    assert storage.calls == len(told) == 1


def test_a_full_disk_that_is_emptied(tmp_path: Path) -> None:
    """A real ENOSPC."""
    target = [Path("/dev/full")]

    def write() -> int:
        with target[0].open("wb", buffering=0) as file:
            return file.write(b"x")

    assert patiently(write, lambda _: target.__setitem__(0, tmp_path / "file"), str) == 1
