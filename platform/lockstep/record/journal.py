"""The journal: the log of a run's recorded events, a JSON line each, on disk in its folder before any store hears of it.

* It is the spool: metric points are made from it again, with the timestamps of their rows, however late a store answers.
* It is the ledger in the making: a process that is killed loses what it had not been told, and nothing else.
* A step and an evaluation are in it once. A float is kept bit for bit, NaN with its payload.
* A line ends in its CRC-32. One that is damaged is passed over; its rows are added again from a checkpoint's history.
* One process writes it, under a lock that ends with that process. A torn last line, of a machine that went down, is cut off.
* Steps are mostly in order. A step that an earlier writer could not write is added when it is told again, after later ones.
* When a segment is full and its points are with the store its steps are sealed, and the journal is cut: another file takes its
  place, which names the sealed segments and begins behind them. Offsets are those of a journal that was never cut.
"""

from __future__ import annotations

import errno
import os
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from heapq import merge
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lockstep.errors import RecordError
from lockstep.files import NoLocksError, flush, lock, make_folder
from lockstep.record.events import (
    Delivered,
    EvaluationRow,
    Mended,
    Recorded,
    Sampled,
    Sealed,
    Segment,
    StepRow,
)
from lockstep.record.journal_lines import from_line, held_by, to_line
from lockstep.record.ledger import step_table
from lockstep.record.sealed import SealedSteps
from lockstep.record.segments import SEGMENT_STEPS, digest_of, end_of

if TYPE_CHECKING:
    import pyarrow as pa

