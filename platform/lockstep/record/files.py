"""Files of a run's folder: each is written aside and renamed into place, so that it is whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when the block ends well, and leaves nothing when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """`text` as the whole of `path`, in UTF-8."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def append_bounded(path: Path, text: str, most: int = 1 << 20) -> None:
    """Add `text` to a file of which at least the newest `most` bytes stay, and at most twice as many."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(text.encode("utf-8"))
        size = file.tell()
    if size <= 2 * most:
        return
    with path.open("rb") as file:
        file.seek(size - most)
        file.readline()  # a part of a line
        left = file.read()
    with replacing(path) as file:
        file.write(f"… what was here before was dropped: {len(left)} bytes are left of the file\n".encode())
        file.write(left)
