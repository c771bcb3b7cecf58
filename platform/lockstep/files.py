"""Files that survive a loss of power: each is written aside, flushed, renamed into place, and its folder flushed.

A reader sees a file whole or not at all, and what has its name keeps it. Locks are here too, for file
systems that support only some kinds.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import stat
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from lockstep import problems

_NEVER_FLUSHED = {errno.EINVAL, errno.ENOTSUP}  # file systems that know no fsync of a folder
NO_LINKS = frozenset({errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP})
"""Errors of a file system that cannot give a file this second name, or never can."""

_private_lock = threading.Lock()
_private_count, _mask_before = 0, 0
"""How many threads are in `private`, and the umask from before the first of them."""

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yields the name of a file to write, which replaces `path` when the block succeeds; when it fails, nothing is left."""
    make_folder(path.parent)
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield aside
        flush(aside)
        aside.replace(path)
        flush(path.parent)
    finally:
        aside.unlink(missing_ok=True)


class _Raw(io.RawIOBase):
    """A file through the plain system calls, until it is `over`: after that its descriptor may be another file's."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.over = False

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self.over:  # a buffer that is collected after a failure writes its remaining bytes
            return memoryview(data).nbytes
        return os.write(self._descriptor, data)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """As `replaced`, but yields the open file."""
    with replaced(path) as aside:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(aside, flags, 0o666)
        raw = _Raw(descriptor)
        try:
            file = io.BufferedWriter(raw)
            yield cast(BinaryIO, file)
            file.flush()
        finally:
            raw.over = True
            os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write `text` as the whole content of `path`, in UTF-8; see `encoded`."""
    write_bytes(path, encoded(text))


def write_bytes(path: Path, content: bytes) -> None:
    """Write the whole content of `path`."""
    with replacing(path) as file:
        file.write(content)


def encoded(text: str) -> bytes:
    r"""`text` in UTF-8. A byte of a file name that is not UTF-8, which Python holds as a surrogate, is written as `\udce9`."""
    return text.encode("utf-8", errors="backslashreplace")


def as_text(content: bytes) -> str:
    """The content of a file as text that has every byte of it: what is not UTF-8 becomes surrogates, which `as_bytes` undoes."""
    return content.decode("utf-8", errors="surrogateescape")


def as_bytes(text: str) -> bytes:
    """The content of a file that `as_text` has read."""
    return text.encode("utf-8", errors="surrogateescape")


def append(path: Path, text: str) -> int:
    """Add `text` to a file, in UTF-8; see `encoded`. Returns the size of the file afterwards."""
    make_folder(path.parent)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        data = encoded(text)
        while data:
            data = data[os.write(descriptor, data) :]
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def append_bounded(path: Path, text: str, most: int = 1 << 20) -> None:
    """Add `text` to a file that keeps at least its newest `most` bytes, and at most twice as many."""
    size = append(path, text)
    if size <= 2 * most:
        return
    with path.open("rb") as file:
        file.seek(size - most)
        file.readline()  # drop a partial line
        tail = file.read()
    with replacing(path) as file:
        file.write(f"… what was here before was dropped: {len(tail)} bytes are left of the file\n".encode())
        file.write(tail)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, each flushed into the folder that holds it."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    flush(folder.parent)


def is_there(path: Path) -> bool:
    """Whether a path leads to something that this process may look at; False too for a name that is too long."""
    try:
        return path.exists()
    except OSError:
        return False


def flush(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NEVER_FLUSHED:
            raise
    finally:
        os.close(descriptor)


def own_folder(base: Path) -> Path:
    """The folder of this user's temporary files below `base`, a folder that all users share. Made if it is not there.

    Only a folder that belongs to this user, and that nobody else may enter, is used. Where another user has taken its name, it has another, which nobody
    could foresee, and all processes of this user find. StorageError where `base` takes no folder.
    """
    name = f"lockstep-{os.getuid()}"
    try:
        with suppress(FileExistsError):
            Path(base, name).mkdir(mode=0o700)
        while not (
            folders := [path for path in (base / name, *sorted(base.glob(f"{name}-*"))) if _is_own(path)]
        ):
            tempfile.mkdtemp(prefix=f"{name}-", dir=base)
    except OSError as error:
        raise problems.NO_FOLDER(folder=base, got=error.strerror) from error
    return folders[0]


def _is_own(path: Path) -> bool:
    """Whether a path is a folder, not a link to one, that belongs to this user alone."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


@contextmanager
def private(enabled: bool) -> Iterator[None]:
    """If wanted, make what this process creates in the block readable by its user only: folders 0700, files 0600."""
    global _private_count, _mask_before
    if not enabled:
        yield
        return
    with _private_lock:
        if not _private_count:
            _mask_before = os.umask(0o077)
        _private_count += 1
    try:
        yield
    finally:
        with _private_lock:
            _private_count -= 1
            if not _private_count:
                os.umask(_mask_before)


class NoLocksError(OSError):
    """A file system on which no file can be locked."""


def lock(descriptor: int, *, shared: bool = False, wait: bool = False) -> None:
    """Lock an open file until it is closed, however its process ends. BlockingIOError where another process has it.

    If the file system has no `flock` (Lustre mounted without it, some NFS), locks of byte ranges are used instead:
    those of the open file, which like `flock` are not released when another descriptor of the file is closed. NoLocksError
    where it has none either.
    """
    how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    try:
        fcntl.flock(descriptor, how)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _lock_range(descriptor, shared=shared, wait=wait)


def unlock(descriptor: int) -> None:
    """Release the lock of a file that is then closed. Closing alone is not enough: a process that is being started has a copy of each descriptor until it executes its program."""
    with suppress(OSError):  # the lock goes with the last copy
        try:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_UNLCK))


def _whole_file(kind: int) -> bytes:
    """A lock of all of a file's bytes, as `fcntl` takes it."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)


def _lock_range(descriptor: int, *, shared: bool, wait: bool) -> None:
    command = getattr(fcntl, "F_OFD_SETLKW" if wait else "F_OFD_SETLK", None)
    if command is None:  # not Linux
        raise NoLocksError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    try:
        fcntl.fcntl(descriptor, command, _whole_file(fcntl.F_RDLCK if shared else fcntl.F_WRLCK))
    except OSError as error:
        if error.errno == errno.EACCES:  # means the same as EAGAIN here
            raise BlockingIOError(errno.EAGAIN, error.strerror) from error
        if error.errno in _NO_LOCKS | {errno.EINVAL}:
            raise NoLocksError(error.errno, error.strerror) from error
        raise
