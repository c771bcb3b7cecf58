"""The journal: what was told of a run, a JSON line each, on disk in its folder before any store hears of it.

* It is the spool: metric points are made from it again, with the timestamps of their rows, however late a store answers.
* It is the ledger in the making: a process that is killed loses what it had not been told, and nothing else.
* A step and an evaluation are in it once. A float is kept bit for bit, NaN with its payload.
* One process writes it, under a lock that ends with that process. A torn last line, of a machine that went down, is cut off.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import RecordError
from lockstep.record.ledger import EvaluationRow, StepRow

NAME = "journal.jsonl"
POINTS_ONLY = frozenset({"system"})
"""Kinds of events that become points and are not looked at again."""
_READ_BYTES = 1 << 20


class Entry(NamedTuple):
    """One line: `kind` is `step`, `evaluation` or the name of an event, `end` where the line ends in the file."""

    kind: str
    value: Any
    end: int


class Journal:
    """The journal of the run in `folder`, created or gone on with. Used by one thread."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _broken(self._path, error) from error
        self._lock()
        self._numbers, self._starts = array("q"), array("q")
        self._evaluations: dict[int, EvaluationRow] = {}
        self.events: list[Entry] = []
        self.size = 0
        self._index()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._file)
            raise RecordError(
                f"run {self._path.parent.name}: another process records it now; wait for it, or end it"
            ) from error

    def _index(self) -> None:
        for entry in self.read(0):
            self._note(entry, self.size)
            self.size = entry.end
        if os.fstat(self._file).st_size > self.size:
            os.ftruncate(self._file, self.size)

    def _note(self, entry: Entry, start: int) -> None:
        if entry.kind == "step":
            self._numbers.append(entry.value.step)
            self._starts.append(start)
        elif entry.kind == "evaluation":
            self._evaluations[entry.value.step] = entry.value
        elif entry.kind not in POINTS_ONLY:
            self.events.append(entry)

    # --- writing ------------------------------------------------------------------------------------------

    def add_steps(self, rows: list[StepRow]) -> None:
        """Add steps, each after the last one that the journal has."""
        lines = [_line("step", _plain_row(row)) for row in rows]
        start = self.size
        self._append(b"".join(lines))
        for row, line in zip(rows, lines, strict=True):
            self._numbers.append(row.step)
            self._starts.append(start)
            start += len(line)

    def add_evaluation(self, row: EvaluationRow) -> None:
        """Add an evaluation that the journal does not have."""
        self._append(_line("evaluation", _plain_row(row)))
        self._evaluations[row.step] = row

    def add_event(self, kind: str, value: Any) -> None:
        """Add anything else that happened, as plain data."""
        start = self.size
        self._append(_line(kind, value))
        self._note(Entry(kind, value, self.size), start)

    def _append(self, data: bytes) -> None:
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            os.ftruncate(self._file, self.size)  # no half line before whatever is written next
            raise _broken(self._path, error) from error
        self.size += len(data)

    def close(self) -> None:
        """Let the disk have it, and the lock go."""
        try:
            os.fsync(self._file)
        finally:
            os.close(self._file)

    # --- reading ------------------------------------------------------------------------------------------

    @property
    def last_step(self) -> int:
        """Number of the last step, or 0."""
        return self._numbers[-1] if self._numbers else 0

    def step(self, number: int) -> StepRow | None:
        """The row of a step, where the journal has it."""
        at = bisect_left(self._numbers, number)
        if at == len(self._numbers) or self._numbers[at] != number:
            return None
        row: StepRow = next(self.read(self._starts[at])).value
        return row

    def evaluation(self, number: int) -> EvaluationRow | None:
        """The evaluation after a step, where the journal has it."""
        return self._evaluations.get(number)

    def evaluations(self) -> list[EvaluationRow]:
        """All evaluations, in order."""
        return list(self._evaluations.values())

    def steps(self) -> Iterator[StepRow]:
        """All steps, in order."""
        return (entry.value for entry in self.read(0) if entry.kind == "step")

    def read(self, start: int) -> Iterator[Entry]:
        """The entries from the offset `start` on, up to the last whole line."""
        rest, end = b"", start
        while data := os.pread(self._file, _READ_BYTES, start):
            start += len(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                end += len(line) + 1
                yield _entry(line, end, self._path)


def read_steps(folder: Path) -> list[StepRow]:
    """The steps in the journal of a run that another process may be recording; none where there is no journal."""
    path = folder / NAME
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    entries = (_entry(line, 0, path) for line in lines if line.startswith(b'{"step"'))
    return [entry.value for entry in entries]


def newest_step(folder: Path) -> StepRow | None:
    """The last step in the journal of a run, looked for at its end, or None."""
    path = folder / NAME
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _READ_BYTES))
        lines = file.read().split(b"\n")[:-1]
    newest = next((line for line in reversed(lines) if line.startswith(b'{"step":')), None)
    return _entry(newest, 0, path).value if newest else None


def _line(kind: str, value: Any) -> bytes:
    return json.dumps({kind: value}, default=str, separators=(",", ":")).encode() + b"\n"


def _entry(line: bytes, end: int, path: Path) -> Entry:
    try:
        ((kind, value),) = json.loads(line).items()
        if kind == "step":
            value = StepRow._make(_floats(value, StepRow))
        elif kind == "evaluation":
            value = EvaluationRow._make(_floats(value, EvaluationRow))
    except (ValueError, TypeError, AttributeError) as error:
        raise RecordError(f"record: {str(path)!r} is damaged before byte {end}: {error}") from error
    return Entry(kind, value, end)


def _plain_row(row: StepRow | EvaluationRow) -> list[Any]:
    return [_plain(value) for value in row]


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
