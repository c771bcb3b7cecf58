"""Parses JSON and YAML that may come from anywhere, within bounds on bytes, depth, numbers and aliases.

What is beyond a bound, or is not of the format, is a ValueError of one line, and nothing else: no RecursionError, no MemoryError, no
value that a later step stumbles over, such as a whole number with more digits than Python writes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

T = TypeVar("T")

MOST_BYTES = 64 << 20
"""Of a document of JSON. The largest that Lockstep writes, a manifest that shares thousands of files, has a few megabytes."""
MOST_YAML_BYTES = 4 << 20
DEEPEST = 128
"""Lists and mappings within each other."""
_DEEPEST_STRICT = 400
"""The same in a checkpoint, where a tree of 100 levels may take three for each."""
MOST_NODES = 100_000
"""Values of a document of YAML, each alias counted as all that it stands for."""
_LONGEST_NUMBER = 400
"""Characters of a number in YAML: a float of 64 bits has at most 326."""
_EXACT = 1 << 53
"""Up to this every whole number is a float as well."""
_LARGEST = 1 << 64
"""Whole numbers are below this: a digest has 64 bits."""

_LARGE_EXPONENT = re.compile(rb"[eE]\+?[0-9]{3}")
_LONG_DIGITS = re.compile(rb"[0-9]{19}")
_BRACKET_OR_STRING = re.compile(rb'(?P<opening>[\[{])|(?P<closing>[\]}])|"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def json_value(text: bytes | bytearray | str, *, most: int = MOST_BYTES) -> Any:
    """The value of a JSON text. NaN and Infinity are taken as Python writes them. ValueError for anything else."""
    return _parsed(text, most, DEEPEST)


def json_mapping(text: bytes | bytearray | str, *, most: int = MOST_BYTES) -> dict[str, Any]:
    """As `json_value`, of a text that holds a mapping."""
    return _mapping(json_value(text, most=most))


def json_document(text: bytes | bytearray | str, *, most: int = MOST_BYTES) -> dict[str, Any]:
    """As `json_mapping`, of a document that others read too: a key that is given twice is refused, since some of them take its first value."""
    return _mapping(_parsed(text, most, DEEPEST, object_pairs_hook=_unique))


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, wanted a mapping")
    return value


def strict_json(text: bytes | bytearray, *, most: int = MOST_BYTES) -> Any:
    """As `json_value`, but a key that is given twice and NaN are refused too."""
    return _parsed(text, most, _DEEPEST_STRICT, object_pairs_hook=_unique, parse_constant=_refuse)


def canonical_json(document: Any, *, indent: int | None = None, sort_keys: bool = False) -> bytes:
    """`document` in ASCII with a final newline, in only one way. Floats survive exactly: Python writes the shortest exact form."""
    text = json.dumps(document, indent=indent, sort_keys=sort_keys, allow_nan=False)
    return f"{text}\n".encode("ascii")


def _parsed(text: bytes | bytearray | str, most: int, deepest: int, **hooks: Any) -> Any:
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if len(data) > most:
        raise ValueError(f"it has {len(data)} bytes, and at most {most} are read")
    has_many = data.count(b"[") + data.count(b"{") > deepest
    if has_many and _depth(data, deepest) > deepest:
        raise ValueError(f"it is nested too deep, wanted at most {deepest} levels")
    try:
        value = json.loads(data, **hooks)
    except (RecursionError, MemoryError):
        raise ValueError(f"it is nested too deep, wanted at most {deepest} levels") from None
    if has_many or _LONG_DIGITS.search(data) or _LARGE_EXPONENT.search(data):
        _check(value, deepest, infinite="parse_constant" not in hooks)
    return value


def _depth(data: bytes | bytearray, deepest: int) -> int:
    """The most levels of a text, as far as the first that is below `deepest`. Python's parser recurses in C as deep as the recursion limit of the process
    lets it, which a job or a library may have raised beyond what the stack holds.
    """
    depth = most = 0
    for match in _BRACKET_OR_STRING.finditer(data):
        if (opening := match.lastgroup == "opening") or match.lastgroup == "closing":
            depth += 1 if opening else -1
            most = max(most, depth)
            if most > deepest:
                break
    return most


def _check(value: Any, deepest: int, *, infinite: bool) -> None:
    """ValueError for what is nested too deep, or a whole number that is too large."""
    level = [value]
    for _ in range(deepest + 1):
        following: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                following.extend(item.values())
            elif isinstance(item, list):
                following.extend(item)
            elif type(item) is int and not -_LARGEST < item < _LARGEST:
                raise ValueError("it holds a whole number of more than 64 bits")
            elif type(item) is float and math.isinf(item) and not infinite:
                raise ValueError("it holds a number that no float can have")
        if not following:
            return
        level = following
    raise ValueError(f"it is nested too deep, wanted at most {deepest} levels")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a key is given twice")
    return mapping


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def one_line(error: object) -> str:
    """What an error says, in one line that is not too long: it may quote what was read."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:299]}…"


