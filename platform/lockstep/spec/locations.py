"""Where the paths and URIs of a spec lead: each made to mean the same from every working directory."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import SplitResult, quote, unquote, urlsplit

from lockstep.spec import problems
from lockstep.spec.messages import shown

RECORD_OFF = "off"
"""The value of `record.uri` that keeps a run out of MLflow."""


_LONGEST_NAME = 255
"""Bytes: more is refused by every file system of Linux."""


def absolute(path: str) -> str:
    """A path from the root on; a URI stays as it is. SpecError for one that no file system takes."""
    if "://" in path:
        return path
    from_root = _from_root(path)
    longest = max(len(name.encode(errors="replace")) for name in from_root.parts)
    if longest > _LONGEST_NAME:
        raise problems.LONG_PATH(got=shown(path), bytes=longest)
    return str(from_root)


def _from_root(path: str) -> Path:
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:  # `~name` of a user who does not exist
        raise problems.NO_HOME(got=shown(path)) from error


def storage_location(location: str) -> str:
    """A checkpoint storage: a path from the root on, also where it was given as a file:// URI of this machine, or another URI as it is.

    SpecError for what would lead to another place than it says.
    """
    if not location.removeprefix("file://").strip():
        raise problems.STORAGE_EMPTY(got=location)
    if slip := re.fullmatch("(file|s3|gs):/([^/].*)", location):
        expected = f"a path such as /{slip[2]}" if slip[1] == "file" else f"two, {slip[1]}://{slip[2]}"
        raise problems.STORAGE_SLASH(got=location, wanted=expected)
    try:
        uri = urlsplit(location)
    except ValueError as error:
        raise problems.STORAGE_NO_URI(got=shown(location), reason=error) from error
    if "://" not in location:
        return absolute(location)
    if uri.scheme != "file":
        _check_key(location, uri)
        return location
    if uri.netloc not in {"", "localhost"}:
        raise problems.STORAGE_HOST(got=location, host=uri.netloc, path=uri.path)
    return absolute(location if uri.query else unquote(uri.path))


def _check_key(location: str, uri: SplitResult) -> None:
    """SpecError for a URI of an object store whose key is another one there than it says."""
    if uri.fragment:
        raise problems.STORAGE_KEY(
            got=location, reason="what follows # is no part of a key", remedy="write %23 for #"
        )
    strange = next(
        (c for c in uri.path if not c.isascii() or not c.isprintable() or c in ' "<>\\^`{|}'), None
    )
    if strange is not None:
        raise problems.STORAGE_KEY(
            got=location,
            reason=f"{strange!r} stands for nothing in a URI",
            remedy=f"write {quote(strange)} for it",
        )
    parts = unquote(uri.path).strip("/").split("/") if uri.path.strip("/") else []
    if any(part in ("", ".", "..") for part in parts) or uri.path.startswith("//"):
        raise problems.STORAGE_KEY(
            got=location,
            reason="a key has a part that is empty, . or ..",
            remedy=f"write {uri.scheme}://{uri.netloc}/{'/'.join(part for part in parts if part not in ('', '.', '..'))}",
        )


def absolute_weights(weights: str) -> str:
    """A run id stays as it is: a word of hexadecimal digits that is no file here."""
    return (
        weights if re.fullmatch("[0-9a-f]{32}", weights) and not Path(weights).exists() else absolute(weights)
    )


def tracking_uri(uri: str | None) -> str:
    """The tracking URI, absolute: `uri`, else MLFLOW_TRACKING_URI, else a file in the working directory. SpecError for what can be no URI."""
    named = unchecked_uri(uri)
    check_server(named)
    return named


def unchecked_uri(uri: str | None) -> str:
    """The same, whatever it is: for what a message says of it, and for a report."""
    return _absolute_uri(uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db")


def check_server(uri: str) -> None:
    """SpecError for a URI whose host or port can be none."""
    before, at, after = uri.rpartition("@")
    without_user = f"{before.partition('://')[0]}://***@{after}" if at else uri  # who may have a password
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise problems.RECORD_NO_URI(got=without_user, reason="its host cannot be understood") from error
    if parts.scheme not in {"http", "https"}:  # a password of a database may have what would end a host
        return
    try:
        is_port = parts.port != 0
    except ValueError:
        is_port = False
    if not is_port:
        raise problems.RECORD_NO_URI(got=without_user, reason="its port is no number from 1 to 65535")
    if not parts.hostname:
        raise problems.RECORD_NO_URI(got=without_user, reason="it names no host")


def _absolute_uri(uri: str) -> str:
    """A tracking URI that means the same from every working directory."""
    if uri.partition(":")[0] in {RECORD_OFF, "databricks", "databricks-uc", "uc"}:
        return uri
    scheme, separator, path = uri.partition(":///")
    if separator and scheme.startswith("sqlite") and path and path != ":memory:":
        return f"{scheme}:///{_from_root(path)}"
    if uri.startswith("file:") and not uri.startswith("file:/"):
        return Path(uri.removeprefix("file:")).absolute().as_uri()
    return uri if ":" in uri else str(_from_root(uri))
