"""The journal: the log of a run's recorded events, one JSON line each, on disk in its folder before any store gets them.

* It is the spool: metric points can be made from it again, with the timestamps of their rows, however late a store answers.
* It is the source of the ledger: a process that is killed loses only what it was not told yet.
* A step or an evaluation is in it once. A float is kept bit for bit, NaN with its payload.
* A line ends with its CRC-32. A damaged line is skipped; its rows are added again from a checkpoint's history.
* One process writes it, under a lock that ends with that process. A torn last line, left by a machine that went down, is cut off.
* Steps are mostly in order. A step that an earlier writer could not write is added when it is told again, after later ones.
* When a segment is full and its points are in the store, its steps are sealed and the journal is cut: a new file takes its
place, which names the sealed segments and begins after them. Offsets are those of a journal that was never cut.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from heapq import merge
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from lockstep.errors import RecordError
from lockstep.job.identity import forked_step
from lockstep.paths import open_beneath
from lockstep.record.events import (
    CheckpointRow,
    Delivered,
    EvaluationRow,
    Mended,
    Observation,
    Opened,
    Recorded,
    Sampled,
    Sealed,
    Segment,
    Started,
    StepRow,
)
from lockstep.record.journal_file import NAME, READ_BYTES, JournalFile, broken
from lockstep.record.journal_lines import from_line, held_by, to_line
from lockstep.record.ledger import step_table
from lockstep.record.open_steps import OpenSteps
from lockstep.record.sealed import SealedSteps
from lockstep.record.segments import SEGMENT_STEPS, digest_of

if TYPE_CHECKING:
    import pyarrow as pa

_LINE_BYTES = 1 << 10
_STEP = b'{"step":['
_NUMBERED = re.compile(rb'\{"step":\[(\d{1,18}),')
_OBSERVATION = b'{"observation":['
_MOST_AT_ONCE = 16
"""The most segments that are sealed before other events are recorded: each takes some 0.3 s."""


class Entry(NamedTuple):
    """One line: its event, or None if it is damaged, and where it begins and ends in the file."""

    event: Recorded | None
    start: int
    end: int


class Damage(NamedTuple):
    """A damaged line that begins at byte `start`; `held` is what it seems to have been."""

    start: int
    held: str


class Journal:
    """The journal of the run in `folder`: created, continued, or only read (`read_only`). One thread adds rows; all may read."""

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self._folder = folder
        self._adding = RLock()
        self._file = JournalFile(folder, read_only=read_only)
        self._open = OpenSteps()
        self._evaluations: dict[int, EvaluationRow] = {}
        self._observed: set[int] = set()
        self.events: list[Recorded] = []
        """Events that are neither rows nor samples, in order."""
        self._sealed = SealedSteps(folder)
        self._damage: list[Damage] = []
        self._mended: set[int] = set()
        self.delivered = False
        """Whether the store has confirmed everything in it."""
        try:
            self._index()
        except BaseException as error:
            self._file.release()
            if isinstance(error, OSError):
                raise broken(self._file.path, error) from error
            raise

    @property
    def size(self) -> int:
        """The offset at which the last whole line ends."""
        return self._file.size

    @property
    def is_deleted(self) -> bool:
        """Whether its file was deleted since it was opened."""
        return self._file.is_deleted

    def _index(self) -> None:
        for line, start, _ in self._file.take_up():
            event = from_line(line, self._folder)
            if event is not None:
                self._note(event, start)
                continue
            self._damage.append(Damage(start, held_by(line)))
            if start == 0:
                self._sealed.take_up_all()

    @property
    def damage(self) -> list[Damage]:
        """The damaged lines that are not mended yet."""
        return [damage for damage in self._damage if damage.start not in self._mended]

    def _note(self, event: Recorded, start: int) -> None:
        self.delivered = isinstance(event, Delivered)
        match event:
            case Sealed():
                self._sealed.take_up(event.segments)
            case StepRow():
                # Otherwise it is a late one of a segment that was sealed since.
                if self._sealed.segment_of(event.step) is None:
                    self._open.add(event.step, start, late=event.step <= self.last_step)
            case EvaluationRow():
                self._evaluations[event.step] = event
            case Observation():
                self._observed.add(event.step)
            case Sampled():
                pass  # it becomes points, and is not needed again
            case Mended():
                self._mended.update(event.starts)
            case _:
                self.events.append(event)

    # --- writing ------------------------------------------------------------------------------------------

    def add(self, events: Sequence[Recorded]) -> None:
        """Add events, all or none of them; an existing row is replaced. RecordError where the disk refuses."""
        lines = [to_line(event, self._folder) for event in events]
        with self._adding:
            start = self.size
            self._file.append(b"".join(lines))
            for event, line in zip(events, lines, strict=True):
                self._note(event, start)
                start += len(line)

    def flush(self) -> None:
        """Make the additions survive a loss of power. RecordError where the disk refuses."""
        self._file.flush()

    def close(self) -> None:
        """Flush to the disk and release the lock."""
        self._file.close()

    # --- reading ------------------------------------------------------------------------------------------

    @property
    def last_step(self) -> int:
        """Number of the last step, or 0."""
        return max(self._open.last, self._sealed.last)

    @property
    def last_sign(self) -> float | None:
        """When the last row was recorded, or without any the run was opened, Unix seconds; None if nothing tells."""
        step = self.step(self.last_step)
        rows = [row.wall_clock for row in (step, *self.evaluations()[-1:]) if row is not None]
        opened = [event.at for event in self.events[:1] if isinstance(event, Opened)]
        return max(rows or opened, default=None)

    def missing_steps(self) -> range:
        """The first gap between the run's first step and the last one; empty if there is none."""
        count = self._open.count + self._sealed.count
        if not count or count == self.last_step - self._first_step + 1:
            return range(0)
        wanted = self._first_step
        open_steps = (range(number, number + 1) for number in self._open.in_order())
        for stretch in merge(open_steps, self._sealed.numbers(), key=lambda stretch: stretch.start):
            if stretch.start > wanted:
                return range(wanted, stretch.start)
            wanted = max(wanted, stretch.stop)
        return range(0)

    @property
    def begins(self) -> int | None:
        """The run's first step, a fork's after that of its parent, as the facts of its attempts tell; None if nothing tells."""
        for event in self.events:
            if isinstance(event, Started) and event.facts.get("fields"):
                return forked_step(event.facts["fields"]) + 1
        return None

    @property
    def _first_step(self) -> int:
        """The run's first step; the first one that is there if nothing tells."""
        there = [first for first in (self._open.first, self._sealed.first) if first is not None]
        return self.begins or min(there, default=0)

    @property
    def lost(self) -> list[Segment]:
        """The sealed segments whose files are damaged or missing and whose steps were not added again."""
        return [
            one
            for one in self._sealed.lost
            if not all(self.has_step(number) for number in range(one.first, one.last + 1))
        ]

    def step(self, number: int) -> StepRow | None:
        """The row of a step, if the journal has it."""
        start = self._open.start_of(number)
        return self.sealed_step(number) if start is None else self._step_at(start)

    def sealed_step(self, number: int) -> StepRow | None:
        """The row of a sealed step. Any thread may call it."""
        try:
            return self._sealed.step(number)
        except RecordError:
            # Damaged since. The next writer of the ledger or opener of the journal finds that too.
            return None

    def _step_at(self, start: int) -> StepRow | None:
        data, length = b"", 0
        while b"\n" not in data and length < self.size - start:
            length = min(2 * length or _LINE_BYTES, self.size - start)
            data = self._file.read(length, start)
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
        return self._open.start_of(number) is not None or self._sealed.segment_of(number) is not None

    def is_sealed(self, number: int) -> bool:
        """Whether a step is in a sealed segment, where it cannot be replaced."""
        return self._sealed.segment_of(number) is not None

    def evaluation(self, number: int) -> EvaluationRow | None:
        """The evaluation after a step, if the journal has it."""
        return self._evaluations.get(number)

    def evaluations(self) -> list[EvaluationRow]:
        """All evaluations, in order."""
        return [self._evaluations[step] for step in sorted(self._evaluations)]

    def has_observation(self, step: int) -> bool:
        """Whether the journal has the observation after a step."""
        return step in self._observed

    def observations(self) -> list[Observation]:
        """All observations, in order. Of one that was made again after wrong bits, the last counts."""
        lines = (line for line, _, _ in self._file.lines(0) if line.startswith(_OBSERVATION))
        events = (from_line(line, self._folder) for line in lines)
        found = {event.step: event for event in events if isinstance(event, Observation)}
        return [found[step] for step in sorted(found)]

    def steps(self, after: int = 0) -> Iterator[StepRow]:
        """All steps after number `after`, in order. RecordError where one was damaged since the journal was opened."""
        for part in self._in_parts():
            if not isinstance(part, Segment):
                yield from (row for row in part if row.step > after)
            elif part.last > after:
                yield from (row for row in self._sealed.steps(part) if row.step > after)

    @property
    def segments(self) -> list[Segment]:
        """The sealed segments, in order."""
        return self._sealed.segments

    def steps_of(self, segment: Segment) -> list[StepRow]:
        """The steps of a sealed segment. RecordError as in `steps`."""
        return self._sealed.steps(segment)

    def tables(self, columns: Sequence[str] | None) -> Iterator[pa.Table]:
        """All steps, in order, as one table after another, with all columns or the named ones. RecordError as in `steps`."""
        for part in self._in_parts():
            if isinstance(part, Segment):
                yield self._sealed.table(part, columns)
            else:
                table = step_table(part)
                yield table if columns is None else table.select(columns) if columns else table.slice(0, 0)

    def _in_parts(self) -> Iterator[Segment | list[StepRow]]:
        """The sealed segments, and the other steps between and after them, in order."""
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
        late_steps = set(self._open.late)
        late = (row for number in self._open.late if (row := self.step(number)) is not None)
        on_time = (
            entry.event
            for entry in self.read(0)
            if isinstance(entry.event, StepRow)
            and entry.event.step not in late_steps
            and self._open.on_time(entry.event.step)
        )
        count = 0
        for row in merge(on_time, late, key=lambda row: row.step):
            count += 1
            yield row
        if count != self._open.count:
            raise self._damaged_since()

    def _damaged_since(self) -> RecordError:
        return RecordError(
            f"record: {str(self._file.path)!r} was damaged since it was opened; resume the run"
        )

    def read(self, start: int) -> Iterator[Entry]:
        """The whole lines from the offset `start` on; of those before a cut, the ones that were kept."""
        for line, begin, end in self._file.lines(start):
            yield Entry(from_line(line, self._folder), begin, end)

    # --- sealing --------------------------------------------------------------------------------------------

    def seal(self, delivered: int) -> bool:
        """Seal full segments, a few at a time, and cut the journal. Returns whether there were any.

        The store has the points of the lines before the offset `delivered`. RecordError where the disk refuses: the journal
        then still has everything.
        """
        if self.damage:
            return False  # the content of a damaged line may still come
        try:
            return self._seal(delivered)
        except OSError as error:
            raise broken(self._file.path, error) from error

    def _seal(self, delivered: int) -> bool:
        segments: list[Segment] = []
        while len(segments) < _MOST_AT_ONCE and (steps := self._full(segments, delivered)) is not None:
            rows = [row for number in steps if (row := self.step(number)) is not None]
            if len(rows) < len(steps):
                raise self._damaged_since()
            segments.append(self._sealed.write(rows))
        if segments:
            with self._adding:
                self._cut(segments, delivered)
        return bool(segments)

    def _full(self, written: Sequence[Segment], delivered: int) -> range | None:
        behind = written[-1].last if written else 0
        return self._open.full(behind, delivered, self.last_step, self._sealed.segments)

    def _cut(self, sealed: Sequence[Segment], delivered: int) -> None:
        """Replace the journal by a file that names the sealed segments, and keeps open steps and what is no step."""

        def is_open(number: int) -> bool:
            return not any(one.first <= number <= one.last for one in sealed)

        at = min([delivered, *(start for number, start in self._open.places() if is_open(number))])
        lost = [one for one in self._sealed.lost if is_open(one.first)]
        before = [to_line(Sealed([*self._sealed.segments, *sealed, *lost]), self._folder)]
        self._file.cut(b"".join([*before, *self._kept(at)]), at)
        for segment in sealed:
            self._sealed.add(segment)
        self._damage, self._mended = [], set()
        self._open.keep(is_open)

    def _kept(self, until: int) -> Iterator[bytes]:
        """The lines before the offset `until` that are in no segment."""
        for line, start, _ in self._file.lines(0):
            if start >= until:
                return
            event = None if line.startswith(_STEP) else from_line(line, self._folder)
            if event is not None and not isinstance(event, Sealed | Mended):  # damaged lines are mended
                yield line + b"\n"


