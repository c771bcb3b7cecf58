"""Runs the diagnosis where rows are recorded: what a row shows goes into the journal right behind it, in the same write.

A resumed run is judged with the rows that it has, and nothing is reported twice. If its folder is gone, the rows of its
checkpoint show what was already reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from heapq import merge
from operator import attrgetter
from typing import Any

from lockstep.errors import RecordError
from lockstep.record.diagnosis.rules import REACH, Diagnosis
from lockstep.record.events.union import Diagnosed, Event, Recorded, Restored
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.rows import EvaluationRow, Observation, StepRow
from lockstep.spec.fields import Spec


class Diagnosing:
    """The diagnosis of one run, continued from its journal."""

    def __init__(self, journal: Journal, spec: Spec) -> None:
        self._journal, self._spec = journal, spec
        self._new = journal.last_step == 0
        self._restored = 0
        """In a new journal: the last step whose rows were restored."""
        trained = spec.initial_weights is not None or spec.fork is not None
        self._diagnosis = Diagnosis(trained=trained)
        # The writer of the ledger reports what cannot be read. Here the diagnosis just starts again: recording must not fail for it.
        with suppress(RecordError, OSError):
            self._take_up(journal)
        self._diagnosis.reported = {event.rule for event in journal.events if isinstance(event, Diagnosed)}

    def _take_up(self, journal: Journal) -> None:
        since, by_step = journal.last_step - REACH, attrgetter("step")
        rows: Iterator[Any] = merge(
            journal.steps(since), journal.evaluations(), journal.observations(), key=by_step
        )
        for row in rows:
            self._judged(row)

    def _judged(self, row: Recorded) -> list[Diagnosed]:
        """What a row shows. One that cannot be judged must be recorded all the same: the statistics of huge losses overflow."""
        try:
            return list(self._diagnosis.take(row))
        except OverflowError:
            return []

    def again(self) -> Diagnosing:
        """A new one from what the journal has now, after a failed write."""
        return Diagnosing(self._journal, self._spec)

    def with_diagnoses(self, events: Sequence[Event], admitted: Iterable[Recorded]) -> list[Recorded]:
        """The events that were `admitted` out of `events`, with the diagnoses that they lead to."""
        if self._new:
            self._restored = max([self._restored, *map(_last_step, events)])
        recorded: list[Recorded] = []
        for event in admitted:
            recorded.append(event)
            diagnoses = self._judged(event)
            past = isinstance(event, StepRow | EvaluationRow | Observation) and event.step <= self._restored
            if not past:
                recorded += diagnoses
        return recorded


def _last_step(event: Event) -> int:
    if not isinstance(event, Restored):
        return 0
    return max(
        [0, *(row.step for row in event.steps[-1:]), *(segment.last for segment in event.segments[-1:])]
    )
