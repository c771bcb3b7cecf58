"""Where checkpoints are kept: a folder on a disk or a prefix in an object store, behind one small interface.

Paths are relative to the storage and use `/`. A file that is written is there whole or not at all. Every
failure is a StorageError of one line; credentials in a URI are never shown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

PIECE = 1 << 20
"""Bytes that are hashed and written, or read and hashed, at a time: they stay in the processor's cache between the two."""


class Written(NamedTuple):
    """A file as it was written."""

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
        """Fill the front of `buffer`; the number of bytes, 0 at the end."""


class Storage(Protocol):
    """A folder or a prefix. `staging` names the folder that files are written aside in, where that is a thing."""

    shown: str
    """The storage as a person is shown it."""
    fences: bool
    """Whether a staging folder that has ended stops whoever still writes through it; where not, names keep attempts apart."""

    def write(self, path: str, pieces: Iterable[bytes | memoryview], *, staging: str) -> Written:
        """Write `path` whole or not at all, in place of what is there. LostFileError where `staging` has ended."""

    def create(self, path: str, content: bytes) -> None:
        """Write a small file that must be new. TakenError where it is there already; of many at once, one succeeds at most."""

    def put(self, path: str, content: bytes) -> None:
        """Write a small file whole, in place of what is there, without waiting for the disk: a loss of power may undo it."""

    def read(self, path: str) -> bytes:
        """All of a small file."""

    def open(self, path: str) -> AbstractContextManager[Reading]:
        """A file to read from its beginning."""

    def list(self, folder: str) -> list[Item]:
        """What is in a folder, by name; nothing where there is no such folder."""

    def tree(self, folder: str) -> Mapping[str, Sequence[Item]]:
        """The files of each folder in `folder`, by the folder's name, in as few requests as there can be."""

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder."""

    def delete(self, path: str, *, staging: str | None = None) -> None:
        """Delete a file, through `staging` where given. LostFileError where the file is gone or `staging` has ended."""

    def delete_folder(self, folder: str) -> None:
        """Delete a folder if it is empty."""

    def begin_staging(self, folder: str, owner: str) -> None:
        """Make a staging folder, in which `folder/owner` is the one to write through. TakenError where it is there already.

        One that is made again by another owner, after its end, is not written through by who held it before.
        """

    def end_staging(self, folder: str) -> None:
        """End a staging folder for all who write through it, in one moment, and delete what is in it."""


def hashed(pieces: Iterable[bytes | memoryview], write: Callable[[memoryview], object]) -> Written:
    """Pass `pieces` to `write` in small portions, and tell their size and hash."""
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