def conforms(value: Any, hint: Any) -> bool:
    """Whether a value, parsed from JSON and put together, is of an annotated type. A whole number is a float too, and a list a tuple."""
    return _checker(hint)(value)


@cache
def _checker(hint: Any) -> Callable[[Any], bool]:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: True
    if hint is None or hint is type(None):
        return lambda value: value is None
    if hint in (str, bool, Path):
        return lambda value: isinstance(value, hint)
    if hint is int:
        return lambda value: type(value) is int and -_LARGEST < value < _LARGEST
    if hint is float:
        return lambda value: type(value) is float or (type(value) is int and abs(value) <= _EXACT)
    if origin is Literal:
        return lambda value: isinstance(value, str | int) and value in inner
    if origin in (Union, types.UnionType):
        either = [_checker(member) for member in inner]
        return lambda value: any(check(value) for check in either)
    if origin is Mapping:
        content = _checker(inner[1])
        return lambda value: (
            isinstance(value, dict)
            and all(isinstance(name, str) and content(item) for name, item in value.items())
        )
    if origin is tuple and inner[-1] is not ...:
        parts = [_checker(member) for member in inner]
        return lambda value: (
            isinstance(value, list | tuple)
            and len(value) == len(parts)
            and all(check(item) for check, item in zip(parts, value, strict=True))
        )
    if origin in (tuple, Sequence):
        item = _checker(inner[0])
        return lambda value: isinstance(value, list | tuple) and all(map(item, value))
    fields = {name: _checker(annotation) for name, annotation in get_type_hints(hint).items()}
    return lambda value: (
        isinstance(value, hint) and all(check(getattr(value, name)) for name, check in fields.items())
    )


_FLAT: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (float, int), "bool": (bool,)}


def flat_record(kind: type[T], value: object) -> T:
    """The dataclass of a mapping that was parsed, whose fields are text, numbers and truth values. ValueError for another one."""
    if not isinstance(value, dict):
        raise ValueError(f"got a {type(value).__name__}, wanted a mapping")
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        allowed = _FLAT[str(field.type)]
        if field.name in value and type(value[field.name]) not in allowed:
            raise ValueError(f"{field.name} is a {type(value[field.name]).__name__}, wanted {field.type}")
    try:
        return kind(**value)
    except TypeError as error:  # a field is missing, or unknown
        raise ValueError(str(error)) from error


# --- documents that contain their own hash ---------------------------------------------------------------------------


class OtherVersionError(ValueError):
    """The format of a document has another version than the one that this Lockstep writes and reads."""


def check_version(got: Any, expected: int) -> None:
    """OtherVersionError unless the format version of a document is `expected`."""
    if type(got) is not int or got != expected:
        raise OtherVersionError(
            f"it has format version {str(got)[:20]}, wanted {expected}: it was made by another Lockstep; use that one"
        )


class WrongHashError(ValueError):
    """A document's content is not the one that it was written with. Example: a manifest in which a name was changed."""


