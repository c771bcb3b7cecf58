"""Checkpoints as MLflow's models: each that a run keeps is one, with its step, its data set and what its evaluation measured, once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.record.errors import UnavailableError
from lockstep.record.events.metrics import Point
from lockstep.record.events.union import CheckpointRow, Event, Finished, Started
from lockstep.record.ledger.rows import EvaluationRow
from lockstep.record.mirror import delivery_lanes
from lockstep.record.mirror.data_sets import DataSet, measured_by
from lockstep.record.mirror.folder import FolderStore
from lockstep.record.mirror.mlflow import registry
from lockstep.record.mirror.mlflow.models import Models
from lockstep.record.mirror.run_store import Measured
from lockstep.record.recorder import Recorder
from lockstep.record.writer import FLUSH_S
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec
from tests.forked import Forked
from tests.unit.record.mirror.test_checkpoint_copies import checkpoint
from tests.unit.record.rows import evaluation_row, step_row
from tests.unit.record.server import Server

Specs = Callable[..., Spec]

FIELDS = {
    "data.train_samples": 100,
    "data.eval/clean_samples": 10,
    "data.eval/noisy_samples": 20,
    "data.test_samples": 30,
    "data.eval/noisy.samples": "f" * 32,
}


def client(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def models(uri: str, run_id: str) -> dict[str, Any]:
    """The models of a run by name; each name once."""
    reading = client(uri)
    experiment = reading.get_run(run_id).info.experiment_id
    found = reading.search_logged_models([experiment], filter_string=f"source_run_id = '{run_id}'")
    assert len({model.name for model in found}) == len(found)
    return {model.name: model for model in found}


def metrics(model: Any) -> list[tuple[str, int, float, str | None]]:
    """The metrics of a model as MLflow's page of it has them: key, step, value, data set."""
    return sorted((m.key, m.step, m.value, m.dataset_name) for m in model.metrics or ())


def has_files(uri: str, model: Any) -> bool:
    return bool(client(uri).list_logged_model_artifacts(model.model_id))


def saved(folder: Path, step: int, essential: list[int], *deleted: int) -> CheckpointRow:
    path = folder / f"step-{step}"
    uri = str(path) if path.exists() else checkpoint(folder, step)
    whole = tuple((one, str(folder / f"step-{one}")) for one in essential)
    return CheckpointRow(step, uri, None, 1, 0.0, 0.0, 0.0, 1_700_000_000.0, deleted, whole)


def evaluation(step: int) -> EvaluationRow:
    return evaluation_row(step, **{"clean/loss": step / 7, "noisy/loss": step / 3})


def linked(step: int) -> list[tuple[str, int, float, str | None]]:
    """What is to be seen of `evaluation(step)` at its checkpoint."""
    return [
        ("eval/clean/loss", step, step / 7, "Digits.eval_data.clean"),
        ("eval/noisy/loss", step, step / 3, "Digits.eval_data.noisy"),
    ]


def told(folder: Path, first: int, last: int) -> list[Event]:
    """Steps with an evaluation and a checkpoint each; the last three are kept, and the newest and the third essential."""
    events: list[Event] = []
    for step in range(first, last + 1):
        gone = [step - 3] if step - 3 > 0 and step - 3 != 3 else []
        essential = [step, 3] if step > 3 else [step]
        events += [step_row(step), evaluation(step), saved(folder, step, essential, *gone)]
    return events


def start(spec: Spec, run_id: str | None = None) -> Recorder:
    recorder = Recorder(spec, run_id=run_id)
    recorder.start()
    recorder.tell(Started({"identity": "abc", "fields": FIELDS}))
    return recorder


