"""The file of a journal where a disk refuses, a line is damaged, or its name comes to lead elsewhere."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import RecordError
from lockstep.record import problems
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.journal_file import NAME, JournalFile
from tests.raised import raises
from tests.unit.record.rows import step_row


def lines(file: JournalFile, start: int = 0) -> list[bytes]:
    return [line for line, _, _ in file.lines(start)]


def opened(folder: Path, *added: bytes) -> JournalFile:
    """The journal's file, which this process writes, with these lines."""
    file = JournalFile(folder)
    assert list(file.take_up()) == []
    for line in added:
        file.append(line)
    return file


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Refusing:
    """One call of the operating system, which refuses its `nth` use from now on for files of this name; a write leaves half of it behind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str, name: str, nth: int = 1) -> None:
        self.left = nth
        self._real: Callable[..., Any] = getattr(os, call)
        self._call, self._name = call, name
        monkeypatch.setattr(os, call, self)

    def __call__(self, target: Any, *given: Any, **more: Any) -> Any:
        path = Path(f"/proc/self/fd/{target}").readlink() if isinstance(target, int) else Path(target)
        self.left -= path.name == self._name
        if self.left or path.name != self._name:
            return self._real(target, *given, **more)
        if self._call == "write":
            self._real(target, bytes(given[0])[: len(given[0]) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_half_a_line_that_could_not_be_cut_off_is_cut_off_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that refuses a line, and then also to take half of it away: the next line does not become its other half."""
    file = opened(tmp_path, b"one\n")
    with monkeypatch.context() as refusing:
        Refusing(refusing, "write", NAME)
        Refusing(refusing, "ftruncate", NAME)
        with raises(problems.CANNOT_WRITE, got="No space left on device"):
            file.append(b"two and more\n")
    assert file.torn
    assert (tmp_path / NAME).read_bytes() == b"one\ntwo an"
    assert (file.size, lines(file)) == (4, [b"one"])
    file.append(b"three\n")
    assert not file.torn
    assert (tmp_path / NAME).read_bytes() == b"one\nthree\n"
    assert lines(file) == [b"one", b"three"]
    file.close()


def test_a_new_journal_is_on_the_disk_under_its_name_or_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a loss of power would leave a run whose first rows were flushed into a file without a name. What was added last is flushed as it closes."""
    folder = tmp_path / "run"
    flushed: list[str] = []
    real = os.fsync

    def fsync(file: int) -> None:
        flushed.append(str(Path(f"/proc/self/fd/{file}").readlink()))
        real(file)

    with monkeypatch.context() as watched:
        watched.setattr(os, "fsync", fsync)
        file = opened(folder, b"one\n")
        assert flushed[-1] == str(folder)
        file.close()
    assert not (folder / NAME).stat().st_mode & 0o111
    assert flushed[-2:] == [str(folder), str(folder / NAME)]
    before = descriptors()
    with monkeypatch.context() as refusing:
        Refusing(refusing, "fsync", "run")
        with raises(problems.CANNOT_WRITE, path=folder / NAME, got="No space left on device"):
            JournalFile(folder)
    assert descriptors() == before


def test_a_journal_whose_file_was_deleted_knows_it(tmp_path: Path) -> None:
    file = opened(tmp_path, b"one\n")
    assert not file.is_deleted
    (tmp_path / NAME).unlink()
    assert file.is_deleted
    other = JournalFile(tmp_path)  # a second writer, of another file
    assert file.is_deleted
    assert not other.is_deleted
    with raises(problems.LOCKED):
        JournalFile(tmp_path)
    file.close()
    other.close()


def test_a_journal_that_cannot_be_read_is_refused_and_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk with a bad sector: a journal of which a part is not known would be taken for one without those rows."""
    journal = Journal(tmp_path)
    journal.add([step_row(1)])
    journal.close()
    before = descriptors()
    for refusal in (OSError(errno.EIO, os.strerror(errno.EIO)), KeyboardInterrupt()):
        with monkeypatch.context() as refusing:
            refusing.setattr(os, "pread", raising(refusal))
            with pytest.raises(RecordError if isinstance(refusal, OSError) else KeyboardInterrupt):
                Journal(tmp_path)
        assert descriptors() == before
    again = Journal(tmp_path)
    assert list(again.steps()) == [step_row(1)]
    assert not again.delivered and not again.is_deleted
    (tmp_path / NAME).unlink()
    assert again.is_deleted
    again.close()


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise error

    return call


def test_a_line_that_is_damaged_while_the_run_goes_on_does_not_pass(tmp_path: Path) -> None:
    """Any bit of it, once it was added: the ledger is not written from what is left, and no other value comes back."""
    journal = Journal(tmp_path)
    assert not journal.delivered
    journal.add([step_row(1), step_row(2), step_row(3)])
    whole = (tmp_path / NAME).read_bytes()
    begin = whole.index(b"\n") + 1
    end = whole.index(b"\n", begin)
    for bit in range(8 * begin, 8 * end, 5):
        with (tmp_path / NAME).open("r+b") as disk:
            disk.seek(bit // 8)
            disk.write(bytes([whole[bit // 8] ^ 1 << bit % 8]))
        assert journal.step(2) is None
        assert journal.step(3) == step_row(3)
        with raises(problems.JOURNAL_CHANGED):
            list(journal.steps())
        with (tmp_path / NAME).open("r+b") as disk:
            disk.write(whole)
    assert list(journal.steps()) == [step_row(1), step_row(2), step_row(3)]
    journal.close()


def test_a_reader_changes_nothing(tmp_path: Path) -> None:
    """It leaves half a last line to its writer, and several read at a time."""
    file = opened(tmp_path, b"one\n")
    file.close()
    with (tmp_path / NAME).open("ab") as disk:
        disk.write(b"two, torn")
    readers = [JournalFile(tmp_path, read_only=True) for _ in range(2)]
    for reader in readers:
        assert [line for line, _, _ in reader.take_up()] == [b"one"]
        assert reader.size == 4
    assert (tmp_path / NAME).read_bytes() == b"one\ntwo, torn"
    for reader in readers:
        reader.close()
    with raises(problems.CANNOT_WRITE):
        JournalFile(tmp_path / "nowhere", read_only=True)
    assert not (tmp_path / "nowhere").exists()
