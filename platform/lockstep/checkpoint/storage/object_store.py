"""A storage in an object store, through `pyarrow.fs`.

A put is complete or absent, so nothing is written aside. There is no rename either, and so no fence at the moment
of publishing. Instead an attempt checks that it is the current one right before, and a request that is late all the same
has a name that no newer attempt uses (see `layout`).

What must be new is written with a condition (`If-None-Match`), which pyarrow does not offer: S3 is used through boto3.
In a store without conditions, each writer that wants a name announces it, and gives way if it sees another announcement.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qs, unquote, urlsplit

from lockstep.checkpoint import problems
from lockstep.checkpoint.errors import LostFileError
from lockstep.checkpoint.storage.interface import LARGEST_READ, Item, Reading, Written, filled, hashed
from lockstep.errors import StorageError
from lockstep.paths import OutsideError, relative

if TYPE_CHECKING:
    import pyarrow.fs as pafs  # 0.1 s to import, which only users of an object store should pay

_RIVAL = timedelta(seconds=60)
"""How long to respect a process that wants a name, by the store's own clock: it may have been killed meanwhile."""
_CONNECT_S, _SILENT_S, _ATTEMPTS = 10, 20, 3
"""How long a request to S3 may wait for a connection, and then for the next byte in either direction, and how often it is sent: a store that accepts it and never
answers is given up after a minute or so. A large upload that goes on is not cut."""
_CONFLICTS = {"PreconditionFailed", "ConditionalRequestConflict", "OperationAborted"}
_UNCONDITIONAL = {"NotImplemented", "InvalidRequest", "InvalidArgument"}


