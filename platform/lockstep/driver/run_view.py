"""What is seen of a run while it goes on, as a fold over its events: for the progress line, the watchdog and the supervisor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, assert_never

from lockstep.data.table_pins import pins_of
from lockstep.driver.progress import ProgressLine, Rate
from lockstep.errors import ClusterError, DeviceError, LockstepError
from lockstep.failure_kinds import said_by_watchdog
from lockstep.record.events import union
from lockstep.record.events.union import (
    Alive,
    Broke,
    CheckpointRow,
    Corrupted,
    Event,
    Finished,
    Joined,
    Printed,
    Restored,
    StageEnded,
    Started,
    Straggling,
    Warned,
)
from lockstep.record.ledger.rows import EvaluationRow, Observation, StepRow


@dataclass(slots=True)
class RunView:
    """One attempt as it is seen so far. Holds the newest of everything, and never the history of a figure."""

    attempt: int = 1
    step: StepRow | None = None
    evaluation: EvaluationRow | None = None
    total_steps: int | None = None
    warnings: list[str] = field(default_factory=list)
    stragglers: list[str] = field(default_factory=list)
    """Ranks that keep the others waiting, a line each."""
    signs_of_life: int = 0
    """Grows with everything that is told from the first step on; 0 before, when anything may take as long as it likes."""
    members: dict[int, Joined] = field(default_factory=dict)
    """The workers by rank."""
    stage_ends: dict[str, float] = field(default_factory=dict)
    """When the attempt came to the end of each stage, in Unix seconds; the first time counts."""
    saved: bool = False
    """Whether the run has told of a checkpoint, in this attempt or an earlier one."""
    table_versions: Mapping[str, str] = field(default_factory=dict)
    """The versions in which the run reads tables that change, by their names."""
    summary: Mapping[str, Any] | None = None
    files: Sequence[Path] = ()
    error: LockstepError | None = None
    """The first error that a worker told, before any that is the loss of a peer: that is its consequence."""
    details: str = ""
    rate: Rate = field(default_factory=Rate)
    broken: list[Broke] = field(default_factory=list)
    """The failures in the midst of a micro-batch."""
    device_ranks: set[int] = field(default_factory=set)
    """The ranks whose GPU or driver failed."""

    differences: list[tuple[Corrupted, dict[int, str]]] = field(default_factory=list)
    """The differences between the bits of workers, each with the nodes of the workers then, by rank."""
    memory: dict[str, str] = field(default_factory=dict)
    """What workers held as their memory came near a limit, in this attempt, a line for each document."""
    watchdog: str | None = None
    """The first line with which NCCL's watchdog ended a worker, as that worker printed it."""

    def next(self, attempt: int) -> RunView:
        """The view of another attempt of the same run: what ended this one is no longer the run's end."""
        return RunView(
            attempt,
            self.step,
            self.evaluation,
            self.total_steps,
            self.warnings,
            saved=self.saved,
            table_versions=self.table_versions,
            rate=self.rate,
        )

    def gone_on(self, attempt: int, workers: Sequence[int]) -> RunView:
        """The view of an attempt that goes on in memory: its members are those that these ranks were."""
        view = self.next(attempt)
        old = {rank: self.members[worker] for rank, worker in enumerate(workers) if worker in self.members}
        view.members = {rank: replace(member, rank=rank) for rank, member in old.items()}
        view.differences = list(self.differences)
        view.signs_of_life = self.signs_of_life + 1  # it trains: it may not be silent for as long as it likes
        return view

    def progress_line(self) -> ProgressLine | None:
        """How far the run is; None before its first step."""
        row = self.step
        if row is None:
            return None
        remaining = max(0, (self.total_steps or 0) - row.step)
        return ProgressLine(
            step=row.step,
            attempt=row.attempt,
            epoch=row.epoch,
            total_steps=self.total_steps,
            loss=row.loss,
            metrics={} if self.evaluation is None else self.evaluation.metrics,
            samples_per_s=self.rate.samples_per_s,
            waiting=self.rate.waiting,
            left_s=remaining / self.rate.steps_per_s if self.rate.steps_per_s else 0.0,
        )

    def take(self, event: Event) -> None:
        """Take in what the attempt tells."""
        match event:
            case StepRow():
                self._take_step(event)
            case EvaluationRow():
                self.evaluation = event
                self._lives()
            case Alive():
                self._lives()
            case Restored():
                self.step = event.steps[-1] if event.steps else self.step
                self.evaluation = event.evaluations[-1] if event.evaluations else self.evaluation
            case Started():
                self.total_steps = event.facts.get("plan", {}).get("total_steps", self.total_steps)
                self.table_versions = pins_of(event.facts.get("fields", {}))
            case Warned():
                self.warnings.append(event.text)
            case Straggling():
                self.stragglers.append(event.text)
            case Joined():
                self.members[event.rank] = event
            case StageEnded():
                self.stage_ends.setdefault(event.stage, event.at)
            case Finished():
                self.summary, self.files = event.summary, event.files
            case Printed():
                self.watchdog = self.watchdog or said_by_watchdog(event.text)
            case Corrupted():
                self.differences.append((event, {rank: joined.node for rank, joined in self.members.items()}))
            case Broke():
                self._take_error(event)
            case CheckpointRow():
                self.saved = self.saved or event.uri is not None
            case Observation() | union.Sampled():
                pass  # of interest to the record alone, as are those below
            case union.Document():
                if event.tells_memory:
                    self.memory[event.name] = event.memory_line
            case union.PeakMemory() | union.ResumeChecked() | union.Violated() | union.TimeSpent():
                pass
            case (
                union.AttemptsSummarised()
                | union.Diagnosed()
                | union.Alerted()
                | union.Failed()
                | union.TakenOver()
            ):
                pass
            case union.InputsFound() | union.Opened() | union.SetAside() | union.Mended() | union.Delivered():
                pass
            case _:
                assert_never(event)

    def lost(self, error: LockstepError) -> LockstepError:
        """The error of an attempt that lost workers, with the words of NCCL's watchdog where that ended one of them, and what was held near a limit of memory."""
        if self.memory:
            holdings = "; ".join(self.memory[name] for name in sorted(self.memory))
            error = error.with_message(f"{error}; memory had come near a limit, where {holdings}")
        if self.watchdog is None:
            return error
        return error.with_message(
            f"{error}; NCCL's watchdog ended a worker that waited for another: {self.watchdog}"
        )

    def _take_step(self, row: StepRow) -> None:
        self.step = row
        self.rate.add(row)
        if row.attempt == self.attempt:
            self.signs_of_life += 1
            self.stage_ends.setdefault("first_step", row.wall_clock)

    def _lives(self) -> None:
        self.signs_of_life += bool(self.signs_of_life)

    def _take_error(self, broke: Broke) -> None:
        if isinstance(broke.error, DeviceError):
            self.device_ranks.add(broke.rank)
        if broke.error.failed_at is not None:
            self.broken.append(broke)
        consequence = type(self.error) is ClusterError and type(broke.error) is not ClusterError
        if self.error is None or consequence:
            self.error, self.details = broke.error, broke.details
