"""The lines of a journal: an event as JSON under its name, followed by its CRC-32. The one with which a recorder begins has the format's version.

A float is kept bit for bit, NaN with its payload. File paths are relative to the run's folder.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, assert_never, get_type_hints

from lockstep.errors import StorageError
from lockstep.parsing import OtherVersionError, check_version, conforms, json_mapping
from lockstep.paths import component, relative
from lockstep.record import problems
from lockstep.record.events.union import (
    SOURCE,
    Alerted,
    AttemptsSummarised,
    CheckpointRow,
    Corrupted,
    Delivered,
    Diagnosed,
    Document,
    Failed,
    Finished,
    InputsFound,
    Mended,
    Opened,
    PeakMemory,
    Recorded,
    ResumeChecked,
    Sampled,
    SetAside,
    Started,
    Straggling,
    TakenOver,
    TimeSpent,
    Violated,
    Warned,
    Witness,
)
from lockstep.record.ledger.rows import VERSION, Digests, EvaluationRow, Observation, StepRow


def to_line(event: Recorded, folder: Path) -> bytes:
    """The line for an event in a journal in `folder`."""
    kind, value = _plain_event(event, folder)
    text = json.dumps({kind: value}, default=str, separators=(",", ":")).encode()
    return b"%s %08x\n" % (text, zlib.crc32(text))


def _plain_event(event: Recorded, folder: Path) -> tuple[str, Any]:
    """The name of an event's line and its content as plain data; file paths are relative to the run's folder."""
    match event:
        case StepRow():
            return "step", [_plain(value) for value in event]
        case EvaluationRow():
            return "evaluation", [_plain(value) for value in event]
        case Observation():
            return "observation", [_plain(value) for value in event]
        case CheckpointRow():
            return "checkpoint", event._asdict()
        case Opened():
            return "opened", {"version": VERSION, "at": event.at, "run": event.run, **event.process}
        case Started():
            return "started", dict(event.facts)
        case InputsFound():
            return "inputs", asdict(event)
        case Sampled():
            return "system", {"node": event.node, "at": event.at, "values": dict(event.values)}
        case AttemptsSummarised():
            return "attempts", list(event.attempts)
        case PeakMemory():
            return "peak_memory", list(event.bytes_by_rank)
        case Document():
            return "document", {"name": event.name, "text": event.text}
        case Finished():
            files = [
                path.relative_to(folder) if path.is_relative_to(folder) else path for path in event.files
            ]
            return "finished", {
                "summary": dict(event.summary), "files": [str(path) for path in files], "at": event.at
            }  # fmt: skip
        case Failed():
            return "failed", asdict(event)
        case TakenOver():
            return "taken_over", {"message": event.message}
        case Diagnosed():
            return "diagnosed", asdict(event)
        case Alerted():
            return "alerted", asdict(event)
        case Warned():
            return "warned", {"text": event.text}
        case Straggling():
            return "straggling", {"text": event.text}
        case Violated():
            return "violated", {"text": event.text}
        case SetAside():
            return "set_aside", {"what": event.what, "reason": event.reason}
        case Mended():
            return "mended", {"starts": list(event.starts), "how": event.how}
        case Corrupted():
            return "corrupted", asdict(event)
        case ResumeChecked():
            return "resume_checked", asdict(event)
        case TimeSpent():
            return "time_spent", asdict(event)
        case Delivered():
            return "delivered", {}
        case _:
            assert_never(event)


_MAPPINGS = ("fields", "plan", "git", "environment", SOURCE)
"""Facts of an attempt that are mappings."""
_CHECKED = re.compile(rb"(.*\}) ([0-9a-f]{8})", re.DOTALL)


_NUMBERED = re.compile(rb'\{"step":\[(\d{1,18}),')


def step_number(line: bytes) -> int | None:
    """The number of a step by its line, if the checksum is right; None for any other line. Its values are not looked at: that is the faster by far."""
    match = _NUMBERED.match(line)
    return int(match[1]) if match and line[-9:] == b" %08x" % zlib.crc32(line[:-9]) else None


class StepTime(NamedTuple):
    """What the line of a step says of its time; as in `StepRow`."""

    step: int
    attempt: int
    step_s: float
    wall_clock: float


_NO_DIGESTS = b",null]}"
"""How the line of a step without digests ends: digests are the last of a row, and numbers are before them."""

_OF_TIME = tuple(StepRow._fields.index(name) for name in StepTime._fields)
_FROM_DIGESTS = tuple(StepRow._fields.index("digests") - index for index in _OF_TIME[1:])
"""How many fields before the digests attempt and times are."""


def step_time(line: bytes) -> StepTime | None:
    """The time of a step by its line, whose checksum is known to be right; None where it is not as it was written. Ten times as fast as to read the row."""
    try:
        number = step_number(line)
        if number is not None and line[:-9].endswith(_NO_DIGESTS):
            last = line[: -9 - len(_NO_DIGESTS)].rsplit(b",", max(_FROM_DIGESTS))
            attempt, step_s, wall_clock = (last[-before] for before in _FROM_DIGESTS)
            return StepTime(number, int(attempt), float(step_s), float(wall_clock))
        values = json_mapping(line[:-9])["step"]
        step, attempt, step_s, wall_clock = (values[index] for index in _OF_TIME)
        return StepTime(int(step), int(attempt), float(step_s), float(wall_clock))
    except (ValueError, TypeError, LookupError):
        return None


def from_line(line: bytes, folder: Path) -> Recorded | None:
    """The event of a line, or None if the line is damaged. RecordError for a line of another version of the format."""
    match = _CHECKED.fullmatch(line)
    if not match or zlib.crc32(match[1]) != int(match[2], 16):
        return None
    try:
        ((kind, value),) = json_mapping(match[1]).items()
        event = _from_plain(kind, value, folder)
        _check(event, folder)
        return event
    except OtherVersionError as error:
        raise problems.UNREADABLE(run=folder.name, file="journal", got=error) from error
    except (ValueError, TypeError, AttributeError, KeyError, LookupError, struct.error, StorageError):
        return None


LATEST = 253402300799.0
"""The last second of the year 9999 in Unix time: a later one has no date."""
_LATEST_OF_ROW = 1e300
"""A row's time in seconds is a float in milliseconds too."""
_MOST_COUNTED = 1 << 62
"""Steps, samples and attempts that are counted: the ledger has 63 bits for them."""
_MOST_DOUBTED = 10_000_000
"""Steps that one corruption can cast doubt on."""


