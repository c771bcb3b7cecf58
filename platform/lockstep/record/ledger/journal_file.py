"""The file of a journal: one process adds lines to it, under a lock that ends with that process.

A torn last line, left by a machine that went down, is cut off.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lockstep.errors import RecordError
from lockstep.files import NoLocksError, flush, lock, make_folder, unlock
from lockstep.paths import plain_file
from lockstep.record import problems

NAME = "journal.jsonl"
READ_BYTES = 1 << 20


class JournalFile:
    """The journal's file in `folder`, locked; created if missing, unless it is only read (`read_only`).

    RecordError where it cannot be opened, or another process has locked it. One thread adds; all may read.
    """

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self._folder, self.path = folder, folder / NAME
        self._process = os.getpid()
        self._read_only = read_only
        self.size = 0
        """The offset at which the last whole line ends, as far as it was read or added."""
        self.torn = False
        """Whether a failed write may have left half a line after the last whole one."""
        flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT | os.O_APPEND
        try:
            if not read_only:
                make_folder(folder)
            flags |= (
                os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            )  # a link would be written to, a pipe waited for
            self._file = plain_file(os.open(self.path, flags, 0o644), self.path)
        except OSError as error:
            raise broken(self.path, error) from error
        try:
            self._lock()
            if not read_only:
                flush(folder)  # a journal that was just made
        except BaseException as error:
            self.release()
            if isinstance(error, OSError):
                raise broken(self.path, error) from error
            raise

    @property
    def is_deleted(self) -> bool:
        """Whether its name leads to no file, or to another one, since it was opened: what is added is lost when it is closed."""
        try:
            return os.fstat(self._file).st_ino != self.path.stat().st_ino
        except FileNotFoundError:
            return True
        except OSError:  # nothing can be said for now
            return False

    def _lock(self) -> None:
        try:
            lock(self._file, shared=self._read_only)
        except BlockingIOError as error:
            raise problems.LOCKED(run=self._folder.name) from error
        except NoLocksError as error:
            raise problems.FOLDER_LOCKS(folder=self._folder, got=error.strerror) from error

    def take_up(self) -> Iterator[tuple[bytes, int, int]]:
        """Yields the existing lines when the file is opened, and cuts off what follows the last whole one."""
        file_size = os.fstat(self._file).st_size
        for line, start, end in self._lines(0, file_size):
            yield line, start, end
            self.size = end
        if file_size > self.size and not self._read_only:
            os.ftruncate(self._file, self.size)

    def append(self, data: bytes) -> None:
        """Add lines, all or none of them. RecordError where the disk refuses."""
        try:
            if self.torn:
                os.ftruncate(self._file, self.size)
            self.torn = True
            _write(self._file, data)
        except OSError as error:
            with suppress(OSError):  # else before the next write
                os.ftruncate(self._file, self.size)
                self.torn = False
            raise broken(self.path, error) from error
        self.torn = False
        self.size += len(data)

    def lines(self, start: int) -> Iterator[tuple[bytes, int, int]]:
        """The whole lines from the offset `start` on, without line ends, and the offsets where each begins and ends."""
        return self._lines(start, self.size)

    def _lines(self, start: int, until: int) -> Iterator[tuple[bytes, int, int]]:
        partial, end = b"", start
        while start < until and (data := self.read(min(READ_BYTES, until - start), start)):
            start += len(data)
            *lines, partial = (partial + data).split(b"\n")
            for line in lines:
                begin, end = end, end + len(line) + 1
                yield line, begin, end

    def read(self, length: int, start: int) -> bytes:
        """`length` bytes from the offset `start` on."""
        return os.pread(self._file, length, start)

    def flush(self) -> None:
        """Make the additions survive a loss of power. RecordError where the disk refuses."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise broken(self.path, error) from error

    def close(self) -> None:
        """Flush to the disk and release the lock."""
        try:
            if not self._read_only:
                self.flush()
        finally:
            self.release()

    def release(self) -> None:
        """Release the lock."""
        file, self._file = self._file, -1  # a thread that still reads must not read another file
        if os.getpid() == self._process:  # a forked process must not release the lock of its parent
            unlock(file)
        os.close(file)


def _write(file: int, data: bytes) -> None:
    written = 0
    while written < len(data):
        written += os.write(file, data[written:])


def broken(path: Path, error: OSError) -> RecordError:
    """The error for a disk that refuses."""
    return problems.CANNOT_WRITE(path=path, got=error.strerror or error)