@pytest.fixture(params=["artifact", "reference"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.every(2)
def test_each_kept_checkpoint_is_a_model_with_its_evaluations(
    database: str, spec: Specs, tmp_path: Path, kind: str
) -> None:
    """The newest and the best with their files, the others as references; what retention deletes leaves no model."""
    recorder = start(spec(database, record={"uri": database, "checkpoints": kind}))
    recorder.tell(*told(tmp_path, 1, 6))
    recorder.tell(step_row(7), saved(tmp_path, 7, [7, 3], 4))  # not evaluated
    recorder.tell(Finished({"step": 7, "test": {"test/loss": 0.5}, "tested_at": 1.7e9, "tested_step": 3}))
    recorder.close()
    run_id = recorder.run_id()
    found = models(database, run_id)
    assert set(found) == {f"checkpoint-{step}" for step in (3, 5, 6, 7)}
    assert all(model.status == "READY" for model in found.values())
    whole = {name for name, model in found.items() if has_files(database, model)}
    assert whole == ({"checkpoint-3", "checkpoint-7"} if kind == "artifact" else set())
    assert metrics(found["checkpoint-5"]) == linked(5)
    assert metrics(found["checkpoint-6"]) == linked(6)
    assert metrics(found["checkpoint-7"]) == []
    assert metrics(found["checkpoint-3"]) == [*linked(3), ("test/loss", 3, 0.5, "Digits.test_data")]
    digests = {
        data.name: data.digest
        for data in (i.dataset for i in client(database).get_run(run_id).inputs.dataset_inputs)
    }
    assert all(m.dataset_digest == digests[m.dataset_name] for m in found["checkpoint-3"].metrics)
    steps = {
        output.model_id: output.step for output in client(database).get_run(run_id).outputs.model_outputs
    }
    assert all(steps[model.model_id] == int(name.partition("-")[2]) for name, model in found.items())
    assert [m.step for m in client(database).get_metric_history(run_id, "eval/clean/loss")] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    from mlflow.tracking._tracking_service.utils import _get_store

    traces, _ = _get_store(database).search_traces([client(database).get_run(run_id).info.experiment_id])
    assert traces == []


def test_what_is_not_a_number_is_no_metric_of_a_model(database: str, spec: Specs, tmp_path: Path) -> None:
    """MLflow would show it as 0; the run's own metric says NaN."""
    recorder = start(spec(database))
    recorder.tell(step_row(1), evaluation_row(1, **{"clean/loss": math.nan, "clean/accuracy": 0.5}))
    recorder.tell(saved(tmp_path, 1, [1]), Finished({"step": 1}))
    recorder.close()
    (model,) = models(database, recorder.run_id()).values()
    assert metrics(model) == [("eval/clean/accuracy", 1, 0.5, "Digits.eval_data.clean")]
    (point,) = client(database).get_metric_history(recorder.run_id(), "eval/clean/loss")
    assert math.isnan(point.value)


def test_an_evaluation_that_a_resume_makes_up_is_linked(
    database: str, spec: Specs, tmp_path: Path, kind: str
) -> None:
    """The checkpoint of a run that was stopped is older than the evaluation of its step."""
    chosen = spec(database, record={"uri": database, "checkpoints": kind})
    first = start(chosen)
    first.tell(step_row(1), saved(tmp_path, 1, [1]), Finished({"step": 1, "stopped": True}))
    first.close()
    (model,) = models(database, first.run_id()).values()
    assert metrics(model) == []
    again = start(chosen, first.run_id())
    again.tell(evaluation(1), step_row(2), saved(tmp_path, 2, [2]), Finished({"step": 2}))
    again.close()
    found = models(database, first.run_id())
    assert metrics(found["checkpoint-1"]) == linked(1) and metrics(found["checkpoint-2"]) == []


def record_until_killed(uri: str, folder: Path, kind: str, call: str, at: int) -> None:
    """Record six steps, and wait for ever in the `at`-th call of one of the models' methods."""
    count = 0

    def dies(self: Models, *given: Any) -> Any:
        nonlocal count
        count += 1
        if count == at:
            (folder / "dying").touch()
            time.sleep(600)
        return method(self, *given)

    method = getattr(Models, call)
    setattr(Models, call, dies)
    document = {
        "name": "digits",
        "job": {"use": "jobs.digits.job:Digits"},
        "record": {"uri": uri, "checkpoints": kind},
    }
    recorder = start(load_spec({**document, "checkpoint": {"storage": str(folder / "runs")}}))
    (folder / "run_id").write_text(recorder.run_id())
    for step in range(1, 7):
        recorder.tell(*told(folder, step, step))
        time.sleep(1.5 * FLUSH_S)  # so that it is published before the next one deletes others
    time.sleep(600)


def killed(uri: str, folder: Path, kind: str, call: str, at: int) -> str:
    """Kill a process that records, at its `at`-th call of `call`. The run's id."""
    process = Forked(record_until_killed, uri, folder, kind, call, at)
    until = time.monotonic() + 90
    while not (folder / "dying").exists():
        assert process.poll() is None, process.communicate()
        if time.monotonic() > until:
            process.kill()
            raise AssertionError(f"{call} was not called {at} times")
        time.sleep(0.05)
    process.kill()
    process.wait()
    return (folder / "run_id").read_text()


@pytest.mark.scenario
@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    ("kind", "call", "at"),
    [
        ("artifact", "measure", 1),
        pytest.param("artifact", "_commit", 1, marks=pytest.mark.scenario),
        pytest.param("artifact", "publish_reference", 1, marks=pytest.mark.scenario),
        pytest.param("reference", "measure", 2, marks=pytest.mark.scenario),
        pytest.param("reference", "_commit", 2, marks=pytest.mark.scenario),
        pytest.param("reference", "_delete", 1, marks=pytest.mark.scenario),
    ],
    indirect=["kind"],
)
def test_a_killed_recorder_leaves_nothing_lost_or_twice(
    database: str, spec: Specs, tmp_path: Path, kind: str, call: str, at: int
) -> None:
    """SIGKILL in the middle; the attempt that resumes the run leaves what an uninterrupted run has."""
    run_id = killed(database, tmp_path, kind, call, at)
    recorder = start(spec(database, record={"uri": database, "checkpoints": kind}), run_id)
    recorder.tell(*told(tmp_path, 1, 7), Finished({"step": 7}))
    recorder.close()
    found = models(database, run_id)
    assert {name: model.status for name, model in found.items()} == {
        f"checkpoint-{step}": "READY" for step in (3, 5, 6, 7)
    }
    assert {name: metrics(model) for name, model in found.items()} == {
        f"checkpoint-{step}": linked(step) for step in (3, 5, 6, 7)
    }
    whole = {name for name, model in found.items() if has_files(database, model)}
    assert whole == ({"checkpoint-3", "checkpoint-7"} if kind == "artifact" else set())
    for key in ("eval/clean/loss", "eval/noisy/loss", "train/loss"):
        assert [m.step for m in client(database).get_metric_history(run_id, key)] == [1, 2, 3, 4, 5, 6, 7], (
            key
        )


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path) as server:
        yield server


