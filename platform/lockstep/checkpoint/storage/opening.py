"""Opens the storage that a path or a URI names."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from lockstep.checkpoint import problems
from lockstep.checkpoint.storage.interface import Storage
from lockstep.checkpoint.storage.local import LocalStorage


def open_storage(uri: str) -> Storage:
    """The storage at a path or at a `file:`, `s3:` or `gs:` URI. SpecError for any other."""
    scheme, separator, _ = uri.partition("://")
    if not separator:
        return LocalStorage(Path(uri))
    if scheme == "file":
        return LocalStorage(Path(unquote(urlsplit(uri).path)))
    if scheme in {"s3", "gs"}:
        from lockstep.checkpoint.storage.object_store import ObjectStorage

        return ObjectStorage(uri)
    raise problems.SCHEME(got=scheme)
