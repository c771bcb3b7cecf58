"""A sweep's search, scheduler and table, called in the order in which Tune's controller calls them, without a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray.tune.schedulers import TrialScheduler

from lockstep.driver.progress import Silent
from lockstep.driver.signals import StopSignal
from lockstep.spec.sweep import SweepSpec, load_sweep
from lockstep.sweeps.decisions import Decisions
from lockstep.sweeps.schedulers import RecordedScheduler, make_scheduler
from lockstep.sweeps.search import Search
from lockstep.sweeps.sweep_progress import SweepTable


class NoRecorders:
    """Takes every call, and records nothing."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *_, **__: None)


class Tuned:
    """One session of a sweep in `folder`: begun there, or resumed from what another one has left there."""

    def __init__(self, sweep: SweepSpec, folder: Path, total_steps: int = 30) -> None:
        folder.mkdir(exist_ok=True)
        self.sweep, self.decisions = sweep, Decisions(folder)
        self.table = SweepTable(sweep, self.decisions, NoRecorders(), Silent(), StopSignal())
        rule = make_scheduler(sweep, total_steps, 10)
        self.scheduler = RecordedScheduler(rule, sweep, self.decisions, self.table.pruned, sweep.total)
        self.search = Search(sweep, self.decisions, lambda: True)
        self.trials: dict[int, Any] = {}

    def begin(self) -> int:
        """The next trial begins; its number."""
        trial_id = f"trial-{len(self.trials)}"
        config = self.search.suggest(trial_id)
        trial = SimpleNamespace(trial_id=trial_id, config=config, status="RUNNING")
        self.trials[config["trial"]] = trial
        self.scheduler.on_trial_add(None, trial)
        self.table.on_trial_start(0, [], trial)
        return int(config["trial"])

    def report(self, number: int, step: int, value: float, status: str = "") -> bool:
        """A trial's next evaluation, which is its last one where it has a `status`. Whether the trial is over."""
        trial = self.trials[number]
        result: dict[str, Any] = {"step": step, self.sweep.metric: value, "run_id": f"run-{number}"}
        if status:
            result |= {"done": True, "status": status, "reason": ""}
        stop = bool(status)
        if not stop:
            stop = self.scheduler.on_trial_result(None, trial, result) == TrialScheduler.STOP
        self.table.on_trial_result(0, [], trial, result)
        if stop:
            self.scheduler.on_trial_complete(None, trial, result)
            self.search.on_trial_complete(trial.trial_id, result=result)
            self.table.on_trial_complete(0, [], trial)
            trial.status = "TERMINATED"
        return stop

    def rows(self) -> list[tuple[int, str, int, float]]:
        """How the trials stand: number, status, step, metric."""
        return [(row["trial"], row["status"], row["step"], row["metric"]) for row in self.table.trials]


def sweep_of(space: dict[str, Any], spec: Mapping[str, Any] | None = None, **fields: Any) -> SweepSpec:
    """A sweep that minimizes its loss, or has other `fields`; `spec` has more of what its trials share."""
    base = {"job": {"use": "jobs.digits.job:Digits"}, "record": {"uri": "off"}, **(spec or {})}
    return load_sweep({"spec": base, "space": space, "metric": "eval/loss", "mode": "min", **fields})
