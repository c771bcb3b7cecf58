"""A storage in an object store, through `pyarrow.fs`.

A put is whole or it is not there, so nothing is written aside. There is no rename either, and so no fence at
the moment of publishing: an attempt is asked whether it is the current one right before (see `run_folder`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from lockstep.checkpoint.errors import LostFileError, TakenError
from lockstep.checkpoint.storage import Item, Reading, Written, hashed
from lockstep.errors import SpecError, StorageError

if TYPE_CHECKING:
    import pyarrow.fs as pafs  # 0.1 s to import: only who keeps checkpoints in an object store pays


class ObjectStorage:
    """The bucket and prefix of a URI; pyarrow reads credentials and options from it, or from the environment."""

    def __init__(self, uri: str) -> None:
        import pyarrow as pa
        import pyarrow.fs as pafs

        parts = urlsplit(uri)
        self.shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        try:
            self._files, root = pafs.FileSystem.from_uri(_in_one_request(uri))
        except (OSError, ValueError, pa.ArrowException) as error:
            reason = _one_line(error).replace(uri, self.shown)
            raise SpecError(f"checkpoint.storage: cannot open {self.shown!r}: {reason}") from None
        self._root = root.rstrip("/")

    def write(self, path: str, pieces: Iterable[bytes | memoryview], *, staging: str) -> Written:
        with self._told("write", path):
            try:
                with self._files.open_output_stream(self._at(path)) as stream:
                    return hashed(pieces, stream.write)
            except BaseException:
                with suppress(Exception):  # closing has put what there was; no manifest names it
                    self._files.delete_file(self._at(path))
                raise

    def create(self, path: str, content: bytes) -> None:
        """Exclusive but for two that create at the same time: the one that reads back another's content loses."""
        if self.exists(path):
            raise TakenError(f"checkpoint.storage: {self._shown(path)!r} is there already")
        self.write(path, [content], staging="")
        if self.read(path) != content:
            raise TakenError(f"checkpoint.storage: {self._shown(path)!r} was created by another process")

    def read(self, path: str) -> bytes:
        with self._told("read", path), self._files.open_input_stream(self._at(path)) as stream:
            return cast(bytes, stream.read())

    @contextmanager
    def open(self, path: str) -> Iterator[Reading]:
        with self._told("read", path), self._files.open_input_file(self._at(path)) as file:
            yield file

    def list(self, folder: str) -> list[Item]:
        import pyarrow.fs as pafs

        with self._told("list", folder):
            selector = pafs.FileSelector(self._at(folder), allow_not_found=True)
            return sorted(_item(info) for info in self._files.get_file_info(selector))

    def exists(self, path: str) -> bool:
        import pyarrow.fs as pafs

        with self._told("look at", path):
            found = self._files.get_file_info(self._at(path)).type
            return bool(found != pafs.FileType.NotFound)

    def delete(self, path: str, *, staging: str | None = None) -> None:
        with self._told("delete", path):
            self._files.delete_file(self._at(path))

    def delete_folder(self, folder: str) -> None:
        if not self.list(folder) and self.exists(folder):
            with self._told("delete", folder):
                self._files.delete_dir(self._at(folder))

    def begin_staging(self, folder: str) -> None:
        """Nothing: an object is never seen half written."""

    def end_staging(self, folder: str) -> None:
        """Nothing."""

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/")

    def _shown(self, path: str) -> str:
        return f"{self.shown.rstrip('/')}/{path}"

    @contextmanager
    def _told(self, verb: str, path: str) -> Iterator[None]:
        """Turn pyarrow's errors into StorageError, one line each."""
        import pyarrow as pa

        try:
            yield
        except (OSError, pa.ArrowException) as error:
            kind = LostFileError if isinstance(error, FileNotFoundError) else StorageError
            raise kind(
                f"checkpoint.storage: cannot {verb} {self._shown(path)!r}: {_one_line(error)}"
            ) from error


def _in_one_request(uri: str) -> str:
    """The URI with the option that a file of a few megabytes is put in one request instead of three."""
    if not uri.startswith("s3://") or "allow_delayed_open" in uri:
        return uri
    return f"{uri}{'&' if urlsplit(uri).query else '?'}allow_delayed_open=true"


def _item(info: pafs.FileInfo) -> Item:
    import pyarrow.fs as pafs

    is_folder = info.type == pafs.FileType.Directory
    return Item(info.base_name, is_folder, 0 if is_folder else info.size)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
