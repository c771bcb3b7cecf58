"""The run of a sweep: its table is told by what changed, and what a trial's end costs does not grow with the trials before it."""

from __future__ import annotations

import csv
import errno
import itertools
import json
import math
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.cli.sweeps import as_text
from lockstep.driver.progress import Silent
from lockstep.driver.signals import StopSignal
from lockstep.job import problems
from lockstep.job.source import check_job_source
from lockstep.proof.recorded_run import recorded_main
from lockstep.record.errors import UnavailableError
from lockstep.record.events.metrics import Point
from lockstep.record.mirror import folder as folder_store
from lockstep.record.problems import CANNOT_WRITE
from lockstep.spec.sweep import SweepSpec, load_sweep
from lockstep.sweeps import sweep_record
from lockstep.sweeps.decisions import Decisions
from lockstep.sweeps.driver import SweepResult
from lockstep.sweeps.sweep_progress import SweepTable
from lockstep.sweeps.sweep_record import SweepRecord
from lockstep.sweeps.trial_standings import Standing, best_of, tally
from tests.empty_store import put_empty_store
from tests.raised import raises
from tests.unit.record.conftest import THIRD_PARTY

TRIALS = 1000
pytestmark = [pytest.mark.filterwarnings(text) for text in THIRD_PARTY]


@pytest.fixture
def sweep(tmp_path: Path) -> SweepSpec:
    spec = {
        "job": {"use": "jobs.digits.job:Digits"},
        "record": {"uri": "off"},
        "checkpoint": {"storage": str(tmp_path)},
    }
    return load_sweep(
        {"spec": spec, "space": {"optimizer.lr": {"loguniform": [1e-4, 1e-1]}}, "trials": TRIALS}
    )


def ended(number: int) -> dict[str, Any]:
    return {
        "trial": number,
        "status": "failed" if number % 7 == 3 else "finished",
        "fields": {"optimizer.lr": 1e-3 / (number + 1)},
        "metric": ((number * 37) % 1009) / 1009,
        "step": 10,
        "run_id": f"run-{number}",
        "reason": "",
        "order": number,
        "ended": 1_700_000_000.0 + number,
    }


