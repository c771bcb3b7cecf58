"""The source of a job, read without running it: which files it is made of, and whether it is there at all."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

from lockstep.errors import nearest
from lockstep.job import problems
from lockstep.job.frames import is_installed, is_of_the_job

MAIN_MODULE = "lockstep_main"
"""The module of a class of `__main__`: a run whose `job.use` begins with it has its source in its record and nowhere else."""


def job_source_digest(use: str) -> str:
    """sha256 over the files of `job_sources`."""
    return _digest(job_sources(use))


def _digest(files: Mapping[str, Path]) -> str:
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        digest.update(f"{name}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def job_sources(use: str) -> dict[str, Path]:
    """File by module name: the job's module, its packages, and what they import from below the same root.

    Lockstep itself is known by its version: of a job that comes with it, the files of its own room. Beside an installed job lies
    whatever else is installed: it has the files of its own package.
    """
    module = use.partition(":")[0]
    root = root_of(module)
    return _followed(
        [module], root, module, within=module.partition(".")[0] if _is_installed(root, module) else ""
    )


def imported_sources(text: str, root: Path) -> dict[str, Path]:
    """File by module name: what a module of this text imports from below `root`, and what that imports."""
    return _followed(list(_imported(ast.parse(text), "")), root, "")


def _is_installed(root: Path | None, module: str) -> bool:
    return root is not None and is_installed(root.absolute() / module.partition(".")[0])


def _followed(waiting: list[str], root: Path | None, job: str, within: str = "") -> dict[str, Path]:
    """File by module name: these modules, their packages, and what they import from below the root, for the job in the module `job`.

    With `within` only what lies in the package of this name.
    """
    files: dict[str, Path] = {}
    while waiting:
        name = waiting.pop()
        if name in files or not _is_of_job(name, job) or (within and name.partition(".")[0] != within):
            continue
        if (path := file_of(name, root)) is None:
            continue
        files[name] = path
        waiting += imports_of(path, name)
        if "." in name:
            waiting.append(name.rpartition(".")[0])
    return files


_read_module = SourceFileLoader.get_code

_COMPILED = dict[Path, bytes]()
"""By file, the sha256 of what this process has compiled of it last."""


def _compiled(loader: SourceFileLoader, fullname: str) -> CodeType | None:
    path = loader.get_filename(fullname)
    if not is_of_the_job(path):
        return _read_module(loader, fullname)
    content = loader.get_data(path)
    _COMPILED[Path(path).resolve()] = hashlib.sha256(content).digest()
    code: CodeType = loader.source_to_code(content, path)
    return code


def changed_since_import(files: Iterable[Path]) -> Path | None:
    """The first of these files that holds something else than what this process has compiled of it."""
    for path in files:
        compiled = _COMPILED.get(path)
        if compiled is not None and path.is_file() and hashlib.sha256(path.read_bytes()).digest() != compiled:
            return path
    return None


def import_from_source() -> None:
    """From here on have this process compile the job's modules, wherever they lie, from their files and never take bytecode for them.

    Python takes bytecode for that of a file whose size and whole second of change are as they were, as after an edit within a second, `cp -p` or
    `rsync -t`, and unchecked bytecode for that of any. The identity has what the file holds.
    """
    SourceFileLoader.get_code = _compiled  # type: ignore[assignment, method-assign]


_AT_IMPORT = dict[Path, dict[Path, str]]()
"""By the file of a job's module, the sha256 of the job's files as they were when this process imported it."""


def note_files(module: str) -> None:
    """Before a job's module is imported: note what its files hold. Of those that are imported already what was noted first counts."""
    noted = {path: digests for files in _AT_IMPORT.values() for path, digests in files.items()}
    digests = dict[Path, str]()
    try:
        sources = job_sources(f"{module}:")
        for name, path in sources.items():
            earlier_digest = noted.get(path.resolve()) if name in sys.modules else None
            digests[path.resolve()] = earlier_digest or hashlib.sha256(path.read_bytes()).hexdigest()
    except (ValueError, OSError):  # told by the import
        return
    if module in sources:
        _AT_IMPORT[sources[module].resolve()] = digests


def changed_file(use: str) -> Path | None:
    """A file of a job that is no longer what it was when this process imported the job."""
    job_file = getattr(sys.modules.get(use.partition(":")[0]), "__file__", None)
    noted = {} if job_file is None else _AT_IMPORT.get(Path(job_file).resolve(), {})
    for path, digest in noted.items():
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            return path
    return None


def class_of(use: str) -> tuple[str, str]:
    """The module and the name of the class of a `job.use`. Raises JobImportError where it has not this form."""
    module, colon, class_name = use.partition(":")
    if not colon or not module or not class_name or "/" in module:
        raise problems.FORM(got=use)
    if module == "__main__":
        raise problems.OF_SCRIPT(got=use)
    return module, class_name


def check_job_source(use: str) -> None:
    """Find in milliseconds what would fail in a worker: no such module, a syntax error, no such class.

    A name that is not plainly in the file is left to the import itself. Raises JobImportError.
    """
    module, class_name = class_of(use)
    path = file_of(module, root_of(module))
    if path is None:
        if _importable(module):
            return
        if module == MAIN_MODULE:
            raise problems.OF_RECORD(got=use)
        raise problems.NO_MODULE(got=module, folder=sys.path[0] or ".")
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError as error:
        raise problems.SYNTAX(file=path, line=error.lineno, got=error.msg) from error
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    mentioned = {
        (node.asname or node.name).partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.alias)
    }
    assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if class_name not in classes | mentioned | assigned and "*" not in mentioned and classes:
        raise problems.NO_CLASS(module=module, got=class_name, hint=nearest(class_name, classes))


def _is_of_job(name: str, module: str) -> bool:
    """Whether the source of a module is that of the job in `module`, and not Lockstep's."""
    parts = name.split(".")
    return parts[0] != "lockstep" or (len(parts) > 1 and parts[:2] == module.split(".")[:2])


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def root_of(module: str) -> Path | None:
    """The folder that holds the top-level module or package of a module.

    A package without an `__init__.py` may have parts in several folders: that one which has the module.
    """
    top = module.partition(".")[0]
    loaded = sys.modules.get(top)
    spec = getattr(loaded, "__spec__", None) or importlib.util.find_spec(top)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        roots = [Path(part).parent for part in spec.submodule_search_locations]
        return next((root for root in roots if file_of(module, root) is not None), roots[0])
    return Path(spec.origin).parent if spec.origin else None


def file_of(name: str, root: Path | None) -> Path | None:
    """The file of a module below a folder, if it is there; of a package and a module of one name the package, as Python imports them."""
    if root is None:
        return None
    base = root.joinpath(*name.split("."))
    return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()), None)


def imports_of(path: Path, name: str) -> tuple[str, ...]:
    """The modules that the module `name` of a file may import, as its statements have them."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return _imports_in(path.read_bytes(), package)


@lru_cache(maxsize=1024)
def _imports_in(source: bytes, package: str) -> tuple[str, ...]:
    """The modules that a module of `package` may import; a trial of a sweep asks for the same ones as the trial before.

    One that Python cannot read imports nothing: it is only named, as in a branch for another version of Python, and told if it is imported.
    """
    try:
        return tuple(_imported(ast.parse(source), package))
    except (SyntaxError, ValueError):  # a null byte was a ValueError once
        return ()


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            origin = ".".join(part for part in (base, node.module or "") if part)
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)
