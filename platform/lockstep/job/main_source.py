"""A job class of `__main__`, which a notebook's cell or a script defines: its source as a module that workers and the record import.

The module is made of whole statements, with their text: the class, and what its code names in `__main__`. Nothing of it comes
from the interpreter's memory, so it is the same however often and in whichever order the cells were run:
- imports, functions and classes are taken from the newest cell that defines them, or the one that their code is from;
- another value is taken from the cell of what uses it, or from any cell where it is a literal that the name still has;
- whatever else the code names is refused.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import symtable
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from lockstep.job import problems
from lockstep.job.source import MAIN_MODULE, imported_sources

_BUILTINS = frozenset(dir(builtins)) - {"get_ipython", "display"}  # the last two are a notebook's


def main_use(job_class: type, main: ModuleType | None = None) -> tuple[str, dict[str, bytes]]:
    """`job.use` of a class, and the files that it is imported from, by their paths below a source root; no files for a class of a module.

    For a class of `__main__` these are its own module, and the modules beside the notebook or script that it imports. JobImportError
    if its source is not available, or if it uses something that is not in its source.
    """
    main = main or sys.modules["__main__"]
    name = job_class.__qualname__
    if "." in name:
        raise problems.NESTED(got=name)
    if job_class.__module__ != "__main__":
        return f"{job_class.__module__}:{name}", {}
    if vars(main).get(name) is not job_class:
        raise problems.REPLACED(got=name)
    text = module_source(name, vars(main), cells_of(main, name))
    files = {f"{MAIN_MODULE}.py": text.encode()}
    for root in dict.fromkeys([_folder(main), Path.cwd()]):
        for module, path in imported_sources(text, root).items():
            if module.partition(".")[0] != "lockstep":
                files.setdefault(path.relative_to(root).as_posix(), path.read_bytes())
    return f"{MAIN_MODULE}:{name}", files


def cells_of(main: ModuleType, name: str) -> list[str]:
    """The text of `__main__`: a notebook's cells in the order in which they were run, or a script. JobImportError where there is none."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        return [str(cell) for cell in shell.history_manager.input_hist_parsed]
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).is_file():
        raise problems.NO_SOURCE(got=name)
    return ["".join(linecache.getlines(str(file)))]


def _folder(main: ModuleType) -> Path:
    file = getattr(main, "__file__", None)
    return Path(file).resolve().parent if file else Path.cwd()


def module_source(name: str, namespace: Mapping[str, Any], cells: Sequence[str]) -> str:
    """The text of a module with the class `name` and what it needs, out of `cells`. `namespace` is what `__main__` holds by now.

    JobImportError where the code names what no text gives.
    """
    slice_ = _Slice(namespace, cells)
    slice_.include(name, None)
    if slice_.missing:
        pronoun = "it" if len(slice_.missing) == 1 else "them"
        raise problems.SOURCE_MISSING(name=name, got=", ".join(sorted(slice_.missing)), them=pronoun)
    return slice_.text()


