"""Diagnosis where rows are recorded: what they show goes into the journal behind the row that shows it, in the same write.

A run that goes on is judged with the rows that it has, and nothing that was told is told again. Where its folder is gone, the rows of its
checkpoint say what was told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from heapq import merge
from operator import attrgetter
from typing import Any

from lockstep.errors import RecordError
from lockstep.record.diagnosis import REACH, Diagnosis
from lockstep.record.events import Diagnosed, EvaluationRow, Event, Observation, Recorded, Restored, StepRow
from lockstep.record.journal import Journal
from lockstep.spec.fields import Spec


class Diagnosing:
    """The diagnosis of one run, from what its journal has on."""

    def __init__(self, journal: Journal, spec: Spec) -> None:
        self._journal, self._spec = journal, spec
        self._new = journal.last_step == 0
        self._restored = 0
        """In a new journal: the last step whose rows were restored."""
        trained = spec.initial_weights is not None or spec.fork is not None
        self._diagnosis = Diagnosis(trained=trained)
        # What cannot be read is told by whoever writes the ledger. Here the judgement begins anew: a record must not fail for it.
        with suppress(RecordError, OSError):
            self._take_up(journal)
        self._diagnosis.told = {event.rule for event in journal.events if isinstance(event, Diagnosed)}

    def _take_up(self, journal: Journal) -> None:
        after, by_step = journal.last_step - REACH, attrgetter("step")
        rows: Iterator[Any] = merge(
            journal.steps(after), journal.evaluations(), journal.observations(), key=by_step
        )
        for row in rows:
            for _ in self._diagnosis.take(row):
                pass

    def again(self) -> Diagnosing:
        """The same from what the journal has now: a write has failed."""
        return Diagnosing(self._journal, self._spec)

    def with_diagnoses(self, events: Sequence[Event], admitted: Iterable[Recorded]) -> list[Recorded]:
        """What of `events` was `admitted`, with what it shows."""
        if self._new:
            self._restored = max([self._restored, *map(_last_step, events)])
        recorded: list[Recorded] = []
        for event in admitted:
            recorded.append(event)
            found = list(self._diagnosis.take(event))
            past = isinstance(event, StepRow | EvaluationRow | Observation) and event.step <= self._restored
            if not past:
                recorded += found
        return recorded


def _last_step(event: Event) -> int:
    if not isinstance(event, Restored):
        return 0
    return max([0, *(row.step for row in event.steps[-1:]), *(one.last for one in event.segments[-1:])])