def _check(event: Recorded, folder: Path) -> None:
    """ValueError for an event that no recorder writes: a value of another type, or a name that leads out of the run's folder."""
    if not conforms(event, type(event)):
        raise ValueError("a value is of another type")
    # A row's time is a number of the ledger, whatever the clock of its machine said; a store may refuse it, and says so.
    at = getattr(event, "at", None)
    if at is not None and not 0 <= at <= LATEST:
        raise ValueError("a time is out of bounds")
    match event:
        case StepRow() | EvaluationRow() | Observation():
            _check_numbers(event)
        case Document():
            relative(event.name)
            _ = event.content
        case Started():
            for name in event.facts:
                component(name)
            for name in event.facts.get(SOURCE) or {}:
                relative(name)
            if not all(isinstance(event.facts.get(name) or {}, dict) for name in _MAPPINGS):
                raise ValueError("a fact is of another type")
        case Finished():
            for path in event.files:
                relative(path.relative_to(folder).as_posix())
        case CheckpointRow():
            if any("\0" in uri for uri in (event.uri or "", *(uri for _, uri in event.essential))):
                raise ValueError("a place has a null character")
        case Corrupted():
            if not 0 <= event.step - event.since <= _MOST_DOUBTED:
                raise ValueError("it casts doubt on too many steps")


_COUNTED = {
    row: [name for name, kind in get_type_hints(row).items() if kind is int]
    for row in (StepRow, EvaluationRow, Observation)
}
"""The columns of whole numbers of each kind of row."""