def with_hash(document: dict[str, Any]) -> bytes:
    """The document as it is written, with the hash of the rest as its `sha256`."""
    return _sealed({**document, "sha256": hashlib.sha256(_sealed(document)).hexdigest()})


def without_hash(document: object, text: bytes) -> dict[str, Any]:
    """The rest of a document that was parsed from `text`. WrongHashError unless `text` is exactly what `with_hash` makes of it."""
    if not isinstance(document, dict):
        raise WrongHashError("it is no mapping with a hash")
    content = {name: value for name, value in document.items() if name != "sha256"}
    if "sha256" not in document or with_hash(content) != text:
        raise WrongHashError("its hash is not that of its content")
    return content


def _sealed(document: dict[str, Any]) -> bytes:
    return canonical_json(document, indent=1, sort_keys=True)


# --- YAML ------------------------------------------------------------------------------------------------------------


class BoundedLoader(yaml.SafeLoader):
    """Reads plain data, within bounds. What the constructor of a tag stumbles over is an error of YAML with its line."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth = 0
        self._sizes: dict[int, int] = {}
        """How many nodes each composed one stands for, by its id."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        is_alias = isinstance(event, yaml.AliasEvent)
        self._depth += 1
        if self._depth > DEEPEST:
            raise _yaml_error(f"it is nested too deep, wanted at most {DEEPEST} levels", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None and not is_alias:
            self._sizes[id(node)] = self._size(node)
            if len(self._sizes) > MOST_NODES:
                raise _yaml_error(f"it has more than {MOST_NODES} values", event.start_mark)
        return node

    def _size(self, node: yaml.Node) -> int:
        inner: Iterable[yaml.Node] = ()
        if isinstance(node, yaml.SequenceNode):
            inner = node.value
        elif isinstance(node, yaml.MappingNode):
            inner = [child for pair in node.value for child in pair]
        size = 1
        for child in inner:
            if id(child) not in self._sizes:
                raise _yaml_error("an alias stands for a value that holds it", child.start_mark)
            size += self._sizes[id(child)]
        if size > MOST_NODES:
            raise _yaml_error(f"with its aliases it has more than {MOST_NODES} values", node.start_mark)
        return size

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Refuses a key that is given twice: other programs read its first value. Before `<<` adds keys of others to those of a mapping."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        keys: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in keys:
                raise _yaml_error(f"{key.value!r} is given twice", key.start_mark)
            keys.add((key.tag, key.value) if isinstance(key, yaml.ScalarNode) else ("", ""))
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            kind = node.tag.removeprefix("tag:yaml.org,2002:")
            raise _yaml_error(f"{_start(node.value)} is no {kind}", node.start_mark) from error

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > _LONGEST_NUMBER:
            raise _yaml_error(f"{_start(node.value)} has {len(node.value)} digits", node.start_mark)
        return super().construct_yaml_int(node)


BoundedLoader.add_constructor("tag:yaml.org,2002:int", BoundedLoader.construct_yaml_int)


def _start(value: object) -> str:
    text = repr(value) if isinstance(value, str) else "it"
    return text if len(text) <= 80 else f"{text[:77]}…"


def _yaml_error(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, mark)


def yaml_value(text: str, loader: type[BoundedLoader] = BoundedLoader) -> Any:
    """The value of a YAML text, read by `loader`. ValueError, which names the line, for anything else."""
    if len(text) > MOST_YAML_BYTES:
        raise ValueError(f"it has more than {MOST_YAML_BYTES} characters")
    try:
        return yaml.load(text, Loader=loader)
    except (RecursionError, MemoryError) as error:
        raise ValueError("it is nested too deeply to be read") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        words = [
            getattr(error, "context", None),
            getattr(error, "problem", None) or str(error).partition("\n")[0],
        ]
        line = f"line {mark.line + 1}, " if mark else ""
        raise ValueError(f"{line}{', '.join(filter(None, words))}") from error
