"""The record in a real MLflow database."""

from __future__ import annotations

import json
import math
import re
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lockstep.record import problems
from lockstep.record.errors import UnavailableError
from lockstep.record.events.metrics import Point
from lockstep.record.events.union import Failed, Finished, Started
from lockstep.record.ledger.tables import read_parquet
from lockstep.record.mirror.mlflow import MlflowStore
from lockstep.record.mirror.mlflow.reading import MlflowReader
from lockstep.record.mirror.store_uri import unreachable
from lockstep.record.mirror.stores import reader
from lockstep.record.recorder import Recorder
from lockstep.record.runs.heartbeat import process_tags
from lockstep.spec.fields import Spec
from tests.empty_store import put_empty_store
from tests.forked import script
from tests.raised import raises
from tests.unit.record.rows import evaluation_row, step_row

Specs = Callable[..., Spec]


def client(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def history(uri: str, run_id: str, key: str) -> list[tuple[int, int, float]]:
    return [(m.step, m.timestamp, m.value) for m in client(uri).get_metric_history(run_id, key)]


def artifacts(uri: str, run_id: str, folder: str | None = None) -> set[str]:
    return {file.path for file in client(uri).list_artifacts(run_id, folder)}


def opened(uri: str, run_id: str | None = None) -> tuple[MlflowStore, str]:
    store = MlflowStore(uri, "store", "a run")
    return store, store.open(run_id)


def finished_run(spec: Spec, steps: int) -> Recorder:
    recorder = Recorder(spec)
    recorder.start()
    recorder.tell(
        Started({"identity": "abc", "workers": 2, "git": {"commit": "c0ffee", "dirty": True, "diff": "+1"}})
    )
    for step in range(1, steps + 1):
        recorder.tell(step_row(step))
    recorder.tell(evaluation_row(steps, loss=0.25))
    weights = recorder.run_folder() / "weights" / "final.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"weights")
    recorder.tell(
        Finished({"step": steps, "weights_digest": "f00", "metrics": {"eval/loss": 0.25}}, [weights])
    )
    recorder.close()
    return recorder


def test_every_step_is_recorded_once_in_order_with_the_ledgers_bits(database: str, spec: Specs) -> None:
    """G4, and the artifacts, tags and parameters of a run that finished."""
    recorder = finished_run(spec(database), steps=400)
    run_id = recorder.run_id()
    ledger = read_parquet(recorder.run_folder() / "ledger.parquet")
    assert [row.step for row in ledger] == list(range(1, 401))
    of_row: dict[str, Callable[[Any], float]] = {
        "train/loss": lambda row: row.loss,
        "train/entropy": lambda row: row.parts["entropy"],
        "train/lr": lambda row: row.lr,
        "train/grad_norm": lambda row: row.grad_norm,
        "train/clipped_norm": lambda row: row.clipped_norm,
        "perf/step_s": lambda row: row.step_s,
    }
    for key, value in of_row.items():
        expected = [(row.step, int(row.wall_clock * 1000), value(row)) for row in ledger]
        assert history(database, run_id, key) == expected, key
    assert [(step, value) for step, _, value in history(database, run_id, "eval/loss")] == [(400, 0.25)]
    run = client(database).get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "digits"
    assert run.data.params["optimizer.lr"] == "0.001"
    assert run.data.params["batch.global"] == "64"
    assert run.data.tags["lockstep.identity"] == "abc"
    assert run.data.tags["lockstep.weights_digest"] == "f00"
    assert run.data.tags["mlflow.source.name"] == "jobs.digits.job:Digits"
    assert run.data.tags["mlflow.source.git.commit"] == "c0ffee"
    assert run.data.tags["mlflow.note.content"].startswith("**FINISHED** at step 400 · eval/loss 0.25\n")
    kept = artifacts(database, run_id)
    assert kept >= {
        "ledger.parquet",
        "evaluations.parquet",
        "spec.yaml",
        "summary.json",
        "git.diff",
        "weights",
    }
    assert artifacts(database, run_id, "weights") == {"weights/final.safetensors"}


def test_the_data_of_a_run_are_its_inputs(database: str, spec: Specs) -> None:
    """A short digest that MLflow takes, the whole fingerprint beside it, and the job as their source; told twice, there once."""
    import mlflow

    fields = {
        "data.train_samples": 1500,
        "data.eval_samples": 297,
        "data.train.file.a.parquet": "rows 1500, sha256 " + "f" * 64,
        "data.eval.samples": "0" * 32,
        "optimizer.lr": 1.0,
    }
    recorder = Recorder(spec(database))
    recorder.start()
    for _ in range(2):  # two attempts
        recorder.tell(Started({"identity": "abc", "fields": fields}))
    recorder.tell(Finished({"step": 0}))
    recorder.close()
    inputs = client(database).get_run(recorder.run_id()).inputs.dataset_inputs
    found = {tag.value: one.dataset for one in inputs for tag in one.tags if tag.key == "mlflow.data.context"}
    assert len(inputs) == 2
    assert {context: data.name for context, data in found.items()} == {
        "train": "Digits.train_data",
        "eval": "Digits.eval_data",
    }
    for context, samples in (("train", 1500), ("eval", 297)):
        data = found[context]
        profile = json.loads(data.profile)
        prefix = f"data.{context}."
        assert profile["fingerprint"] == {
            name.removeprefix(prefix): text for name, text in fields.items() if name.startswith(prefix)
        }
        assert profile["num_rows"] == samples
        assert len(profile["sha256"]) == 64
        assert len(data.digest) == 32
        assert profile["sha256"].startswith(data.digest)
        assert (
            mlflow.data.get_source(data).to_dict()["tags"]["mlflow.source.name"] == "jobs.digits.job:Digits"
        )
    assert found["train"].digest != found["eval"].digest


def test_infinity_is_read_as_it_was_told(database: str, spec: Specs) -> None:
    """MLflow keeps the largest number in its place."""
    recorder = Recorder(spec(database))
    recorder.start()
    recorder.tell(step_row(1, loss=math.inf), step_row(2, loss=-math.inf), Finished({"step": 2}))
    recorder.close()
    assert reader(database, Path()).run(recorder.run_id()).metrics["train/loss"] == -math.inf


def test_artifacts_lie_beside_the_database_wherever_the_run_was_started(
    database: str, spec: Specs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    run_id = finished_run(spec(database), steps=1).run_id()
    assert list(elsewhere.iterdir()) == []
    beside = Path(database.removeprefix("sqlite:///")).parent
    assert (
        beside / "mlartifacts" / run_id / "artifacts" / "weights" / "final.safetensors"
    ).read_bytes() == b"weights"


def test_a_resumed_run_records_only_what_is_new(database: str, spec: Specs) -> None:
    first = Recorder(spec(database))
    first.start()
    first.tell(*[step_row(i) for i in range(1, 21)])
    first.tell(evaluation_row(10))
    first.tell(Failed("stopped by SIGTERM", status="KILLED"))
    first.close()
    run_id = first.run_id()
    assert client(database).get_run(run_id).info.status == "KILLED"

    second = Recorder(spec(database, workers={"max": 2}), run_id=run_id)
    second.start()
    assert second.run_id() == run_id
    assert client(database).get_run(run_id).info.status == "RUNNING"
    second.tell(*[step_row(i, wall_clock=2e9 + i) for i in range(11, 31)])
    second.tell(evaluation_row(10)._replace(wall_clock=2e9))
    second.tell(evaluation_row(30))
    second.tell(Finished({"step": 30}))
    second.close()
    assert [step for step, _, _ in history(database, run_id, "train/loss")] == list(range(1, 31))
    assert [step for step, _, _ in history(database, run_id, "perf/samples_per_s")] == list(range(1, 31))
    assert [step for step, _, _ in history(database, run_id, "eval/loss")] == [10, 30]
    run = client(database).get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["workers.max"] == "1"
    assert run.data.tags["lockstep.changed"] == '{"workers.max": ["1", "2"]}'


def test_a_failed_run_says_so(database: str, spec: Specs) -> None:
    recorder = Recorder(spec(database))
    recorder.start()
    recorder.tell(Failed("job.use: broke", "Traceback (most recent call last): …"))
    recorder.close()
    run = client(database).get_run(recorder.run_id())
    assert run.info.status == "FAILED"
    assert run.data.tags["lockstep.error"] == "job.use: broke"
    assert "error.txt" in artifacts(database, recorder.run_id())


def test_a_run_whose_folder_cannot_be_made_does_not_stay_running(
    database: str, spec: Specs, tmp_path: Path
) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    recorder = Recorder(spec(database, record={"uri": database, "experiment": "no folder"}))
    recorder.start()
    with raises(problems.CANNOT_WRITE, path=re.compile("runs")):
        recorder.run_id()
    experiment = client(database).get_experiment_by_name("no folder")
    runs = client(database).search_runs([experiment.experiment_id])
    assert [run.info.status for run in runs] == ["FAILED"]


def test_points_sent_twice_are_recorded_once(database: str) -> None:
    """What lets a call be repeated that may have succeeded."""
    store, run_id = opened(database)
    points = [
        Point("train/loss", math.nan if i == 3 else float(i), 1_700_000_000_000 + i, i) for i in range(1, 6)
    ]
    store.log_metrics(points)
    store.log_metrics(points)
    assert [step for step, _, _ in history(database, run_id, "train/loss")] == [1, 2, 3, 4, 5]
    reopened, _ = opened(database, run_id)
    assert reopened.last_steps() == {"train/loss": 5}


def test_nan_stays_nan_and_infinity_becomes_the_largest_number(database: str) -> None:
    store, run_id = opened(database)
    store.log_metrics([Point("loss", value, 1, i) for i, value in enumerate((math.nan, math.inf, -math.inf))])
    first, second, third = (value for _, _, value in sorted(history(database, run_id, "loss")))
    assert math.isnan(first)
    assert (second, third) == (sys.float_info.max, -sys.float_info.max)


def test_long_values_are_kept_whole(database: str) -> None:
    """MLflow would cut the first at 6000 characters without a word, and refuse the second."""
    store, run_id = opened(database)
    param, tag = "p" * 6001, "t" * 8001
    store.log_params({"job.params.text": param, "job.params.fits": "x" * 6000})
    store.set_tags({"lockstep.note": tag})
    run = client(database).get_run(run_id)
    assert run.data.params["job.params.fits"] == "x" * 6000
    for text, pointer in (
        (param, run.data.params["job.params.text"]),
        (tag, run.data.tags["mlflow.note.content"]),
    ):
        file = pointer.partition("artifact ")[2].partition(",")[0]
        assert Path(client(database).download_artifacts(run_id, file)).read_text() == text


def test_more_than_a_hundred_parameters_and_odd_names_are_taken(database: str) -> None:
    store, run_id = opened(database)
    store.log_params(
        {f"job.params.p{i}": str(i) for i in range(250)} | {"job.params.a@b": "1", "job.params.a%b": "2"}
    )
    params = client(database).get_run(run_id).data.params
    assert len(params) == 252
    assert (params["job.params.a:40:b"], params["job.params.a:25:b"]) == ("1", "2")


def test_a_deleted_run_and_an_unknown_one_are_refused_in_one_line(database: str) -> None:
    _, run_id = opened(database)
    client(database).delete_run(run_id)
    for wrong, problem in ((run_id, problems.RUN_DELETED), ("0" * 32, problems.REFUSES)):
        with raises(problem) as told:
            opened(database, wrong)
        assert "\n" not in str(told.value)


def test_a_store_that_cannot_be_opened_is_one_clear_line(tmp_path: Path, spec: Specs) -> None:
    (tmp_path / "file").write_text("no database")
    wrong = {
        f"sqlite:///{tmp_path}/file/mlflow.db": (problems.BESIDE_DATABASE, "name another database"),
        f"sqlite:///{tmp_path}/file": (
            problems.DATABASE_DAMAGED,
            "it is a file of another kind: move it away",
        ),
        "sqlite:///:memory:": (problems.IN_MEMORY, ""),
        "gopher://host": (problems.REFUSES, ""),
        "http://127.0.0.1:9": (problems.UNREACHABLE, "start it, name another with --uri"),
    }
    for uri, (problem, remedy) in wrong.items():
        recorder = Recorder(spec(uri), patience_s=0.1)
        recorder.start()
        with raises(problem) as told:
            recorder.run_id()
        assert told.value.remedy.startswith(remedy)
        assert "\n" not in str(told.value)
        assert str(recorder.state.failure) == str(told.value)


def test_a_database_that_cannot_be_used_is_one_true_line(tmp_path: Path, spec: Specs, database: str) -> None:
    """What it is and what to do, at once: it is not started, and no second try helps. The control is the whole copy."""
    whole = Path(database.removeprefix("sqlite:///"))
    opened(database)
    for name in ("other", "newer", "cut", "whole"):
        shutil.copyfile(whole, tmp_path / f"{name}.db")
    for name, revision in (("other", "0a8213491aaa"), ("newer", "deadbeef1234")):
        with closing(sqlite3.connect(tmp_path / f"{name}.db")) as connection:
            connection.execute("update alembic_version set version_num = ?", (revision,))
            if name == "newer":  # its tables are others as well
                connection.execute("drop table alembic_version")
                connection.execute("drop table webhooks")
                connection.execute("create table alembic_version (version_num varchar(32))")
                connection.execute("insert into alembic_version values (?)", (revision,))
            connection.commit()
    with (tmp_path / "cut.db").open("rb+") as file:
        file.truncate(40_000)
    wrong = {
        "other": (
            problems.REFUSES,
            r"^its tables have version 0a8213491aaa, those of this MLflow \w+$",
            "another version of MLflow made it: install that version",
        ),
        "newer": (problems.REFUSES, "Can't locate revision", "a newer MLflow, or another program, made it"),
        "cut": (
            problems.DATABASE_DAMAGED,
            "database disk image is malformed",
            "the file is damaged: put a copy of it back",
        ),
    }
    with closing(sqlite3.connect(tmp_path / "foreign.db")) as connection:
        connection.execute("create table users (a int)")
        connection.commit()
    before = (tmp_path / "foreign.db").read_bytes()
    with raises(problems.OTHER_PROGRAM, got="users"):
        MlflowStore(f"sqlite:///{tmp_path}/foreign.db", "e", "r").open(None)
    assert (tmp_path / "foreign.db").read_bytes() == before
    for name, (problem, got, remedy) in wrong.items():
        with raises(problem, got=re.compile(got), remedy=re.compile(f"^{remedy}")) as told:
            MlflowStore(f"sqlite:///{tmp_path}/{name}.db", "e", "r").open(None)
        assert not isinstance(told.value, UnavailableError)
        assert "\n" not in str(told.value) and "start it" not in str(told.value)
    opened(f"sqlite:///{tmp_path}/whole.db")


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("OperationalError: (sqlite3.OperationalError) database or disk is full", "make room on its disk, or name another"),
        ("OperationalError: (sqlite3.OperationalError) attempt to write a readonly database", "make the file and its folder writable"),
        ("Connection refused", "start it, name another with --uri, or set record.uri=off"),
    ],
)  # fmt: skip
def test_what_to_do_follows_from_what_a_store_says(reason: str, words: str) -> None:
    assert unreachable("sqlite:////data/mlflow.db", reason, UnavailableError).remedy.startswith(words)


