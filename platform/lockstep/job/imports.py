"""What a job imports and no reading of its source finds: modules over a changed `sys.path`, and by names that it computes.

It must be the same whatever else the process has imported, in this run or before it, for it is part of the run's identity.
So a module counts where the job's own code names, holds or asks for it, not where it is merely there.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, cast

from lockstep.job.frames import is_of_the_job
from lockstep.job.source import MAIN_MODULE, file_of, imports_of, job_sources, root_of

FIELD = "job.source."
"""How the identity's field of such a file begins; its path below the job's root follows."""

_NOTED = "_lockstep_imports"
"""The attribute of a job that has what it asked for."""

_BY_NAME = frozenset({"import_module", "__import__", "exec_module", "load_module"})
"""Functions that import what they are given a name of."""


@contextmanager
def imports_noted(found: set[str]) -> Iterator[None]:
    """Note what the code of the block asks to be imported, by module name, or by file where it is loaded from one.

    A request counts whether or not the module is there already, so a second run in a process notes what the first one did. What a module
    asks for while it is imported itself does not count: that is read from the module.
    """
    importing, thread = False, threading.get_ident()

    @contextmanager
    def outermost(*names: str) -> Iterator[None]:
        nonlocal importing
        if importing or threading.get_ident() != thread:
            yield
            return
        importing = True
        try:
            yield
            found.update(names)
        finally:
            importing = False

    by_names, loaders = (
        cast(Any, importlib)._bootstrap,
        cast(Any, importlib)._bootstrap_external._LoaderBasics,
    )
    import_statement, import_by_name = builtins.__import__, by_names._gcd_import
    load_file = loaders.exec_module

    def statement(  # with the names of the arguments of `__import__`
        name: str,
        globals: Any = None,  # noqa: A002
        locals: Any = None,  # noqa: A002
        fromlist: Any = (),
        level: int = 0,
    ) -> ModuleType:
        package = (globals or {}).get("__package__") or ""
        origin = _absolute("." * level + name, package)
        with outermost(origin, *(f"{origin}.{one}" for one in fromlist or ())):
            return import_statement(name, globals, locals, fromlist, level)

    def by_name(name: str, package: Any = None, level: int = 0) -> Any:
        with outermost(_absolute("." * level + name, package or "")):
            return import_by_name(name, package, level)

    def of_file(loader: Any, module: ModuleType) -> None:
        with outermost(str(getattr(loader, "path", ""))):
            load_file(loader, module)

    builtins.__import__, by_names._gcd_import, loaders.exec_module = statement, by_name, of_file
    try:
        yield
    finally:
        builtins.__import__, by_names._gcd_import = import_statement, import_by_name
        loaders.exec_module = load_file


def imports_of_job(job: object) -> AbstractContextManager[None]:
    """Note what the code of the block asks for as asked for by a job."""
    return imports_noted(note_imports(job, ()))


def note_imports(job: object, asked: Iterable[str]) -> set[str]:
    """Add to what a job asked for. Returns all of it."""
    noted: set[str] = vars(job).setdefault(_NOTED, set())
    noted.update(asked)
    return noted


def imported_by(use: str, job: object) -> dict[str, bytes]:
    """`imported_files` of a job whose data and model were made."""
    return imported_files(use, vars(job).get(_NOTED, ()))


def imported_files(use: str, noted: Iterable[str]) -> dict[str, bytes]:
    """The files that a job is made of beside `job_sources`, by their paths below its root. The job and its model were made, and asked for `noted`."""
    module = use.partition(":")[0]
    root = root_of(module)
    if root is None:
        return {}
    roots = [root, *([Path.cwd()] if module == MAIN_MODULE else [])]  # a notebook's modules lie beside it
    known = {path.resolve() for path in job_sources(use).values()}
    found: dict[str, bytes] = {}
    seen, waiting = set[str](), [*job_sources(use), *noted]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        path = _path(name, root)
        below = None if path is None else _below(path, roots)
        if path is None or below is None:
            continue
        if path.resolve() not in known:
            found[below] = path.read_bytes()
        waiting += _further(name, path)
    return dict(sorted(found.items()))


def source_fields(files: Mapping[str, bytes]) -> dict[str, str]:
    """The fields of the identity for these files."""
    return {f"{FIELD}{path}": hashlib.sha256(content).hexdigest() for path, content in files.items()}


def recorded_beside(fields: Mapping[str, Any]) -> dict[str, str]:
    """The sha256 of the files that an identity has in fields of their own, by path below the job's root."""
    return {name.removeprefix(FIELD): str(value) for name, value in fields.items() if name.startswith(FIELD)}


