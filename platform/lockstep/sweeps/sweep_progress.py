"""How a sweep stands: a row a trial, kept by the driver from what Tune tells, shown and recorded as it changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray import tune

from lockstep.driver.progress import Progress
from lockstep.driver.signals import StopSignal
from lockstep.durations import duration_text
from lockstep.spec.sweep import SweepSpec
from lockstep.sweeps import problems
from lockstep.sweeps.decisions import Decisions, WithoutState
from lockstep.sweeps.recorders import NEWS_S, answer_of_recorders
from lockstep.sweeps.trial_standings import Standing
from lockstep.sweeps.trial_watchdog import SweepWatchdog

RECORD_S = 10.0
"""How often the table is recorded while no trial ends."""

LAST_SHOWN = 12
"""How many of the trials that ended are shown."""


class SweepTable(WithoutState, tune.Callback, tune.Stopper):  # type: ignore[misc]
    """Tune tells it of every trial, and asks it whether the sweep is over. `when_stopped` is told of the signal that ends it."""

    def __init__(
        self,
        sweep: SweepSpec,
        decisions: Decisions,
        recorders: Any,
        progress: Progress,
        stop: StopSignal,
        when_stopped: Callable[[int], object] = lambda number: None,
    ) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self.over: str | None = None
        """Why no other trial begins and those that run end after their next step."""
        self._sweep, self._decisions, self._recorders = sweep, decisions, recorders
        self._progress, self._stop, self._when_stopped = progress, stop, when_stopped
        self._watchdog = SweepWatchdog(recorders, sweep.base.faults)
        self._began = self._placed_at = time.monotonic()
        self._recorded_at = time.monotonic()
        self._update: Any = None
        self._standing = Standing(sweep.mode)
        self._going: dict[int, dict[str, Any]] = {}
        """The trials that have not ended."""
        self._touched: dict[int, None] = {}
        """Trials that the standing does not know as they are."""
        self._changed: set[int] = set()
        """Trials that the record does not know as they are."""
        self._ends = 0
        self._trials: list[Any] = []
        """Tune's own."""

    @property
    def trials(self) -> list[dict[str, Any]]:
        """The trials by their number."""
        return [self.rows[number] for number in sorted(self.rows)]

    # --- what Tune tells ---------------------------------------------------------------------------------------

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        self._trials = trials
        # From the newest on: of a thousand trials it is among the last that one waits or runs.
        if not any(trial.status == "PENDING" for trial in reversed(trials)) or any(
            trial.status == "RUNNING" for trial in reversed(trials)
        ):
            self._placed_at = time.monotonic()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._row(trial)["status"] = "running"
        self._show()

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        row, metric = self._row(trial), result.get(self._sweep.metric)
        row["run_id"] = result.get("run_id", row["run_id"])
        row["weights_digest"] = result.get("weights_digest")
        if result.get("step", 0) > row["step"]:
            row["step"] = result["step"]
            row["metrics"] = {name: value for name, value in result.items() if name.startswith("eval/")}
            if metric is not None:
                row["metric"] = metric
                row["curve"].append((result["step"], metric))
        if result.get("status"):
            self._end(row, result["status"], result["reason"] or without_metric(row, self._sweep.metric))
        self._show()

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        row = self._row(trial)
        if row["order"] is None:  # Tune has stopped it
            self._end(row, "pruned", row["reason"])

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        row = self._row(trial)
        error = str(trial.get_error() or "the trial's workers were lost").strip().splitlines()[-1]
        reason = row["reason"] or error
        self._recorders.end_trial.remote(str(row["trial"]), reason, "", "FAILED")
        self._end(row, "failed", f"{trial.num_failures} attempts ended early, the last with: {reason}")

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        row = self._row(trial)
        row |= {"restarts": row["restarts"] + 1, "reason": ""}

    def pruned(self, number: int, reason: str) -> None:
        """The scheduler ends a trial."""
        self.rows[number]["reason"] = reason
        self._touch(number)
        self._recorders.end_trial.remote(str(number), f"pruned by {reason}", "", "KILLED")

    # --- what Tune asks ----------------------------------------------------------------------------------------

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        self._record_now_and_then()
        self._ensure_room()
        for number, why in self._watchdog.end_hung().items():
            self.rows[number]["reason"] = why
            self._touch(number)
            self._progress.say(f"trial {number} was ended and starts again: {why}")
        reason = self._reason_to_end() if self.over is None else None
        if reason is not None:
            self.over = reason
            self._progress.say(f"the sweep ends: {reason}; its trials stop after their next step")
            if self._stop.number is not None:
                self._when_stopped(self._stop.number)
            stopping = self._recorders.stop_all.remote(self._stop.number)
            answer_of_recorders(stopping, NEWS_S)
        if self.over is None or not (running := self._running()):
            return self.over is not None
        paused = {trial.config["trial"] for trial in self._trials if trial.status == "PAUSED"}
        if not paused.issuperset(running):
            return False
        for number in running:  # they wait for others of their population, which may be stopped on their way
            self._touch(number)
            self._end(self.rows[number], "stopped", "")
        return True

    def _running(self) -> list[int]:
        return [number for number, row in self._going.items() if row["status"] == "running"]

    def _ensure_room(self) -> None:
        """ClusterError where trials wait and none runs, for longer than the spec allows."""
        base = self._sweep.base
        if time.monotonic() - self._placed_at > base.faults.wait_for_workers_s:
            raise problems.NO_ROOM(
                seconds=f"{base.faults.wait_for_workers_s:g}",
                workers=base.workers.min,
                cpus=f"{base.workers.cpus_each:g}",
            )

    def _reason_to_end(self) -> str | None:
        if self._stop.asked:
            return "stopped by a signal"
        budget, steps = self._sweep.budget, self.standing.steps
        if budget.seconds is not None and time.monotonic() - self._began >= budget.seconds:
            return f"budget.seconds = {budget.seconds:g} are over"
        if budget.steps is not None and steps >= budget.steps:
            return f"budget.steps = {budget.steps} are done"
        return None

    # --- rows --------------------------------------------------------------------------------------------------

    @property
    def standing(self) -> Standing:
        """How the trials stand now."""
        for number in self._touched:
            self._standing.take(self.rows[number])
        self._touched = {}
        return self._standing

    def _touch(self, number: int) -> None:
        """The row of a trial is new, or about to change."""
        self._touched[number] = None
        self._changed.add(number)

    def _row(self, trial: Any) -> dict[str, Any]:
        number, fields = trial.config["trial"], trial.config["fields"]
        self._touch(number)
        row = self.rows.setdefault(
            number,
            {
                "trial": number,
                "status": "waiting",
                "fields": dict(fields),
                "step": 0,
                "metric": None,
                "metrics": {},
                "run_id": "",
                "reason": "",
                "restarts": 0,
                "began": time.time(),
                "ended": None,
                "order": None,
                "curve": [],
                "weights_digest": None,
            },
        )
        if row["order"] is None:
            self._going[number] = row
        if row["fields"] != fields:  # a member of a population has taken over another one's state
            row["fields"] = dict(fields)
        return row

    def _end(self, row: dict[str, Any], status: str, reason: str) -> None:
        if row["order"] is not None:
            return
        row |= {"status": status, "reason": reason, "ended": time.time(), "order": self._ends}
        self._ends += 1
        self._going.pop(row["trial"], None)
        if status != "stopped":  # that one goes on when the sweep does
            self._decisions.end(row["trial"], status, row["step"], row["metric"], reason)
        metric = "" if row["metric"] is None else f" · {self._sweep.metric} {row['metric']:.6g}"
        self._progress.say(
            f"trial {row['trial']} {status} at step {row['step']}{metric} · {shown(row['fields'])}"
            + (f" · {reason}" if reason else "")
        )
        self.record()

    def _record_now_and_then(self) -> None:
        if time.monotonic() - self._recorded_at >= RECORD_S:
            self.record()

    def record(self) -> None:
        """Send what has changed of the table to the record, where the last of it has arrived."""
        if self._update is None or ray.wait([self._update], timeout=0)[0]:
            self._recorded_at = time.monotonic()
            changed, self._changed = sorted(self._changed), set()
            self._update = self._recorders.update_sweep.remote([self.rows[number] for number in changed])

    def _show(self) -> None:
        standing = self.standing
        best = standing.best
        counts = " · ".join(f"{count} {status}" for status, count in standing.counts.items())
        leader = (
            ""
            if best is None
            else f" · best {self._sweep.metric} {best['metric']:.6g}, trial {best['trial']}"
        )
        last = [standing.ended[order] for order in range(max(0, self._ends - LAST_SHOWN), self._ends)]
        self._progress.table(
            f"{len(self.rows)} of {self._sweep.total} trials · {counts}{leader}{self._remaining()}",
            [*last, *self._going.values()],
        )

    def _remaining(self) -> str:
        """The remaining time, estimated from what the trials so far took."""
        if not self._ends:
            return ""
        spent = time.monotonic() - self._began
        remaining_s = spent / self._ends * (self._sweep.total - self._ends)
        return f" · about {duration_text(remaining_s)} left"


def without_metric(row: Mapping[str, Any], metric: str) -> str:
    """That a trial's last evaluation gave no such metric, and what it gave; nothing where it did, or where there was none."""
    if not row["metrics"] or metric in row["metrics"]:
        return ""
    value_note = f", and the value is that of step {row['curve'][-1][0]}" if row["curve"] else ""
    return f"its evaluation of step {row['step']} gave no {metric!r}, but {', '.join(sorted(row['metrics']))}{value_note}"


def shown(fields: Mapping[str, Any]) -> str:
    """What a trial sets, in a few words."""
    return " ".join(f"{field}={value}" for field, value in fields.items())
