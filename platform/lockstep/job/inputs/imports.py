"""What a job imports and no reading of its own folder finds: modules over a changed `sys.path` or from another folder on it, those by
names that it computes, and the distributions from which all the others come.

It must be the same whatever else the process has imported, in this run or before it, for it is part of the run's identity.
So a module counts where the job's own code names, holds or asks for it, not where it is merely there.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, cast

from lockstep.job import problems
from lockstep.job.frames import is_of_the_job
from lockstep.job.inputs.computed_imports import absolute, asked_by
from lockstep.job.inputs.distributions import distribution_of
from lockstep.job.source import MAIN_MODULE, changed_since_import, file_of, imports_of, job_sources, root_of

FIELD = "job.source."
"""How the identity's field of such a file begins; its path below the job's root follows."""

_NOTED = "_lockstep_imports"
"""The attribute of a job that has what it asked for."""

_BY_NAME = frozenset({"import_module", "__import__", "exec_module", "load_module"})
"""Functions that import what they are given a name of."""


_PICKLES_TO_HASH = str(Path("torch", "_inductor", "codecache.py"))
"""It names what has no module of its own, such as `torch.contiguous_format`, by the first module of the process in which that is found."""


@dataclass(slots=True)
class Asked:
    """Modules that were asked to be imported, and those of them that code of the job asked for, and no library in its stead."""

    modules: set[str] = field(default_factory=set)
    by_job: set[str] = field(default_factory=set)

    def add(self, names: Iterable[str], *, by_job: bool) -> None:
        """Note a request."""
        self.modules.update(names)
        if by_job:
            self.by_job.update(names)

    def join(self, asked: Asked) -> None:
        """Note all that was asked for elsewhere."""
        self.modules |= asked.modules
        self.by_job |= asked.by_job


@contextmanager
def imports_noted(asked: Asked) -> Iterator[None]:
    """Note what the code of the block asks to be imported, by module name, or by file where it is loaded from one.

    A request counts whether or not the module is there already, so a second run in a process notes what the first one did. What a module
    asks for while it is imported itself does not count: that is read from the module.
    """
    importing, thread = False, threading.get_ident()

    @contextmanager
    def outermost(file: str, *names: str) -> Iterator[None]:
        """Note the names that a file asks for, unless an import is under way."""
        nonlocal importing
        if importing or threading.get_ident() != thread or file.endswith(_PICKLES_TO_HASH):
            yield
            return
        importing = True
        try:
            yield
            asked.add(names, by_job=is_of_the_job(file))
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
        module = globals or {}
        origin = absolute("." * level + name, module.get("__package__") or "")
        with outermost(
            str(module.get("__file__", "<>")), origin, *(f"{origin}.{member}" for member in fromlist or ())
        ):
            return import_statement(name, globals, locals, fromlist, level)

    def by_name(name: str, package: Any = None, level: int = 0) -> Any:
        caller = sys._getframe(1)
        if caller.f_globals.get("__name__") == "importlib" and caller.f_back is not None:
            caller = caller.f_back
        with outermost(caller.f_code.co_filename, absolute("." * level + name, package or "")):
            return import_by_name(name, package, level)

    def of_file(loader: Any, module: ModuleType) -> None:
        path = str(getattr(loader, "path", "<>"))
        with outermost(path, path):
            load_file(loader, module)

    builtins.__import__, by_names._gcd_import, loaders.exec_module = statement, by_name, of_file
    try:
        yield
    finally:
        builtins.__import__, by_names._gcd_import = import_statement, import_by_name
        loaders.exec_module = load_file


def imports_of_job(job: object) -> AbstractContextManager[None]:
    """Note what the code of the block asks for as asked for by a job."""
    return imports_noted(note_imports(job))


def note_imports(job: object, asked: Asked | None = None) -> Asked:
    """Add to what a job asked for. Returns all of it."""
    noted: Asked = vars(job).setdefault(_NOTED, Asked())
    noted.join(asked or Asked())
    return noted


class Imported(NamedTuple):
    """What a job is made of beside `job_sources`."""

    files: dict[str, bytes]
    """Files that no distribution has installed: by their path below the job's root, or of their module where they lie elsewhere."""
    distributions: dict[str, str]
    """The versions of the distributions that its modules name, by name."""
    paths: frozenset[str]
    """Where all its files lie, `job_sources` included."""
    archives: frozenset[str] = frozenset()
    """The archives that it imports modules from."""
    libraries: frozenset[str] = frozenset()
    """The compiled modules that it imports and no distribution has installed."""