NAME, NEXT = "journal.jsonl", "journal.jsonl.next"
_READ_BYTES = 1 << 20
_LINE_BYTES = 1 << 10
_STEP = b'{"step":['
_MOST_AT_ONCE = 16
"""Segments that are sealed before others are recorded: each takes some 0.3 s."""


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
        self._reading = threading.Lock()
        """Held while a part of the file is read, and while another takes its place."""
        try:
            if not read_only:
                make_folder(folder)
            self._file = os.open(self._path, flags | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _broken(self._path, error) from error
        try:
            self._lock(self._file)
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
        self._base = 0
        """Where the file begins, after it took the place of a longer one."""
        self._sealed = SealedSteps(self._folder)
        self._damage: list[Damage] = []
        self._mended: set[int] = set()
        self.delivered = False
        """Whether the store has confirmed all of it."""
        self._torn = False
        """Whether a write that failed may have left half a line behind the last whole one."""
        self._index()

    def _lock(self, file: int) -> None:
        try:
            lock(file, shared=self._read_only)
            if os.fstat(file).st_ino != self._path.stat().st_ino and file == self._file:
                raise BlockingIOError(errno.EAGAIN, "it was cut meanwhile")  # by whoever held the lock
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
                if entry.start == 0:
                    self._sealed.take_up_all()
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
            case Sealed():
                self._sealed.take_up(event.segments)
            case StepRow():
                if self._sealed.segment_of(event.step) is not None:
                    pass  # a late one, of a segment that is sealed since
                elif event.step > self.last_step:
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
                os.ftruncate(self._file, self.size - self._base)
            self._torn, written = True, 0
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            with suppress(OSError):  # else before the next write
                os.ftruncate(self._file, self.size - self._base)
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
        return max(self._numbers[-1] if self._numbers else 0, self._sealed.last)

    def missing_steps(self) -> range:
        """The first stretch of steps that is missing between the first and the last one; empty where none is."""
        if self._count == self.last_step - self._first_step + bool(self._count):
            return range(0)
        wanted = self._first_step
        open_steps = (range(number, number + 1) for number in self._in_order())
        for stretch in merge(open_steps, self._sealed.numbers(), key=lambda stretch: stretch.start):
            if stretch.start > wanted:
                return range(wanted, stretch.start)
            wanted = max(wanted, stretch.stop)
        return range(0)

    @property
    def _count(self) -> int:
        return len(self._numbers) + len(self._late) + self._sealed.count

    @property
    def _first_step(self) -> int:
        sealed = self._sealed.first
        return min([*self._numbers[:1], *self._late, *([] if sealed is None else [sealed])], default=0)

    def _in_order(self) -> Iterator[int]:
        return merge(self._numbers, sorted(self._late))

    @property
    def lost(self) -> list[Segment]:
        """The sealed segments whose files are damaged or missing, and whose steps were not added since."""
        return [
            one
            for one in self._sealed.lost
            if not all(self.has_step(number) for number in range(one.first, one.last + 1))
        ]

    def step(self, number: int) -> StepRow | None:
        """The row of a step, where the journal has it."""
        start = self._late.get(number)
        if start is None:
            if not self._on_time(number):
                return self.sealed_step(number)
            start = self._starts[bisect_left(self._numbers, number)]
        return self._step_at(start)

    def sealed_step(self, number: int) -> StepRow | None:
        """The row of a step that is sealed. Any thread may ask."""
        try:
            return self._sealed.step(number)
        except RecordError:
            # Damaged since: whoever writes the ledger, or opens the journal, finds it as well.
            return None

    def _step_at(self, start: int) -> StepRow | None:
        data, length = b"", 0
        while b"\n" not in data and length < self.size - start:
            length = min(2 * length or _LINE_BYTES, self.size - start)
            data = self._pread(length, start)
        row = from_line(data.partition(b"\n")[0], self._folder)
        return row if isinstance(row, StepRow) else None  # damaged since

    def has_segment(self, segment: Segment) -> bool:
        """Whether the journal has all steps of a segment, with the same bits in their deterministic columns."""
        sealed = self._sealed.segment_of(segment.first)
        if sealed is not None and sealed[:2] == segment[:2]:
            return sealed.digest == segment.digest
        rows = []
        for number in range(segment.first, segment.last + 1):
            row = self.step(number) if self.has_step(number) else None
            if row is None:
                return False
            rows.append(row)
        return digest_of(rows) == segment.digest

    def has_step(self, number: int) -> bool:
        """Whether the journal has a step."""
        return number in self._late or self._on_time(number) or self._sealed.segment_of(number) is not None

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
        for part in self._in_parts():
            yield from self._sealed.steps(part) if isinstance(part, Segment) else part

    @property
    def segments(self) -> list[Segment]:
        """The segments that are sealed, in order."""
        return self._sealed.segments

    def steps_of(self, segment: Segment) -> list[StepRow]:
        """The steps of one of them. RecordError likewise."""
        return self._sealed.steps(segment)

    def tables(self, columns: Sequence[str] | None) -> Iterator[pa.Table]:
        """All steps, in order, a table after the other: of all columns, or of those that are named. RecordError likewise."""
        for part in self._in_parts():
            if isinstance(part, Segment):
                yield self._sealed.table(part, columns)
            else:
                table = step_table(part)
                yield table if columns is None else table.select(columns) if columns else table.slice(0, 0)

    def _in_parts(self) -> Iterator[Segment | list[StepRow]]:
        """The sealed segments, and the other steps between them and behind."""
        waiting: list[StepRow] = []
        segments = deque(self._sealed.segments)
        for row in self._open_steps():
            while segments and segments[0].first < row.step:
                if waiting:
                    yield waiting
                    waiting = []
                yield segments.popleft()
            waiting.append(row)
            if len(waiting) == SEGMENT_STEPS:
                yield waiting
                waiting = []
        if waiting:
            yield waiting
        yield from segments

    def _open_steps(self) -> Iterator[StepRow]:
        late = (row for number in sorted(self._late) if (row := self.step(number)) is not None)
        on_time = (
            entry.event
            for entry in self.read(0)
            if isinstance(entry.event, StepRow)
            and entry.event.step not in self._late
            and self._on_time(entry.event.step)
        )
        count = 0
        for row in merge(on_time, late, key=lambda row: row.step):
            count += 1
            yield row
        if count != len(self._numbers) + sum(not self._on_time(number) for number in self._late):
            raise RecordError(f"record: {str(self._path)!r} was damaged since it was opened; resume the run")

    def read(self, start: int) -> Iterator[Entry]:
        """The lines from the offset `start` on, up to the last one that is whole; of those before a cut, the ones that were kept."""
        return self._read(max(start, self._base), self.size)

    def _read(self, start: int, until: int) -> Iterator[Entry]:
        for line, begin, end in self._lines(start, until):
            yield Entry(from_line(line, self._folder), begin, end)

    def _lines(self, start: int, until: int) -> Iterator[tuple[bytes, int, int]]:
        rest, end = b"", start
        while start < until and (data := self._pread(min(_READ_BYTES, until - start), start)):
            start += len(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                begin, end = end, end + len(line) + 1
                yield line, begin, end

    def _pread(self, length: int, start: int) -> bytes:
        with self._reading:
            return os.pread(self._file, length, start - self._base)

    # --- sealing --------------------------------------------------------------------------------------------

    def seal(self, delivered: int) -> bool:
        """Seal the segments that are full, a few at once, and cut the journal. Whether there were any.

        The lines before the offset `delivered` became points that the store has. RecordError where the disk refuses: the journal
        then has all that it had.
        """
        if self.damage:
            return False  # what a damaged line held may come yet
        try:
            return self._seal(delivered)
        except OSError as error:
            raise _broken(self._path, error) from error

    def _seal(self, delivered: int) -> bool:
        segments: list[Segment] = []
        while len(segments) < _MOST_AT_ONCE and (steps := self._full(segments, delivered)) is not None:
            rows = [row for number in steps if (row := self.step(number)) is not None]
            if len(rows) < len(steps):
                raise RecordError(
                    f"record: {str(self._path)!r} was damaged since it was opened; resume the run"
                )
            segments.append(self._sealed.write(rows))
        if segments:
            with self._adding:
                self._cut(segments, delivered)
        return bool(segments)

    def _full(self, segments: Sequence[Segment], delivered: int) -> range | None:
        """The first stretch of open steps behind `segments` that makes another, where there are later ones."""
        behind = segments[-1].last if segments else 0
        at = bisect_right(self._numbers, behind)
        late = [number for number in self._late if number > behind]
        first = min([*self._numbers[at : at + 1], *late], default=None)
        if first is None or self.last_step <= (last := end_of(first)):
            return None
        later = (one.first - 1 for one in self._sealed.segments if one.first > first)
        steps = range(first, min([last, *later]) + 1)
        at = bisect_left(self._numbers, first)
        starts = dict(
            zip(self._numbers[at : at + len(steps)], self._starts[at : at + len(steps)], strict=True)
        )
        starts |= {number: self._late[number] for number in late}
        return steps if all(starts.get(number, delivered) < delivered for number in steps) else None

    def _places(self) -> Iterator[tuple[int, int]]:
        """Numbers and starts of the open steps."""
        yield from zip(self._numbers, self._starts, strict=True)
        yield from self._late.items()

    def _cut(self, sealed: Sequence[Segment], delivered: int) -> None:
        """Put a file in the journal's place that names the sealed segments, and has what is open or is no step."""

        def is_open(number: int) -> bool:
            return not any(one.first <= number <= one.last for one in sealed)

        open_steps = [(number, start) for number, start in self._places() if is_open(number)]
        cut = min([delivered, *(start for _, start in open_steps)])
        lost = [one for one in self._sealed.lost if is_open(one.first)]
        head = [to_line(Sealed([*self._sealed.segments, *sealed, *lost]), self._folder)]
        for line, _, _ in self._lines(self._base, cut):
            event = None if line.startswith(_STEP) else from_line(line, self._folder)
            if event is not None and not isinstance(event, Sealed | Mended):  # damaged lines are mended
                head.append(line + b"\n")
        before = b"".join(head)
        file = self._beginning(before, cut)
        with self._reading:
            old, self._file, self._base = self._file, file, cut - len(before)
        os.close(old)
        for segment in sealed:
            self._sealed.add(segment)
        self._damage, self._mended, self._torn = [], set(), False
        on_time = [(n, s) for n, s in zip(self._numbers, self._starts, strict=True) if is_open(n)]
        self._numbers, self._starts = (array("q", [one[i] for one in on_time]) for i in (0, 1))
        self._late = {number: start for number, start in self._late.items() if is_open(number)}

    def _beginning(self, before: bytes, cut: int) -> int:
        """A file in the journal's place, locked, that has `before` and then what is behind the offset `cut`."""
        following = self._path.with_name(NEXT)
        file = -1
        try:
            file = os.open(following, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._lock(file)
            _write(file, before)
            while cut < self.size and (data := self._pread(min(_READ_BYTES, self.size - cut), cut)):
                _write(file, data)
                cut += len(data)
            os.fsync(file)
            flush(self._folder)
            following.replace(self._path)
        except OSError as error:
            if file >= 0:
                os.close(file)
            raise _broken(following, error) from error
        # Either of the two journals has all there is: a loss of power may take back which.
        with suppress(OSError):
            flush(self._folder)
        return file


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


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