def _opened(folder: Path) -> BinaryIO | None:
    """The journal of a run, to read without its lock; None where there is none. RecordError for anything but a file."""
    try:
        return os.fdopen(open_beneath(folder, NAME), "rb")
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RecordError(f"run {folder.name}: {error}") from error
    except OSError as error:
        raise RecordError(
            f"run {folder.name}: its {NAME} in {str(folder)!r} cannot be read: {error.strerror}"
        ) from error


def newest_step(folder: Path) -> StepRow | None:
    """The highest step near the end of a run's journal, where a row that was mended may follow later ones; None if it has no step."""
    file = _opened(folder)
    if file is None:
        return None
    with file:
        size, length = os.fstat(file.fileno()).st_size, READ_BYTES // 4
        while True:  # what an attempt begins with may be longer than what is read at once
            file.seek(max(0, size - length))
            lines = file.read().split(b"\n")[:-1]
            likely = sorted(filter(None, map(_NUMBERED.match, reversed(lines))), key=lambda one: -int(one[1]))
            rows = (from_line(one.string, folder) for one in likely)
            newest = next((row for row in rows if isinstance(row, StepRow)), None)
            if newest is not None or length >= size:
                return newest
            length *= 4


def newest_checkpoint(folder: Path) -> CheckpointRow | None:
    """The last checkpoint in the journal of a run whose place it names, or None."""
    found = None
    file = _opened(folder)
    if file is None:
        return None
    with file as lines:
        for line in lines:
            row = from_line(line.rstrip(b"\n"), folder) if line.startswith(b'{"checkpoint":') else None
            if isinstance(row, CheckpointRow) and row.uri is not None:
                found = row
    return found
