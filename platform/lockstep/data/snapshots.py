"""Snapshots of tables that change: which version of a Delta, Iceberg or Lance table a run reads, and the files that it is made of.

The newest version is looked up once, when a run begins. It is in the identity of the run, and every other worker, every
resume and every replay opens the same.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pyarrow as pa

from lockstep.data import problems
from lockstep.data.file_locations import DataLocation, StoredFile, one_line
from lockstep.data.table_pins import version_of
from lockstep.errors import DataError, SpecError


@dataclass(frozen=True)
class SnapshotFiles:
    """One version of a table as files of Parquet or Arrow, in the order of their paths."""

    version: str
    stored: Sequence[StoredFile]
    contents: str
    """A digest of what the version consists of: the names of its files, which are never written twice, the rows that are deleted in them, and of Lance the columns."""
    partitions: Sequence[Mapping[str, str | None]] = ()
    """For each file the values of the columns that are not in it, but in the table's log; empty where there are none."""
    types: Mapping[str, pa.DataType] = field(default_factory=dict)
    """The types of these columns."""


class Snapshot(ABC):
    """A version of a table, as the source of a `Table`. Each format has a class of its own, which imports the format's library when it is opened."""

    format: ClassVar[str]
    extra: ClassVar[str]
    """The optional dependencies of Lockstep that have the library."""

    @property
    @abstractmethod
    def location(self) -> str:
        """Where the table is: a path, a URI or the name in a catalog."""

    @property
    @abstractmethod
    def named_version(self) -> str | None:
        """The version that the job names; None for the newest one at the beginning of the run."""

    @abstractmethod
    def newest(self) -> str:
        """The table's newest version."""

    @abstractmethod
    def files(self, version: str, columns: Sequence[str] | None) -> SnapshotFiles:
        """The files of a version. Rows that have to be read through the library are written as Arrow, once, with these `columns` (None: all)."""

    def opened(self, columns: Sequence[str] | None) -> SnapshotFiles:
        """The files of the version that this run reads. Raises SpecError without the library, DataError where the version cannot be read."""
        try:
            version = self.named_version
            if version is None:
                version = version_of(self.format, self.location, self.newest)
        except ImportError as error:
            raise self._missing(error) from error
        try:
            return self.files(version, columns)
        except ImportError as error:
            raise self._missing(error) from error

    @property
    def shown(self) -> str:
        """The location for a message, without what may be secret in a URI."""
        parts = urlsplit(self.location)
        if not parts.netloc:
            return self.location
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    @contextmanager
    def reading(self, version: str | None = None) -> Iterator[None]:
        """DataError for what the library raises in the block, which reads this `version` (None: looks for the newest)."""
        try:
            yield
        except (DataError, SpecError, ImportError):
            raise
        except Exception as error:
            if version is None:
                raise problems.NO_TABLE(format=self.format, path=self.shown, got=one_line(error)) from error
            raise self.gone(version, one_line(error)) from error

    def gone(self, version: str, reason: str) -> DataError:
        """The error for a version that cannot be read."""
        return problems.NO_VERSION(version=version, format=self.format, path=self.shown, got=reason)

    def _missing(self, error: ImportError) -> SpecError:
        return problems.TABLE_LIBRARY(format=self.format, got=error, extra=self.extra)

    def stored_files(self, version: str, root: str, paths: Sequence[str]) -> list[StoredFile]:
        """Files at these paths or URIs, most of them below `root`. DataError for one that is not there any more."""
        folders = [root if path.startswith(f"{root}/") else path.rpartition("/")[0] for path in paths]
        stored: dict[str, StoredFile] = {}
        for folder in dict.fromkeys(folders):
            inside = [path for path, home in zip(paths, folders, strict=True) if home == folder]
            names = [path.removeprefix(f"{folder}/") for path in inside]
            for path, file in zip(inside, DataLocation(folder, ()).named(names), strict=True):
                if file is None:
                    raise self.gone(version, f"its file {path!r} is not there any more")
                stored[path] = file
        return [stored[path] for path in paths]


@dataclass(frozen=True)
class NumberedVersion(Snapshot):
    """A table at a path or a URI whose versions are numbers. `storage_options` are those of its format's library."""

    uri: str | os.PathLike[str]
    version: int | None = None
    storage_options: Mapping[str, str] | None = field(default=None, repr=False)

    @property
    def location(self) -> str:
        return os.fspath(self.uri)

    @property
    def named_version(self) -> str | None:
        return None if self.version is None else str(self.version)

    @property
    def options(self) -> dict[str, str] | None:
        """`storage_options` as the library takes them."""
        return None if self.storage_options is None else dict(self.storage_options)


def selected_columns(columns: Sequence[str] | None, available: Sequence[str]) -> list[str]:
    """The columns to read, in the order of `columns`. A missing one is left to `TableFiles.columns`, which names it in its error."""
    return [name for name in columns or available if name in available] or list(available)


def contents_digest(parts: Iterable[Any]) -> str:
    """A digest of what a version consists of."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{part!r}\n".encode())
    return digest.hexdigest()[:32]


def in_path_order(paths: Sequence[str]) -> list[int]:
    """The places of these paths, by which files are taken in the order of their paths."""
    return sorted(range(len(paths)), key=lambda i: PurePosixPath(paths[i]))
