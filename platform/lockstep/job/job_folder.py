"""The folder that a job is imported from, which is searched before all others, and what must not lie in it.

A file there is imported in place of a module of that name, by Python's own library and by those of Lockstep as well. Which of them have been imported
before is chance: a run is refused where one of the folder's files has the name of a module that they need.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES, BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path
from types import ModuleType

from lockstep.interpreters import search_path
from lockstep.job import problems

_DISTRIBUTION = "lockstep-train"

_SUFFIXES = (".py", *EXTENSION_SUFFIXES)

_NEEDED_BY_NOBODY = frozenset(
    {
        *("antigravity", "chunk", "ensurepip", "graphlib", "idlelib", "lib2to3", "mailbox", "sched"),
        *("symtable", "test", "this", "trace", "turtle", "turtledemo", "venv"),
        *("example", "isympy", "pylab"),
    }
)
"""Modules of Python's and of Lockstep's libraries that none of them imports. A job may have its own `test.py`, as many do."""


def search_job_folder(*, first: bool = False) -> None:
    """Have modules looked up in the current folder before all others, or with `first` false where the path has it already.

    SpecError where the folder has a file that would be imported in place of a module which Lockstep needs.
    """
    refuse_hidden_modules()
    folder = str(Path.cwd())
    if folder not in (sys.path[:1] if first else sys.path):
        sys.path.insert(0, folder)


def refuse_hidden_modules() -> None:
    """SpecError where a file of the current folder would be imported in place of a module of Python's or of a library that Lockstep needs."""
    for module, file in sorted(_modules_in(Path.cwd())):
        if (hidden := _hidden_by(file, module)) is not None:
            raise problems.HIDES_MODULE(file=file, hidden=hidden)


def _modules_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """The modules and packages that an import finds in a folder. A folder without an `__init__` is none that hides another."""
    try:
        entries = [*os.scandir(folder)]
    except OSError:  # nothing is imported from it either
        return
    for entry in entries:
        if entry.name.endswith(_SUFFIXES):
            yield entry.name.partition(".")[0], Path(entry.path)
        elif entry.name.isidentifier() and (file := Path(entry.path, "__init__.py")).is_file():
            yield entry.name, file


def _hidden_by(file: Path, module: str) -> str | None:
    """What a file of the current folder hides, in a few words, if Lockstep needs it."""
    if module in _NEEDED_BY_NOBODY or BuiltinImporter.find_spec(module) or FrozenImporter.find_spec(module):
        return None  # what is in the interpreter itself comes before every folder
    here = os.path.realpath(Path.cwd())
    hidden = PathFinder.find_spec(module, [path for path in search_path() if os.path.realpath(path) != here])
    if hidden is None or os.path.realpath(hidden.origin or "") == os.path.realpath(file):
        return None
    if module in sys.stdlib_module_names:
        return f"Python's own module {module!r}"
    if module == "lockstep":
        return "Lockstep itself"
    return f"the library {module!r}, which Lockstep needs" if module in _required_modules() else None


@cache
def _required_modules() -> frozenset[str]:
    """The top-level modules of all that Lockstep is installed with, extras left out."""
    modules, seen, waiting = set[str](), set[str](), [_DISTRIBUTION]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # for another system or Python
            continue
        modules |= {file.parts[0].partition(".")[0] for file in distribution.files or ()}
        requirements = (line for line in distribution.requires or () if "extra ==" not in line)
        waiting += [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in requirements]
    return frozenset(modules)


def not_imported(module: ModuleType) -> Path | None:
    """The file of the current folder that has the name of an imported module and is not the one that was imported, if there is one."""
    imported = os.path.realpath(getattr(module, "__file__", None) or "")
    files = (path for name, path in _modules_in(Path.cwd()) if name == module.__name__)
    return next((path for path in files if os.path.realpath(path) != imported), None)