class ObjectStorage:
    """The bucket and prefix of a URI; pyarrow reads credentials and options from it, or from the environment."""

    fences = False

    def __init__(self, uri: str) -> None:
        import pyarrow as pa
        import pyarrow.fs as pafs

        parts = urlsplit(uri)
        if parts.scheme == "s3" and find_spec("boto3") is None:
            raise problems.BOTO3_MISSING()
        self._uri = uri
        self.shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        try:
            files, root = pafs.FileSystem.from_uri(_in_one_request(uri))
            self._files = _bounded(files) if parts.scheme == "s3" else files
        except (OSError, ValueError, pa.ArrowException) as error:
            reason = _one_line(error).replace(uri, self.shown)
            raise problems.CANNOT_OPEN(storage=self.shown, got=reason) from None
        self._root = root.rstrip("/")
        self._conditions = parts.scheme == "s3"

    def write(self, path: str, pieces: Iterable[bytes | memoryview], *, staging: str) -> Written:
        with self._storage_errors("write", path):
            try:
                with self._files.open_output_stream(self._at(path)) as stream:
                    return hashed(pieces, stream.write)
            except BaseException:
                with suppress(Exception):  # closing has put a partial object, in the place of what was there
                    self._files.delete_file(self._at(path))
                raise

    def create(self, path: str, content: bytes) -> None:
        if self._conditions:
            self._create_on_condition(path, content)
        if not self._conditions:
            self._create_alone(path, content)

    def put(self, path: str, content: bytes) -> None:
        with self._storage_errors("write", path), self._files.open_output_stream(self._at(path)) as stream:
            stream.write(content)

    def read(self, path: str) -> bytes:
        with self._storage_errors("read", path), self._files.open_input_stream(self._at(path)) as stream:
            content = cast(bytes, stream.read(LARGEST_READ + 1))
        if len(content) > LARGEST_READ:
            raise problems.TOO_LARGE(path=self._shown(path), got="more", wanted=LARGEST_READ)
        return content

    @contextmanager
    def open(self, path: str) -> Iterator[Reading]:
        with self._storage_errors("read", path), self._files.open_input_file(self._at(path)) as file:
            yield file

    def fill(self, path: str, start: int, buffer: memoryview) -> None:
        with self._storage_errors("read", path), self._files.open_input_file(self._at(path)) as file:
            file.seek(start)
            filled(file, buffer, self._shown(path))

    def list(self, folder: str) -> list[Item]:
        return sorted(_item(info) for info in self._infos(folder))

    def tree(self, folder: str) -> Mapping[str, Sequence[Item]]:
        folders: dict[str, Any] = {}
        start = len(self._at(folder)) + 1
        for info in self._infos(folder, recursive=True):
            item, (name, *inside) = _item(info), info.path[start:].split("/")
            if item.is_folder and not inside:
                folders.setdefault(name, [])
            elif len(inside) == 1 and not item.is_folder:
                folders.setdefault(name, []).append(item)
        return folders

    def exists(self, path: str) -> bool:
        import pyarrow.fs as pafs

        with self._storage_errors("look at", path):
            file_type = self._files.get_file_info(self._at(path)).type
            return bool(file_type != pafs.FileType.NotFound)

    def delete(self, path: str, *, staging: str | None = None) -> None:
        with self._storage_errors("delete", path):
            self._files.delete_file(self._at(path))

    def delete_folder(self, folder: str) -> None:
        if not self.list(folder) and self.exists(folder):
            with self._storage_errors("delete", folder):
                self._files.delete_dir(self._at(folder))

    def begin_staging(self, folder: str, owner: str) -> None:
        """Nothing: an object is never seen half written."""

    def end_staging(self, folder: str) -> None:
        """Nothing."""

    def _create_on_condition(self, path: str, content: bytes) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        bucket, _, key = self._at(path).partition("/")
        try:
            self._client.put_object(Bucket=bucket, Key=key, Body=content, IfNoneMatch="*")
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code", "")
            if code in _CONFLICTS:
                self._refuse_unless_own(path, content)
            elif code in _UNCONDITIONAL:
                self._conditions = False
            else:
                raise self._failed("create", path, error) from error
        except BotoCoreError as error:
            raise self._failed("create", path, error) from error

    def _refuse_unless_own(self, path: str, content: bytes) -> None:
        """TakenError, unless the object is our own: a put that was repeated because its answer was lost finds it. Contents that matter contain a token."""
        with suppress(LostFileError):
            if content and self.read(path) == content:
                return
        raise problems.TAKEN(path=self._shown(path))

    def _create_alone(self, path: str, content: bytes) -> None:
        """Announce that we want the name, look, and take it if nobody else is seen: of two, the later one sees the earlier."""
        folder, _, name = path.rpartition("/")
        marker = f"{name}.{uuid.uuid4().hex}.wanted"
        self.put(f"{folder}/{marker}", b"")
        try:
            mtimes = {info.base_name: info.mtime for info in self._infos(folder)}
            markers = [
                base_name
                for base_name, at in mtimes.items()
                if base_name.startswith(f"{name}.")
                and base_name.endswith(".wanted")
                and mtimes[marker] - at < _RIVAL
            ]
            if name in mtimes or markers != [marker]:
                raise problems.TAKEN(path=self._shown(path))
            self.put(path, content)
        finally:
            self.delete(f"{folder}/{marker}")

    @cached_property
    def _client(self) -> Any:
        """A boto3 client of the same store. It finds credentials where pyarrow does: in the URI, or else in the environment."""
        import boto3
        from botocore.config import Config

        parts = urlsplit(self._uri)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        endpoint = query.get("endpoint_override")
        if endpoint and "://" not in endpoint:
            endpoint = f"{query.get('scheme', 'https')}://{endpoint}"
        virtual = not endpoint or query.get("force_virtual_addressing") == "true"
        credentials = {"aws_access_key_id": parts.username, "aws_secret_access_key": parts.password}
        return boto3.session.Session().client(
            "s3",
            endpoint_url=endpoint,
            region_name=query.get("region"),
            config=Config(
                s3={"addressing_style": "auto" if virtual else "path"},
                connect_timeout=_CONNECT_S,
                read_timeout=_SILENT_S,
                retries={"mode": "standard", "max_attempts": _ATTEMPTS},
            ),
            **{name: unquote(value) for name, value in credentials.items() if value},
        )

    def _infos(self, folder: str, *, recursive: bool = False) -> Sequence[pafs.FileInfo]:
        import pyarrow.fs as pafs

        with self._storage_errors("list", folder):
            selector = pafs.FileSelector(self._at(folder), allow_not_found=True, recursive=recursive)
            return cast("Sequence[pafs.FileInfo]", self._files.get_file_info(selector))

    def _at(self, path: str) -> str:
        """The key of a name in the storage. BadCheckpointError where it leads out: some stores resolve `..`."""
        try:
            return f"{self._root}/{relative(path)}" if path else self._root
        except OutsideError as error:
            raise problems.KEY_LEADS_OUT(got=error) from error

    def _shown(self, path: str) -> str:
        return f"{self.shown.rstrip('/')}/{path}"

    def _failed(self, verb: str, path: str, error: BaseException) -> StorageError:
        problem = problems.LOST if isinstance(error, FileNotFoundError) else problems.FAILED
        return problem(verb=verb, path=self._shown(path), got=_one_line(error))

    @contextmanager
    def _storage_errors(self, verb: str, path: str) -> Iterator[None]:
        """Turn pyarrow's errors into StorageError, one line each."""
        import pyarrow as pa

        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise self._failed(verb, path, error) from error


def _in_one_request(uri: str) -> str:
    """The URI with the option that puts a file of a few megabytes in one request instead of three."""
    if not uri.startswith("s3://") or "allow_delayed_open" in uri:
        return uri
    return f"{uri}{'&' if urlsplit(uri).query else '?'}allow_delayed_open=true"


def _bounded(files: pafs.FileSystem) -> pafs.FileSystem:
    """The same S3 with limits, which a URI cannot name: its options are those by which pyarrow pickles it."""
    import pyarrow.fs as pafs

    _, (options,) = files.__reduce__()
    limits = {"connect_timeout": _CONNECT_S, "request_timeout": _SILENT_S}
    retries = pafs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS)
    proxy = options["proxy_options"] if options["proxy_options"]["host"] else None
    return pafs.S3FileSystem(**{**options, **limits, "proxy_options": proxy, "retry_strategy": retries})


def _item(info: pafs.FileInfo) -> Item:
    import pyarrow.fs as pafs

    is_folder = info.type == pafs.FileType.Directory
    return Item(info.base_name, is_folder, 0 if is_folder else info.size)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
