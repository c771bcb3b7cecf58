"""What the code of a job takes from outside itself and no spec names: files that it reads, folders that it lists, programs that it starts.

A file counts by its content, never by when it was changed, so that a copy of it is the same. What the job has written itself is no input, but what it
makes of it. Only the first `MOST_FILES` files of a run are looked at, so that a data set of any number costs nothing.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Container, Iterable
from pathlib import Path
from typing import NamedTuple

MOST_FILES = 256
"""So many files of a run are looked at, and as many folders and programs."""

MOST_BYTES = 64 << 20
"""After so many bytes of files that were read while the run computes, no more are looked at."""

WHOLE_BYTES = 16 << 20
"""A larger file counts by its size and `_BLOCKS` blocks of `_BLOCK` bytes, evenly spread, the first and the last among them."""

_BLOCKS, _BLOCK = 16, 64 << 10

MOST_NAMES = 10_000
"""A folder with more names is not compared."""

ABSENT = None
"""The content of a file that is not there."""

NOT_REGULAR = "no regular file"
TOO_MANY_NAMES = f"more than {MOST_NAMES} names"


class FileRead(NamedTuple):
    """A file as it was when it was read first."""

    content: str | None
    early: bool
    """Whether it was read before the run computed anything: while the job was imported and made, or its data and model were."""


def content_of(path: str) -> tuple[str | None, int]:
    """What stands for the content of a file, and the bytes that were read for it. ABSENT where it is not there or may not be read."""
    try:
        status = Path(path).stat()
        if not stat.S_ISREG(status.st_mode):
            return NOT_REGULAR, 0
        with io.FileIO(path) as file:  # no `open`: that one is noted
            if status.st_size <= WHOLE_BYTES:
                content = file.read(WHOLE_BYTES + 1) or b""
                return hashlib.sha256(content).hexdigest(), len(content)
            digest = hashlib.sha256(f"{status.st_size}\n".encode())
            for i in range(_BLOCKS):
                file.seek((status.st_size - _BLOCK) * i // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK) or b"")
            return f"{digest.hexdigest()} of {_BLOCKS} blocks", _BLOCKS * _BLOCK
    except (OSError, ValueError):
        return ABSENT, 0


def names_of(path: str, ignored: Container[str] = ()) -> str | None:
    """What stands for the names in a folder, in no order: without hidden ones, bytecode and `ignored` paths, which others put there.

    ABSENT where there is no folder.
    """
    names = list[str]()
    try:
        with _scandir(path) as entries:
            for entry in entries:
                if len(names) > MOST_NAMES:
                    return TOO_MANY_NAMES
                hidden = entry.name.startswith(".") or entry.name == "__pycache__"
                if not hidden and os.path.abspath(entry.path) not in ignored:  # noqa: PTH100 - not to follow links
                    names.append(entry.name)
    except (OSError, ValueError):
        return ABSENT
    return hashlib.sha256(b"\0".join(sorted(map(os.fsencode, names)))).hexdigest()


_scandir = os.scandir  # before it is noted


class ExternalReads:
    """What a job has taken so far, by absolute paths, in the order of the first time."""

    def __init__(self) -> None:
        self.files: dict[str, FileRead] = {}
        self.folders: dict[str, None] = {}
        self.programs: dict[str, str] = {}
        """Where each was started first."""
        self.written: set[str] = set()
        self.early = True
        self.full = False
        """Whether no more files are looked at."""
        self._late_bytes = 0

    @property
    def count(self) -> int:
        """How much was noted, to see whether more was."""
        return len(self.files) + len(self.folders) + len(self.programs)

    def read(self, path: str) -> None:
        """Note that a file is about to be read."""
        if self.full or path in self.files:
            return
        content, size = (ABSENT, 0) if path in self.written else content_of(path)
        self.files[path] = FileRead(content, self.early)
        self._late_bytes += 0 if self.early else size
        self.full = len(self.files) >= MOST_FILES or self._late_bytes >= MOST_BYTES

    def wrote(self, path: str) -> None:
        """Note that a file is about to be written."""
        if len(self.written) < MOST_FILES:
            self.written.add(path)

    def listed(self, path: str) -> None:
        """Note that a folder is about to be listed."""
        if path not in self.folders and len(self.folders) < MOST_FILES:
            self.folders[path] = None

    def started(self, program: str, caller: str) -> None:
        """Note that another program is about to be started by a line of the job, such as `job.py:12`."""
        if len(self.programs) < MOST_FILES:
            self.programs.setdefault(program, caller)


class MergedReads(NamedTuple):
    """What several `ExternalReads` have noted: the content of files by path, folders, and programs with where they were started."""

    steady: dict[str, str | None]
    """Files that were read early and are none of the job's own making."""
    others: dict[str, str | None]
    """Files that were read later, or that the job has written itself, as its caches are: as they are now."""
    folders: list[str]
    programs: dict[str, str]


def merged(every: Iterable[ExternalReads]) -> MergedReads:
    """The reads of several processes or phases as one. A file that any of them has written is none of the steady ones."""
    parts = list(every)
    written = set[str]().union(*(part.written for part in parts))
    steady, others = dict[str, str | None](), dict[str, str | None]()
    for path, file in [pair for part in parts for pair in list(part.files.items())]:
        if path in written or (file.content is ABSENT and Path(path).exists()):
            if (now := content_of(path)[0]) is not ABSENT:
                others[path] = now
        else:
            (steady if file.early else others).setdefault(path, file.content)
    folders = dict.fromkeys(path for part in parts for path in part.folders)
    programs = {program: caller for part in parts for program, caller in part.programs.items()}
    return MergedReads({p: c for p, c in steady.items() if p not in others}, others, list(folders), programs)
