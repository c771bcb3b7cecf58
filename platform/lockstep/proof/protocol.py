"""What a process that executes a stranger's job says to the one that judges it: lines of JSON, and the content of files by their sizes.

Reading runs no code and believes nothing: every message has a bound, each value the type that it must have, floats all of their
bits. A process that says anything else has broken the protocol, and what it said is not used.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NamedTuple, get_type_hints

from lockstep import errors
from lockstep.errors import LockstepError
from lockstep.proof import problems
from lockstep.proof.errors import ProtocolError
from lockstep.record.ledger.rows import Digests, EvaluationRow, StepRow

MOST_BYTES = 1 << 24
"""The longest line: a row of a hundred thousand micro-batches has 2 MB."""

MOST_FACTS = 32
"""How many facts of an error are taken."""

MOST_NAMES = 10_000
"""How many parts or metrics a row may have."""

_FLOAT = re.compile(r"[0-9a-f]{16}")


def broken(reason: str) -> ProtocolError:
    """The error for a process that does not keep to the protocol."""
    return problems.PROTOCOL(got=reason)


class FileSent(NamedTuple):
    """The content of a file follows, of so many bytes."""

    name: str
    size: int


# --- the writing side -------------------------------------------------------------------------------------------


def line(kind: str, **content: Any) -> bytes:
    """A message as it is sent."""
    return json.dumps({"kind": kind, **content}, default=str, separators=(",", ":")).encode() + b"\n"


def write_file(pipe: BinaryIO, name: str, content: BinaryIO, size: int) -> None:
    """Send a file."""
    pipe.write(line("file", name=name, size=size))
    remaining = size
    while remaining and (piece := content.read(min(remaining, 1 << 20))):
        pipe.write(piece)
        remaining -= len(piece)
    pipe.flush()


def as_texts(files: Mapping[str, bytes]) -> dict[str, str]:
    """Files by their paths, in base64."""
    return {path: base64.b64encode(content).decode() for path, content in files.items()}


def step_document(row: StepRow) -> dict[str, Any]:
    """A row in plain data, its floats as 16 hexadecimal digits."""
    document = {name: kind.write(getattr(row, name)) for name, kind in _COLUMNS.items()}
    digests = None if row.digests is None else list(row.digests)
    return {**document, "parts": _hex_of(row.parts), "digests": digests}


def evaluation_document(row: EvaluationRow) -> dict[str, Any]:
    """The same for an evaluation."""
    return {"step": row.step, "epoch": row.epoch, "metrics": _hex_of(row.metrics)}


def _hex(value: float) -> str:
    return struct.pack(">d", value).hex()


def _hex_of(values: Mapping[str, float]) -> dict[str, str]:
    return {name: _hex(value) for name, value in values.items()}


# --- the reading side -------------------------------------------------------------------------------------------


def parsed(content: bytes) -> dict[str, Any]:
    """A message that was sent. ProtocolError for anything else."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise broken("a line that is no JSON") from error
    if not (isinstance(document, dict) and isinstance(document.get("kind"), str)):
        raise broken("a line without a kind")
    return document


def step_row(document: Any) -> StepRow:
    """The row that `step_document` made the document of. ProtocolError for any other."""
    values = _fields(document, StepRow._fields)
    fields = {name: kind.read(values[name]) for name, kind in _COLUMNS.items()}
    return StepRow(**fields, parts=_reals(values["parts"]), digests=_digests(values["digests"]))


def evaluation_row(document: Any) -> EvaluationRow:
    """The same for an evaluation; its times are those of no execution."""
    values = _fields(document, ("step", "epoch", "metrics"))
    return EvaluationRow(_whole(values["step"]), _whole(values["epoch"]), _reals(values["metrics"]), 0.0, 0.0)


def file_sent(document: Mapping[str, Any]) -> FileSent:
    """The file that is announced."""
    name, size = document.get("name"), document.get("size")
    if not (isinstance(name, str) and 0 < len(name) < 1000 and name.isprintable()):
        raise broken("a file without a name")
    return FileSent(name, _whole(size))


def error_told(document: Mapping[str, Any]) -> LockstepError:
    """The error that a process tells of, as one of Lockstep's own and one plain line."""
    kind = getattr(errors, str(document.get("error")), None)
    is_known = isinstance(kind, type) and issubclass(kind, LockstepError)
    error: LockstepError = (kind if is_known else LockstepError)(plain_text(document.get("text")))  # type: ignore[misc]
    error.code = plain_text(document.get("code", ""), 60)
    error.evidence, error.remedy = (plain_text(document.get(name, "")) for name in ("evidence", "remedy"))
    if isinstance(facts := document.get("facts"), dict):
        error.facts = {plain_text(name, 60): plain_text(facts[name]) for name in [*facts][:MOST_FACTS]}
    return error


def plain_text(value: Any, most: int = 4000) -> str:
    """A text of a stranger's as one line that a terminal only shows."""
    text = str(value)[:most]
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def texts(value: Any) -> dict[str, bytes]:
    """Files by their paths, as they were sent in base64."""
    try:
        return {name: base64.b64decode(content) for name, content in mapping(value).items()}
    except (ValueError, TypeError) as error:
        raise broken("a file that is none") from error


def shown(value: Any) -> Any:
    """Plain data with each text as `plain_text` has it."""
    if isinstance(value, dict):
        return {plain_text(name): shown(item) for name, item in value.items()}
    if isinstance(value, list):
        return [shown(item) for item in value]
    return plain_text(value) if isinstance(value, str) else value


def mapping(value: Any) -> dict[str, Any]:
    """Plain data by names."""
    if not isinstance(value, dict):
        raise broken("a value without names")
    return value


def _fields(document: Any, names: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(document, dict) or set(document) != set(names):
        raise broken("a row with other columns")
    return document


def _whole(value: Any, below: int = 1 << 63) -> int:
    if type(value) is not int or not 0 <= value < below:
        raise broken("a number that is none")
    return value


def _real(value: Any) -> float:
    if not (isinstance(value, str) and _FLOAT.fullmatch(value)):
        raise broken("a number that is none")
    (number,) = struct.unpack(">d", bytes.fromhex(value))
    return float(number)


def _truth(value: Any) -> bool:
    if type(value) is not bool:
        raise broken("a value that is neither true nor false")
    return value


class _Kind(NamedTuple):
    """How a value of a type is written and read."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


_KINDS: dict[Any, _Kind] = {int: _Kind(int, _whole), float: _Kind(_hex, _real), bool: _Kind(bool, _truth)}
_COLUMNS = {name: _KINDS[hint] for name, hint in get_type_hints(StepRow).items() if hint in _KINDS}
"""The columns of a step's row by name, but for its parts and digests."""


def _reals(value: Any) -> dict[str, float]:
    if not isinstance(value, dict) or len(value) > MOST_NAMES:
        raise broken("a row with other columns")
    return {name: _real(item) for name, item in value.items()}


def _digests(value: Any) -> Digests | None:
    if value is None:
        return None
    if not (isinstance(value, list) and len(value) == len(Digests._fields)):
        raise broken("digests that are none")
    weights, optimizer, gradients, average = value
    return Digests(
        _digest(weights),
        _digest(optimizer),
        None
        if gradients is None
        else tuple(map(_digest, gradients if isinstance(gradients, list) else [""])),
        None if average is None else _digest(average),
    )


def _digest(value: Any) -> int:
    return _whole(value, 1 << 64)