def _check_numbers(row: StepRow | EvaluationRow | Observation) -> None:
    """ValueError for a row that the ledger cannot hold."""
    named = (
        row.parts
        if isinstance(row, StepRow)
        else row.metrics
        if isinstance(row, EvaluationRow)
        else row.values
    )
    "".join(named).encode()  # a UnicodeEncodeError is a ValueError
    if not abs(row.wall_clock) <= _LATEST_OF_ROW:
        raise ValueError("a time is out of bounds")
    counted: list[int] = [getattr(row, name) for name in _COUNTED[type(row)]]
    if not all(0 <= number < _MOST_COUNTED for number in counted):
        raise ValueError("a number is out of bounds")
    if isinstance(row, StepRow) and row.digests is not None and min(_whole(row.digests)) < 0:
        raise ValueError("a digest is negative")


def _whole(digests: Digests) -> list[int]:
    return [digests.weights, digests.optimizer, *(digests.gradients or ()), digests.average or 0]


def damaged_content(line: bytes) -> str:
    """What a damaged line seems to have been."""
    match = re.match(rb'\{"(\w+)":(?:\[(\d+),)?', line)
    if not match:
        return "unreadable"
    return " ".join(part.decode() for part in match.groups() if part)


def _from_plain(kind: str, value: Any, folder: Path) -> Recorded:
    match kind:
        case "step":
            return _step(value)
        case "evaluation":
            return EvaluationRow._make(_floats(value, EvaluationRow))
        case "observation":
            return Observation._make(_floats(value, Observation))
        case "checkpoint":
            essential = tuple((step, uri) for step, uri in value["essential"])
            return CheckpointRow(**{**value, "deleted": tuple(value["deleted"]), "essential": essential})
        case "opened":
            check_version(value.pop("version", None), VERSION)
            return Opened(value.pop("at"), run=value.pop("run", ""), process=value)
        case "started":
            return Started(value)
        case "inputs":
            return InputsFound(**value)
        case "system":
            return Sampled(**value)
        case "attempts":
            return AttemptsSummarised(value)
        case "peak_memory":
            return PeakMemory(value)
        case "document":
            return Document(**value)
        case "finished":
            return Finished(value["summary"], [folder / name for name in value["files"]], value["at"])
        case "failed":
            return Failed(**value)
        case "taken_over":
            return TakenOver(**value)
        case "diagnosed":
            return Diagnosed(**value)
        case "alerted":
            return Alerted(**value)
        case "warned":
            return Warned(**value)
        case "straggling":
            return Straggling(**value)
        case "violated":
            return Violated(**value)
        case "set_aside":
            return SetAside(**value)
        case "mended":
            return Mended(**value)
        case "corrupted":
            workers = tuple(
                Witness(*worker)._replace(digests=tuple(worker[-1])) for worker in value["workers"]
            )
            return Corrupted(**{**value, "workers": workers, "wrong": tuple(value["wrong"])})
        case "resume_checked":
            return ResumeChecked(**value)
        case "time_spent":
            return TimeSpent(**value)
        case "delivered":
            return Delivered()
    raise ValueError(f"unknown event {kind!r}")


def _plain(value: Any) -> Any:
    """A value for JSON. JSON's NaN has no payload, so NaN becomes text."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if value != value:
        return f"nan:{struct.pack('>d', value).hex()}"
    return value


def _step(values: list[Any]) -> StepRow:
    row = StepRow._make(_floats(values, StepRow))
    if row.digests is None:
        return row
    digests = Digests(*row.digests)
    return row._replace(
        digests=digests._replace(gradients=None if digests.gradients is None else tuple(digests.gradients))
    )


def _floats(values: list[Any], row: type[StepRow | EvaluationRow | Observation]) -> list[Any]:
    if len(values) != len(row._fields):
        raise ValueError(f"{len(values)} values, wanted {len(row._fields)}")
    return [_float(value) for value in values]


def _float(value: Any) -> Any:
    if isinstance(value, str):
        return struct.unpack(">d", bytes.fromhex(value.removeprefix("nan:")))[0]
    if isinstance(value, dict):
        return {name: _float(inner) for name, inner in value.items()}
    return value
