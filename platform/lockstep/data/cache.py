"""What took a pass over files to find, kept in the user's cache by the files' identity, so that it is found once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path


def cached(kind: str, identity: str, find: Callable[[], str]) -> str:
    """What `find` gave when it was first called for this `identity`, which changes with all that it looks at."""
    path = _cache() / kind / hashlib.sha256(identity.encode()).hexdigest()
    try:
        return path.read_text()
    except OSError:  # not there, or not readable: it is found again
        found = find()
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(found)
        aside.replace(path)
    except OSError:
        pass  # a home that cannot be written costs the time to read the files again, and nothing else
    return found


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lockstep")
