"""Opens the storage that a path or a URI names."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from lockstep.checkpoint import problems
from lockstep.checkpoint.storage.interface import Storage
from lockstep.checkpoint.storage.local import LocalStorage
from lockstep.redaction_marks import is_redacted

_IN_ENVIRONMENT = {"AWS_ACCESS_KEY_ID", "AWS_PROFILE"}


def open_storage(uri: str) -> Storage:
    """The storage at a path or at a `file:`, `s3:` or `gs:` URI. SpecError for any other.

    One that comes from a record, without its credentials, is opened with those of the environment. SpecError where there are none.
    """
    scheme, separator, _ = uri.partition("://")
    if not separator:
        return LocalStorage(Path(uri))
    if scheme == "file":
        return LocalStorage(Path(unquote(urlsplit(uri).path)))
    if scheme in {"s3", "gs"}:
        from lockstep.checkpoint.storage.object_store import ObjectStorage

        return ObjectStorage(_with_credentials(uri) if is_redacted(uri) else uri)
    raise problems.SCHEME(got=scheme)


def _with_credentials(uri: str) -> str:
    """A recorded URI without what stands for its credentials, which are looked for in the environment then."""
    scheme, _, address = uri.partition("://")
    bare = f"{scheme}://{address.rpartition('@')[2]}"
    if is_redacted(bare) or not _IN_ENVIRONMENT & os.environ.keys():
        raise problems.CREDENTIALS_HIDDEN(got=uri)
    return bare
