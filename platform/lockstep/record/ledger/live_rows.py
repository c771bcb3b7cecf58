"""Reads the rows in a run's folder while its process may be recording: without its lock, and without changing a byte."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import assert_never

from lockstep.record.events import union
from lockstep.record.events.codec import from_line
from lockstep.record.events.union import Failed, Finished, Recorded
from lockstep.record.ledger.goodput import TIMED
from lockstep.record.ledger.journal_file import NAME
from lockstep.record.ledger.rows import EvaluationRow, Observation, StepRow
from lockstep.record.ledger.step_offsets import StepOffsets


class RowsSoFar:
    """The rows of the journal in `folder`, each step, evaluation and observation once. OSError where it cannot be read.

    Of a row that was recorded again after wrong bits, the last counts. Damaged lines are skipped.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._offsets = folder, StepOffsets()
        self.failed: bool | None = None
        """Whether the run ended in failure; None if it goes on, or its process was killed."""
        self.events: list[Recorded] = []
        """What `time_spent` needs beside the steps, in order."""
        evaluations: dict[int, EvaluationRow] = {}
        observations: dict[int, Observation] = {}
        start = 0
        with (folder / NAME).open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):  # else the line is still being written
                    self._note(from_line(line[:-1], folder), start, evaluations, observations)
                start += len(line)
        self.evaluations = [evaluations[step] for step in sorted(evaluations)]
        """In order."""
        self.observations = [observations[step] for step in sorted(observations)]
        """In order."""

    def _note(
        self,
        event: Recorded | None,
        start: int,
        evaluations: dict[int, EvaluationRow],
        observations: dict[int, Observation],
    ) -> None:
        if isinstance(event, TIMED):
            self.events.append(event)
        match event:
            case Finished():
                self.failed = event.status == "FAILED"
            case Failed():
                self.failed = True
            case StepRow():
                self.failed = None  # a journal of which the line before was damaged
                self._offsets.add(event.step, start)
            case EvaluationRow():
                evaluations[event.step] = event
            case Observation():
                observations[event.step] = event
            case union.Started():
                self.failed = None  # it was resumed, and may take recorded steps again
            case union.CheckpointRow() | union.Sampled():
                pass
            case union.PeakMemory() | union.AttemptsSummarised() | union.Document():
                pass
            case (
                union.TakenOver()
                | union.Diagnosed()
                | union.Alerted()
                | union.Corrupted()
                | union.ResumeChecked()
                | union.TimeSpent()
            ):
                pass
            case union.Warned() | union.Straggling() | union.Violated():
                pass
            case union.InputsFound() | union.Opened() | union.SetAside() | union.Mended() | union.Delivered():
                pass
            case None:
                pass  # damaged
            case _:
                assert_never(event)

    def steps(self) -> Iterator[StepRow]:
        """The steps, in order, one held at a time."""
        with (self._folder / NAME).open("rb") as file:
            for number in self._offsets.numbers():
                file.seek(self._offsets.start_of(number) or 0)
                row = from_line(file.readline().rstrip(b"\n"), self._folder)
                if isinstance(row, StepRow):
                    yield row