def imported_by(use: str, job: object) -> Imported:
    """What a job is made of whose data and model were made. SpecError where a file of it was changed after this process had imported it."""
    made_of = imported(use, note_imports(job))
    if (changed := changed_since_import(map(Path, sorted(made_of.paths)))) is not None:
        raise problems.SOURCE_CHANGED(got=changed)
    return made_of


def imported(use: str, asked: Asked) -> Imported:
    """What a job is made of that asked for these modules."""
    module = use.partition(":")[0]
    root = root_of(module)
    if root is None:
        return Imported({}, {}, frozenset())
    roots = roots_of(use)
    sources = job_sources(use)
    job_paths = {path.resolve() for path in sources.values()}
    files, installed = dict[str, bytes](), dict[str, Path]()
    archives, libraries = set[str](), set[str]()
    visited, waiting, named = (
        set[str](),
        [*sources, *asked.modules, *(_OF_THE_INTERPRETER & sys.modules.keys())],
        set(asked.by_job),
    )
    while waiting:
        name = waiting.pop()
        if name in visited:
            continue
        visited.add(name)
        path = _path(name, root)
        if path is None or not path.is_file():
            if (file := _other_file(name)) is not None:
                (archives if path else libraries).add(file)
            continue
        path = Path(os.path.abspath(path))  # noqa: PTH100 - without `..`, and links as they are
        if not is_of_the_job(str(path)):
            installed[name] = path
            continue
        if path.resolve() not in job_paths:
            job_paths.add(path.resolve())
            files[_key(files, name, path, roots)] = path.read_bytes()
        further = set(_further(name, path))
        named |= further
        waiting += further
    owners = {distribution_of(path) for name, path in installed.items() if name in named}
    distributions = {
        distribution.name: distribution.version
        for distribution in owners
        if distribution is not None and distribution.name not in _TOLD
    }
    return Imported(
        dict(sorted(files.items())),
        dict(sorted(distributions.items())),
        frozenset(map(str, job_paths)),
        frozenset(archives),
        frozenset(libraries),
    )


def _other_file(name: str) -> str | None:
    """The archive that has an imported module, or the compiled file that is one. None for what is installed, and for Python's own."""
    file = None if name == "__main__" else getattr(sys.modules.get(name), "__file__", None)
    if not isinstance(file, str) or not is_of_the_job(file):
        return None
    path = Path(file)
    return next((str(candidate) for candidate in (path, *path.parents) if candidate.is_file()), None)


def roots_of(use: str) -> list[Path]:
    """The folders that a job's files are named from, the job's own first."""
    module = use.partition(":")[0]
    root = root_of(module)
    others = [Path.cwd()] if module == MAIN_MODULE else []  # a notebook's modules lie beside it
    if root is None:
        return others
    file = file_of(module, root)
    linked = None if file is None else _linked_root(file, root)
    return [root, *([] if linked is None else [linked]), *others]


def _linked_root(file: Path, root: Path) -> Path | None:
    """Where a link to the job, or to one of its packages, leads: the folder that stands for the root there, for what the job reads beside its real file. None where it is no link."""
    real = file.resolve()
    if real.is_relative_to(root.resolve()):
        return None
    folders = zip(file.relative_to(root).parent.parts[::-1], real.parent.parts[::-1], strict=False)
    same = sum(1 for _ in takewhile(lambda names: names[0] == names[1], folders))
    return real.parents[same]


