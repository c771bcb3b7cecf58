"""Taking steps of a recorded run again, in this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from lockstep.checkpoint.runs.run_folder import AttemptOrigin, Replay
from lockstep.communication.group import Group, local_device
from lockstep.job.inputs.external_facts import MOVED
from lockstep.job.loading import load_job
from lockstep.proof.operator_trace import Look
from lockstep.record.events.union import Event, Finished, Started
from lockstep.record.ledger.rows import EvaluationRow, StepRow
from lockstep.spec.fields import Spec
from lockstep.training.driver_requests import NoRequests
from lockstep.training.loop import fit


@dataclass(slots=True)
class Replayed:
    """What the steps came to when they were taken again; rows by step."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the job took from outside itself and the identity has not."""
    steps: dict[int, StepRow] = field(default_factory=dict)
    evaluations: dict[int, EvaluationRow] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Of the state after the last of the steps."""
    look: Look | None = None
    """At the micro-batch that was looked into."""
    source: Mapping[str, bytes] = field(default_factory=dict)
    """The job's files, where they were asked for, by their paths below a source root."""


class Watching(Protocol):
    """Gets each row as its step is taken, and says when no more are needed."""

    def row(self, row: StepRow) -> None: ...

    def enough(self) -> bool: ...


@runtime_checkable
class Informed(Watching, Protocol):
    """Also gets the fields of the identity and the facts beside them, before any row, and each evaluation."""

    def begun(self, fields: Mapping[str, Any], facts: Mapping[str, Any]) -> None: ...

    def evaluation(self, row: EvaluationRow) -> None: ...


def replay_spec(spec: Spec) -> Spec:
    """The run's spec with digests in every step: placement, so no bit of the run changes."""
    return spec.model_copy(update={"record": spec.record.model_copy(update={"digest_every": 1})})


class _Collector(NoRequests):
    """Keeps what a run reports from a step on."""

    def __init__(self, first: int, watch: Watching) -> None:
        self.replayed = Replayed()
        self._first, self._watch = first, watch

    def stop(self) -> bool:
        return self._watch.enough()

    def tell(self, event: Event) -> None:
        match event:
            case Started():
                self.replayed.fields = event.facts["fields"]
                self.replayed.facts = event.facts["environment"].get(MOVED) or {}
                if isinstance(self._watch, Informed):
                    self._watch.begun(self.replayed.fields, self.replayed.facts)
            case StepRow() if event.step >= self._first:
                self.replayed.steps[event.step] = event
                self._watch.row(event)
            case EvaluationRow() if event.step >= self._first:
                self.replayed.evaluations[event.step] = event
                if isinstance(self._watch, Informed):
                    self._watch.evaluation(event)
            case Finished():
                self.replayed.summary = event.summary
            case _:
                pass  # among them Restored: rows that are not taken again


def replay_here(spec: Spec, replay: Replay, watch: Watching, group: Group | None = None) -> Replayed:
    """Take the steps in this process, on one worker or as one of `group`, up to the one after which `watch` has enough. Raises LockstepError."""
    collector = _Collector(replay.step + 1, watch)
    device: torch.device = local_device(spec)
    fit(
        replay_spec(spec),
        load_job(spec.job.use, spec.job.params),
        group or Group(0, 1, device),
        collector.tell,
        collector,
        AttemptOrigin(replay=replay),
    )
    return collector.replayed
