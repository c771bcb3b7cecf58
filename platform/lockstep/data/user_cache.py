"""Results of passes over files, kept in the user's cache by the files' identity, so that each pass is made once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lockstep.files import write_text


def cached(kind: str, identity: str, find: Callable[[], str]) -> str:
    """The result of `find` for this `identity`, which changes with everything that `find` reads; it is called once."""
    path = cache_path(kind, identity)
    try:
        return path.read_text()
    except OSError:  # not there, or not readable: it is found again
        text = find()
    # A home that cannot be written costs the time to read the files again, and nothing else.
    with suppress(OSError):
        write_text(path, text)  # flushed: an empty file would pass for what was found
    return text


def cache_path(kind: str, identity: str) -> Path:
    """The path at which the result for this `identity` is kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lockstep")
    return cache / kind / hashlib.sha256(identity.encode()).hexdigest()
