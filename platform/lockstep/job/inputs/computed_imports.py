"""What the modules of a job ask `importlib.import_module` and loaders of files for while they are imported themselves: names that no reading of them tells.

A module is imported once in a process, and may keep nothing of what it asked for but a value, as in `WIDTH = import_module(f"configs.{NAME}").WIDTH`. So the
names are noted for as long as the process lives, and are the same for each run in it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from types import FrameType, ModuleType
from typing import Any, cast

from lockstep.job.frames import is_of_the_job

_BETWEEN = frozenset({"importlib", "lockstep.job.inputs.imports"})
"""Modules whose frames are between whoever asks and the import."""

_asked = dict[str, set[str]]()
"""Names of modules or their paths, by the file of the module whose import asked for them."""


def asked_by(file: str) -> Iterable[str]:
    """The names, or paths, of the modules that the module of a file asked for while it was imported, directly or by a function of the job."""
    return sorted(_asked.get(file, ()))


def absolute(name: str, package: str) -> str:
    """The name of a module that is asked for from within a package."""
    try:
        return importlib.util.resolve_name(name, package)
    except ImportError:  # told by the import itself
        return name


def watch_computed_imports() -> None:
    """Have them noted in this process from now on. An `import` statement does not come by here."""
    by_names, loaders = (
        cast(Any, importlib)._bootstrap,
        cast(Any, importlib)._bootstrap_external._LoaderBasics,
    )
    import_by_name, execute = by_names._gcd_import, loaders.exec_module
    if hasattr(import_by_name, "_lockstep"):
        return

    def by_name(name: str, package: Any = None, level: int = 0) -> Any:
        if (file := _importing(sys._getframe(1))) is not None:
            _asked.setdefault(file, set()).add(absolute("." * level + name, package or ""))
        return import_by_name(name, package, level)

    def of_file(loader: Any, module: ModuleType) -> None:
        # The import system comes by here as well, from a frame of its own. A loader of an archive has no path.
        path = getattr(loader, "path", None)
        if path is not None and (file := _importing(sys._getframe(1))) is not None:
            _asked.setdefault(file, set()).add(str(path))
        execute(loader, module)

    by_name._lockstep = True  # type: ignore[attr-defined]
    by_names._gcd_import, loaders.exec_module = by_name, of_file


def _importing(frame: FrameType | None) -> str | None:
    """The file of the module that is being imported, where it and whoever asks are the job's."""
    while frame is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    if frame is None or not is_of_the_job(frame.f_code.co_filename):
        return None
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return None if frame is None or not is_of_the_job(frame.f_code.co_filename) else frame.f_code.co_filename
