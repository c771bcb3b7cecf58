"""The journal: the log of a run's recorded events, a JSON line each, on disk in its folder before any store hears of it.

* It is the spool: metric points are made from it again, with the timestamps of their rows, however late a store answers.
* It is the ledger in the making: a process that is killed loses what it had not been told, and nothing else.
* A step and an evaluation are in it once. A float is kept bit for bit, NaN with its payload.
* A line ends in its CRC-32. One that is damaged is passed over; its rows are added again from a checkpoint's history.
* One process writes it, under a lock that ends with that process. A torn last line, of a machine that went down, is cut off.
* Steps are mostly in order. A step that an earlier writer could not write is added when it is told again, after later ones.
"""

from __future__ import annotations

import json
import os
import re
import struct
import threading
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from heapq import merge
from pathlib import Path
from typing import Any, NamedTuple, assert_never

from lockstep.errors import RecordError
from lockstep.files import NoLocksError, flush, lock, make_folder
from lockstep.record.events import (
    AttemptsSummarised,
    CheckpointRow,
    Delivered,
    Document,
    EvaluationRow,
    Failed,
    Finished,
    Mended,
    Opened,
    PeakMemory,
    Recorded,
    Sampled,
    SetAside,
    Started,
    StepRow,
    TakenOver,
)

NAME = "journal.jsonl"
_READ_BYTES = 1 << 20


class Entry(NamedTuple):
    """One line: its event, or None where it is damaged, and where it begins and ends in the file."""

    event: Recorded | None
    start: int
    end: int


class Damage(NamedTuple):
    """A line that is not what was written, from the byte `start` on; `held` is what it seems to have been."""

    start: int
    held: str


