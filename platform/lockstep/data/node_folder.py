"""Memory that the processes of one node share: files in a folder that goes away with the last process that uses it.

A process that uses a folder holds a shared lock on the folder's lock file; the kernel lets go of it however the
process ends. A process that finds that no other holds a folder deletes it: the last user when it is done, or, where that
one was killed, the next process that opens any folder here. A file that is deleted lives on in those who mapped it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lockstep import files
from lockstep.data import problems

MEMORY = Path("/dev/shm")
"""Where shared memory lies, if there is room; else the folder for temporary files, whose pages the kernel may write out."""

ROOM = 1.1
"""Free space that is asked for, as a multiple of what will be written."""


class NodeFolder:
    """One shared folder, known to all processes of a user on this node by its `key`; `size` bytes are planned for it."""

    def __init__(self, key: str, size: int) -> None:
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        root = _root(name, size)
        _sweep(root)
        self.path = root / name
        lock = root / f"{name}.lock"
        self._lock_descriptor = _held_lock(lock)
        self.path.mkdir(exist_ok=True)
        self._let_go = weakref.finalize(self, _let_go, self._lock_descriptor, self.path, lock, os.getpid())

    def file(self, name: str, make: Callable[[Path], None], *, wait: bool = True) -> Path | None:
        """The file of that name, which `make` writes where it is missing: one process makes it, the others wait.

        None where another process is at it and `wait` is off. Raises StorageError where there is no room.
        """
        path = self.path / name
        if path.exists():
            return path
        with _locked(self.path / f"{name}.making", wait=wait) as mine:
            if not mine:
                return None
            if not path.exists():
                aside = self.path / f"{name}.aside"
                try:
                    make(aside)
                except OSError as error:
                    raise problems.MEMORY_UNWRITABLE(
                        path=str(self.path), got=error.strerror or error
                    ) from error
                aside.replace(path)
        return path

    def delete(self, name: str) -> None:
        """Delete a file or folder in one moment; those who mapped it keep it."""
        gone = self.path / f"{name}.{os.getpid()}.gone"
        try:
            (self.path / name).rename(gone)
        except FileNotFoundError:
            return  # another process was quicker
        shutil.rmtree(gone, ignore_errors=True) if gone.is_dir() else gone.unlink()

    def close(self) -> None:
        """Let go of the folder; the last process deletes it. What is mapped stays."""
        self._let_go()


def mapped_array(
    key: str, length: int, dtype: DTypeLike, fill: Callable[[NDArray[Any]], None]
) -> NDArray[Any]:
    """A read-only array that the processes of this node share under `key`; the first one fills it."""
    folder = NodeFolder(key, length * np.dtype(dtype).itemsize)

    def make(path: Path) -> None:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, length * np.dtype(dtype).itemsize)  # else a full disk kills
        fill(np.memmap(path, dtype, "r+", shape=(length,)))

    path = folder.file("array", make)
    assert path is not None  # only a call that does not wait comes back without a file
    array = np.memmap(path, dtype, "r", shape=(length,)).view(np.ndarray)
    weakref.finalize(array, folder.close)  # holds the folder for as long as the array is used
    return array


def map_file(path: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
    """A read-only view of a file; an empty one, which cannot be mapped, gives an empty array."""
    if not np.prod(shape):
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", shape=shape).view(np.ndarray)


def _root(name: str, size: int) -> Path:
    """The user's folder in memory where there is room for `size` bytes or the folder `name` is already, else on disk."""
    roots = [files.own_folder(base) for base in (MEMORY, Path(tempfile.gettempdir())) if _is_writable(base)]
    for root in roots:
        if (root / f"{name}.lock").exists():
            return root
    for root in roots:
        if shutil.disk_usage(root).free >= ROOM * size:
            return root
    required = f"{ROOM * size / 2**20:.0f} MiB"
    raise problems.NO_ROOM(memory=MEMORY, folder=tempfile.gettempdir(), required=required)


def _is_writable(base: Path) -> bool:
    """Whether this process may make a folder there."""
    return os.access(base, os.W_OK | os.X_OK)


def _held_lock(path: Path) -> int:
    """A descriptor that holds a shared lock on a file that is still the one at `path`."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        _lock(descriptor, path, shared=True, wait=True)
        if _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)  # it was deleted between the two calls


def _lock(descriptor: int, path: Path, *, shared: bool = False, wait: bool = False) -> None:
    try:
        files.lock(descriptor, shared=shared, wait=wait)
    except files.NoLocksError as error:
        raise problems.NO_LOCKS(folder=str(path.parent), got=error.strerror) from error


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _let_go(descriptor: int, folder: Path, lock: Path, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked process has its parent's lock, and nothing of its own to give back
    _delete_if_unused(descriptor, folder, lock)
    os.close(descriptor)


def _delete_if_unused(descriptor: int, folder: Path, lock: Path) -> None:
    try:
        _lock(descriptor, lock)
    except BlockingIOError:
        return  # in use by another process
    if _is_at(descriptor, lock):
        shutil.rmtree(folder, ignore_errors=True)  # a reader of the folder does not stop its end
        lock.unlink()


def _sweep(root: Path) -> None:
    """Delete what killed processes left."""
    for lock in root.glob("*.lock"):
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another process was quicker
        try:
            _delete_if_unused(descriptor, lock.with_suffix(""), lock)
        finally:
            os.close(descriptor)


@contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold an exclusive lock on a file; gives False where another process holds it and `wait` is off."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        try:
            _lock(file.fileno(), path, wait=wait)
        except BlockingIOError:
            yield False
            return
        yield True
