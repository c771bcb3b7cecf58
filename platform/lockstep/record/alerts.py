"""The alerts that a spec asks for: a fold over recorded events, and what only a clock or a disk shows. Each rule fires once in a run.

Rules over metrics count rows. So they fire after the same step in every execution of a run, and a resumed run goes on counting from its
journal. What fires is an event of its own, right behind the row that shows it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lockstep.errors import RecordError
from lockstep.record.events.union import (
    Alerted,
    CheckpointRow,
    Corrupted,
    Diagnosed,
    Event,
    Recorded,
    Restored,
    Violated,
)
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.rows import EvaluationRow, Observation, StepRow
from lockstep.spec.alert import AlertRule
from lockstep.spec.fields import Spec

NO_PROGRESS, WAITING, DRIFT, DISK = "no progress", "waiting", "drift", "disk"
"""The rules that are about no metric."""

UNKNOWN = "alert without a metric"
"""The diagnosis of a rule whose metric the run does not have."""

DISK_EVERY_S = 10.0
"""Seconds between two looks at the disks."""


class Alerts:
    """The alerts of one run, continued from its journal. `folders` are on the disks that are looked at."""

    def __init__(self, spec: Spec, journal: Journal, folders: Sequence[Path]) -> None:
        self._spec, self._journal = spec, journal
        self._alert, self._folders = spec.alert, folders
        self._counts: dict[str, int] = {}
        """How many rows in a row have met a rule, by its metric."""
        self._last: dict[str, int] = {}
        """The last step at which a metric was judged."""
        self._reported = {event.rule for event in journal.events if isinstance(event, Alerted)}
        self._moved_at = time.monotonic()
        self._looked_at = 0.0
        self._is_new, self._restored = journal.last_step == 0, 0
        self._step = journal.last_step
        if self._alert.metrics:
            longest = max(rule.for_ for rule in self._alert.metrics.values())
            with suppress(RecordError, OSError):  # the writer of the ledger tells what cannot be read
                rows: list[Recorded] = [*journal.steps(max(0, self._step - longest)), *journal.evaluations()]
                for row in rows:
                    list(self._judged(row))

    def again(self) -> Alerts:
        """New ones from what the journal has now, after a failed write."""
        return Alerts(self._spec, self._journal, self._folders)

    @property
    def any(self) -> bool:
        """Whether the spec asks for any."""
        return self._alert.any

    def with_alerts(self, events: Sequence[Event], recorded: Iterable[Recorded]) -> list[Recorded]:
        """The events that are `recorded` of `events`, each with the alerts that it leads to. What is restored into a new journal has alerted before."""
        if self._is_new:
            for event in events:
                if isinstance(event, Restored):
                    last = [
                        *(row.step for row in event.steps[-1:]),
                        *(part.last for part in event.segments[-1:]),
                    ]
                    self._restored = max([self._restored, *last])
        every: list[Recorded] = []
        for event in recorded:
            if isinstance(event, Alerted):
                every += self._once(event)
                continue
            every.append(event)
            alerts = [fired for alert in self._judged(event) for fired in self._once(alert)]
            past = isinstance(event, StepRow | EvaluationRow | Observation) and event.step <= self._restored
            if not past:
                every += alerts
        return every

    def by_clock(self) -> list[Recorded]:
        """What has become due by itself: no progress for too long, a disk that is nearly full."""
        now = time.monotonic()
        return [fired for alert in self._due(now) for fired in self._once(alert)]

    def _due(self, now: float) -> Iterator[Alerted]:
        limit = self._alert.no_progress_s
        if limit is not None and now - self._moved_at > limit:
            yield Alerted(NO_PROGRESS, self._step, f"no step, evaluation or checkpoint for {limit:g} s")
        if self._alert.disk_below_gb is not None and now - self._looked_at > DISK_EVERY_S:
            self._looked_at = now
            for folder in self._folders:
                with suppress(OSError):  # a folder that is not there yet, or a mount that went away
                    free = shutil.disk_usage(folder).free / 1e9
                    if free < self._alert.disk_below_gb:
                        evidence = f"{free:.1f} GB are free on the disk of {str(folder)!r}, wanted {self._alert.disk_below_gb:g}"
                        yield Alerted(DISK, self._step, evidence)

    def _once(self, alert: Alerted | Diagnosed) -> Iterator[Alerted | Diagnosed]:
        if alert.rule not in self._reported:
            self._reported.add(alert.rule)
            yield alert

    def _judged(self, event: Recorded) -> Iterator[Alerted | Diagnosed]:
        match event:
            case StepRow():
                values = {
                    "train/loss": event.loss,
                    "train/lr": event.lr,
                    "train/grad_norm": event.grad_norm,
                    "train/clipped_norm": event.clipped_norm,
                }
                parts = {f"train/{name}": value for name, value in event.parts.items()}
                yield from self._metrics(event.step, {**parts, **values}, "steps")
                yield from self._unknown(event.step, {**parts, **values})
            case EvaluationRow():
                yield from self._metrics(event.step, event.metrics, "evaluations")
            case CheckpointRow():
                self._moved_at = time.monotonic()
            case Violated() | Corrupted() if self._alert.drift:
                yield Alerted(DRIFT, self._step, event.text if isinstance(event, Violated) else str(event))

    def _metrics(self, step: int, values: Mapping[str, float], unit: str) -> Iterator[Alerted]:
        self._moved_at, self._step = time.monotonic(), max(step, self._step)
        for name, rule in self._alert.metrics.items():
            value = values.get(metric_of(name))
            if value is None:
                continue
            again = step <= self._last.get(name, 0)  # taken again after wrong bits
            self._counts[name] = (0 if again else self._counts.get(name, 0)) + 1 if rule.met_by(value) else 0
            self._last[name] = step
            if self._counts[name] >= rule.for_:
                lasted = f" for {rule.for_} {unit}" if rule.for_ > 1 else ""
                yield Alerted(rule_name(name, rule), step, f"{name} is {value:.4g}{lasted}, {rule}")

    def _unknown(self, step: int, values: Mapping[str, float]) -> Iterator[Diagnosed]:
        for name in self._alert.metrics:
            metric = metric_of(name)
            if metric.startswith("train/") and metric not in values:
                known = ", ".join(sorted(values))
                yield Diagnosed(
                    UNKNOWN,
                    step,
                    f"alert.{name}: a step has no {metric}",
                    f"name one of its metrics: {known}",
                )


def metric_of(name: str) -> str:
    """The metric that a rule of this name is about: that of a step where nothing else is said."""
    return name if "/" in name else f"train/{name}"


def rule_name(name: str, rule: AlertRule) -> str:
    """What a rule is called where it fires; a rule that is changed at a resume is another one."""
    lasted = f" for {rule.for_}" if rule.for_ > 1 else ""
    return f"{name} {rule}{lasted}"
