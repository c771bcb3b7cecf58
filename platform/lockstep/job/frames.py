"""Where in the job's own code something went wrong: the innermost frame that is neither a library's nor Lockstep's."""

from __future__ import annotations

import os
import sysconfig
import traceback
from functools import cache
from pathlib import Path

_PACKAGES = frozenset({"site-packages", "dist-packages"})
"""Folders of what is installed, wherever the interpreter finds them: its own, or those below a virtual environment."""


def place_in_job(error: BaseException) -> str:
    """`, jobs/digits/job.py:41 in loss`, or nothing where no frame of the traceback is the job's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_theirs(frame.filename):
            return f", {_shown(frame.filename)}:{frame.lineno} in {frame.name}"
    return ""


@cache
def _is_theirs(file: str) -> bool:
    path = os.path.realpath(file)
    installed = not _PACKAGES.isdisjoint(Path(path).parts)
    return not (file.startswith("<") or installed or path.startswith(_not_theirs()))


@cache
def _not_theirs() -> tuple[str, ...]:
    """The folders of Python and of Lockstep, each with a separator at its end."""
    folders = [
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")),
        str(Path(__file__).parents[1]),
    ]
    return tuple(os.path.realpath(folder) + os.sep for folder in folders)


def _shown(file: str) -> str:
    """A path from the current folder where it lies below, else as it is."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
