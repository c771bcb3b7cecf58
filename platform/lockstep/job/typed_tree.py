"""A value as one canonical tree of plain JSON, from which it is read back with its types. The identity of a run is a digest of such trees.

Two values have the same tree if and only if they have the same kinds, the same order and the same bits. JSON by itself does not
tell a tuple from a list, bytes from text or one NaN from another, and whoever writes it may sort the names of a mapping. So only a
mapping of text whose names are sorted is a plain object; whatever JSON has no form for is an object with one name that begins with `$`.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_WHOLE = 2**53
"""Whole numbers from here on are written as text: readers of JSON other than Python's round them."""


_MARKS = frozenset({"int", "float", "str", "bytes", "tuple", "set", "frozenset", "mapping"})


class Opaque(NamedTuple):
    """A value of a kind of its own, as its tree has it: the name of its type, and what it holds as far as that is told."""

    kind: str
    content: Any

    def __repr__(self) -> str:
        return f"{self.kind}({self.content!r})"


def encoded(value: Any, convert: Callable[[Any], Any] | None = None) -> Any:
    """The tree of a value. A value of no built-in kind is first given to `convert`, which makes a built-in value or an `Opaque` of it. TypeError without one."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if abs(value) < _WHOLE else {"$int": str(value) if abs(value) < 10**600 else hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if kind is str:
        return value if _is_text(value) else {"$str": value.encode("utf-8", "surrogatepass").hex()}
    if kind is bytes:
        return {"$bytes": value.hex()}
    if kind is list:
        return [encoded(inner, convert) for inner in value]
    if kind is tuple:
        return {"$tuple": [encoded(inner, convert) for inner in value]}
    if kind in (set, frozenset):  # its order is another one in another process
        return {f"${kind.__name__}": sorted((encoded(inner, convert) for inner in value), key=text)}
    if kind is dict:
        return _mapping(value, convert)
    if kind is Opaque:
        if value.kind in _MARKS:
            raise ValueError(f"{value.kind!r} is a kind that has a form of its own")
        return {f"${value.kind}": encoded(value.content, convert)}
    if convert is None:
        raise TypeError(f"a {kind.__module__}.{kind.__qualname__} has no tree")
    return encoded(convert(value), convert)


def _mapping(value: dict[Any, Any], convert: Callable[[Any], Any] | None) -> Any:
    plain = all(type(key) is str and _is_text(key) and not key.startswith("$") for key in value)
    if plain and list(value) == sorted(value):
        return {key: encoded(inner, convert) for key, inner in value.items()}
    return {"$mapping": [[encoded(key, convert), encoded(inner, convert)] for key, inner in value.items()]}


def _is_text(value: str) -> bool:
    """Whether UTF-8 can hold it; a name of a file may have half a surrogate pair."""
    return value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)


def decoded(tree: Any) -> Any:
    """The value of a tree, down to its types."""
    if isinstance(tree, list):
        return [decoded(inner) for inner in tree]
    if not isinstance(tree, Mapping):
        return tree
    if not (len(tree) == 1 and (name := next(iter(tree))).startswith("$")):
        return {key: decoded(inner) for key, inner in tree.items()}
    content = tree[name]
    match name:
        case "$int":
            return int(content, 0)
        case "$float":
            return struct.unpack(">d", bytes.fromhex(content))[0]
        case "$str":
            return bytes.fromhex(content).decode("utf-8", "surrogatepass")
        case "$bytes":
            return bytes.fromhex(content)
        case "$tuple":
            return tuple(decoded(inner) for inner in content)
        case "$set":
            return {decoded(inner) for inner in content}
        case "$frozenset":
            return frozenset(decoded(inner) for inner in content)
        case "$mapping":
            return {decoded(key): decoded(inner) for key, inner in content}
    return Opaque(name.removeprefix("$"), decoded(content))


def text(tree: Any) -> str:
    """A tree as text, the same whichever way its names were ordered."""
    return json.dumps(tree, sort_keys=True, allow_nan=False, separators=(",", ":"))


def digest(tree: Any) -> str:
    """sha256 of a tree."""
    return hashlib.sha256(text(tree).encode("ascii")).hexdigest()