@pytest.mark.scenario
def test_a_sweep_of_a_thousand_trials_rewrites_no_table_at_each_end(
    sweep: SweepSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each end brings its own row and point; the documents come now and then, and whole at the end."""
    monkeypatch.setattr(sweep_record, "DOCUMENTS_S", 3600.0)
    monkeypatch.setattr(sweep_record.sweep_plots, "draw", lambda *_: [])
    monkeypatch.setattr(SweepRecord, "_keep_best", lambda self, run_id: None)
    record = SweepRecord(sweep, None)
    written: list[str] = []
    points: list[Point] = []
    real = sweep_record.write_bytes
    monkeypatch.setattr(
        sweep_record, "write_bytes", lambda path, content: (written.append(path.name), real(path, content))[1]
    )
    monkeypatch.setattr(record._store, "log_metrics", points.extend)
    trials = [ended(number) for number in range(TRIALS)]
    for trial in trials:
        assert record.update([trial]) is None
    assert sorted(written) == ["trials.csv", "trials.json"]
    assert record.end(trials, "FINISHED", "1000 trials") is None
    assert len(written) == 4
    assert [point.step for point in points] == list(range(1, TRIALS + 1))
    for count in (1, 4, 5, 500, TRIALS):
        best = best_of(trials[:count], sweep.mode)
        assert best is not None and points[count - 1].value == best["metric"]
    table = json.loads((record.folder / "trials.json").read_text())
    assert [row[0] for row in table["data"]] == list(range(TRIALS))
    with (record.folder / "trials.csv").open() as file:
        assert len(list(csv.reader(file))) == TRIALS + 1


def test_the_standing_of_trials_is_that_of_all_of_them_however_each_changes() -> None:
    """As the driver tells it: the rows themselves change, and are told some time later."""
    for mode, seed in itertools.product(("min", "max"), range(20)):
        draw, standing, rows = random.Random(seed), Standing(mode), dict[int, dict[str, Any]]()
        for _ in range(200):
            touched = [draw.randrange(12) for _ in range(3)]
            for number in touched:
                row = rows.setdefault(number, {"trial": number, "order": None})
                row |= {
                    "status": draw.choice(["running", "finished", "failed"]),
                    "metric": draw.choice([None, math.nan, math.inf, 0.5, draw.random()]),
                    "step": draw.randrange(9),
                }
            for number in touched:
                standing.take(rows[number])
            table = list(rows.values())
            assert standing.best is best_of(table, mode)
            assert standing.counts == tally(table)
            assert standing.steps == sum(row["step"] for row in table)


def test_what_a_change_costs_does_not_grow_with_the_trials() -> None:
    """Counted in rows that are looked at, not in time."""
    looks = [0]

    class Row(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            looks[0] += key == "metric"
            return super().__getitem__(key)

    standing, costs = Standing("max"), []
    for number in range(TRIALS):
        looks[0] = 0
        standing.take(Row(ended(number)))
        costs.append(looks[0])
    assert costs[-50:] == costs[:50] == [1] * 50


def test_a_finished_run_is_read_once_however_many_trials_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And again when it has changed."""
    for number in range(3):
        tags = {"lockstep.identity": "a"}
        run = {
            "run_id": f"run-{number}",
            "name": "",
            "status": "FINISHED",
            "started": number,
            "ended": 9,
            "params": {},
            "tags": tags,
        }
        folder_store.write_text(tmp_path / f"run-{number}" / "run.json", json.dumps(run))
    read: list[str] = []
    real = folder_store._read
    monkeypatch.setattr(folder_store, "_read", lambda path: (read.append(path.parent.name), real(path))[1])
    monkeypatch.setattr(folder_store, "recorded_in_folder", lambda storage, run_id: run_id)
    for _ in range(4):
        assert list(folder_store.finished_in_folder(tmp_path, "a")) == ["run-2", "run-1", "run-0"]
    assert sorted(read) == ["run-0", "run-1", "run-2"]
    changed = {**json.loads((tmp_path / "run-1" / "run.json").read_text()), "status": "RUNNING"}
    folder_store.write_text(tmp_path / "run-1" / "run.json", json.dumps(changed))
    assert list(folder_store.finished_in_folder(tmp_path, "a")) == ["run-2", "run-0"]
    assert sorted(read) == ["run-0", "run-1", "run-1", "run-2"]


def test_the_source_of_a_class_is_kept_with_the_sweep_and_found_there(tmp_path: Path) -> None:
    """G6: what a resumed sweep imports; without it the line says where the source is. A sweep over a module keeps none."""
    source = {"lockstep_main.py": b"import beside\n\nclass Mine: ...\n", "beside/part.py": b"WIDTH = 8\n"}
    for use, kept in (("lockstep_main:Mine", source), ("jobs.digits.job:Digits", None)):
        document = {
            "spec": {
                "job": {"use": use},
                "record": {"uri": "off"},
                "checkpoint": {"storage": str(tmp_path)},
            },
            "space": {"optimizer.lr": {"grid": [1e-3]}},
        }
        sweep = load_sweep(document)
        record = SweepRecord(sweep, None, kept)
        assert recorded_main(sweep.base, record.run_id) == kept
        assert (record.folder / "source").exists() is (kept is not None)
    with raises(problems.OF_RECORD):
        check_job_source("lockstep_main:Mine")


def told_of(sweep: SweepSpec, folder: Path, *results: dict[str, Any]) -> dict[str, Any]:
    """The row of a trial that gives these results and ends well."""
    folder.mkdir()
    recorders = SimpleNamespace(update_sweep=SimpleNamespace(remote=lambda rows: None))
    table = SweepTable(sweep, Decisions(folder), recorders, Silent(), StopSignal())
    trial = SimpleNamespace(config={"trial": 0, "fields": {"optimizer.lr": 0.1}})
    for result in results:
        table.on_trial_result(0, [trial], trial, {"run_id": "run-0", **result})
    end = {"status": "finished", "reason": "", "weights_digest": "f00", "run_id": "run-0", "done": True}
    table.on_trial_result(0, [trial], trial, {**results[-1], **end})
    (row,) = table.trials
    return row


def test_a_trial_that_gives_no_metric_says_so_and_what_it_gave(sweep: SweepSpec, tmp_path: Path) -> None:
    """Its step is the one that it reached. The controls are a trial that gives it, and one that gave it once."""
    sweep = sweep.model_copy(update={"metric": "eval/acc"})
    without, given = {"eval/loss": 0.5, "eval/f1": 0.1}, {"eval/loss": 0.5, "eval/acc": 0.25}
    missing = told_of(sweep, tmp_path / "a", {"step": 3, **without}, {"step": 6, **without})
    assert (missing["step"], missing["metric"], missing["curve"]) == (6, None, [])
    assert missing["reason"] == "its evaluation of step 6 gave no 'eval/acc', but eval/f1, eval/loss"
    once = told_of(sweep, tmp_path / "b", {"step": 3, **given}, {"step": 6, **without})
    assert (once["step"], once["metric"], once["curve"]) == (6, 0.25, [(3, 0.25)])
    assert once["reason"].endswith(
        "gave no 'eval/acc', but eval/f1, eval/loss, and the value is that of step 3"
    )
    whole = told_of(sweep, tmp_path / "c", {"step": 3, **given}, {"step": 6, **given})
    assert (whole["step"], whole["metric"], whole["reason"]) == (6, 0.25, "")

    rows = [{**row, "trial": number} for number, row in enumerate((missing, whole, once))]
    rows.append({**whole, "trial": 3, "metric": math.nan})
    result = SweepResult("0" * 32, "FINISHED", "eval/acc", "max", rows, rows[1], {}, 1.0, "", "off", "/runs")
    lines = as_text(result).splitlines()
    assert f"  trial 0   finished: {missing['reason']}" in lines
    assert f"  trial 2   finished: {once['reason']}" in lines
    assert not any(line.startswith("  trial 1") for line in lines)
    ranked = [line.split(" trial ")[1].split()[0] for line in lines if line.startswith("  eval/acc")]
    assert ranked == ["1", "2", "3"], "what is no number is last"


def test_a_figure_that_cannot_be_drawn_costs_a_sweep_nothing(
    sweep: SweepSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """matplotlib's axes overflow near the largest float64, where a trial that diverged may end."""
    monkeypatch.setattr(SweepRecord, "_keep_best", lambda self, run_id: None)
    record = SweepRecord(sweep, None)
    trials = [
        {**ended(number), "metric": metric, "curve": [(1, 1.0), (10, metric)], "reason": ""}
        for number, metric in ((0, 0.5), (1, 1.6e308), (2, -1.6e308))
    ]
    assert record.end(trials, "FINISHED", "3 trials") is None
    told = json.loads((record.folder / "run.json").read_text())
    assert told["status"] == "FINISHED"
    assert "no figure metric_by_optimizer.lr.png: it cannot be drawn" in told["tags"]["lockstep.note"]


def test_a_full_disk_is_waited_for_at_the_end_of_a_sweep(
    sweep: SweepSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its documents and figures are written when there is room again. Until then each call says in one line what it could not say."""
    monkeypatch.setattr(SweepRecord, "_keep_best", lambda self, run_id: None)
    monkeypatch.setattr(sweep_record.time, "sleep", lambda seconds: None)
    record = SweepRecord(sweep, None)
    refusals = [1, 0]
    write, draw = sweep_record.write_bytes, sweep_record.sweep_plots.draw

    def refuse(which: int) -> None:
        if refusals[which]:
            refusals[which] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sweep_record, "write_bytes", lambda *file: (refuse(0), write(*file)))
    monkeypatch.setattr(sweep_record.sweep_plots, "draw", lambda *what: (refuse(1), draw(*what))[1])
    trial = {**ended(0), "curve": [(10, 0.5)]}
    failure = record.update([trial])
    assert isinstance(failure, UnavailableError)
    assert failure.code == CANNOT_WRITE.code
    assert failure.facts == {"path": str(record.folder), "got": os.strerror(errno.ENOSPC)}
    refusals[:] = [2, 2]
    assert record.end([trial], "FINISHED", "1 trial") is None
    assert refusals == [0, 0]
    assert json.loads((record.folder / "run.json").read_text())["status"] == "FINISHED"
    assert json.loads((record.folder / "trials.json").read_text())["data"][0][0] == 0


@pytest.mark.scenario
def test_a_sweep_that_was_cut_off_takes_back_what_a_reader_has_marked(
    sweep: SweepSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run does: a reader elsewhere has heard nothing of it for minutes, and takes it for gone."""
    from mlflow import MlflowClient

    monkeypatch.setattr(SweepRecord, "_keep_best", lambda self, run_id: None)
    uri = put_empty_store(tmp_path / "mlflow.db")
    record = SweepRecord(load_sweep(sweep.document(), uri=uri), None)
    client = MlflowClient(tracking_uri=uri)
    for name in ("lockstep.vanished", "lockstep.error"):
        client.set_tag(record.run_id, name, "nothing was heard for 152 s from the process that recorded it")
    client.set_terminated(record.run_id, "FAILED")
    trial = {**ended(0), "curve": [(10, 0.5)]}
    assert record.update([trial]) is None

    def told() -> tuple[str, str, str]:
        run = client.get_run(record.run_id)
        return run.info.status, run.data.tags["lockstep.vanished"], run.data.tags["lockstep.error"]

    assert told() == ("RUNNING", "", "")
    assert record.end([trial], "FINISHED", "1 trial") is None
    assert told() == ("FINISHED", "", "")