def test_the_link_lands_on_the_training_page_and_shows_no_password() -> None:
    store = MlflowStore("https://me:hunter2@host:5000/mlflow/", "e", "r")
    store._experiment_id, store._run_id = "3", "abc"
    assert store.url() == "https://host:5000/mlflow/#/experiments/3/runs/abc?workflowType=machine_learning"


def test_processes_that_open_one_fresh_database_at_once_all_succeed(tmp_path: Path) -> None:
    """Nothing of MLflow reaches standard output either."""
    text = (
        "from lockstep.record.mirror.mlflow import MlflowStore\n"
        f"store = MlflowStore('sqlite:///{tmp_path}/mlflow.db', 'race', 'r')\n"
        "store.open(None)\n"
        "store.set_status('FINISHED')\n"
    )
    processes = [script(text) for _ in range(2)]
    ended = [(*process.communicate(), process.returncode) for process in processes]
    assert [(out, code) for out, _, code in ended] == [("", 0)] * 2, ended
    assert (
        len(client(f"sqlite:///{tmp_path}/mlflow.db").search_experiments(filter_string="name = 'race'")) == 1
    )


def test_without_mlflow_a_person_is_told_what_to_do(
    spec: Specs, monkeypatch: pytest.MonkeyPatch, database: str
) -> None:
    monkeypatch.setattr(sys, "meta_path", [_NoMlflow(), *sys.meta_path])
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlflow"]:
        monkeypatch.delitem(sys.modules, name)
    recorder = Recorder(spec(database))
    recorder.start()
    with raises(problems.MLFLOW_MISSING):
        recorder.run_id()


