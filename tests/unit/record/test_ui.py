"""`lockstep ui`: its pages have what the docs promise, asked for as they ask; and it is open to nobody without a password."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

import pytest

from lockstep.calls.ui import guarded
from lockstep.errors import SpecError
from lockstep.record.ledger.tables import read_parquet
from tests.empty_store import put_empty_store
from tests.forked import lockstep
from tests.ports import free_port

ROOT = Path(__file__).parents[3]
PASSWORD = "correct-horse-battery"
PNG = b"\x89PNG"


class Pages:
    """Asks a server as MLflow's pages do."""

    def __init__(self, uri: str, headers: Mapping[str, str] | None = None) -> None:
        self.uri = uri
        self.headers = dict(headers or {})

    def raw(self, path: str, document: Any = None) -> bytes:
        body = None if document is None else json.dumps(document).encode()
        headers = {**self.headers, **({"Content-Type": "application/json"} if body else {})}
        with urllib.request.urlopen(
            urllib.request.Request(f"{self.uri}/{path}", body, headers), timeout=30
        ) as answer:
            found: bytes = answer.read()
            return found

    def get(self, path: str, /, **values: Any) -> Any:
        return json.loads(self.raw(f"ajax-api/2.0/mlflow/{path}?{urlencode(values, doseq=True)}"))

    def post(self, path: str, /, **values: Any) -> Any:
        return json.loads(self.raw(f"ajax-api/2.0/mlflow/{path}", values))

    def artifact(self, run_id: str, path: str) -> bytes:
        return self.raw(f"get-artifact?{urlencode({'path': path, 'run_uuid': run_id})}")

    def status(self, path: str) -> int:
        try:
            self.raw(path)
        except urllib.error.HTTPError as error:
            return error.code
        return 200

    def answers(self) -> bool:
        try:
            return self.status("health") in {200, 401}
        except OSError:
            return False

    def artifacts(self, run_id: str, folder: str | None = None) -> Iterator[str]:
        """Every path below a folder, asked for folder by folder as the page unfolds them."""
        where = {} if folder is None else {"path": folder}
        for file in self.get("artifacts/list", run_id=run_id, **where).get("files", []):
            if file["is_dir"]:
                yield from self.artifacts(run_id, file["path"])
            else:
                yield file["path"]


