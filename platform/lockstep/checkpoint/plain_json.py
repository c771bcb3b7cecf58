"""JSON that is written in only one way, and read strictly: a duplicate key, NaN or endless nesting is refused."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def as_text(document: Any, *, indent: int | None = None, sort_keys: bool = False) -> bytes:
    """`document` in ASCII with a final newline. Floats survive exactly: Python writes the shortest exact form."""
    text = json.dumps(document, indent=indent, sort_keys=sort_keys, allow_nan=False)
    return f"{text}\n".encode("ascii")


def parsed(text: bytes | bytearray) -> Any:
    """Read what `as_text` wrote. ValueError for anything that is not strict JSON."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