@pytest.mark.scenario
def test_an_outage_costs_no_model_and_no_metric(own_server: Server, spec: Specs, tmp_path: Path) -> None:
    """A server that is killed while models are published, and started again."""
    recorder = start(spec(own_server.uri))
    recorder.tell(*told(tmp_path, 1, 4))
    until = time.monotonic() + 60
    while "checkpoint-4" not in models(own_server.uri, recorder.run_id()):
        assert time.monotonic() < until
        time.sleep(0.05)
    own_server.kill()
    recorder.tell(*told(tmp_path, 5, 6))
    time.sleep(3.0)
    own_server.start()
    recorder.tell(*told(tmp_path, 7, 7), Finished({"step": 7}))
    recorder.close()
    found = models(own_server.uri, recorder.run_id())
    assert {name: (model.status, metrics(model)) for name, model in found.items()} == {
        f"checkpoint-{step}": ("READY", linked(step)) for step in (3, 5, 6, 7)
    }
    history = client(own_server.uri).get_metric_history(recorder.run_id(), "eval/noisy/loss")
    assert [m.step for m in history] == [1, 2, 3, 4, 5, 6, 7]


class Away(FolderStore):
    """A store that does not take points for a while, and keeps the order of what it took."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec.folder, spec.name)
        self.tries, self.took = 0, list[str]()

    def log_metrics(self, points: Sequence[Point]) -> None:
        self.tries += 1
        if self.tries < 5:
            raise UnavailableError("record.uri: away")
        self.took.append("points")

    def log_evaluation(self, step: int, evaluation: Sequence[Measured]) -> None:
        self.took.append(f"evaluation of step {step}")


@pytest.mark.scenario
def test_an_evaluation_is_linked_only_after_all_points_before_it(
    spec: Specs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a lane tries the next call because the first one fails: a process that is then killed would hide the missing points behind a later step."""
    monkeypatch.setattr(delivery_lanes, "_TRIES", 1)
    monkeypatch.setattr(delivery_lanes, "_PROBED_AFTER_S", 0.0)
    store = Away(spec(record={"checkpoints": "reference"}))
    recorder = Recorder(spec(), lambda _: store)
    recorder.start()
    recorder.tell(*told(tmp_path, 1, 2), Finished({"step": 2}))
    recorder.close()
    assert store.tries >= 5
    assert store.took[0] == "points"
    assert sorted(store.took[1:]) == ["evaluation of step 1", "evaluation of step 2"]


def test_a_metric_is_of_the_set_that_it_names() -> None:
    def data(name: str) -> DataSet:
        return DataSet(f"Job.{name}", name.partition("_")[0], "m:Job", 1, {}, "0" * 64)  # type: ignore[arg-type]

    sets = [data("train_data"), data("eval_data.clean"), data("test_data")]
    names = ("eval/clean/loss", "eval/loss", "test/loss", "test/top/5", "perf/evaluation_s")
    found = [measured_by(name, sets) for name in names]
    assert [one and one.name for one in found] == [
        "Job.eval_data.clean", None, "Job.test_data", "Job.test_data", None,
    ]  # fmt: skip


@pytest.mark.scenario
def test_a_server_registers_a_checkpoint_that_the_recorder_then_keeps(
    own_server: Server, spec: Specs, tmp_path: Path
) -> None:
    """A reference gets its files and an alias, for which the run keeps the checkpoint from then on."""
    recorder = start(spec(own_server.uri))
    recorder.tell(*told(tmp_path, 1, 3), *told(tmp_path, 4, 5))
    until = time.monotonic() + 60
    while "checkpoint-4" not in models(own_server.uri, recorder.run_id()):  # the reference comes last
        assert time.monotonic() < until
        time.sleep(0.05)
    run_id, folder = recorder.run_id(), tmp_path / "step-4"
    made = registry.promote(
        own_server.uri, run_id, 4, str(folder), folder, name="digits", alias="champion", tags={"lockstep.step": "4"}
    )  # fmt: skip
    recorder.tell(*told(tmp_path, 6, 6), step_row(7), saved(tmp_path, 7, [7, 4, 3]), Finished({"step": 7}))
    recorder.close()
    version = client(own_server.uri).get_model_version_by_alias("digits", "champion")
    assert (version.version, version.tags) == (made.version, {"lockstep.step": "4"})
    model = models(own_server.uri, run_id)["checkpoint-4"]
    assert (model.model_id, model.status, metrics(model)) == (made.model_id, "READY", linked(4))
    assert has_files(own_server.uri, model)
