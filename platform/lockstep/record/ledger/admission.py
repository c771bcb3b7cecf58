"""Decides which of a run's events go into its journal: each fact once, and a repeated step is compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.record.events.union import (
    SOURCE,
    Alive,
    AttemptsSummarised,
    Broke,
    CheckpointRow,
    Corrupted,
    Diagnosed,
    Document,
    Event,
    Failed,
    Finished,
    Joined,
    Printed,
    Recorded,
    Restored,
    Segment,
    StageEnded,
    Started,
    Straggling,
    TakenOver,
    Violated,
    Warned,
)
from lockstep.record.git_state import git_state
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.row_comparison import evaluation_difference, step_difference
from lockstep.record.ledger.rows import EvaluationRow, Observation, StepRow
from lockstep.record.ledger.segments import check, steps_in
from lockstep.record.redaction import redacted, redacted_document
from lockstep.spec.fields import Spec


class Admission:
    """Lets events into the journal of one run.

    A row that the journal already has is compared with it instead: with `determinism: strict` and `reduction: exact` a repeated
    step has the same bits. The first one that differs is let in as a violation. A row that was recorded from
    corrupted bits gives way to the one of the repeated step. Secrets are removed from texts. Of restored segments the digest is compared;
    a segment that the journal lacks is read by `fetch`, or is `lost`.
    """

    def __init__(
        self,
        journal: Journal,
        spec: Spec,
        source: Path | None,
        fetch: Callable[[Segment], bytes],
    ) -> None:
        self._journal, self._source, self._fetch = journal, source, fetch
        self._lost: dict[int, str] = {}
        self._promised = spec.determinism == "strict" and spec.reduction == "exact"
        self._earlier_violations = self._violations
        self._corrupted = [event for event in journal.events if isinstance(event, Corrupted)]
        self._first: int | None = None
        self._reached = 0
        self._gap = False

    def admit(self, events: Sequence[Event]) -> Iterator[Recorded]:
        """The events that the journal should get from these, with the rows of `Restored` events in their place."""
        steps: dict[int, StepRow] = {}
        evaluations: dict[int, EvaluationRow] = {}
        observed: set[int] = set()
        reported: set[str] = set()
        warnings: set[Warned | Straggling] = set()
        violated = not self._promised or self._violations > self._earlier_violations
        for event in self._with_rows(events):
            match event:
                case StepRow(step=step):
                    self._pass(step)
                    previous = steps.get(step) or (
                        self._journal.step(step) if self._journal.has_step(step) else None
                    )
                    difference = "" if previous is None else step_difference(previous, event)
                    if previous is None or (difference and self._is_doubted(previous)):
                        steps[step] = event
                        yield event
                    elif difference and not violated:
                        violated = True
                        yield _violation(step, difference)
                case EvaluationRow(step=step):
                    evaluated = evaluations.get(step) or self._journal.evaluation(step)
                    difference = "" if evaluated is None else evaluation_difference(evaluated, event)
                    if evaluated is None or (difference and self._is_doubted(evaluated)):
                        evaluations[step] = event
                        yield event
                    elif difference and not violated:
                        violated = True
                        yield _violation(step, difference)
                case Observation(step=step):
                    doubted = any(corrupted.since < step <= corrupted.step for corrupted in self._corrupted)
                    if doubted or not (step in observed or self._journal.has_observation(step)):
                        observed.add(step)
                        yield event
                case Corrupted():
                    self._corrupted.append(event)
                    yield event
                case Diagnosed(rule=rule):
                    if rule not in reported and not self._has_reported(rule):
                        reported.add(rule)
                        yield event
                case Started():
                    facts = self._with_git(event.facts)
                    unredacted = {SOURCE: facts[SOURCE]} if SOURCE in facts else {}  # it is executed again
                    yield Started({**redacted_document(facts), **unredacted})
                case AttemptsSummarised():
                    yield AttemptsSummarised(redacted_document(event.attempts))
                case CheckpointRow() if event.error:
                    yield event._replace(error=redacted(event.error))
                case TakenOver():
                    yield TakenOver(redacted(event.message))
                case Finished():
                    yield replace(event, at=time.time())
                case Failed():
                    yield Failed(redacted(event.message), redacted(event.details), event.status, time.time())
                case Document():
                    yield Document(event.name, redacted(event.text))
                case Warned() | Straggling():
                    warning = replace(event, text=redacted(event.text))
                    if warning not in warnings and warning not in self._journal.events:
                        warnings.add(warning)
                        yield warning
                case Alive() | Broke() | Joined() | Printed() | Restored() | StageEnded():
                    pass
                case _:
                    yield event

    @property
    def _violations(self) -> int:
        """How many violations the journal has."""
        return sum(isinstance(event, Violated) for event in self._journal.events)

    def _has_reported(self, rule: str) -> bool:
        return any(isinstance(event, Diagnosed) and event.rule == rule for event in self._journal.events)

    def _with_git(self, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._source is None or "git" in facts:
            return facts
        return {**facts, "git": git_state(self._source)}

    def _is_doubted(self, row: StepRow | EvaluationRow) -> bool:
        """Whether a row in the journal may come from corrupted bits."""
        return any(
            corrupted.since < row.step <= corrupted.step
            and (isinstance(row, EvaluationRow) or row.attempt <= corrupted.attempt)
            for corrupted in self._corrupted
        )

    @property
    def retold(self) -> bool:
        """Whether every step of the run was told since this object was made, so that everything the journal may lack was told again."""
        return self._first == (self._journal.begins or 1) and not self._gap

    def _pass(self, step: int) -> None:
        if self._first is None:
            self._first = step
        elif step > self._reached + 1:
            self._gap = True
        self._reached = max(self._reached, step)

    def _with_rows(self, events: Sequence[Event]) -> Iterator[Event]:
        for event in events:
            if isinstance(event, Restored):
                for segment in event.segments:
                    yield from self._steps_of(segment)
                yield from event.steps
                yield from event.evaluations
                yield from event.observations
            else:
                yield event

    def _steps_of(self, segment: Segment) -> Sequence[StepRow]:
        """The steps of a restored segment to be looked at: none if the journal has the same segment."""
        self._lost.pop(segment.first, None)
        if self._journal.has_segment(segment):
            self._pass(segment.first)
            self._reached = max(self._reached, segment.last)
            return ()
        try:
            return steps_in(check(segment, self._fetch(segment)))
        except Exception as error:  # noqa: BLE001 - an unreadable segment must not cost the rows after it; the run is then not whole
            self._lost[segment.first] = f"steps {segment.first} to {segment.last}: {error}"
            return ()

    @property
    def lost(self) -> str:
        """Which restored steps are neither recorded nor readable, and why; empty if none."""
        return next(iter(self._lost.values()), "")


def _violation(step: int, difference: str) -> Violated:
    return Violated(f"step {step} gave other bits when it was done again: {difference}")