_OF_THE_INTERPRETER = frozenset({"sitecustomize", "usercustomize"})
"""Modules that Python itself imports, for every program: they may change anything in any other."""

_TOLD = frozenset({"torch", "numpy", "lockstep-train"})
"""Distributions whose versions every identity has."""


def _key(files: Mapping[str, bytes], name: str, path: Path, roots: Iterable[Path]) -> str:
    """The path that stands for a file in the identity and in the record."""
    module = f"{name.replace('.', '/')}{'/__init__' if path.name == '__init__.py' else ''}.py"
    key = below(path, roots) or (path.name if name.endswith(".py") else module)
    while key in files:  # a module of that name lies elsewhere too
        key = f"elsewhere/{key}"
    return key


def source_fields(files: Mapping[str, bytes]) -> dict[str, str]:
    """The fields of the identity for these files."""
    return {f"{FIELD}{path}": hashlib.sha256(content).hexdigest() for path, content in files.items()}


def distribution_fields(distributions: Mapping[str, str]) -> dict[str, str]:
    """The fields of the identity for these distributions."""
    return {f"distribution.{name}": version for name, version in distributions.items()}


def recorded_beside(fields: Mapping[str, Any]) -> dict[str, str]:
    """The sha256 of the files that an identity has in fields of their own, by path below the job's root."""
    return {name.removeprefix(FIELD): str(value) for name, value in fields.items() if name.startswith(FIELD)}


def files_here(use: str, paths: Iterable[str]) -> dict[str, bytes]:
    """What lies at these paths below the job's root, or is the module of such a path."""
    root = root_of(use.partition(":")[0])
    candidates = [(path, _file_at(path, root)) for path in paths] if root is not None else []
    return {path: file.read_bytes() for path, file in candidates if file is not None and file.is_file()}


def _file_at(path: str, root: Path) -> Path | None:
    if (root / path).is_file():
        return root / path
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return _path(name, root)


_GENERATED = "torch._inductor.runtime.compile_tasks."
"""What torch's compiler writes is a module too, wherever its folder of programs is."""


def new_modules(known: Iterable[str]) -> list[str]:
    """The modules of this process that are not among `known`, that no distribution has installed and that torch's compiler has not written."""
    names = {name for name in sys.modules.keys() - set(known) if not name.startswith(_GENERATED)}
    files = ((name, getattr(sys.modules.get(name), "__file__", None)) for name in sorted(names))
    return [name for name, file in files if isinstance(file, str) and is_of_the_job(file)]


def _further(name: str, path: Path) -> Iterator[str]:
    """The modules that a module names or holds, and its packages."""
    yield from asked_by(str(path))
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
            file = vars(value).get("__file__")
            if value.__name__ not in sys.modules and isinstance(file, str) and file.endswith(".py"):
                yield file  # it was loaded from one, and is known by no name
        elif isinstance(value, FunctionType | type):
            yield str(value.__module__)
    if path.name == "__init__.py" and _fills_itself(path.read_bytes()):
        yield from (f"{name}.{sibling.stem}" for sibling in path.parent.glob("*.py") if sibling != path)
        yield from (f"{name}.{sibling.parent.name}" for sibling in path.parent.glob("*/__init__.py"))


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
        argument_names = {argument.id for argument in node.args if isinstance(argument, ast.Name)}
        if called in names or "__path__" in argument_names:
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


def below(path: Path, roots: Iterable[Path]) -> str | None:
    """The path from the first of the roots that it lies below; None for one that is elsewhere."""
    for root in roots:
        if (inside := path.absolute()).is_relative_to(folder := root.absolute()):
            return inside.relative_to(folder).as_posix()
        if (inside := path.resolve()).is_relative_to(folder := root.resolve()):
            return inside.relative_to(folder).as_posix()
    return None