class _NoMlflow:
    """An import finder that finds no mlflow."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "mlflow":
            raise ModuleNotFoundError("No module named 'mlflow'", name="mlflow")


def test_a_run_of_another_user_whose_process_has_gone_is_shown_so(tmp_path: Path) -> None:
    """A store that lets this user read alone still lists the runs, that one as failed; whoever may write marks it."""
    uri = put_empty_store(tmp_path / "mlflow.db")
    store, gone = opened(uri)
    store.set_status("RUNNING")
    tags = process_tags(1_700_000_000.0)
    store.set_tags({**tags, "lockstep.process": f"{tags['lockstep.process']}1"})  # started at another time
    _, lives = opened(uri)
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as connection:
        for table in ("tags", "runs"):
            for verb in ("insert", "update"):
                refuse = f"create trigger no_{verb}_{table} before {verb} on {table} begin select raise(abort, 'no'); end"
                connection.execute(refuse)
        connection.commit()
        found = {run.run_id: run for run in MlflowReader(uri).runs(None, 10)}
        assert {run_id: run.status for run_id, run in found.items()} == {gone: "FAILED", lives: "RUNNING"}
        assert found[gone].ended == 1_700_000_000.0
        assert found[gone].tags["lockstep.error"].startswith("the process that recorded it is gone")
        assert client(uri).get_run(gone).info.status == "RUNNING"
        for table in ("tags", "runs"):
            for verb in ("insert", "update"):
                connection.execute(f"drop trigger no_{verb}_{table}")
        connection.commit()
    assert MlflowReader(uri).run(gone) == found[gone]
    kept = client(uri).get_run(gone)
    assert (kept.info.status, kept.data.tags) == ("FAILED", found[gone].tags)
