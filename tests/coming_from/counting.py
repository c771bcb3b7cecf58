"""Lines of code: those that are neither blank nor all comment, without docstrings."""

from __future__ import annotations

import ast
from pathlib import Path


def lines_of(path: Path) -> int:
    """How many lines of code a file of Python or YAML has."""
    text = path.read_text()
    skipped = _docstrings(ast.parse(text)) if path.suffix == ".py" else set()
    lines = enumerate(text.splitlines(), start=1)
    return sum(
        number not in skipped and bool(line.strip()) and not line.strip().startswith("#")
        for number, line in lines
    )


def _docstrings(tree: ast.Module) -> set[int]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            text = node.body[0]
            found |= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return found
