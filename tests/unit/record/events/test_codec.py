"""Every recorded event comes back from its line in the journal as it was."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from lockstep.record.events.codec import from_line, step_time, to_line
from lockstep.record.events.union import Alive, Document, Recorded
from lockstep.record.ledger.rows import Digests
from tests.unit.record.rows import step_row

FOLDER = Path("/runs/abc")
SCALARS: dict[Any, Any] = {
    int: 3,
    float: 0.1,
    str: "text",
    bool: True,
    Any: "any",
    Path: FOLDER / "a.txt",
    type(None): None,
}


def value_of(hint: Any, *, full: bool) -> Any:
    """A value of an annotated type; collections are empty and optional values None unless `full`."""
    if hint in SCALARS:
        return SCALARS[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return arguments[-1]
    if origin in {Union, types.UnionType}:
        return value_of(arguments[0 if full else -1], full=full)
    if origin is tuple and arguments[-1] is not ...:
        return tuple(value_of(argument, full=full) for argument in arguments)
    if origin is tuple:
        return (value_of(arguments[0], full=full),) * (2 * full)
    if origin is Sequence:
        return [value_of(arguments[0], full=full)] * (2 * full)
    if origin is Mapping:
        return {"key": value_of(arguments[1], full=full)} if full else {}
    fields = get_type_hints(hint)
    assert is_dataclass(hint) or hasattr(hint, "_fields"), f"no value of the type {hint}"
    return hint(**{name: value_of(inner, full=full) for name, inner in fields.items()})


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("kind", get_args(Recorded))
def test_a_recorded_event_comes_back_as_it_was(kind: Any, full: bool) -> None:
    event = value_of(kind, full=full)
    back = from_line(to_line(event, FOLDER).removesuffix(b"\n"), FOLDER)
    assert type(back) is kind
    assert back == event


def test_an_event_without_its_case_is_none_of_the_others() -> None:
    """The control: it cannot be written, and a line of its name cannot be read."""
    with pytest.raises(AssertionError):
        to_line(Alive(), FOLDER)  # type: ignore[arg-type]
    assert from_line(b'{"alive":{}}', FOLDER) is None


@pytest.mark.parametrize("digests", [None, Digests(1, 2, (3, 4)), Digests(1, 2, None, 5)])
def test_the_time_of_a_step_is_read_without_the_rest_of_its_line(
    tmp_path: Path, digests: Digests | None
) -> None:
    row = step_row(7, digests=digests, step_s=1 / 3, wall_clock=1_700_000_000.1, attempt=4, loss=float("nan"))
    line = to_line(row, tmp_path).rstrip(b"\n")
    assert step_time(line) == (7, 4, 1 / 3, 1_700_000_000.1)
    assert step_time(b'{"step":[7,"x",null]} ' + b"0" * 8) is None


@pytest.mark.parametrize(
    ("text", "is_read"), [("gASVAAAA", True), ("not base64", False), ("gASV!AAA", False)]
)
def test_a_document_whose_text_is_no_content_is_a_damaged_line(text: str, is_read: bool) -> None:
    """Bytes travel as base64: a line that somebody changed is not found out later, by who writes the file."""
    document = Document("memory-attempt-1-rank-0.pickle", text)
    back = from_line(to_line(document, FOLDER).removesuffix(b"\n"), FOLDER)
    assert back == (document if is_read else None)