class Journal:
    """The journal of the run in `folder`, created or gone on with, or with `read_only` looked at. One thread adds rows; all may read."""

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self._folder = folder
        self._path = folder / NAME
        self._read_only = read_only
        self._adding = threading.RLock()
        flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT | os.O_APPEND
        try:
            make_folder(folder)
            self._file = os.open(self._path, flags | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _broken(self._path, error) from error
        try:
            self._lock()
            if not read_only:
                flush(folder)  # a journal that was just made
            self._open()
        except BaseException as error:
            os.close(self._file)
            if isinstance(error, OSError):
                raise _broken(self._path, error) from error
            raise

    def _open(self) -> None:
        self._numbers, self._starts = array("q"), array("q")
        self._late: dict[int, int] = {}
        """Where the steps begin that came after later ones."""
        self._evaluations: dict[int, EvaluationRow] = {}
        self.events: list[Recorded] = []
        """What is neither a row nor a sample, in order."""
        self.size = 0
        self._damage: list[Damage] = []
        self._mended: set[int] = set()
        self.delivered = False
        """Whether the store has confirmed all of it."""
        self._torn = False
        """Whether a write that failed may have left half a line behind the last whole one."""
        self._index()

    def _lock(self) -> None:
        try:
            lock(self._file)
        except BlockingIOError as error:
            raise RecordError(
                f"run {self._path.parent.name}: another process records it now; wait for it, or end it"
            ) from error
        except NoLocksError as error:
            raise RecordError(
                f"record.folder: no file can be locked on the file system of {str(self._folder)!r} ({error.strerror}), so two "
                "processes could write one record; name a folder elsewhere, or mount that one with locks (Lustre: -o flock)"
            ) from error

    def _index(self) -> None:
        size = os.fstat(self._file).st_size
        for entry in self._read(0, size):
            if entry.event is None:
                self._damage.append(Damage(entry.start, _held(self._line_at(entry))))
            else:
                self._note(entry.event, entry.start)
            self.size = entry.end
        if size > self.size and not self._read_only:
            os.ftruncate(self._file, self.size)

    def _line_at(self, entry: Entry) -> bytes:
        return os.pread(self._file, min(entry.end - entry.start, 200), entry.start)

    @property
    def damage(self) -> list[Damage]:
        """The damaged lines that were not mended yet."""
        return [damage for damage in self._damage if damage.start not in self._mended]

    def _note(self, event: Recorded, start: int) -> None:
        self.delivered = isinstance(event, Delivered)
        match event:
            case StepRow():
                if event.step > self.last_step:
                    self._numbers.append(event.step)
                    self._starts.append(start)
                else:
                    self._late[event.step] = start
            case EvaluationRow():
                self._evaluations[event.step] = event
            case Sampled():
                pass  # it becomes points, and is not looked at again
            case Mended():
                self._mended.update(event.starts)
            case _:
                self.events.append(event)

    # --- writing ------------------------------------------------------------------------------------------

    def add(self, events: Sequence[Recorded]) -> None:
        """Add events, all or none of them; rows only where the journal does not have them. RecordError where the disk refuses."""
        lines = [_line(event, self._folder) for event in events]
        with self._adding:
            start = self.size
            self._append(b"".join(lines))
            for event, line in zip(events, lines, strict=True):
                self._note(event, start)
                start += len(line)

    def _append(self, data: bytes) -> None:
        try:
            if self._torn:
                os.ftruncate(self._file, self.size)
            self._torn, written = True, 0
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            with suppress(OSError):  # else before the next write
                os.ftruncate(self._file, self.size)
                self._torn = False
            raise _broken(self._path, error) from error
        self._torn = False
        self.size += len(data)

    def close(self) -> None:
        """Let the disk have it, and the lock go."""
        try:
            if not self._read_only:
                os.fsync(self._file)
        except OSError as error:
            raise _broken(self._path, error) from error
        finally:
            file, self._file = self._file, -1  # a thread that still reads must not find another file
            os.close(file)

    # --- reading ------------------------------------------------------------------------------------------

    @property
    def last_step(self) -> int:
        """Number of the last step, or 0."""
        return self._numbers[-1] if self._numbers else 0

    def missing_steps(self) -> range:
        """The first stretch of steps that is missing between the first and the last one; empty where none is."""
        if len(self._numbers) + len(self._late) == self.last_step - self._first_step + bool(self._numbers):
            return range(0)
        wanted = self._first_step
        for number in self._in_order():
            if number > wanted:
                return range(wanted, number)
            wanted = number + 1
        return range(0)

    @property
    def _first_step(self) -> int:
        return min([*self._numbers[:1], *self._late], default=0)

    def _in_order(self) -> Iterator[int]:
        return merge(self._numbers, sorted(self._late))

    def step(self, number: int) -> StepRow | None:
        """The row of a step, where the journal has it."""
        start = self._late.get(number)
        if start is None:
            at = bisect_left(self._numbers, number)
            if at == len(self._numbers) or self._numbers[at] != number:
                return None
            start = self._starts[at]
        row = next(self.read(start)).event
        return row if isinstance(row, StepRow) else None  # damaged since

    def has_step(self, number: int) -> bool:
        """Whether the journal has a step."""
        return number in self._late or self._on_time(number)

    def _on_time(self, number: int) -> bool:
        at = bisect_left(self._numbers, number)
        return at < len(self._numbers) and self._numbers[at] == number

    def evaluation(self, number: int) -> EvaluationRow | None:
        """The evaluation after a step, where the journal has it."""
        return self._evaluations.get(number)

    def evaluations(self) -> list[EvaluationRow]:
        """All evaluations, in order."""
        return [self._evaluations[step] for step in sorted(self._evaluations)]

    def steps(self) -> Iterator[StepRow]:
        """All steps, in order. RecordError where one was damaged since the journal was opened."""
        late = (row for number in sorted(self._late) if (row := self.step(number)) is not None)
        on_time = (
            entry.event
            for entry in self.read(0)
            if isinstance(entry.event, StepRow) and entry.event.step not in self._late
        )
        count = 0
        for row in merge(on_time, late, key=lambda row: row.step):
            count += 1
            yield row
        if count != len(self._numbers) + sum(not self._on_time(number) for number in self._late):
            raise RecordError(f"record: {str(self._path)!r} was damaged since it was opened; resume the run")

    def read(self, start: int) -> Iterator[Entry]:
        """The lines from the offset `start` on, up to the last one that is whole."""
        return self._read(start, self.size)

    def _read(self, start: int, until: int) -> Iterator[Entry]:
        rest, end = b"", start
        while start < until and (data := os.pread(self._file, min(_READ_BYTES, until - start), start)):
            start += len(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                begin, end = end, end + len(line) + 1
                yield Entry(_event(line, self._path), begin, end)


def read_steps(folder: Path) -> list[StepRow]:
    """The steps in the journal of a run that another process may be recording; none where there is no journal."""
    path = folder / NAME
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    rows = (_event(line, path) for line in lines if line.startswith(b'{"step"'))
    steps = {row.step: row for row in rows if isinstance(row, StepRow)}
    return [steps[number] for number in sorted(steps)]


def newest_step(folder: Path) -> StepRow | None:
    """The last step in the journal of a run, looked for at its end, or None."""
    path = folder / NAME
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _READ_BYTES))
        lines = file.read().split(b"\n")[:-1]
    rows = (_event(line, path) for line in reversed(lines) if line.startswith(b'{"step":'))
    return next((row for row in rows if isinstance(row, StepRow)), None)


