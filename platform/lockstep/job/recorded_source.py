"""Importing a job from files that are handed over, as a run has recorded them, in place of those that lie on the path."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import ModuleType


def module_name(path: str) -> str:
    """The module of a recorded file: `jobs/digits/job.py` is `jobs.digits.job`, `models/__init__.py` is `models`."""
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def source_digest(source: Mapping[str, bytes]) -> str:
    """`job_source_digest` of recorded files, given by their paths below the source root."""
    digest = hashlib.sha256()
    for name, path in sorted((module_name(path), path) for path in source):
        digest.update(f"{name}\n".encode())
        digest.update(source[path])
    return digest.hexdigest()


_OF_LOCKSTEP = "lockstep/hf/"
"""The one room of Lockstep that has jobs: a run of such a job has its files."""


def shadows(source: Iterable[str]) -> list[str]:
    """Which of these files would stand in for a module of Python's library or of Lockstep: those are not imported from a record."""
    return [path for path in source if _shadows(path) and not path.startswith(_OF_LOCKSTEP)]


def _shadows(path: str) -> bool:
    top = module_name(path).partition(".")[0]
    return top == "lockstep" or top in sys.stdlib_module_names


@contextmanager
def imported_from(source: Mapping[str, bytes], temporary: str | None = None) -> Iterator[None]:
    """While the block runs, the modules of these files are imported from them; those that were imported before come back after it.

    Files that `shadows` names are left out. They are written below `temporary`; default: where temporary files are.
    """
    left_out = set(shadows(source))
    source = {path: content for path, content in source.items() if path not in left_out}
    names = {module_name(path) for path in source}
    names |= {name for name in sys.modules if any(name.startswith(f"{parent}.") for parent in names)}
    local_files = {str(Path.cwd() / path) for path in source}  # whatever the job calls them
    names |= {name for name, file in _files() if file in local_files}
    saved_modules = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    with tempfile.TemporaryDirectory(prefix="lockstep-source-", dir=temporary) as folder:
        for path, content in source.items():
            target = Path(folder, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        sys.path.insert(0, folder)
        searched = list(_searched_by_packages(names))
        for top, paths in searched:
            paths.insert(0, str(Path(folder, top)))
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.path[:] = [path for path in sys.path if not path.startswith(folder)]  # the job's own as well
            for top, paths in searched:
                paths.remove(str(Path(folder, top)))
            names |= {name for name, file in _files() if file.startswith(f"{folder}{os.sep}")}
            for name in names:
                sys.modules.pop(name, None)
                _in_parent(name, saved_modules.get(name))
            sys.modules.update(saved_modules)
            importlib.invalidate_caches()


def _files() -> list[tuple[str, str]]:
    """The modules that are imported from a file, with their files."""
    return [
        (name, str(vars(module).get("__file__") or ""))
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
    ]


def _searched_by_packages(names: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Packages that are imported and stay, as Lockstep does, with the paths at which they look for the modules `names`."""
    for top in sorted({name.partition(".")[0] for name in names}):
        paths = getattr(sys.modules.get(top), "__path__", None)
        if isinstance(paths, list):  # a package without an __init__ goes by sys.path itself
            yield top, paths


def _in_parent(name: str, module: ModuleType | None) -> None:
    """Put a module back where `from package import module` finds it, or take it away there."""
    package, _, leaf = name.rpartition(".")
    parent = sys.modules.get(package)
    if parent is not None and module is not None:
        setattr(parent, leaf, module)
    elif parent is not None and hasattr(parent, leaf):
        delattr(parent, leaf)