def files_here(use: str, paths: Iterable[str]) -> dict[str, bytes]:
    """What lies at these paths below the job's root."""
    root = root_of(use.partition(":")[0])
    found = [(path, root / path) for path in paths] if root is not None else []
    return {path: file.read_bytes() for path, file in found if file.is_file()}


def _further(name: str, path: Path) -> Iterator[str]:
    """The modules that a module names or holds, and its packages."""
    if name.endswith(".py"):
        yield from imports_of(path, path.stem)
        return
    yield from imports_of(path, name)
    if "." in name:
        yield name.rpartition(".")[0]
    for key, value in list(vars(sys.modules[name]).items()) if name in sys.modules else ():
        if isinstance(value, ModuleType):
            # A package holds whichever of its modules anybody has imported.
            if value.__name__ != f"{name}.{key}":
                yield value.__name__
        elif isinstance(value, FunctionType | type):
            yield str(value.__module__)
    if path.name == "__init__.py" and _fills_itself(path.read_bytes()):
        yield from (f"{name}.{one.stem}" for one in path.parent.glob("*.py") if one != path)
        yield from (f"{name}.{one.parent.name}" for one in path.parent.glob("*/__init__.py"))


@lru_cache(maxsize=1024)
def _fills_itself(source: bytes) -> bool:
    """Whether a package imports modules by computed names when it is imported, as one that registers all its modules does.

    Which ones is not known, so that all of them count.
    """
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):  # it is named, and cannot be imported
        return False
    functions = {
        node.name for node in body if isinstance(node, ast.FunctionDef) and _calls_one(node, _BY_NAME)
    }
    defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return any(_calls_one(node, _BY_NAME | functions) for node in body if not isinstance(node, defined))


def _calls_one(tree: ast.AST, names: frozenset[str] | set[str]) -> bool:
    """Whether code calls a function of one of these names, or one that is given the package's `__path__`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = getattr(node.func, "id", getattr(node.func, "attr", None))
        given = {one.id for one in node.args if isinstance(one, ast.Name)}
        if called in names or "__path__" in given:
            return True
    return False


def _path(name: str, root: Path) -> Path | None:
    """The file of a module: the one that was imported, or else would be. None for what is no file of Python's."""
    if name.endswith(".py"):
        return Path(name)
    if name == "__main__":  # whichever program this is
        return None
    module = sys.modules.get(name)
    if isinstance(module, ModuleType):
        file = vars(module).get("__file__")
        return Path(file) if isinstance(file, str) and file.endswith(".py") else None
    if name.partition(".")[0] in sys.stdlib_module_names:
        return None
    return file_of(name, root) or file_of(name, _root_or_none(name))


def _root_or_none(name: str) -> Path | None:
    try:
        return root_of(name)
    except (ImportError, ValueError):  # `__main__`, and what has no name
        return None


def _below(path: Path, roots: Iterable[Path]) -> str | None:
    """The path from the first of the roots that it lies below; None for one that is elsewhere, or no code of the job's."""
    if not path.is_file() or not is_of_the_job(str(path)):
        return None
    for root in roots:
        for folder, one in ((root.absolute(), path.absolute()), (root.resolve(), path.resolve())):
            if one.is_relative_to(folder):
                return one.relative_to(folder).as_posix()
    return None


def _absolute(name: str, package: str) -> str:
    try:
        return importlib.util.resolve_name(name, package)
    except ImportError:  # told by the import itself
        return name
