"""Where in the job's own code something went wrong: the innermost frame that is neither a library's nor Lockstep's."""

from __future__ import annotations

import os
import sysconfig
from functools import cache
from pathlib import Path

from lockstep.job.inputs.distributions import distribution_of

_PACKAGES = frozenset({"site-packages", "dist-packages"})
"""Folders of what is installed, wherever the interpreter finds them: its own, or those below a virtual environment."""


def place_in_job(error: BaseException) -> str:
    """`, jobs/digits/job.py:41 in loss`, or nothing where no frame of the traceback is the job's."""
    import traceback  # here, since `import lockstep` comes by

    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_of_the_job(frame.filename):
            return f", {_shown(frame.filename)}:{frame.lineno} in {frame.name}"
    return ""


@cache
def is_of_the_job(file: str) -> bool:
    """Whether a file is neither Python's or Lockstep's nor installed, both by where it was found and by where it lies."""
    paths = (os.path.abspath(file), os.path.realpath(file))  # noqa: PTH100 - the first is not to follow links
    return not file.startswith("<") and not any(
        is_installed(Path(path)) or path.startswith(_not_of_the_job()) for path in paths
    )


def is_installed(path: Path) -> bool:
    """Whether a file or a package's folder is where packages are installed, or in another folder that a distribution was installed into."""
    return not _PACKAGES.isdisjoint(path.parts) or distribution_of(path) is not None


@cache
def _not_of_the_job() -> tuple[str, ...]:
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
