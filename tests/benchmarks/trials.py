"""What the end of a trial costs the driver and the recorders of a sweep, in processor time: of the last trials beside the first ones.

A sweep's own table, decisions, recorders and record take a thousand trials in, one after the other, on a Ray cluster of one
CPU. No worker trains: the events of each trial, five steps and an evaluation, are told as its rank 0 tells them, and Tune's
calls are made in its place.

    python -m tests.benchmarks.trials [--trials N] [--each N] [--uri URI] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import ray

from lockstep.driver.progress import Silent
from lockstep.driver.signals import StopSignal
from lockstep.record.events.union import Finished, Started
from lockstep.record.ledger.rows import EvaluationRow
from lockstep.spec.sweep import SweepSpec, load_sweep
from lockstep.sweeps.decisions import Decisions
from lockstep.sweeps.recorders import recorders_here
from lockstep.sweeps.sweep_progress import SweepTable
from tests.benchmarks.million import row

STEPS = 5


def sweep_of(folder: Path, trials: int, uri: str) -> SweepSpec:
    return load_sweep(
        {
            "spec": {
                "job": {"use": "jobs.digits.job:Digits"},
                "record": {"uri": uri.format(folder=folder)},
                "checkpoint": {"storage": str(folder / "runs")},
            },
            "space": {"optimizer.lr": {"loguniform": [1e-4, 1e-1]}},
            "metric": "eval/accuracy",
            "mode": "max",
            "trials": trials,
        }
    )


class Told:
    """A sweep whose trials are told."""

    def __init__(self, sweep: SweepSpec, recorders: Any, folder: Path, stop: StopSignal) -> None:
        self._sweep, self._recorders = sweep, recorders
        self._decisions = Decisions(folder)
        self._board = SweepTable(sweep, self._decisions, recorders, Silent(), stop)
        self._trials: list[Any] = []

    def trial(self, number: int) -> None:
        """One trial from its begin to the end of its record."""
        key, fields = str(number), self._sweep.sample(number)
        self._decisions.begin(number, fields)
        spec = self._sweep.trial(fields)
        trial = SimpleNamespace(config={"trial": number, "fields": fields}, status="RUNNING")
        self._trials.append(trial)
        self._board.on_trial_start(0, self._trials, trial)
        ray.get(self._recorders.open.remote(key, f"trial-{number}", spec, None, 1, True))
        self._recorders.tell.remote(key, 1, [Started({"identity": f"{number:064x}"})])
        for step in range(1, STEPS + 1):
            self._recorders.tell.remote(key, 1, [row(step)])
            self._board.stop_all()
        accuracy = (number * 37 % 1009) / 1009
        result = {"step": STEPS, "eval/accuracy": accuracy}
        ended = [EvaluationRow(STEPS, 0, {"accuracy": accuracy}, 1.7e9, 1), Finished({"step": STEPS})]
        self._recorders.tell.remote(key, 1, ended)
        run_id = ray.get(self._recorders.run_id.remote(key))
        self._recorders.close_trial.remote(key)
        closed = self._sweep.base.folder / run_id / "summary.json"  # after its tables and figures
        while not closed.exists():
            time.sleep(0.02)
        self._board.on_step_begin(0, self._trials)
        self._board.on_trial_result(
            0, self._trials, trial, {**result, "run_id": run_id, "status": "finished", "reason": ""}
        )
        trial.status = "TERMINATED"
        self._board.on_trial_complete(0, self._trials, trial)


def measured(folder: Path, trials: int, each: int, uri: str) -> dict[str, Any]:
    sweep = sweep_of(folder, trials, uri)
    spent: list[tuple[float, float]] = []
    with StopSignal() as stop, recorders_here(1, lambda pid: None) as recorders:
        actor = psutil.Process(ray.get(recorders.process.remote()))
        _, _, place = ray.get(recorders.open_sweep.remote(sweep, None))
        told = Told(sweep, recorders, Path(place), stop)
        for number in range(trials):
            told.trial(number)
            spent.append((time.process_time(), sum(actor.cpu_times()[:2])))
        mb = actor.memory_info().rss / 1e6

    def ms(which: int, first: int, last: int) -> float:
        return round(1e3 * (spent[last][which] - spent[first][which]) / (last - first), 1)

    found: dict[str, Any] = {"trials": trials, "recorders_mb": round(mb)}
    for which, name in enumerate(("driver", "recorders")):
        # The first trials import what all need.
        begin, end = ms(which, each // 5, each // 5 + each), ms(which, trials - 1 - each, trials - 1)
        found |= {f"{name}_cpu_ms": [begin, end], f"{name}_cpu_ratio": round(end / begin, 2)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1_000)
    parser.add_argument(
        "--each", type=int, default=50, help="how many of the first and of the last trials count"
    )
    parser.add_argument(
        "--uri", default="off", help="the store; {folder} is a new one, as in sqlite:///{folder}/mlflow.db"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as aside,
    ):
        ray.init(
            address="local",
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=aside,
        )
        found = measured(Path(folder), arguments.trials, arguments.each, arguments.uri)
        ray.shutdown()
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text)


if __name__ == "__main__":
    main()
