"""`lockstep runs --where`: which runs are listed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.record.mirror.run_store import RunInfo
from lockstep.views import problems
from lockstep.views.run_filter import conditions, matching
from tests.in_process import here
from tests.raised import raises


def run(name: str, accuracy: float, **more: Any) -> RunInfo:
    params = {"optimizer.lr": "0.001", "optimizer.name": "sgd", **more.pop("params", {})}
    known = {
        "run_id": name * 32, "name": name, "experiment": "e", "status": "FINISHED", "started": 1.0, "ended": 2.0, "step": 10,
        "metrics": {"eval/accuracy": accuracy}, "params": params, "tags": {}, "url": "",
    }  # fmt: skip
    return RunInfo(**{**known, **more})


RUNS = [
    run("a", 0.95, params={"optimizer.lr": "1e-2"}),
    run("b", 0.9, status="KILLED", step=5),
    run("c", float("nan"), metrics={"train/loss": 0.1}, params={"optimizer.name": "adamw"}),
]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("eval/accuracy > 0.9", "a"),
        ("eval/accuracy>=0.9", "ab"),
        ("eval/accuracy >= 0.9 and status = FINISHED", "a"),
        ("optimizer.lr = 0.01", "a"),
        ("optimizer.lr < 0.01", "bc"),
        ("optimizer.name != sgd", "c"),
        ("optimizer.name == 'sgd' and step < 6", "b"),
        ("optimizer.name > adamw", ""),
        ("train/loss < 1", "c"),
        ("eval/accuracy != nan", "ab"),
        ("name = a", "a"),
    ],
)
def test_runs_that_meet_all_conditions_are_listed_in_their_order(text: str, names: str) -> None:
    chosen = matching(RUNS, conditions(text), lambda run: run.metrics)
    assert "".join(run.name for run in chosen) == names


@pytest.mark.parametrize("text", ["", "eval/accuracy", "eval/accuracy >", "> 3", "a = 1 or b = 2 and", "and"])
def test_a_text_that_is_no_condition_is_refused(text: str) -> None:
    with raises(problems.WHERE_FORM):
        conditions(text)


def test_a_name_that_no_run_has_is_refused() -> None:
    with raises(problems.WHERE_NAME, got="eval/accurcy", hint="; did you mean 'eval/accuracy'?"):
        matching(RUNS, conditions("eval/accurcy > 0.9"), lambda run: run.metrics)
    assert matching([], conditions("eval/accurcy > 0.9"), lambda run: run.metrics) == []


def test_the_command_looks_beyond_the_newest_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In folders, of which one has an evaluation in its journal alone."""
    from lockstep.record.ledger.journal import Journal
    from tests.unit.record.rows import evaluation_row, step_row

    for i, accuracy in enumerate((0.5, 0.95, 0.7)):
        run_id = str(i) * 32
        folder = tmp_path / "runs" / run_id
        journal = Journal(folder)
        journal.add([step_row(1), evaluation_row(1, accuracy=accuracy)])
        journal.close()
        known = {
            "run_id": run_id, "name": f"run{i}", "status": "FINISHED", "started": 10.0 - i, "ended": 11.0,
            "params": {}, "tags": {"lockstep.folder": str(folder)},
        }  # fmt: skip
        (folder / "run.json").write_text(json.dumps(known))
    where = ["runs", "--uri", "off", "--limit", "1", "--json"]
    code, out, err = here(monkeypatch, capfd, tmp_path, *where, "--where", "eval/accuracy > 0.6")
    assert code == 0, err
    assert [run["name"] for run in json.loads(out)["runs"]] == ["run1"]
    code, out, _ = here(monkeypatch, capfd, tmp_path, *where)
    assert [run["name"] for run in json.loads(out)["runs"]] == ["run0"]  # the control
