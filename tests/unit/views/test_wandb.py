"""wandb's own reader finds in an offline run what the ledger has: each step once, however often it was written."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.record.events.metrics import evaluation_points, step_points
from lockstep.record.events.union import Failed, Finished, Started
from lockstep.record.ledger.rows import EvaluationRow, StepRow
from lockstep.views import wandb
from lockstep.views.wandb import write_offline_run
from tests.in_process import here
from tests.unit.record.rows import corrupted, evaluation_row, step_row
from tests.unit.views.recorded import RUN, curves, record

STEPS = [step_row(step) for step in range(1, 41)]
EVALUATIONS = [evaluation_row(step) for step in (10, 20, 30, 40)]


def rows(upto: int) -> list[StepRow | EvaluationRow]:
    """As a run tells them."""
    found: list[StepRow | EvaluationRow] = []
    for step in STEPS[:upto]:
        found += [step, *(one for one in EVALUATIONS if one.step == step.step)]
    return found


def in_file(folder: str) -> list[Any]:
    """The records of an offline run."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    (path,) = Path(folder).glob("*.wandb")
    store, found = DataStore(), []
    store.open_for_scan(str(path))
    while (data := store.scan_data()) is not None:
        found.append(Record.FromString(data))
    store.close()
    return found


def kinds(folder: str) -> list[str]:
    return [kind for one in in_file(folder) if (kind := one.WhichOneof("record_type")) != "history"]


def values(items: Any) -> dict[str, str]:
    """By its key, each value as its digits, which NaN has as well."""
    return {one.nested_key[0]: repr(json.loads(one.value_json)) for one in items}


def history(folder: str) -> list[dict[str, str]]:
    return [values(one.history.item) for one in in_file(folder) if one.HasField("history")]


def in_ledger(steps: Sequence[StepRow], evaluations: Sequence[EvaluationRow]) -> list[dict[str, str]]:
    found: dict[int, dict[str, float]] = {}
    before = None
    for row in steps:
        found[row.step] = {point.key: point.value for point in step_points(row, before, scaled=False)}
        times = {"_timestamp": row.wall_clock, "_runtime": row.wall_clock - steps[0].wall_clock}
        found[row.step] |= {"_step": row.step, **times}
        before = row
    for evaluation in evaluations:
        found[evaluation.step] |= {point.key: point.value for point in evaluation_points(evaluation)}
    return [{key: repr(value) for key, value in row.items()} for row in found.values()]


@pytest.mark.scenario
def test_an_offline_run_has_the_points_of_the_ledger(tmp_path: Path) -> None:
    odd = [step_row(41, loss=math.nan), step_row(42, loss=-math.inf, grad_norm=1e300), step_row(43, lr=-0.0)]
    record(tmp_path, [*rows(40), *odd, Finished({})], seed=3, record={"experiment": "a/b: c"})
    written = write_offline_run(curves(tmp_path), tmp_path / "wandb")
    assert (written.run_id, written.steps, written.changed) == (RUN, 43, True)
    found = history(written.folder)
    assert found == in_ledger([*STEPS, *odd], EVALUATIONS)
    assert {"train/loss", "train/entropy", "train/lr", "perf/samples_per_s"} <= found[0].keys()
    assert "eval/loss" in found[9]
    assert kinds(written.folder) == ["header", "run", "summary", "exit"]
    _, run, *_, summary, end = in_file(written.folder)
    assert (run.run.run_id, run.run.project, run.run.display_name) == (RUN, "a-b- c", "digits")
    config = {one.key: json.loads(one.value_json) for one in run.run.config.update}
    assert (config["seed"], config["job"]["use"]) == (3, "jobs.digits.job:Digits")
    assert "workers" not in config, "placement changes no bit"
    assert values(summary.summary.update) == {**found[9], **found[39], **found[-1]}
    assert end.exit.exit_code == 0


