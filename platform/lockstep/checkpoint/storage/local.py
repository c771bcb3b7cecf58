"""A storage on a disk, with plain system calls, so that it is certain what is on the disk when.

A file is written aside, flushed to the disk, renamed into place, and the folder is flushed. A staging folder
is a fence: it ends by being renamed, in one moment, and a writer that still uses it can no longer
rename anything into place. No clocks or locks are involved.
"""

from __future__ import annotations

import errno
import io
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.checkpoint import problems
from lockstep.checkpoint.errors import BadCheckpointError
from lockstep.checkpoint.storage.interface import LARGEST_READ, Item, Reading, Written, filled, hashed
from lockstep.errors import StorageError
from lockstep.files import flush, make_folder
from lockstep.paths import OutsideError, beneath, component, moved, open_beneath

ENDED = "ended-"
"""Prefix of the name of a staging folder that has ended and is not deleted yet."""

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP}
_LOST = {errno.ENOENT, errno.ENOTDIR, errno.EIO}


class LocalStorage:
    """The folder `root`, made when something is first written."""

    fences = True

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()
        self.shown = str(self.root)

    def _at(self, path: str) -> Path:
        """The path of a name in the storage. BadCheckpointError where it leads out, by its text or through a symbolic link."""
        root, name = self._moved(path)
        try:
            return beneath(root, name) if name else root
        except OutsideError as error:
            raise _outside(error) from error

    def _moved(self, path: str) -> tuple[Path, str]:
        """The folder beneath which a name is resolved, and its path there: of a run whose folder was moved, that folder."""
        first, _, inner = path.partition("/")
        try:
            folder = moved(self.root, first) if first else None
        except OutsideError as error:
            raise _outside(error) from error
        return (self.root, path) if folder is None else (folder, inner)

    def write(self, path: str, pieces: Iterable[bytes | memoryview], *, staging: str) -> Written:
        with _storage_errors("write", self.root / path):
            target, aside = self._at(path), self._at(f"{staging}/{path.replace('/', '.')}")
            try:
                written = _write(aside, pieces)
                make_folder(target.parent)
                aside.replace(target)
            except BaseException:
                with suppress(OSError):  # report the failure itself
                    aside.unlink()
                raise
            flush(target.parent)
        return written

    def create(self, path: str, content: bytes) -> None:
        with _storage_errors("create", self.root / path):
            target = self._at(path)
            aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
            make_folder(target.parent)
            try:
                _write(aside, [content])
                _link(aside, target)
            finally:
                aside.unlink(missing_ok=True)
            flush(target.parent)

    def put(self, path: str, content: bytes) -> None:
        with _storage_errors("write", self.root / path):
            target = self._at(path)
            aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
            make_folder(target.parent)
            try:
                aside.write_bytes(content)
                aside.replace(target)
            finally:
                aside.unlink(missing_ok=True)

    def read(self, path: str) -> bytes:
        with _storage_errors("read", self.root / path), self._opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > LARGEST_READ:
                raise problems.TOO_LARGE(path=self.root / path, got=size, wanted=LARGEST_READ)
            return file.read()

    @contextmanager
    def open(self, path: str) -> Iterator[Reading]:
        with _storage_errors("read", self.root / path), self._opened(path) as file:
            yield file

    def fill(self, path: str, start: int, buffer: memoryview) -> None:
        with _storage_errors("read", self.root / path), self._opened(path) as file:
            file.seek(start)
            filled(file, buffer, str(self.root / path))

    def _opened(self, path: str) -> io.FileIO:
        try:
            return io.FileIO(open_beneath(*self._moved(path)), "rb")
        except OutsideError as error:
            raise _outside(error) from error

    def list(self, folder: str) -> list[Item]:
        with _storage_errors("list", self.root / folder):
            try:
                with os.scandir(self._at(folder)) as entries:
                    return sorted(_item(entry) for entry in entries)
            except FileNotFoundError:
                return []

    def tree(self, folder: str) -> Mapping[str, Sequence[Item]]:
        folders = [item.name for item in self.list(folder) if item.is_folder]
        return {
            name: [item for item in self.list(f"{folder}/{name}") if not item.is_folder] for name in folders
        }

    def exists(self, path: str) -> bool:
        with _storage_errors("look at", self.root / path):
            return self._at(path).exists()

    def delete(self, path: str, *, staging: str | None = None) -> None:
        with _storage_errors("delete", self.root / path):
            target = self._at(path)
            if staging is not None:
                aside = self._at(f"{staging}/{path.replace('/', '.')}.deleted")
                target.replace(aside)
                flush(target.parent)
                target = aside
            target.unlink()

    def delete_folder(self, folder: str) -> None:
        with _storage_errors("delete", self.root / folder):
            try:
                self._at(folder).rmdir()
            except OSError as error:
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT}:
                    raise

    def begin_staging(self, folder: str, owner: str) -> None:
        with _storage_errors("create", self.root / folder):
            target = self._at(folder)
            # Until it is renamed it may be cleared like an ended one, but only by an attempt, so only if another has begun.
            temporary = target.with_name(f"{ENDED}{target.name}-{component(owner)}")
            make_folder(target.parent)
            (temporary / component(owner)).mkdir(parents=True, exist_ok=True)
            try:
                flush(temporary)
                temporary.rename(target)
            except OSError as error:
                if temporary.exists():
                    _clear(temporary)
                if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT}:
                    raise problems.TAKEN(path=target) from error
                raise
            try:
                flush(target.parent)
            except OSError:
                with suppress(StorageError):  # report the failure itself
                    self.end_staging(folder)
                raise

    def end_staging(self, folder: str) -> None:
        with _storage_errors("delete", self.root / folder):
            target = self._at(folder)
            if not target.name.startswith(ENDED):
                ended = target.with_name(f"{ENDED}{target.name}-{uuid.uuid4().hex[:8]}")
                target.replace(ended)
                flush(target.parent)
                target = ended
            _clear(target)


def _outside(error: OutsideError) -> BadCheckpointError:
    return problems.LEADS_OUT(got=error)


def _clear(folder: Path) -> None:
    """Delete a folder, the files in it and the folders in it."""
    for item in folder.iterdir():
        if item.is_dir() and not item.is_symlink():
            _clear(item)
        else:
            item.unlink()
    folder.rmdir()


def _write(path: Path, pieces: Iterable[bytes | memoryview]) -> Written:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        written = hashed(pieces, lambda portion: _write_all(descriptor, portion))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return written


def _write_all(descriptor: int, portion: memoryview) -> None:
    while portion:
        portion = portion[os.write(descriptor, portion) :]


def _link(aside: Path, target: Path) -> None:
    """Give `aside` the name `target`, which must be free; the file is complete from its first moment."""
    try:
        os.link(aside, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        os.close(descriptor)
        aside.replace(target)


def _item(entry: os.DirEntry[str]) -> Item:
    is_folder = entry.is_dir()
    try:
        return Item(entry.name, is_folder, 0 if is_folder else entry.stat().st_size)
    except FileNotFoundError:  # deleted since it was listed
        return Item(entry.name, False, 0)


@contextmanager
def _storage_errors(verb: str, path: Path) -> Iterator[None]:
    """Turn the system's errors into StorageError, one line each."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EEXIST:
            raise problems.TAKEN(path=path) from error
        problem = problems.LOST if error.errno in _LOST else problems.FAILED
        raise problem(verb=verb, path=path, got=error.strerror or error) from error
