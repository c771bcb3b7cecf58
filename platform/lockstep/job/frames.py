"""Where in the job's own code something went wrong: the innermost frame that is neither a library's nor Lockstep's."""

from __future__ import annotations

import os
import sysconfig
import traceback
from functools import cache
from pathlib import Path


def place_in_job(error: BaseException) -> str:
    """`, jobs/digits/job.py:41 in loss`, or nothing where no frame of the traceback is the job's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_theirs(frame.filename):
            return f", {_shown(frame.filename)}:{frame.lineno} in {frame.name}"
    return ""


@cache
def _is_theirs(file: str) -> bool:
    path = os.path.realpath(file)
    return not file.startswith("<") and not any(path.startswith(folder + os.sep) for folder in _not_theirs())


@cache
def _not_theirs() -> tuple[str, ...]:
    """The folders of Python, of what is installed, and of Lockstep."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = {os.path.realpath(sysconfig.get_path(name)) for name in names}
    return (*installed, os.path.realpath(Path(__file__).parents[1]))


def _shown(file: str) -> str:
    """A path from the current folder where it lies below, else as it is."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