def test_a_second_call_leaves_no_doubles(tmp_path: Path) -> None:
    """While a run goes on, after it, and without anything new: one folder, and each step once."""
    told = rows(40)
    record(tmp_path / "whole", [*told, Finished({})])
    (expected,) = Path(write_offline_run(curves(tmp_path / "whole"), tmp_path / "expected").folder).iterdir()
    have = 0
    for count in (1, 9, 10, 11, 11, 30, len(told)):
        record(tmp_path / "runs", told[have:count])
        written = write_offline_run(curves(tmp_path / "runs"), tmp_path / "wandb")
        assert written.changed == (count > have)
        assert history(written.folder) == in_ledger(
            [one for one in told[:count] if isinstance(one, StepRow)],
            [one for one in told[:count] if isinstance(one, EvaluationRow)],
        )
        assert kinds(written.folder) == ["header", "run", "summary"], "a run that goes on has no end"
        (Path(written.folder) / f"run-{RUN}.wandb.synced").touch()
        have = count
    record(tmp_path / "runs", [Finished({})])
    written = write_offline_run(curves(tmp_path / "runs"), tmp_path / "wandb")
    (only,) = (tmp_path / "wandb").rglob("*.*")
    assert only.read_bytes() == expected.read_bytes(), "what was sent before is to be sent again"


def test_a_writer_that_adds_to_what_is_there_writes_it_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of all these: the comparison sees doubles."""
    rows_once = wandb._rows

    def twice(*given: Any) -> Any:
        yield from rows_once(*given)
        yield from rows_once(*given)

    monkeypatch.setattr(wandb, "_rows", twice)
    record(tmp_path, rows(12))
    assert history(write_offline_run(curves(tmp_path), tmp_path / "wandb").folder) != in_ledger(
        STEPS[:12], EVALUATIONS[:1]
    )


def test_rows_that_were_recorded_again_and_a_run_that_failed(tmp_path: Path) -> None:
    record(tmp_path, [*rows(12), Finished({"stopped": True})])
    record(tmp_path, [Started({"workers": 1})])
    resumed = write_offline_run(curves(tmp_path), tmp_path / "wandb")
    assert "exit" not in kinds(resumed.folder), "it goes on, though its steps are recorded already"
    again = [step_row(step, loss=7.0, attempt=2) for step in (11, 12, 13)]
    record(tmp_path, [corrupted(12, since=10), *again])
    written = write_offline_run(curves(tmp_path), tmp_path / "wandb")
    assert history(written.folder) == in_ledger([*STEPS[:10], *again], EVALUATIONS[:1])
    assert "exit" not in kinds(written.folder), "it was resumed"
    record(tmp_path, [Failed("no", "")])
    (*_, end) = in_file(write_offline_run(curves(tmp_path), tmp_path / "wandb").folder)
    assert end.exit.exit_code == 1


def test_the_command_writes_several_runs_and_refuses_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def call(*words: str) -> tuple[int, str, str]:
        return here(monkeypatch, capfd, tmp_path, "record", "wandb", *words, "--uri", "off")

    record(tmp_path / "runs", rows(5), record={"private": True})
    code, out, _ = call(RUN, RUN, "--json")
    assert code == 0
    told: Mapping[str, Any] = json.loads(out)
    folder = told["runs"][0]["folder"]
    assert told == {
        "dir": "wandb",
        "runs": [{"run_id": RUN, "folder": folder, "steps": 5, "changed": True}],
    }
    assert history(str(tmp_path / folder)) == in_ledger(STEPS[:5], [])
    (file,) = (tmp_path / folder).iterdir()
    assert file.stat().st_mode & 0o777 == 0o600, "a private record"
    code, out, err = call(RUN, "nothing", "--dir", "elsewhere")
    assert (code, out) == (2, "")
    assert err.startswith("lockstep: run nothing: ")
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "elsewhere").exists(), "nothing is left behind"
    (tmp_path / "full").touch()
    code, _, err = call(RUN, "--dir", "full")
    assert code == 1
    assert err.startswith("lockstep: dir: cannot write ")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "wandb", None)
        code, _, err = call(RUN)
    assert code == 2
    assert err == "lockstep: wandb: the package is not installed; pip install 'lockstep-train[wandb]'\n"
