"""Reads a spec file, and the overrides of a command line, into a document of plain data; `loading.py` makes a Spec of it.

Plain words are read as YAML 1.2 reads them: `off` and `1:30` are text and `1e-3` is a number.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from lockstep.errors import closest
from lockstep.parsing import MOST_YAML_BYTES, BoundedLoader, yaml_value
from lockstep.paths import read_bounded
from lockstep.redaction_marks import MARK
from lockstep.spec import problems
from lockstep.spec.messages import key_shown, shown

ONE_VALUE = {"determinism": "mode", "sharding": "mode"}
"""Sections that may be written as the value of one of their fields."""

COUNTS = ("length", "evaluate.every", "evaluate.sets.every", "checkpoint.every")
"""Sections that have one of epochs, steps and seconds, also below the `spec` of a sweep; those of a set without its name."""

_SET = re.compile(r"^evaluate\.sets\.[^.]+")

_HALF = re.compile("[\ud800-\udfff]")


class _Loader(BoundedLoader):
    """Reads plain words as YAML 1.2 does, and refuses a text with a null character."""

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        if "\0" in value:  # no path and no name may have one
            raise yaml.constructor.ConstructorError(
                None, None, f"{value!r} has a null character", node.start_mark
            )
        return value


_Loader.yaml_implicit_resolvers = {}  # none of YAML 1.1's
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", "<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def _parse(text: str, origin: str) -> Any:
    try:
        return yaml_value(text, _Loader)
    except ValueError as error:
        raise problems.NOT_YAML(what=origin, got=error) from error


def _another(path: Path) -> str:
    """What to do where there is no such file: the one that was meant, or how to make one."""
    folder = path.parent
    names = [file.name for file in folder.glob("*.y*ml")] if folder.is_dir() else []
    close = closest(path.name, names)
    if close is None:
        return "name another file, or have `lockstep init NAME` write one with its job"
    return f"did you mean {str(folder / close)!r}?"


def read_document(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds; SpecError for anything else."""
    try:
        text = read_bounded(path, MOST_YAML_BYTES).decode()
    except FileNotFoundError as error:
        raise problems.MISSING(file=path, got=error.strerror, hint=_another(path)) from error
    except OSError as error:
        raise problems.UNREADABLE(file=path, got=error.strerror) from error
    except UnicodeDecodeError as error:
        raise problems.NOT_TEXT(file=path, got=f"{error.reason} at byte {error.start}") from error
    except ValueError as error:
        raise problems.TOO_LARGE(file=path, got=error) from error
    document = _parse(text, f"spec: {str(path)!r}")
    if document is None:
        raise problems.EMPTY(file=path)
    if not isinstance(document, dict):
        raise problems.NO_MAPPING(file=path, got=shown(document))
    return document


def check_text(document: Mapping[str, Any]) -> None:
    """SpecError for a text or a key, anywhere in a document, that no file and no store can hold: half of a character's two in UTF-16 alone."""
    for field, text in _texts(document):
        if half := _HALF.search(text):
            raise problems.HALF_CHARACTER(field=field, got=shown(text), half=ascii(half[0])[1:-1])


def check_whole(document: Mapping[str, Any]) -> None:
    """SpecError for a value of which a record has left out a secret: with what stands there it would be another run."""
    for field, text in _texts(document):
        if MARK.search(text):
            raise problems.SECRET_LEFT_OUT(field=field, got=shown(text))


def _texts(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The texts and keys of a document in its order, each with its dotted key."""
    left: list[tuple[tuple[Any, ...], Any]] = [((), document)]
    seen = set[int]()
    while left:
        path, value = left.pop()
        if isinstance(value, str):
            yield ".".join(map(key_shown, path)), value
        elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            inner = list(value.items() if isinstance(value, Mapping) else enumerate(value))
            keys = [((*path, key), key) for key, _ in inner if isinstance(key, str)]
            left += [*(((*path, key), content) for key, content in reversed(inner)), *reversed(keys)]


def override(document: dict[str, Any], overrides: Iterable[str]) -> None:
    """Apply `key=value` texts, as `put` does."""
    put(document, [_pair(text) for text in overrides])


def put(document: dict[str, Any], pairs: Collection[tuple[str, Any]]) -> None:
    """Set values by their dotted keys. Epochs, steps and seconds exclude each other, so the one that is given replaces the other."""
    given_keys = {key for key, _ in pairs}
    rivals = {"epochs", "steps", "seconds"}
    for key, value in pairs:
        above, _, leaf = key.rpartition(".")
        section = _section(document, key)
        section[leaf] = value
        if value is None or leaf not in rivals or not _counts(above.removeprefix("spec.")):
            continue
        for rival in rivals - {leaf}:
            if f"{above}.{rival}" not in given_keys:
                section.pop(rival, None)


def _counts(section: str) -> bool:
    return _SET.sub("evaluate.sets", section) in COUNTS


def _pair(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise problems.NO_OVERRIDE(got=override)
    return key, _parse(text, f"{key}: {text!r}")


def _section(document: dict[str, Any], key: str) -> dict[str, Any]:
    """The mapping that holds the dotted `key`; what is missing on the way is created.

    Each one on the way is made the document's own at this place: an anchor of YAML gives one mapping to several places.
    """
    *above, _ = key.split(".")
    section = document
    for depth, part in enumerate(above, start=1):
        value = section.get(part)
        if depth == 1 and part in ONE_VALUE and isinstance(value, str):
            value = {ONE_VALUE[part]: value}
        if value is not None and not isinstance(value, dict):
            name = ".".join(above[:depth])
            raise problems.NO_FIELDS(field=key, section=name, got=shown(value))
        section[part] = dict(value or {})
        section = section[part]
    return section
