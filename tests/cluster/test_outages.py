"""G4 on Ray, through a tracking server over PostgreSQL with its files in S3: whatever is killed, each step is recorded once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from lockstep.record.ledger.rows import StepRow
from lockstep.record.ledger.tables import DETERMINISTIC, read_parquet
from tests.processes import named
from tests.unit.record.postgresql import postgresql
from tests.unit.record.s3 import s3
from tests.unit.record.server import Server

ROOT = Path(__file__).parents[2]
STEPS = 500
OUTAGE_S = 30.0
KEYS = {
    "train/loss": "loss",
    "train/lr": "lr",
    "train/grad_norm": "grad_norm",
    "train/clipped_norm": "clipped_norm",
}
"""Keys whose values are the same in every execution, and the ledger's column of each."""

pytestmark = [
    pytest.mark.exact,  # minutes
    pytest.mark.filterwarnings(
        "ignore"
    ),  # of MLflow and what it imports; the runs are processes of their own
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with (
        postgresql() as database,
        s3() as (bucket, environment),
        Server(
            tmp_path_factory.mktemp("server"), backend=database, artifacts=bucket, environment=environment
        ) as server,
    ):
        yield server


class Run(NamedTuple):
    """A command that trains, in a folder of its own."""

    process: subprocess.Popen[str]
    folder: Path

    def tree(self) -> list[psutil.Process]:
        try:
            own = psutil.Process(self.process.pid)
            return [*own.children(recursive=True), own]
        except psutil.NoSuchProcess:
            return []

    def workers(self) -> list[psutil.Process]:
        return named("RayTrainWorker", among=self.tree())

    def wait_for(self, happened: Callable[[], object]) -> None:
        until = time.monotonic() + 300
        while not happened():
            assert time.monotonic() < until
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL to the driver and to all that it started."""
        tree = self.tree()
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.communicate()
        psutil.wait_procs(tree, timeout=30)

    def result(self) -> dict[str, Any]:
        out, err = self.process.communicate(timeout=400)
        assert self.process.returncode == 0, err
        found: dict[str, Any] = json.loads(out)
        return found


def start(server: Server, folder: Path, *words: str) -> Run:
    folder.mkdir(exist_ok=True)
    variables = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": f"{ROOT / 'platform'}:{ROOT}"}
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", *words, "--address", "local", "--uri", server.uri, "--json"],
        cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    return Run(process, folder)


def training(server: Server, folder: Path) -> Run:
    spec = {
        "job": {"use": "tests.cluster.broken_jobs:SlowDigits", "params": {"width": 8, "pause_s": 0.04}},
        "length": {"steps": STEPS},
        "batch": {"global": 64, "micro": 16},
        "clip_norm": 1.0,
        "evaluate": {"every": {"steps": 250}},
        "workers": {"min": 2, "max": 2},
        "checkpoint": {"every": {"steps": 50}},
        "record": {"experiment": "outages", "checkpoints": "artifact"},
    }
    folder.mkdir()
    (folder / "spec.yaml").write_text(json.dumps(spec))
    return start(server, folder, "train", "spec.yaml")


def saved(folder: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in folder.glob("runs/*/step-*/manifest.json"))


def client(server: Server) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=server.uri)


def copies(server: Server, run_id: str) -> list[str]:
    """The names of the checkpoints that the server has whole."""
    experiment = client(server).get_run(run_id).info.experiment_id
    found = client(server).search_logged_models([experiment], filter_string=f"source_run_id = '{run_id}'")
    return [model.name for model in found if model.status == "READY"]


def deterministic(ledger: list[StepRow]) -> list[tuple[str, ...]]:
    return [tuple(repr(getattr(row, name)) for name in DETERMINISTIC) for row in ledger]


def check(server: Server, result: dict[str, Any]) -> list[StepRow]:
    """Nothing is lost, nothing doubled, and the values have the ledger's bits; the ledger."""
    ledger = read_parquet(Path(result["folder"], "ledger.parquet"))
    assert [row.step for row in ledger] == list(range(1, STEPS + 1))
    run = client(server).get_run(result["run_id"])
    assert (result["status"], run.info.status, result["warnings"]) == ("FINISHED", "FINISHED", [])
    assert "lockstep.violation" not in run.data.tags
    for key in run.data.metrics:
        history = [(m.step, m.value) for m in client(server).get_metric_history(result["run_id"], key)]
        steps = [step for step, _ in history]
        assert steps == sorted(set(steps)), key
        if key in KEYS:
            assert history == [(row.step, getattr(row, KEYS[key])) for row in ledger], key
        if key.startswith("perf/step_s"):
            assert steps == list(range(1, STEPS + 1))
        if key == "eval/loss":
            assert steps == [250, 500]
    assert KEYS.keys() | {"eval/loss", "perf/step_s"} <= run.data.metrics.keys()
    return ledger


@pytest.fixture(scope="module")
def undisturbed(server: Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[StepRow]]:
    """Weights and ledger of a run that nothing happened to."""
    result = training(server, tmp_path_factory.mktemp("undisturbed") / "run").result()
    return result["weights_digest"], check(server, result)


@pytest.mark.parametrize(
    "killed",
    [("server",), ("worker",), ("driver",), ("server", "worker", "driver", "disk")],
    ids=lambda killed: "-".join(killed),
)
def test_each_step_is_recorded_once_whatever_is_killed(
    server: Server, undisturbed: tuple[str, list[StepRow]], tmp_path: Path, killed: tuple[str, ...]
) -> None:
    """The server for half a minute, a worker, the driver with all that it started, and with it the disk that it wrote to."""
    run = training(server, tmp_path / "run")
    run.wait_for(lambda: saved(run.folder))
    if "server" in killed:
        server.kill()
        back_at = time.monotonic() + OUTAGE_S
    if "worker" in killed:
        run.workers()[-1].kill()
    if "server" in killed:
        time.sleep(max(0.0, back_at - time.monotonic()))
        server.start()
    if "driver" not in killed:
        result = run.result()
    else:
        (folder,) = run.folder.glob("runs/*/owner.json")
        run_id, at = folder.parent.name, saved(run.folder)[-1]
        run.wait_for(lambda: saved(run.folder)[-1] > at and copies(server, run_id))
        run.kill()
        if "disk" in killed:
            shutil.rmtree(run.folder)
        result = start(server, run.folder, "resume", run_id).result()
        assert result["run_id"] == run_id
    assert result["attempts"] == 1 + ("worker" in killed) + ("driver" in killed)
    ledger = check(server, result)
    assert deterministic(ledger) == deterministic(undisturbed[1])
    assert result["weights_digest"] == undisturbed[0]
