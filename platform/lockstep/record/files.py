"""Files of a run's folder: each is written aside, flushed, and renamed into place, so that it is whole or not there."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

_NEVER_FLUSHED = {errno.EINVAL, errno.ENOTSUP}  # file systems that know no fsync of a folder


class _Raw(io.RawIOBase):
    """A file through the plain system calls."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return os.write(self._descriptor, data)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when the block ends well, and leaves nothing when it does not."""
    make_folder(path.parent)
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    placed = False
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        try:
            file = io.BufferedWriter(_Raw(descriptor))
            yield cast(BinaryIO, file)
            file.flush()
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(aside, path)  # noqa: PTH105
        placed = True
    finally:
        if not placed:
            aside.unlink(missing_ok=True)
    flush_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Create a folder and those above it; what is new is flushed to the disk."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        flush_folder(folder.parent)


def flush_folder(folder: Path) -> None:
    """Have the disk know the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NEVER_FLUSHED:
            raise
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """`text` as the whole of `path`, in UTF-8."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def append(path: Path, text: str) -> int:
    """Add `text` to a file, in UTF-8; the size of the file then."""
    make_folder(path.parent)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        data = text.encode("utf-8")
        while data:
            data = data[os.write(descriptor, data) :]
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def append_bounded(path: Path, text: str, most: int = 1 << 20) -> None:
    """Add `text` to a file of which at least the newest `most` bytes stay, and at most twice as many."""
    size = append(path, text)
    if size <= 2 * most:
        return
    with path.open("rb") as file:
        file.seek(size - most)
        file.readline()  # a part of a line
        left = file.read()
    with replacing(path) as file:
        file.write(f"… what was here before was dropped: {len(left)} bytes are left of the file\n".encode())
        file.write(left)
