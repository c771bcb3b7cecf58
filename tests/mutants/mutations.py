"""Small mistakes in a module's source, one at a time: what a test that covers it should notice.

A call, a keyword argument or an assignment that is left out is one of them: what is wired wrong looks so. The public tools do not fit: cosmic-ray 8 leaves out nothing, and changes the working tree itself; mutmut 3 leaves out arguments and no calls, and puts a
switch into every function, which the processes that runs start would have to know of.
"""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

_OTHER: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


_ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_CLOCKS = ("running_s", "monotonic", "time")


class Mutant(NamedTuple):
    """A source with one mistake in the function `where`."""

    name: str
    """The same as long as the function has the same text there, wherever in the file it lies."""
    line: int
    source: str


class _Change(NamedTuple):
    kind: str
    node: ast.expr | ast.stmt
    text: str
    """What takes the place of the node."""


def mutants(source: str) -> list[Mutant]:
    """All mutants of a module, in the order of the source. Only bodies of functions are changed."""
    found, names = [], Counter[str]()
    sound = ast.dump(ast.parse(source))
    for where, function in _functions(ast.parse(source), ""):
        for change in _changes(function):
            before = ast.get_source_segment(source, change.node) or ""
            name = f"{where}: {change.kind}: {_short(before)} -> {_short(change.text)}"
            names[name] += 1
            numbered = name if names[name] == 1 else f"{name} #{names[name]}"
            changed = _replaced(source, change.node, change.text)
            if _differs(changed, sound):
                found.append(Mutant(numbered, change.node.lineno, changed))
    return found


def sampled(module: str, every: list[Mutant], most: int, seed: int) -> list[Mutant]:
    """Up to `most` of a module's mutants. A larger sample of the same seed has those of a smaller one."""
    drawn = random.Random(f"{seed} {module}").sample(every, len(every))
    return drawn[:most]


def _functions(node: ast.AST, where: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Each outermost function with its qualified name."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.FunctionDef):
            yield f"{where}{inner.name}", inner
        elif isinstance(inner, ast.ClassDef):
            yield from _functions(inner, f"{where}{inner.name}.")


def _changes(function: ast.FunctionDef) -> Iterator[_Change]:
    for statement in function.body:
        yield from _within(statement)


def _within(node: ast.AST) -> Iterator[_Change]:
    if isinstance(node, ast.JoinedStr | ast.Assert):  # words for a person; a claim of the source's own
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":  # such a claim, too
        return
    yield from _of(node)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_comment", "decorator_list"):
            continue
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, ast.AST):
                yield from _within(inner)


def _of(node: ast.AST) -> Iterator[_Change]:
    """The changes of this node itself."""
    match node:
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise() | ast.Delete():
            yield _Change("statement deleted", node, "pass")
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript() | ast.Tuple()]):
            if not isinstance(node.targets[0], ast.Tuple):
                yield _Change("statement deleted", node, "pass")
        case ast.Continue() | ast.Break():
            yield _Change("statement deleted", node, "pass")
        case ast.Return(value=ast.expr() as value) if not _is_none(value):
            yield _Change("None returned", node, "return None")
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield _Change("condition negated", test, f"(not ({ast.unparse(test)}))")
        case ast.comprehension(ifs=conditions):
            for condition in conditions:
                yield _Change("condition negated", condition, f"(not ({ast.unparse(condition)}))")
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield _Change("condition negated", node, f"({ast.unparse(operand)})")
        case ast.BoolOp(op=op, values=values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield _Change("and/or swapped", node, f"({ast.unparse(ast.BoolOp(other, values))})")
        case ast.Compare(left=left, ops=ops, comparators=right):
            for i, op in enumerate(ops):
                if type(op) in _ORDERED and any(map(_reads_clock, (left, *right))):
                    continue
                swapped = [*ops[:i], _OTHER[type(op)](), *ops[i + 1 :]]
                changed = ast.unparse(ast.Compare(left, swapped, right))
                yield _Change("comparison swapped", node, f"({changed})")
        case ast.Constant(value=bool() as value):
            yield _Change("constant changed", node, repr(not value))
        case ast.Constant(value=int() | float() as value):
            for other in (value + 1, value - 1):
                yield _Change("constant changed", node, f"({other!r})")
        case ast.Call(func=called, args=given, keywords=keywords):
            for i, keyword in enumerate(keywords):
                if keyword.arg == "strict":
                    continue
                rest = [*keywords[:i], *keywords[i + 1 :]]
                yield _Change("argument left out", node, ast.unparse(ast.Call(called, given, rest)))


def _reads_clock(value: ast.expr) -> bool:
    """Whether a clock is read in it: none ever shows the very instant that tells `<` from `<=`."""
    calls = (node.func for node in ast.walk(value) if isinstance(node, ast.Call))
    names = (getattr(called, "attr", getattr(called, "id", "")) for called in calls)
    return any(name in _CLOCKS for name in names)


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _short(text: str) -> str:
    return " ".join(text.split())[:110]


def _replaced(source: str, node: ast.expr | ast.stmt, text: str) -> str:
    """The source with `text` in the node's place."""
    lines = source.encode().splitlines(keepends=True)
    assert node.end_lineno is not None and node.end_col_offset is not None
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    return (before + text.encode() + after).decode()


def _differs(changed: str, sound: str) -> bool:
    """Whether it is another program than the one of this dump, and one at all."""
    try:
        return ast.dump(ast.parse(changed)) != sound
    except SyntaxError:
        return False
