"""The test of a finished run in a real store: its points once, its data sets, and its figures in the result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

import lockstep
from tests.distributed.evaluation_kinds import NamedSets
from tests.distributed.kinds import document
from tests.in_process import here
from tests.unit.record.server import Server


@pytest.mark.scenario
def test_a_test_is_recorded_once_at_the_step_of_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where the whole run is sent again, and where it is resumed after its end."""
    with Server(tmp_path) as server:
        spec = document(
            NamedSets,
            length={"steps": 4},
            rehearsal="off",
            record={"uri": server.uri, "folder": str(tmp_path / "runs")},
            checkpoint={"storage": str(tmp_path / "runs"), "every": None},
        )
        result = lockstep.train(spec, local=True)
        assert (result.tested, result.tested_step, result.best_step) == ("best", 2, 2)
        assert set(result.test) == {"test/loss", "test/accuracy"}
        assert not set(result.test) & set(result.metrics)
        summary = json.loads((tmp_path / "runs" / result.run_id / "summary.json").read_text())
        assert summary["test"] == result.test
        client = MlflowClient(server.uri)

        def points() -> dict[str, list[tuple[int, float]]]:
            return {
                name: [(point.step, point.value) for point in client.get_metric_history(result.run_id, name)]
                for name in (*result.test, "eval/far/loss", "eval/near/loss")
            }

        once = points()
        assert {name: once[name] for name in result.test} == {
            name: [(2, value)] for name, value in result.test.items()
        }
        assert once["test/loss"][0] == once["eval/far/loss"][0]
        assert [step for step, _ in once["eval/far/loss"]] == [2, 4]
        assert [step for step, _ in once["eval/near/loss"]] == [1, 2, 3, 4]
        inputs = {
            (given.dataset.name, given.tags[0].value)
            for given in client.get_run(result.run_id).inputs.dataset_inputs
        }
        assert inputs == {
            ("NamedSets.train_data", "train"),
            ("NamedSets.eval_data.far", "eval"),
            ("NamedSets.eval_data.near", "eval"),
            ("NamedSets.test_data", "test"),
        }
        where = ("--storage", str(tmp_path / "runs"))
        code, _, error = here(
            monkeypatch, capfd, tmp_path, "record", "sync", result.run_id, *where, "--uri", server.uri
        )
        assert code == 0, error
        assert points() == once
        again = lockstep.resume(result.run_id, [f"record.folder={tmp_path}/runs"], local=True, uri=server.uri)
        assert (again.test, again.tested, again.status) == (result.test, "best", "FINISHED")
        assert points() == once