@contextmanager
def ui(*words: str, environment: Mapping[str, str] | None = None, port: int) -> Iterator[str]:
    """`lockstep ui` while the block runs; the link that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "ui", *words, "--port", str(port)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "platform"), **(environment or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        link = process.stderr.readline().strip()
        until = time.monotonic() + 120
        while not Pages(f"http://127.0.0.1:{port}").answers():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.2)
        yield link
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


class Shown(NamedTuple):
    """A finished run and the pages that show it."""

    pages: Pages
    link: str
    result: dict[str, Any]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    folder = tmp_path_factory.mktemp("shown")
    uri = put_empty_store(folder / "mlflow.db")
    trained = lockstep(
        "train", "jobs/digits/train.yaml", "--local", "--json", "--uri", uri,
        "length.epochs=2", "job.params.width=8", "checkpoint.every.epochs=1", "record.checkpoints=artifact",
        f"checkpoint.storage={folder}/runs",
    )  # fmt: skip
    out, err = trained.communicate(timeout=300)
    assert trained.returncode == 0, err
    port = free_port()
    with ui("--uri", uri, port=port) as link:
        yield Shown(Pages(f"http://127.0.0.1:{port}"), link, json.loads(out))


@pytest.mark.scenario
def test_the_link_opens_the_training_pages_of_the_store(shown: Shown) -> None:
    parts = urlsplit(shown.link)
    assert f"{parts.scheme}://{parts.netloc}" == shown.pages.uri
    assert parts.fragment == "/experiments?workflowType=machine_learning"
    assert b'<div id="root"' in shown.pages.raw("")
    experiments = shown.pages.post("experiments/search", max_results=100)["experiments"]
    (own,) = [one for one in experiments if one["name"] == "digits"]
    assert {"key": "mlflow.experimentKind", "value": "custom_model_development"} in own["tags"]


@pytest.mark.scenario
def test_the_table_of_runs_has_what_is_compared(shown: Shown) -> None:
    """Status, figures, parameters, source and the data with their context."""
    (found,) = all_runs(shown)
    info, data = found["info"], found["data"]
    assert (info["run_id"], info["status"], info["run_name"]) == (
        shown.result["run_id"],
        "FINISHED",
        "digits",
    )
    metrics = {metric["key"]: metric for metric in data["metrics"]}
    assert {key.split("/")[0] for key in metrics} >= {"train", "eval", "perf"}
    for name, value in shown.result["metrics"].items():
        assert metrics[name]["value"] == value
    params = {param["key"]: param["value"] for param in data["params"]}
    assert (params["optimizer.lr"], params["plan.steps_per_epoch"]) == ("0.005", "11")
    tags = {tag["key"]: tag["value"] for tag in data["tags"]}
    assert tags["mlflow.source.name"] == "jobs.digits.job:Digits"
    assert tags["lockstep.weights_digest"] == shown.result["weights_digest"]
    inputs = found["inputs"]["dataset_inputs"]
    contexts = {one["dataset"]["name"]: one["tags"][0]["value"] for one in inputs}
    assert contexts == {"Digits.train_data": "train", "Digits.eval_data": "eval"}


def all_runs(shown: Shown) -> list[dict[str, Any]]:
    experiments = shown.pages.post("experiments/search", max_results=100)["experiments"]
    ids = [one["experiment_id"] for one in experiments]
    runs: list[dict[str, Any]] = shown.pages.post("runs/search", experiment_ids=ids, max_results=100)["runs"]
    return runs


@pytest.mark.scenario
def test_the_overview_begins_with_the_verdict_and_its_figures_are_there(shown: Shown) -> None:
    run_id = shown.result["run_id"]
    run = shown.pages.get("runs/get", run_id=run_id)["run"]
    (note,) = [tag["value"] for tag in run["data"]["tags"] if tag["key"] == "mlflow.note.content"]
    assert note.startswith("**FINISHED** at step 22 · ")
    assert "eval/accuracy" in note.splitlines()[0]
    images = re.findall(r"!\[\w+\]\(([^)]+)\)", note)
    assert len(images) == 3
    for image in images:
        assert shown.pages.raw(image).startswith(PNG)


@pytest.mark.scenario
def test_the_charts_have_every_step_with_the_ledgers_bits(shown: Shown) -> None:
    ledger = read_parquet(Path(shown.result["folder"], "ledger.parquet"))
    for key, column in (("train/loss", "loss"), ("train/grad_norm", "grad_norm")):
        answer = shown.pages.get(
            "metrics/get-history-bulk-interval",
            run_ids=shown.result["run_id"],
            metric_key=key,
            max_results=320,
        )
        points = [(point["step"], point["value"]) for point in answer["metrics"]]
        assert points == [(row.step, getattr(row, column)) for row in ledger]
    whole = shown.pages.get("metrics/get-history", run_id=shown.result["run_id"], metric_key="eval/loss")
    assert [point["step"] for point in whole["metrics"]] == [11, 22]


@pytest.mark.scenario
def test_the_files_that_the_docs_name_can_be_opened(shown: Shown) -> None:
    """Those of a run that finished, whole: the page gets the bytes that are in the folder."""
    run_id, folder = shown.result["run_id"], Path(shown.result["folder"])
    listed = set(shown.pages.artifacts(run_id))
    promised = {
        "spec.yaml", "fields.json", "environment.json", "seeds.json", "log.txt", "ledger.parquet", "evaluations.parquet",
        "summary.json", "figures/loss.png", "figures/gradient_norm.png", "figures/time.png",
        "weights/final.safetensors", "source/jobs/digits/job.py",
    }  # fmt: skip
    assert promised <= listed
    for path in promised:
        assert shown.pages.artifact(run_id, path) == (folder / path).read_bytes(), path


@pytest.mark.scenario
def test_the_models_page_has_the_final_model_and_the_checkpoints(shown: Shown) -> None:
    """READY, linked to their steps, with files; the final one says what it takes and gives."""
    (found,) = all_runs(shown)
    models = shown.pages.post(
        "logged-models/search", experiment_ids=[found["info"]["experiment_id"]], max_results=50
    )["models"]
    by_name = {model["info"]["name"]: model["info"] for model in models}
    assert {"final", "checkpoint-22"} <= by_name.keys()
    assert {info["status"] for info in by_name.values()} == {"LOGGED_MODEL_READY"}
    assert {info["source_run_id"] for info in by_name.values()} == {shown.result["run_id"]}
    steps = {one["model_id"]: int(one["step"]) for one in found["outputs"]["model_outputs"]}
    assert steps[by_name["final"]["model_id"]] == steps[by_name["checkpoint-22"]["model_id"]] == 22
    tags = {tag["key"]: tag["value"] for tag in by_name["checkpoint-22"]["tags"]}
    assert re.fullmatch("sha256:[0-9a-f]{64}", tags["lockstep.manifest"])
    for name, file in (("final", "MLmodel"), ("checkpoint-22", "manifest.json")):
        listed = shown.pages.get(f"logged-models/{by_name[name]['model_id']}/artifacts/directories")
        assert file in {one["path"] for one in listed["files"]}


# --- who is let in ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7", "::"])
@pytest.mark.parametrize("given", [{}, {"MLFLOW_AUTH_ADMIN_PASSWORD": "short"}])
def test_beyond_loopback_without_a_password_is_refused(host: str, given: dict[str, str]) -> None:
    with pytest.raises(SpecError, match=r"can be reached from other machines.*MLFLOW_AUTH_ADMIN_PASSWORD"):
        guarded(host, given)
    assert guarded("127.0.0.1", given) == {}


def test_the_command_refuses_with_the_reason() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    refused = subprocess.run(
        [sys.executable, "-m", "lockstep", "ui", "--host", "0.0.0.0"],
        cwd=ROOT, env={**environment, "PYTHONPATH": str(ROOT / "platform")},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert "can be reached from other machines" in line


@pytest.mark.exact  # a server more
def test_beyond_loopback_it_asks_for_the_password_and_answers_to_its_own_names_alone(tmp_path: Path) -> None:
    port = free_port()
    environment = {"MLFLOW_AUTH_ADMIN_PASSWORD": PASSWORD, "XDG_STATE_HOME": str(tmp_path)}
    with ui(
        "--uri", f"sqlite:///{tmp_path}/mlflow.db", "--host", "0.0.0.0", environment=environment, port=port
    ):
        uri = f"http://127.0.0.1:{port}"
        asked = "ajax-api/2.0/mlflow/experiments/get?experiment_id=0"

        def shown_as(user: str, password: str) -> dict[str, str]:
            return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}

        assert Pages(uri).status(asked) == 401
        assert Pages(uri, shown_as("admin", "password1234")).status(asked) == 401
        assert Pages(uri, shown_as("admin", PASSWORD)).status(asked) == 200
        assert Pages(uri, {**shown_as("admin", PASSWORD), "Host": "evil.example"}).status(asked) == 403
    for path in (tmp_path / "lockstep").iterdir():
        assert PASSWORD.encode() not in path.read_bytes()
        assert path.stat().st_mode & 0o077 == 0, path
