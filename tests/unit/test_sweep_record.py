"""The run of a sweep: its table is told by what changed, and what a trial's end costs does not grow with the trials before it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.record.points import Point
from lockstep.spec.sweep import SweepSpec, load_sweep
from lockstep.sweeps import sweep_record
from lockstep.sweeps.sweep_record import SweepRecord, best_of

TRIALS = 1000


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


def test_a_sweep_of_a_thousand_trials_rewrites_no_table_at_each_end(
    sweep: SweepSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each end brings its own row and point; the documents come now and then, and whole at the end."""
    monkeypatch.setattr(sweep_record, "DOCUMENTS_S", 3600.0)
    monkeypatch.setattr(sweep_record.figures, "draw", lambda *_: [])
    monkeypatch.setattr(SweepRecord, "_keep_best", lambda self, run_id: None)
    record = SweepRecord(sweep, None)
    written: list[str] = []
    points: list[Point] = []
    real = sweep_record.write_text
    monkeypatch.setattr(
        sweep_record, "write_text", lambda path, text: (written.append(path.name), real(path, text))[1]
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
