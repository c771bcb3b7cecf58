"""Where checkpoints are kept: a folder on a disk or a prefix in an object store, behind one small interface.

Paths are relative to the storage and use `/`. A written file is complete or absent. Every
failure is a StorageError of one line; credentials in a URI are never shown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from lockstep.checkpoint import problems

PIECE = 1 << 20
"""Bytes that are hashed and written, or read and hashed, at a time: few enough to stay in the processor's cache in between."""


LARGEST_READ = 1 << 30
"""Bytes of the largest file that is read at once: the rows of a segment."""


class Written(NamedTuple):
    """The size and hash of a written file."""

    size: int
    sha256: str


class Item(NamedTuple):
    """One entry of a folder; `size` is 0 for a folder."""

    name: str
    is_folder: bool
    size: int


class Reading(Protocol):
    """A file that is being read from its beginning."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Read into the front of `buffer`. Returns the number of bytes, 0 at the end."""


class Storage(Protocol):
    """A folder or a prefix. `staging` names the folder in which files are written aside, if the storage has one."""

    shown: str
    """The storage, for a person."""
    fences: bool
    """Whether ending a staging folder stops those that still write through it; if not, file names keep attempts apart."""

    def write(self, path: str, pieces: Iterable[bytes | memoryview], *, staging: str) -> Written:
        """Write `path` whole or not at all, replacing what is there. LostFileError where `staging` has ended."""

    def create(self, path: str, content: bytes) -> None:
        """Write a small file that must be new. TakenError where it exists; of many calls at once, at most one succeeds."""

    def put(self, path: str, content: bytes) -> None:
        """Write a small file whole, replacing what is there, without waiting for the disk: a loss of power may undo it."""

    def read(self, path: str) -> bytes:
        """The content of a small file."""

    def open(self, path: str) -> AbstractContextManager[Reading]:
        """Open a file to read it from its beginning."""

    def fill(self, path: str, start: int, buffer: memoryview) -> None:
        """Fill the buffer with the bytes of a file from byte `start` on, and read no others. StorageError where there are too few."""

    def list(self, folder: str) -> list[Item]:
        """The entries of a folder, by name; none if there is no such folder."""

    def tree(self, folder: str) -> Mapping[str, Sequence[Item]]:
        """The files of each folder in `folder`, by the folder's name, in as few requests as possible."""

    def exists(self, path: str) -> bool:
        """Whether such a file or folder exists."""

    def delete(self, path: str, *, staging: str | None = None) -> None:
        """Delete a file, through `staging` where given. LostFileError where the file is gone or `staging` has ended."""

    def delete_folder(self, folder: str) -> None:
        """Delete a folder if it is empty."""

    def begin_staging(self, folder: str, owner: str) -> None:
        """Make a staging folder, whose subfolder `folder/owner` is the one to write through. TakenError where it exists.

        If another owner makes it again after its end, the previous owner cannot write through it.
        """

    def end_staging(self, folder: str) -> None:
        """End a staging folder for all that write through it, in one moment, and delete its content."""


def filled(reading: Reading, buffer: memoryview, shown: str) -> None:
    """Fill the buffer with what follows in a file. StorageError where there is too little."""
    while buffer:
        got = reading.readinto(buffer) or 0
        if not got:
            raise problems.FILE_SHORT(path=shown, missing=len(buffer))
        buffer = buffer[got:]


def hashed(pieces: Iterable[bytes | memoryview], write: Callable[[memoryview], object]) -> Written:
    """Pass `pieces` to `write` in small portions. Returns their size and hash."""
    digest, size = hashlib.sha256(), 0
    for portion in _portions(pieces):
        digest.update(portion)
        write(portion)
        size += len(portion)
    return Written(size, digest.hexdigest())


def _portions(pieces: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    for piece in pieces:
        view = memoryview(piece).cast("B")
        for start in range(0, len(view), PIECE):
            yield view[start : start + PIECE]
