"""Where data files lie: a path, a folder, a glob or a URI of an object store; and reads that are tried again when they fail."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from lockstep.data import problems
from lockstep.errors import DataError

PAUSES_S = (0.1, 0.5, 2.0)
"""Seconds before each further try of a read; what fails after the last one is raised."""

_STORED_WITHIN_NS = 2_000_000_000
"""How far apart the times of one file may be that an object store gives in a listing and for the file alone."""

T = TypeVar("T")


class DataLocation:
    """Where a path, a glob or a URI leads: a file system, and files with these endings, in small letters or large, in it.

    A file or folder of exactly this name comes first; the name is read as a glob only where there is none.
    """

    def __init__(self, source: str, suffixes: Sequence[str]) -> None:
        self._source, self._suffixes = source, tuple(suffixes)
        self._process = os.getpid()
        self.is_local = "://" not in source or source.startswith("file://")
        self.scheme = source.partition("://")[0] if not self.is_local else ""
        parts = urlsplit(source)
        self.shown = (
            source if self.is_local else f"{self.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        )
        self._files, self._path = self._open()
        parts_of_path = PurePosixPath(self._path).parts
        plain = next((i for i, part in enumerate(parts_of_path) if _is_glob(part)), len(parts_of_path))
        if plain < len(parts_of_path) and self._is_there():
            plain = len(parts_of_path)
        self._base = str(PurePosixPath(*parts_of_path[:plain]))
        self._pattern = parts_of_path[plain:]

    def files(self) -> list[pafs.FileInfo]:
        """The data files of this location, as the file system lists them; those that begin with `_` or `.` are left out."""
        try:
            info = self._files.get_file_info(self._base)
            if info.type == pafs.FileType.File and not self._pattern:
                self._base = str(PurePosixPath(self._base).parent)
                return [info]
            if info.type == pafs.FileType.NotFound and self.is_local:
                raise problems.NO_FILE_OR_FOLDER(path=self._base)
            selector = pafs.FileSelector(self._base, recursive=True, allow_not_found=True)
            every = self._files.get_file_info(selector)
        except OSError as error:
            raise problems.CANNOT_LIST(path=self.shown, got=one_line(error)) from error
        return [file for file in every if file.type == pafs.FileType.File and self._matches(file.path)]

    def folders(self) -> list[str]:
        """The names of the folders in this location, but for those that begin with `_` or `.`; none where it is a glob."""
        if self._pattern:
            return []
        try:
            every = self._files.get_file_info(pafs.FileSelector(self._base, allow_not_found=True))
        except OSError as error:
            raise problems.CANNOT_LIST(path=self.shown, got=one_line(error)) from error
        names = sorted(
            PurePosixPath(info.path).name for info in every if info.type == pafs.FileType.Directory
        )
        return [name for name in names if not name.startswith(("_", "."))]

    def endings(self, folder: str) -> set[str]:
        """The endings of all files below a folder in this location."""
        selector = pafs.FileSelector(f"{self._base}/{folder}", recursive=True, allow_not_found=True)
        every = self._files.get_file_info(selector)
        return {PurePosixPath(info.path).suffix for info in every if info.type == pafs.FileType.File}

    def named(self, names: Sequence[str]) -> list[StoredFile | None]:
        """The files of these names below this location, whatever their endings; None for one that does not exist. DataError where the location cannot be asked."""
        try:
            every = self._files.get_file_info([f"{self._base}/{name}" for name in names])
        except OSError as error:
            raise problems.CANNOT_LOOK(path=self.shown, got=one_line(error)) from error
        return [
            StoredFile(self, info.path, info.size, info.mtime_ns or 0)
            if info.type == pafs.FileType.File
            else None
            for info in every
        ]

    def _is_there(self) -> bool:
        try:
            return bool(self._files.get_file_info(self._path).type != pafs.FileType.NotFound)
        except OSError:  # told when its files are looked for
            return False

    def below(self, path: str) -> str:
        """A path relative to this location."""
        return str(PurePosixPath(path).relative_to(self._base))

    def open(self, path: str) -> pa.NativeFile:
        """A file to read from anywhere; a forked process opens the file system anew, for clients of object stores do not survive a fork."""
        if self._process != os.getpid():
            self._files, _ = self._open()
            self._process = os.getpid()
        return self._files.open_input_file(path)

    def _matches(self, path: str) -> bool:
        parts = PurePosixPath(path).relative_to(self._base).parts
        if self._pattern:
            return len(parts) == len(self._pattern) and all(map(fnmatchcase, parts, self._pattern))
        return PurePosixPath(path).suffix.lower() in self._suffixes and not any(
            p.startswith(("_", ".")) for p in parts
        )

    def _open(self) -> tuple[pafs.FileSystem, str]:
        if self.is_local:
            path = unquote(urlsplit(self._source).path) if "://" in self._source else self._source
            return pafs.LocalFileSystem(), str(Path(path).expanduser().absolute())
        try:
            files, path = pafs.FileSystem.from_uri(self._source)
        except (OSError, ValueError, pa.ArrowException) as error:
            reason = one_line(error).replace(self._source, self.shown)
            raise problems.CANNOT_OPEN(path=self.shown, got=reason) from None
        return files, path.rstrip("/")


@dataclass(frozen=True)
class StoredFile:
    """A file at a location, by its path in the file system."""

    location: DataLocation
    path: str
    size: int
    changed_ns: int

    @property
    def name(self) -> str:
        """The path below the location, by which a person knows the file."""
        return self.location.below(self.path)

    @property
    def shown(self) -> str:
        """The path or the URI, for a message."""
        return self.path if self.location.is_local else f"{self.location.scheme}://{self.path}"

    @property
    def identity(self) -> tuple[Any, ...]:
        """Values that change with the file: of one on a disk also where its size and time were set back."""
        status = Path(self.path).stat() if self.location.is_local else None
        return (self.path, self.size, self.changed_ns, status and (status.st_ino, status.st_ctime_ns))

    def pieces(self, spans: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """Its bytes at (offset, length) spans. Raises DataError, also where it is no longer the file that was found."""
        with self.location.open(self.path) as source:
            for offset, length in spans:
                yield retried(lambda o=offset, n=length: self._read(source, o, n), repr(self.shown))  # type: ignore[misc]

    def _read(self, source: pa.NativeFile, offset: int, length: int) -> bytes:
        content: bytes = source.read_at(length, offset)
        self.check(source)
        if len(content) < length:
            raise self._changed(f"it ends after {offset + len(content)} bytes")
        return content

    def check(self, source: pa.NativeFile) -> None:
        """DataError where `source`, of which something was just read, is no longer the file that was found: its size or its time differs.

        A disk is asked by the path, which costs microseconds. A store told both when the file was opened; its times are whole seconds.
        """
        if self.location.is_local:
            status = os.stat(self.path)  # noqa: PTH116 - a Path would cost as much again, for each sample
            size, time_ns, apart_ns = status.st_size, status.st_mtime_ns, 0
        else:
            size, time_ns, apart_ns = source.size(), self._modified_ns(source), _STORED_WITHIN_NS
        if size != self.size:
            raise self._changed(f"it has {size} bytes")
        if abs(time_ns - self.changed_ns) > apart_ns:
            raise self._changed(f"it was written at {_utc(time_ns)}")

    def _modified_ns(self, source: pa.NativeFile) -> int:
        """When a store says that the file was last written, in nanoseconds; as listed where it does not say."""
        try:
            modified = datetime.fromisoformat(source.metadata().get("Last-Modified", b"").decode())
        except ValueError:
            return self.changed_ns
        return round(modified.timestamp() * 1e9)

    def _changed(self, how: str) -> DataError:
        return problems.FILE_CHANGED(path=self.shown, got=how, size=self.size, written=_utc(self.changed_ns))


def find(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], suffixes: Sequence[str]
) -> list[StoredFile]:
    """The files of one location or several, in the order of their paths. DataError where there is none."""
    sources = [source] if isinstance(source, str | os.PathLike) else list(source)
    locations = [DataLocation(os.fspath(path), suffixes) for path in sources]
    files = [
        StoredFile(location, info.path, info.size, info.mtime_ns or 0)
        for location in locations
        for info in location.files()
    ]
    if not files:
        shown = ", ".join(location.shown for location in locations)
        raise problems.NO_FILES(path=shown, wanted=", ".join(suffixes))
    return sorted(files, key=lambda file: file.path)


def _utc(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, UTC).isoformat(sep=" ", timespec="milliseconds")


def _is_glob(part: str) -> bool:
    return any(sign in part for sign in "*?[")


def retried(read: Callable[[], T], label: str) -> T:
    """What `read` gives, tried again after a failure of the disk or the network; DataError in the end."""
    for pause_s in (*PAUSES_S, None):
        try:
            return read()
        except FileNotFoundError as error:
            raise problems.FILE_GONE(what=label, got=one_line(error)) from error
        except OSError as error:
            if pause_s is None:
                raise problems.UNREADABLE_STORAGE(
                    what=label, tries=len(PAUSES_S) + 1, got=one_line(error)
                ) from error
            time.sleep(pause_s)
        except (pa.ArrowException, EOFError) as error:
            raise problems.DAMAGED(what=label, got=one_line(error)) from error
    raise AssertionError("the last try returns or raises")


def one_line(error: BaseException) -> str:
    """What an error says, without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__
