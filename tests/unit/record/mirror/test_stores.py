"""The same record in every store that is promised: SQLite opened by eight at once, a server, PostgreSQL, with a password."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import RecordError
from lockstep.record import problems
from lockstep.record.events.union import Finished, Started
from lockstep.record.ledger.tables import read_parquet
from lockstep.record.mirror.mlflow import MlflowStore
from lockstep.record.mirror.stores import reader
from lockstep.record.recorder import Recorder
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec
from tests.empty_store import put_empty_store
from tests.forked import script
from tests.raised import raises
from tests.unit.record.postgresql import postgresql as running_postgresql
from tests.unit.record.rows import evaluation_row, step_row
from tests.unit.record.s3 import s3
from tests.unit.record.server import Server

Specs = Callable[..., Spec]


def client(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def run_once(spec: Spec, steps: int = 30) -> str:
    """A run of a few odd steps, whole and checked: every point once, and the artifacts there."""
    recorder = Recorder(spec)
    recorder.start()
    recorder.tell(Started({"identity": "abc", "workers": 1}))
    rows = [step_row(i) for i in range(1, steps + 1)]
    rows[3] = step_row(4, grad_norm=math.inf)
    recorder.tell(*rows)
    recorder.tell(evaluation_row(steps))
    recorder.tell(Finished({"step": steps, "metrics": {"eval/loss": 0.5}}))
    recorder.close()
    run_id = recorder.run_id()
    assert spec.record.uri is not None
    found = client(spec.record.uri)
    told = [(m.step, m.timestamp, m.value) for m in found.get_metric_history(run_id, "train/loss")]
    assert told == [(row.step, int(row.wall_clock * 1000), row.loss) for row in rows]
    assert [m.value for m in found.get_metric_history(run_id, "train/grad_norm")][3] == sys.float_info.max
    assert found.get_run(run_id).info.status == "FINISHED"
    run = reader(spec.record.uri, Path()).run(run_id)
    assert (run.status, run.step) == ("FINISHED", steps)
    kept = reader(spec.record.uri, Path()).artifacts(run_id)
    assert {"ledger.parquet", "spec.yaml", "figures/loss.png", "log.txt", "source/jobs/digits/job.py"} <= set(
        kept
    )
    fetched = Path(found.download_artifacts(run_id, "ledger.parquet"))
    assert read_parquet(fetched) == rows
    return run_id


pytestmark = pytest.mark.usefixtures("drawn_figures")


def eight_at_once(uri: str, folder: Path) -> None:
    """Eight runs in processes of their own, each whole: no point, retry or migration of one costs another anything."""
    text = (
        "from lockstep.spec.loading import load_spec\n"
        "from tests.unit.record.mirror.test_stores import run_once\n"
        "document = {'name': 'eight', 'job': {'use': 'jobs.digits.job:Digits'},\n"
        f"            'record': {{'uri': '{uri}'}}, 'checkpoint': {{'storage': '{folder}/runs'}}}}\n"
        "run_once(load_spec(document))\n"
    )
    processes = [script(text) for _ in range(8)]
    ended = [(*process.communicate(timeout=300), process.returncode) for process in processes]
    assert [code for _, _, code in ended] == [0] * 8, ended
    runs = reader(uri, Path()).runs("eight", 100)
    assert [(run.status, run.step) for run in runs] == [("FINISHED", 30)] * 8


@pytest.mark.exact  # eight processes; test_mlflow opens a fresh database from several
def test_eight_runs_at_once_into_one_fresh_database(tmp_path: Path) -> None:
    """Each whole: no run lost to a migration that another one was making."""
    eight_at_once(f"sqlite:///{tmp_path}/mlflow.db", tmp_path)


@pytest.mark.scenario
def test_a_server(tmp_path: Path, spec: Specs) -> None:
    with Server(tmp_path) as server:
        run_id = run_once(spec(server.uri))
        assert reader(server.uri, Path()).run(run_id).url.startswith(f"{server.uri}/#/experiments/")
        with raises(problems.NO_RUN):
            reader(server.uri, Path()).run("0" * 32)
        with raises(problems.NO_EXPERIMENT, got="digit", wanted=re.compile("digits")):
            reader(server.uri, Path()).runs("digit", 1)


def test_an_experiment_that_was_deleted_is_named(tmp_path: Path, spec: Specs) -> None:
    uri = put_empty_store(tmp_path / "mlflow.db")
    store = client(uri)
    store.delete_experiment(store.create_experiment("digits"))
    refused = Recorder(spec(uri))
    refused.start()
    with raises(problems.EXPERIMENT_DELETED, got="digits"):
        refused.run_id()


@pytest.mark.exact  # such a server hashes the password for each request, which takes 0.2 s
def test_a_server_with_a_password(tmp_path: Path, spec: Specs, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "auth.ini"
    config.write_text(
        "[mlflow]\ndefault_permission = READ\nauthorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
        f"database_uri = sqlite:///{tmp_path}/auth.db\nadmin_username = admin\nadmin_password = a-long-password\nauth_cache_ttl_seconds = 60\n"
    )
    environment = {"MLFLOW_AUTH_CONFIG_PATH": str(config), "MLFLOW_FLASK_SERVER_SECRET_KEY": "s"}
    with Server(tmp_path, app="basic-auth", environment=environment) as server:
        refused = Recorder(spec(server.uri))
        refused.start()
        with pytest.raises(RecordError, match=r"refuses|does not answer") as told:
            refused.run_id()
        assert "\n" not in str(told.value)
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "a-long-password")
        run_once(spec(server.uri))


# --- PostgreSQL -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def postgresql() -> Iterator[str]:
    with running_postgresql() as uri:
        yield uri


@pytest.mark.scenario
def test_eight_runs_at_once_into_postgresql(postgresql: str, tmp_path: Path) -> None:
    """Batches of points that several trials logged at once deadlocked in the database (mlflow#24923)."""
    eight_at_once(postgresql, tmp_path)


@pytest.mark.scenario  # test_a_server has one on SQLite
def test_postgresql_and_a_server_before_it_with_files_in_s3(
    postgresql: str, tmp_path: Path, spec: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files go from here to S3: the server only says where."""
    run_once(spec(postgresql))
    with s3() as (bucket, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with Server(tmp_path, backend=postgresql, artifacts=bucket, direct=True) as server:
            run_id = run_once(
                spec(server.uri, record={"uri": server.uri, "experiment": "through the server"})
            )
            assert client(server.uri).get_run(run_id).info.artifact_uri.startswith(bucket)


# --- odd values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1_001, pytest.param(10_000, marks=pytest.mark.exact)])
def test_thousands_of_parameters_are_all_there(tmp_path: Path, database: str, count: int) -> None:
    """Nothing is cut and nothing left out, at 100 a call; long ones are whole in artifacts."""
    params = {f"p{i:05}": ("x" * 7000 + str(i) if i % 250 == 0 else i) for i in range(count)}
    document = {"job": {"use": "jobs.digits.job:Digits", "params": {"nested": {"deep": params}}}}
    store = MlflowStore(database, "params", "r")
    run_id = store.open(None)
    spec = load_spec({**document, "record": {"uri": database}, "checkpoint": {"storage": str(tmp_path)}})
    from lockstep.record.mirror.documents import flat
    from lockstep.record.redaction import redacted_document

    store.log_params(flat(redacted_document(spec.document())))
    kept = client(database).get_run(run_id).data.params
    for name, value in params.items():
        text = kept[f"job.params.nested.deep.{name}"]
        if len(str(value)) > 6000:
            file = text.partition("artifact ")[2].partition(",")[0]
            text = Path(client(database).download_artifacts(run_id, file)).read_text()
        assert text == str(value)


@pytest.mark.scenario
def test_what_a_store_needs_is_imported_ahead() -> None:
    """It takes a second, for which the workers would wait at the start of a run."""
    text = (
        "import sys; from lockstep.spec.loading import load_spec; from lockstep.record.mirror import stores\n"
        "spec = load_spec('jobs/digits/train.yaml', ['record.uri=' + sys.argv[1]])\n"
        "stores.store_for(spec, 0.0)\n"
        "stores.warm_up(spec.record.uri)\n"
        "slow = {'alembic', 'sqlalchemy.orm', 'mlflow.store.tracking.sqlalchemy_store'}\n"
        "print(len(slow & set(sys.modules)))"
    )
    found = [
        subprocess.run([sys.executable, "-c", text, uri], capture_output=True, text=True, check=True).stdout
        for uri in ("sqlite:///never-opened.db", "off")
    ]
    assert found == ["3\n", "0\n"]


class _SaysNothing(BaseHTTPRequestHandler):
    """Answers `{}` to everything, as some proxies and many programs do."""

    denies = False

    def do_GET(self) -> None:
        denied = self.denies and self.path.startswith("/api/2.0/mlflow/experiments/get")
        self.send_response(403 if denied else 200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"error_code": "PERMISSION_DENIED", "message": "no"}' if denied else b"{}")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.do_GET()

    def log_message(self, *_: object) -> None: ...


class _ShowsNothing(_SaysNothing):
    """As an MLflow server answers a user who may see no experiment."""

    denies = True


@pytest.mark.parametrize("handler", [_SaysNothing, _ShowsNothing])
def test_a_server_that_answers_with_nothing_is_no_mlflow_server_without_runs(
    handler: type[_SaysNothing],
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        store = reader(f"http://127.0.0.1:{server.server_address[1]}", Path("runs"))
        try:
            if handler is _ShowsNothing:
                assert store.runs(None, 10) == []
                return
            with raises(problems.NO_MLFLOW):
                store.runs(None, 10)
        finally:
            server.shutdown()
