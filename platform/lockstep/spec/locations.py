"""Where the paths and URIs of a spec lead: each made to mean the same from every working directory."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

RECORD_OFF = "off"
"""The value of `record.uri` that keeps a run out of MLflow."""


def absolute(path: str) -> str:
    """A path from the root on; a URI stays as it is."""
    return path if "://" in path else str(Path(path).expanduser().absolute())


def storage_location(given: str) -> str:
    """A checkpoint storage: a path from the root on, also where it was given as a file:// URI of this machine, or another URI as it is."""
    uri = urlsplit(given)
    local = uri.scheme == "file" and uri.netloc in {"", "localhost"} and not uri.query
    return absolute(unquote(uri.path) if local and "://" in given else given)


def absolute_weights(given: str) -> str:
    """A run id stays as it is: a word of hexadecimal digits that is no file here."""
    return given if re.fullmatch("[0-9a-f]{32}", given) and not Path(given).exists() else absolute(given)


def tracking_uri(given: str | None) -> str:
    """The tracking URI where `given` is what was asked for: else MLFLOW_TRACKING_URI, else a file in the working directory."""
    return _absolute_uri(given or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db")


def _absolute_uri(uri: str) -> str:
    """A tracking URI that means the same from every working directory."""
    if uri.partition(":")[0] in {RECORD_OFF, "databricks", "databricks-uc", "uc"}:
        return uri
    scheme, separator, rest = uri.partition(":///")
    if separator and scheme.startswith("sqlite") and rest and rest != ":memory:":
        return f"{scheme}:///{Path(rest).expanduser().absolute()}"
    if uri.startswith("file:") and not uri.startswith("file:/"):
        return Path(uri.removeprefix("file:")).absolute().as_uri()
    return uri if ":" in uri else absolute(uri)
