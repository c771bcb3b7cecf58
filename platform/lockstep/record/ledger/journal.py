"""The journal: the log of a run's recorded events, one JSON line each, on disk in its folder before any store gets them.

* It is the spool: metric points can be made from it again, with the timestamps of their rows, however late a store answers.
* It is the source of the ledger: a process that is killed loses only what was not reported to it yet.
* A step or an evaluation is in it once. A float is kept bit for bit, NaN with its payload.
* A line ends with its CRC-32. A damaged line is skipped; its rows are added again from a checkpoint's history.
* One process writes it, under a lock that ends with that process. A torn last line, left by a machine that went down, is cut off.
* Steps are mostly in order. A step that an earlier writer could not write is added when it is told again, after later ones.
* A step's line is found by its number when the journal is opened, and its checksum compared; its values are read when they are asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import BinaryIO, NamedTuple

from lockstep.job.identity import forked_step
from lockstep.paths import open_beneath
from lockstep.record import problems
from lockstep.record.events.codec import StepTime, damaged_content, from_line, step_number, step_time, to_line
from lockstep.record.events.union import (
    CheckpointRow,
    Delivered,
    Mended,
    Opened,
    Recorded,
    Sampled,
    Segment,
    Started,
)
from lockstep.record.ledger.journal_file import NAME, READ_BYTES, JournalFile, broken
from lockstep.record.ledger.rows import EvaluationRow, Observation, StepRow
from lockstep.record.ledger.segments import digest_of
from lockstep.record.ledger.step_offsets import StepOffsets

_LINE_BYTES = 1 << 10
_OBSERVATION = b'{"observation":['


class Entry(NamedTuple):
    """One line: its event, or None if it is damaged, and where it begins and ends in the file."""

    event: Recorded | None
    start: int
    end: int


class Damage(NamedTuple):
    """A damaged line that begins at byte `start`; `content` is what it seems to have been."""

    start: int
    content: str


class Journal:
    """The journal of the run in `folder`: created, continued, or only read (`read_only`). One thread adds rows; all may read."""

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self._folder = folder
        self._adding = Lock()
        self._file = JournalFile(folder, read_only=read_only)
        self._steps = StepOffsets()
        self._evaluations: dict[int, EvaluationRow] = {}
        self._observed: set[int] = set()
        self.events: list[Recorded] = []
        """Events that are neither rows nor samples, in order."""
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
            if (number := step_number(line)) is not None:
                self._steps.add(number, start)
                self.delivered = False
            elif (event := from_line(line, self._folder)) is not None:
                self._note(event, start)
            else:
                self._damage.append(Damage(start, damaged_content(line)))

    @property
    def damage(self) -> list[Damage]:
        """The damaged lines that are not mended yet."""
        return [damage for damage in self._damage if damage.start not in self._mended]

    def _note(self, event: Recorded, start: int) -> None:
        self.delivered = isinstance(event, Delivered)
        match event:
            case StepRow():
                self._steps.add(event.step, start)
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
        return self._steps.last

    @property
    def last_sign(self) -> float | None:
        """When the last row was recorded, or without any the run was opened, Unix seconds; None if nothing tells."""
        step = self.step(self.last_step)
        rows = [row.wall_clock for row in (step, *self._evaluations.values()) if row is not None]
        opened = [event.at for event in self.events[:1] if isinstance(event, Opened)]
        return max(rows or opened, default=None)

    def other_run(self) -> str:
        """The id of another run that this is the journal of, as where its file was put into the run's folder; empty if there is none."""
        runs = [event.run for event in self.events if isinstance(event, Opened)]
        return next((run for run in runs if run and run != self._folder.resolve().name), "")

    def check_run(self) -> None:
        """RecordError where this is the journal of another run."""
        if run := self.other_run():
            raise problems.OTHER_JOURNAL(run=self._folder.name, file=NAME, folder=self._folder, got=run)

    def missing_steps(self) -> range:
        """The first gap between the run's first step and the last one; empty if there is none."""
        expected = self._first_step
        lowest = min(self._steps.first or expected, expected)  # rows of another run may come before the first
        if self._steps.count != self.last_step - lowest + 1:  # else there is none to look for
            for number in self._steps.numbers():
                if number > expected:
                    return range(expected, number)
                expected = max(expected, number + 1)
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
        return self.begins or self._steps.first or 0

    def step(self, number: int) -> StepRow | None:
        """The row of a step, if the journal has it. Any thread may call it."""
        start = self._steps.start_of(number)
        return None if start is None else self._step_at(start)

    def _step_at(self, start: int) -> StepRow | None:
        data, length = b"", 0
        while b"\n" not in data and length < self.size - start:
            length = min(2 * length or _LINE_BYTES, self.size - start)
            data = self._file.read(length, start)
        row = from_line(data.partition(b"\n")[0], self._folder)
        return row if isinstance(row, StepRow) else None  # damaged since

    def has_segment(self, segment: Segment) -> bool:
        """Whether the journal has all steps of a segment, with the same bits in their deterministic columns."""
        rows = []
        for number in range(segment.first, segment.last + 1):
            row = self.step(number)
            if row is None:
                return False
            rows.append(row)
        return digest_of(rows) == segment.digest

    def has_step(self, number: int) -> bool:
        """Whether the journal has a step."""
        return self._steps.start_of(number) is not None

    def start_up_to(self, number: int) -> int:
        """The offset at which the last step up to `number` begins, of those that came in order; 0 where there is none."""
        return self._steps.start_up_to(number)

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
        by_step = {event.step: event for event in events if isinstance(event, Observation)}
        return [by_step[step] for step in sorted(by_step)]

    def steps(self, after: int = 0) -> Iterator[StepRow]:
        """All steps after number `after`, in order. RecordError where one was damaged since the journal was opened."""
        for number in self._steps.numbers(after):
            row = self.step(number)
            if row is None:
                raise problems.JOURNAL_CHANGED(file=self._file.path)
            yield row

    def step_times(self) -> Iterator[StepTime]:
        """The times of all steps, each once, in the order in which they were recorded."""
        for line, begin, _ in self._file.lines(0):
            number = step_number(line)
            if (
                number is not None
                and self._steps.start_of(number) == begin
                and (time := step_time(line)) is not None
            ):
                yield time

    def read(self, start: int) -> Iterator[Entry]:
        """The whole lines from the offset `start` on."""
        for line, begin, end in self._file.lines(start):
            yield Entry(from_line(line, self._folder), begin, end)


def _opened(folder: Path) -> BinaryIO | None:
    """The journal of a run, to read without its lock; None where there is none. RecordError for anything but a file."""
    try:
        return os.fdopen(open_beneath(folder, NAME), "rb")
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise problems.LEADS_OUT(run=folder.name, got=error) from error
    except OSError as error:
        raise problems.UNREADABLE(
            run=folder.name, file=f"{NAME} in {str(folder)!r}", got=error.strerror
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
            numbered = (
                (number, line) for line in reversed(lines) if (number := step_number(line)) is not None
            )
            likely = sorted(numbered, key=lambda match: -match[0])
            rows = (row for _, line in likely if isinstance(row := from_line(line, folder), StepRow))
            newest = next(rows, None)
            if newest is not None or length >= size:
                return newest
            length *= 4


def newest_checkpoint(folder: Path) -> CheckpointRow | None:
    """The last checkpoint in the journal of a run whose place it names, or None."""
    newest = None
    file = _opened(folder)
    if file is None:
        return None
    with file as lines:
        for line in lines:
            row = from_line(line.rstrip(b"\n"), folder) if line.startswith(b'{"checkpoint":') else None
            if isinstance(row, CheckpointRow) and row.uri is not None:
                newest = row
    return newest