@dataclass(frozen=True, eq=False)
class _Statement:
    """A statement at the top of a cell."""

    cell: int
    node: ast.stmt
    text: str

    @cached_property
    def binds(self) -> frozenset[str]:
        return frozenset(_bound(self.node))

    @cached_property
    def changes(self) -> frozenset[str]:
        """Names of things of which it sets a part, as `TABLE["a"] = 1` does."""
        return frozenset(_changed(self.node))

    @cached_property
    def waits(self) -> bool:
        """Whether it has an `await` at the top, which a cell may have and a module may not."""
        return any(_awaits(self.node))

    @cached_property
    def needs(self) -> list[str]:
        return sorted(set(_needed(symtable.symtable(self.text, "<job>", "exec"))))

    @property
    def imports(self) -> bool:
        return isinstance(self.node, ast.Import | ast.ImportFrom)

    @property
    def defines(self) -> bool:
        return isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)

    def is_literal(self, value: Any) -> bool:
        """Whether it gives a name this very value, written out."""
        if not isinstance(self.node, ast.Assign | ast.AnnAssign) or self.node.value is None:
            return False
        try:
            written = ast.literal_eval(self.node.value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return False
        return type(written) is type(value) and repr(written) == repr(value)


class _Slice:
    """The statements that a module needs, each after those that it needs itself."""

    def __init__(self, namespace: Mapping[str, Any], cells: Sequence[str]) -> None:
        self.missing: set[str] = set()
        """Names that the code needs and that no statement defines as they are now."""
        self._namespace, self._cells = namespace, cells
        self._statements = [statement for i, cell in enumerate(cells) for statement in _statements(i, cell)]
        self._requested: set[tuple[str, int | None]] = set()
        self._begun: set[_Statement] = set()
        self._included: list[_Statement] = []

    def include(self, name: str, user: int | None) -> None:
        """Include what defines `name` for code in the cell `user`."""
        if (name, user) in self._requested:
            return
        self._requested.add((name, user))
        cells = [statement.cell for statement in self._statements if name in statement.binds]
        if name not in self._namespace or not cells:
            if name in self._namespace and name not in _BUILTINS:
                self.missing.add(name)
            return
        value = self._namespace[name]
        cell = self._cell_of_code(value, cells)
        statements = [statement for statement in self._statements if statement.cell == cell]
        imported = any(statement.imports for statement in statements if name in statement.binds)
        for statement in statements:
            defined = statement.imports or statement.defines or cell == user or statement.is_literal(value)
            if name in statement.binds and not defined:
                self.missing.add(name)
            elif name in statement.binds or (name in statement.changes and (cell == user or not imported)):
                self._include(name, statement)

    def _include(self, name: str, statement: _Statement) -> None:
        if statement.waits:
            self.missing.add(name)
        elif statement not in self._begun:
            self._begun.add(statement)
            for need in statement.needs:
                self.include(need, statement.cell)
            self._included.append(statement)

    def _cell_of_code(self, value: Any, cells: Sequence[int]) -> int | None:
        """The cell that a name's value is from; None, and the name missing, where its code is that of no cell."""
        code = _code(value)
        if code is None:
            return cells[-1]
        text = "".join(linecache.getlines(code.co_filename))
        matches = [cell for cell in cells if self._cells[cell].rstrip() == text.rstrip()]
        if not matches and text:
            self.missing.add(str(value.__name__))
            return None
        return matches[-1] if matches else cells[-1]

    def text(self) -> str:
        future = {statement.text for statement in self._statements if _is_future(statement.node)}
        imports = {statement.text for statement in self._included if statement.imports} - future
        body = [statement.text for statement in self._included if not statement.imports]
        parts = ["\n".join(sorted(future)), "\n".join(sorted(imports)), *body]
        return "\n\n\n".join(part for part in parts if part) + "\n"


def _statements(cell: int, text: str) -> Iterator[_Statement]:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return  # it never ran
    lines = text.splitlines()
    for previous, node in zip([None, *tree.body], tree.body, strict=False):
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        last = node.end_lineno or first
        shared = node.col_offset > 0 or (previous is not None and (previous.end_lineno or 0) >= first)
        shared = shared or any(each.lineno == last for each in tree.body if each is not node)
        yield _Statement(cell, node, ast.unparse(node) if shared else "\n".join(lines[first - 1 : last]))


def _bound(node: ast.AST) -> Iterator[str]:
    """The names that a statement defines at the top."""
    match node:
        case ast.Import():
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        case ast.ImportFrom():
            yield from (alias.asname or alias.name for alias in node.names)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name
        case ast.Name(ctx=ast.Store()):
            yield node.id
        case ast.AnnAssign(value=None) | ast.Lambda() | ast.comprehension() | ast.Expr():
            pass  # binds nothing, or only inside
        case ast.If() if "__name__" in {
            each.id for each in ast.walk(node.test) if isinstance(each, ast.Name)
        }:
            pass  # not run where the module is imported
        case _:
            if isinstance(node, ast.ExceptHandler) and node.name:
                yield node.name
            for child in ast.iter_child_nodes(node):
                yield from _bound(child)


def _awaits(node: ast.AST) -> Iterator[bool]:
    if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith):
        yield True
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _awaits(child)


def _changed(node: ast.AST) -> Iterator[str]:
    targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else ()
    if isinstance(node, ast.AugAssign):
        targets = [node.target]
    for target in targets:
        root: ast.expr = target
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        if isinstance(root, ast.Name) and root is not target:
            yield root.id


def _needed(table: symtable.SymbolTable) -> Iterator[str]:
    """The names at the top that code refers to."""
    top = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (top or symbol.is_global()):
            yield symbol.get_name()
    for inner in table.get_children():
        yield from _needed(inner)


def _code(value: Any) -> CodeType | None:
    """The code of a function or of a class's first method, where `__main__` has it in its text."""
    if isinstance(value, type) and value.__module__ == "__main__":
        methods = (vars(value)[name] for name in vars(value))
        functions = (inspect.unwrap(each) for each in methods if isinstance(each, FunctionType))
        return next(
            (f.__code__ for f in functions if f.__module__ == "__main__" and not _is_generated(f)), None
        )
    if (
        isinstance(value, FunctionType)
        and value.__module__ == "__main__"
        and not hasattr(value, "__wrapped__")
    ):
        return value.__code__
    return None


def _is_generated(function: FunctionType) -> bool:
    """Whether a library wrote the function, as dataclasses does."""
    return function.__code__.co_filename.startswith("<string>")


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"
