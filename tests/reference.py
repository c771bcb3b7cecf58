"""The pages that are made of the code, and the parts of pages: `make docs`, or `python -m tests.reference`.

docs/job-reference.md is made of the docstrings of what a job is written with. In other pages a comment begins a table that is
made of one in the code; it ends with the first blank line.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import FunctionType
from typing import Any

import lockstep
from lockstep import errors, exit_codes
from lockstep.job import interface

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "job-reference.md"


def table_of(path: str, kind: str) -> str:
    """The table that a comment asks for: of exit codes, or of the problems of a room that are errors of a kind."""
    module = importlib.import_module("lockstep." + path.removesuffix(".py").replace("/", "."))
    if module is exit_codes:
        return exit_codes.table()
    problems = [value for value in vars(module).values() if isinstance(value, errors.Problem)]
    return errors.table(problem for problem in problems if problem.section == kind)


HEAD = """# Every part of a job

What a job is written with, as its docstrings say it; [Writing a job](writing-a-job.md) shows how it goes together. This page is generated:
`make docs` writes it anew, and a test holds it against the code.

`model`, `train_data` and `loss` (or `embed` and `batch_loss`) have to be written, and everything else has a default. No method is told a rank, a device or a
number of workers.
"""


def reference() -> str:
    """The text of the page."""
    return "\n".join(
        [
            HEAD,
            *_class(lockstep.Job),
            *_class(lockstep.Loss),
            *_class(lockstep.Term),
            *_class(lockstep.Mean),
            *_rest(),
        ]
    )


def _class(kind: type) -> Iterator[str]:
    yield f"## `lockstep.{kind.__name__}`\n"
    yield _text(kind) + "\n"
    if kind is not lockstep.Job:
        fields = inspect.get_annotations(kind).items()
        yield "\n".join(f"- `{name}: {annotation}`" for name, annotation in fields) + "\n"
        return
    for name, method in vars(kind).items():
        if isinstance(method, FunctionType) and (not name.startswith("_") or name == "__init__"):
            yield from _function(method)


def _rest() -> Iterator[str]:
    yield "## `lockstep.Params`\n"
    yield _text(lockstep.Params) + "\n"
    yield "## `lockstep.Placement`\n"
    yield _below("Placement") + "\n"
    yield "## `lockstep.rng`\n"
    yield from _function(lockstep.rng, heading=False)


def _function(function: Any, *, heading: bool = True) -> Iterator[str]:
    source = textwrap.dedent(inspect.getsource(function))
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.FunctionDef)
    signature = "\n".join(source.splitlines()[: node.body[0].lineno - 1])
    if heading:
        yield f"### `{node.name}`\n"
    yield f"```python\n{signature} ...\n```\n"
    yield _text(function) + "\n"


def _text(documented: Any) -> str:
    return inspect.cleandoc(documented.__doc__ or "")


def _below(name: str) -> str:
    """The text below a name of the module: an alias has no docstring of its own."""
    body = ast.parse(inspect.getsource(interface)).body
    for node, after in pairwise(body):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            assert isinstance(after, ast.Expr)
            assert isinstance(after.value, ast.Constant)
            return inspect.cleandoc(str(after.value.value))
    raise LookupError(name)


_MADE = re.compile(
    r"(<!-- made by `make docs` of platform/lockstep/(\S+)(?: \((\w+)\))? -->\n)\n.*?\n(?=\n|\Z)", re.DOTALL
)


def pages() -> Iterator[tuple[Path, str]]:
    """Each page that is made, or has a table that is, with the text that it should have."""
    yield PAGE, reference()
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if _MADE.search(text):
            yield page, _MADE.sub(lambda match: f"{match[1]}\n{table_of(match[2], match[3])}\n", text)


if __name__ == "__main__":
    for page, text in pages():
        page.write_text(text, encoding="utf-8")
