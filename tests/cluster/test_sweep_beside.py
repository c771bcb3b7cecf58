"""Trials of a sweep that evaluate beside their training: the rows, bits and decisions of trials that evaluate in place with the same delay."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep import SweepResult, sweep
from lockstep.record.ledger.tables import read_evaluations, read_parquet
from tests.cluster.test_sweep import all_is_given_back, document, outcome, statuses
from tests.processes import named

PROCESS = "lockstep.training.evaluation.evaluator_main"

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    # Ray and MLflow leave sockets and temporary folders to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def halving(folder: Path, evaluate: dict[str, Any], workers: int) -> dict[str, Any]:
    """Twenty steps a trial, an evaluation every five; the second rate is hopeless, and the third worse than the first."""
    settings = document(
        folder,
        space={"optimizer.lr": {"grid": [1e-2, 1e-7, 3e-3]}},
        trials=None,
        scheduler={"name": "asha", "grace_steps": 5, "reduction_factor": 2},
        concurrency=1,
        spec={"evaluate": {"every": {"steps": 5}, **evaluate}, "workers": {"min": workers}},
    )
    settings["spec"]["job"]["params"]["pause_s"] = 0.05
    return settings


def decisions(result: SweepResult) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(result.folder, "decisions.jsonl").read_text().splitlines()]


def rows(result: SweepResult) -> list[Any]:
    """By trial: how far it trained, and its evaluations, bit for bit."""
    folders = [Path(result.folder).parent / trial["run_id"] for trial in result.trials]
    return [
        (
            read_parquet(folder / "ledger.parquet")[-1].step,
            [
                (row.step, {name: value.hex() for name, value in row.metrics.items()})
                for row in read_evaluations(folder / "evaluations.parquet")
            ],
        )
        for folder in folders
    ]


@pytest.mark.scenario
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.exact)])
def test_trials_that_evaluate_beside_are_those_that_evaluate_in_place(tmp_path: Path, workers: int) -> None:
    """One of the processes that evaluate is killed. Halving decides by an evaluation where the next one is due: five steps later."""
    in_place = sweep(halving(tmp_path / "in place", {"delay": "next"}, workers))
    over, killed = threading.Event(), list[int]()

    def kill_one() -> None:
        while not over.wait(0.02):
            if not killed and (processes := named(PROCESS)):
                processes[0].kill()
                killed.append(processes[0].pid)

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    beside = sweep(halving(tmp_path / "beside", {"beside": True}, workers))
    over.set()
    killer.join()
    assert killed, "no process evaluated beside a trial"
    all_is_given_back()
    until = time.monotonic() + 30
    while named(PROCESS) and time.monotonic() < until:
        time.sleep(0.1)
    assert not named(PROCESS)

    assert (outcome(beside), rows(beside)) == (outcome(in_place), rows(in_place))
    assert decisions(beside) == decisions(in_place)
    assert statuses(beside) == statuses(in_place)
    pruned = [i for i, trial in enumerate(beside.trials) if trial["status"] == "pruned"]
    assert pruned and all(rows(beside)[i][0] == beside.trials[i]["step"] + 5 for i in pruned)


@pytest.mark.exact  # a minute
def test_a_verdict_without_a_delay_ends_a_trial_five_steps_earlier(tmp_path: Path) -> None:
    """The control: when Tune decides depends on the delay of the spec, and on nothing else."""
    at_once = sweep(halving(tmp_path, {}, 1))
    for trial, (last, _) in zip(at_once.trials, rows(at_once), strict=True):
        assert last == trial["step"]
