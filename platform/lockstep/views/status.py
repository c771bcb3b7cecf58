"""How a run stands: its state, how far it is, how long it still takes, and what of its time went into training."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from lockstep.checkpoint.runs.run_checkpoints import steps_of
from lockstep.durations import duration_text
from lockstep.errors import LockstepError, RecordError, SpecError
from lockstep.record.events.union import TimeSpent
from lockstep.record.ledger.goodput import time_spent, time_text
from lockstep.record.ledger.live_rows import RowsSoFar
from lockstep.record.ledger.rows import StepRow
from lockstep.record.mirror.run_store import RunInfo
from lockstep.spec.loading import load_spec
from lockstep.views.curves import Curves, curves_of

RECENT = 200
"""Steps by whose pace the time that is left is estimated."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run at one moment. `step` counts from 1 and is 0 before the first; what is not known is None.

    `effective`, `away_s`, `interruptions` and `lost_worker_h` are those of `TimeSpent`, until the run ended or now.
    """

    run_id: str
    state: str
    step: int
    steps: int | None
    eta_s: float | None
    effective: float | None
    last_checkpoint: int | None
    workers: int | None
    away_s: float | None = None
    interruptions: int | None = None
    lost_worker_h: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def status_of(run: RunInfo, uri: str, folder: Path, now: float) -> RunStatus:
    """The status of a recorded run, whose `folder` may be elsewhere; `now` is Unix time in seconds."""
    curves = _curves(run.run_id, uri, folder)
    total = int(number) if (number := run.params.get("plan.total_steps", "")).isdigit() else None
    step, eta_s, spent = run.step, None, None
    if curves is not None:
        recent = deque[StepRow](maxlen=RECENT)
        if isinstance(curves.rows, RowsSoFar):
            rows, events = curves.rows.steps(), curves.rows.events
        else:
            rows, events = iter(curves.rows.steps), []
        spent = time_spent(events, _keeping_recent(rows, recent), run.started, run.ended or now)
        if run.status != "RUNNING":
            spent = next((event for event in reversed(events) if isinstance(event, TimeSpent)), spent)
        step = recent[-1].step
        if run.status == "RUNNING" and total is not None:
            eta_s = _eta_s(recent, total)
    workers = run.tags.get("lockstep.workers", "")
    return RunStatus(
        run.run_id,
        run.status,
        step,
        total,
        eta_s,
        None if spent is None else spent.effective,
        _last_checkpoint(run.run_id, curves),
        int(workers) if workers.isdigit() else None,
        None if spent is None else spent.away_s,
        None if spent is None else spent.interruptions,
        None if spent is None else spent.lost_worker_h,
    )


def _keeping_recent(rows: Iterator[StepRow], recent: deque[StepRow]) -> Iterator[StepRow]:
    """The rows as they are read, the newest of them kept in `recent`."""
    for row in rows:
        recent.append(row)
        yield row


def _curves(run_id: str, uri: str, folder: Path) -> Curves | None:
    """The rows of a run; None where it has none yet, or trains on another machine: then its store alone tells how far it is."""
    try:
        return curves_of(run_id, uri, folder)
    except (SpecError, RecordError):
        return None


def _eta_s(recent: deque[StepRow], total: int) -> float | None:
    """Seconds until the last step, at the pace of the newest steps of this attempt; None before there are two."""
    attempt = recent[-1].attempt
    first = next(row for row in recent if row.attempt == attempt)
    steps = recent[-1].step - first.step
    if steps < 1:
        return None
    return (recent[-1].wall_clock - first.wall_clock) / steps * (total - recent[-1].step)


def _last_checkpoint(run_id: str, curves: Curves | None) -> int | None:
    """The newest step with a checkpoint; None where there is none, or their storage cannot be read from here."""
    if curves is None:
        return None
    try:
        storage = load_spec(dict(curves.document)).checkpoint.storage
        return next(islice(steps_of(storage, run_id), 1), None)
    except LockstepError:
        return None


def as_text(status: RunStatus, resume_command: str) -> str:
    """The status for a person; of a run that has not come to its end, with the command that resumes it."""
    of = "" if status.steps is None else f" of {status.steps} ({status.step / max(1, status.steps):.0%})"
    shown = {
        "run": status.run_id,
        "state": status.state,
        "step": f"{status.step}{of}",
        "time left": "" if status.eta_s is None else duration_text(status.eta_s),
        "effective": ""
        if status.effective is None
        else time_text(
            status.effective, status.away_s or 0.0, status.interruptions or 0, status.lost_worker_h or 0.0
        ),
        "last checkpoint": "none" if status.last_checkpoint is None else f"step {status.last_checkpoint}",
        "workers": "" if status.workers is None else str(status.workers),
    }
    if status.state in ("FAILED", "KILLED"):
        shown["resume it with"] = resume_command
    return "\n".join(f"{name:<18}{text}" for name, text in shown.items() if text)
