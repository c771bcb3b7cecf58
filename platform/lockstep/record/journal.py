"""The journal: the log of a run's recorded events, a JSON line each, on disk in its folder before any store hears of it.

* It is the spool: metric points are made from it again, with the timestamps of their rows, however late a store answers.
* It is the ledger in the making: a process that is killed loses what it had not been told, and nothing else.
* A step and an evaluation are in it once. A float is kept bit for bit, NaN with its payload.
* A line ends in its CRC-32. One that is damaged is passed over; its rows are added again from a checkpoint's history.
* One process writes it, under a lock that ends with that process. A torn last line, of a machine that went down, is cut off.
* Steps are mostly in order. A step that an earlier writer could not write is added when it is told again, after later ones.
"""

from __future__ import annotations

import os
import threading
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from heapq import merge
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import RecordError
from lockstep.files import NoLocksError, flush, lock, make_folder
from lockstep.record.events import Delivered, EvaluationRow, Mended, Recorded, Sampled, Segment, StepRow
from lockstep.record.journal_lines import from_line, held_by, to_line
from lockstep.record.segments import digest_of

NAME = "journal.jsonl"
_READ_BYTES = 1 << 20
_LINE_BYTES = 1 << 10


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
            if not read_only:
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
            lock(self._file, shared=self._read_only)
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
                self._damage.append(Damage(entry.start, held_by(self._line_at(entry))))
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
        lines = [to_line(event, self._folder) for event in events]
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
            if not self._on_time(number):
                return None
            start = self._starts[bisect_left(self._numbers, number)]
        return self._step_at(start)

    def _step_at(self, start: int) -> StepRow | None:
        data, length = b"", 0
        while b"\n" not in data and length < self.size - start:
            length = min(2 * length or _LINE_BYTES, self.size - start)
            data = os.pread(self._file, length, start)
        row = from_line(data.partition(b"\n")[0], self._folder)
        return row if isinstance(row, StepRow) else None  # damaged since

    def has_segment(self, segment: Segment) -> bool:
        """Whether the journal has all steps of a segment, with the same bits in their deterministic columns."""
        rows = []
        for number in range(segment.first, segment.last + 1):
            row = self.step(number) if self.has_step(number) else None
            if row is None:
                return False
            rows.append(row)
        return digest_of(rows) == segment.digest

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
                yield Entry(from_line(line, self._path.parent), begin, end)


def read_steps(folder: Path) -> list[StepRow]:
    """The steps in the journal of a run that another process may be recording; none where there is no journal."""
    path = folder / NAME
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    rows = (from_line(line, folder) for line in lines if line.startswith(b'{"step"'))
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
    rows = (from_line(line, folder) for line in reversed(lines) if line.startswith(b'{"step":'))
    return next((row for row in rows if isinstance(row, StepRow)), None)


def _broken(path: Path, error: OSError) -> RecordError:
    return RecordError(
        f"record.folder: cannot write {str(path)!r}: {error.strerror or error}; name a folder that can be written"
    )
