"""How a new interpreter that runs a module of Lockstep's is started, whatever files lie beside the job.

Python puts the current folder, or what `PYTHONPATH` names, before its own library: with a `random.py` there, an interpreter dies of its first imports.
A process that needs no code of the job finds the modules of this one behind Python's own and the installed ones. One that does has the search path of this
process, from when it has started.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def search_path() -> list[str]:
    """Where this process looks modules up, without the empty entry, which is another folder in a process that changes its own."""
    return [path for path in sys.path if path]


def library_words(module: str, *arguments: str) -> list[str]:
    """The command that runs `main` of a module that needs no code of the job, with `library_environment`."""
    program = f"import sys; sys.path += [path for path in {search_path()!r} if path not in sys.path]; from {module} import main; main()"
    return [sys.executable, "-P", "-c", program, *arguments]


def job_words(module: str, *arguments: str) -> list[str]:
    """The command that runs `main` of a module that imports the job. Modules are looked up there as in this process."""
    program = f"import sys; sys.path[:] = {search_path()!r}; from {module} import main; main()"
    return [sys.executable, "-P", "-c", program, *arguments]


def library_environment() -> dict[str, str]:
    """The variables of this process, but the current folder in `PYTHONPATH`."""
    environment = dict(os.environ)
    if "PYTHONPATH" in environment:
        folders = environment.pop("PYTHONPATH").split(os.pathsep)
        if kept := [folder for folder in folders if folder and not _is_here(folder)]:
            environment["PYTHONPATH"] = os.pathsep.join(kept)
    return environment


def _is_here(folder: str) -> bool:
    return os.path.realpath(folder) == os.path.realpath(Path.cwd())