# --- lines --------------------------------------------------------------------------------------------------


def _line(event: Recorded, folder: Path) -> bytes:
    kind, value = _plain_event(event, folder)
    text = json.dumps({kind: value}, default=str, separators=(",", ":")).encode()
    return b"%s %08x\n" % (text, zlib.crc32(text))


def _plain_event(event: Recorded, folder: Path) -> tuple[str, Any]:
    """The name of an event's line and its content as plain data; files are named from the run's folder on."""
    match event:
        case StepRow():
            return "step", [_plain(value) for value in event]
        case EvaluationRow():
            return "evaluation", [_plain(value) for value in event]
        case CheckpointRow():
            return "checkpoint", event._asdict()
        case Opened():
            return "opened", {"at": event.at, **event.process}
        case Started():
            return "started", dict(event.facts)
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
            return "finished", {"summary": dict(event.summary), "files": [str(path) for path in files]}
        case Failed():
            return "failed", {"message": event.message, "details": event.details, "status": event.status}
        case TakenOver():
            return "taken_over", {"message": event.message}
        case SetAside():
            return "set_aside", {"what": event.what, "reason": event.reason}
        case Mended():
            return "mended", {"starts": list(event.starts), "how": event.how}
        case Delivered():
            return "delivered", {}
        case _:
            assert_never(event)


_CHECKED = re.compile(rb"(.*\}) ([0-9a-f]{8})", re.DOTALL)


def _event(line: bytes, path: Path) -> Recorded | None:
    """The event of a line, or None where the line is damaged. Lines of older versions end without a checksum."""
    found = _CHECKED.fullmatch(line)
    if found and zlib.crc32(found[1]) != int(found[2], 16):
        return None
    try:
        ((kind, value),) = json.loads(found[1] if found else line).items()
        return _from_plain(kind, value, path.parent)
    except (ValueError, TypeError, AttributeError, KeyError):
        return None


def _held(line: bytes) -> str:
    """What a damaged line seems to have been."""
    found = re.match(rb'\{"(\w+)":(?:\[(\d+),)?', line)
    if not found:
        return "unreadable"
    return " ".join(part.decode() for part in found.groups() if part)


def _from_plain(kind: str, value: Any, folder: Path) -> Recorded:
    match kind:
        case "step":
            return StepRow._make(_floats(value, StepRow))
        case "evaluation":
            return EvaluationRow._make(_floats(value, EvaluationRow))
        case "checkpoint":
            essential = tuple((step, uri) for step, uri in value.get("essential", ()))
            deleted = tuple(value.get("deleted", ()))
            return CheckpointRow(**{**value, "deleted": deleted, "essential": essential})
        case "opened":
            return Opened(value.pop("at"), value)
        case "started":
            return Started(value)
        case "system":
            return Sampled(**value)
        case "attempts":
            return AttemptsSummarised(value)
        case "peak_memory":
            return PeakMemory(value)
        case "document":
            return Document(**value)
        case "finished":
            return Finished(value["summary"], [folder / name for name in value["files"]])
        case "failed":
            return Failed(**value)
        case "taken_over":
            return TakenOver(**value)
        case "set_aside":
            return SetAside(**value)
        case "mended":
            return Mended(**value)
        case "delivered":
            return Delivered()
    raise ValueError(f"unknown event {kind!r}")


def _plain(value: Any) -> Any:
    """A value for JSON, whose NaN has no payload."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if value != value:
        return f"nan:{struct.pack('>d', value).hex()}"
    return value


def _floats(values: list[Any], row: type[StepRow] | type[EvaluationRow]) -> list[Any]:
    if len(values) != len(row._fields):
        raise ValueError(f"{len(values)} values, wanted {len(row._fields)}")
    return [_float(value) for value in values]


def _float(value: Any) -> Any:
    if isinstance(value, str):
        return struct.unpack(">d", bytes.fromhex(value.removeprefix("nan:")))[0]
    if isinstance(value, dict):
        return {name: _float(inner) for name, inner in value.items()}
    return value


def _broken(path: Path, error: OSError) -> RecordError:
    return RecordError(
        f"record.folder: cannot write {str(path)!r}: {error.strerror or error}; name a folder that can be written"
    )
