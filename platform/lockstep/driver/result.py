"""The result of a run: the object that `lockstep.train` returns and `--json` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.driver import problems
from lockstep.driver.notebook import as_table
from lockstep.driver.resume_hint import look_at, resume_call
from lockstep.driver.start_stages import seconds_by_stage
from lockstep.record.events.union import Finished, TimeSpent
from lockstep.record.redaction import without_uri_secrets
from lockstep.spec.locations import RECORD_OFF


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a run. Times in seconds; `first_step_s` counts from the command to the end of its first step.

    It is None where the command took no step, as a resume of a finished run.
    """

    run_id: str
    status: str
    identity: str
    step: int
    epoch: int
    samples: int
    skipped: int
    attempts: int
    workers: int
    metrics: dict[str, float]
    weights_digest: str
    best_digest: str | None
    best_step: int | None
    first_step_s: float | None
    steps_per_s: float | None
    samples_per_s: float | None
    data_wait_share: float | None
    url: str
    tracking_uri: str
    folder: str
    checkpoint: str | None = None
    ema_digest: str | None = None
    test: dict[str, float] = field(default_factory=dict)
    """The metrics of the test that a finished run ends with."""
    tested: str | None = None
    """Which weights were tested: `best`, `ema` or `final`."""
    tested_step: int | None = None
    signal_number: int | None = None
    """The signal that ended it, where `status` is KILLED."""
    warnings: list[str] = field(default_factory=list)
    effective: float | None = None
    """The share of the run's time that went into steps that count, as `TimeSpent` defines it. None where the command recorded no end."""
    lost_worker_h: float | None = None
    """Hours of workers that interruptions of the run took."""
    start: dict[str, float] = field(default_factory=dict)
    """Seconds by stage, in order: where `first_step_s` went. Times from other nodes are by their own clocks."""

    def _repr_html_(self) -> str:
        """The result as a notebook shows it."""
        shown = {
            "status": self.status,
            "step": f"{self.step} (epoch {self.epoch})",
            **{name: f"{value:.4g}" for name, value in {**self.metrics, **self.test}.items()},
            "weights_digest": self.weights_digest,
            "run": self.run_id,
            "folder": self.folder,
        }
        if self.status == "KILLED":
            shown["resume it with"] = resume_call(self.run_id, self.tracking_uri, self.folder)
        if self.tracking_uri != RECORD_OFF:
            shown["look at it"] = look_at(self.url, self.tracking_uri)
        return as_table(shown)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON, which is printed: passwords in the store's URI are hidden."""
        return {**asdict(self), "tracking_uri": without_uri_secrets(self.tracking_uri)}


_OF_THE_END = frozenset({"beside", "first_step_at", "stopped", "signal", "unsaved", "tested_at"})
"""Keys of a summary that are used to make a result, an error or an export."""


def check_saved(summary: Mapping[str, Any], run_id: str, folder: str) -> None:
    """StorageError for a run that came to its end, and whose last state no checkpoint has. One that is stopped says so in its warnings."""
    if error := Finished(summary).error:
        raise problems.UNSAVED(got=error, folder=folder, run=run_id)


def result_of(
    summary: Mapping[str, Any],
    *,
    run_id: str,
    url: str,
    tracking_uri: str,
    folder: str,
    began_at: float,
    start: Mapping[str, float],
    warnings: list[str],
    attempts: int,
    signal_number: int | None,
    time_spent: TimeSpent | None = None,
) -> Result:
    """The result of a run that came to its end, from the summary that its workers agreed on, and what became of its time. `start` says when the stages
    of its start ended.
    """
    remaining = {key: value for key, value in summary.items() if key not in _OF_THE_END}
    first = summary["first_step_at"]
    return Result(
        run_id=run_id,
        status="KILLED" if summary["stopped"] else "FINISHED",
        signal_number=signal_number if summary["stopped"] else None,
        attempts=attempts,
        first_step_s=None if first is None or first < began_at else first - began_at,
        url=url,
        tracking_uri=tracking_uri,
        folder=folder,
        warnings=warnings,
        effective=None if time_spent is None else time_spent.effective,
        lost_worker_h=None if time_spent is None else time_spent.lost_worker_h,
        start=seconds_by_stage(began_at, start, first),
        **remaining,
    )
