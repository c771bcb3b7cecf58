"""Runs that a queue suspends, preempts, requeues and stops, with the real command and the files in `cluster/`: the bits and the one record of a run left alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep import Result, train
from lockstep.clusters.authentication import LOOPBACK_ONLY
from lockstep.exit_codes import ExitCode
from lockstep.record.ledger.tables import DETERMINISTIC, read_parquet
from tests.cluster.queue_systems import Pod, Processes, SlurmJob, action, after_failure
from tests.cluster.test_local_cluster import Nodes, finished
from tests.processes import named
from tests.unit.clusters.schemas import CLUSTER, ROOT, documents

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # of MLflow and what it imports; the runs are processes of their own

SPEC = "jobs/digits/train.yaml"
JOB = [
    "job.use=tests.cluster.broken_jobs:SlowDigits", "batch={global: 64, micro: 32}", "rehearsal=off", "record.digest_every=1",
]  # fmt: skip
STEPS = 30
SLOW = [
    *JOB, "job.params={width: 4, pause_s: 0.2}", f"length.steps={STEPS}", "checkpoint.every.steps=4",
    "workers.min=2", "workers.max=2", "workers.cpus_each=0.5", "faults.longest_silence_s=6",
]  # fmt: skip
PAUSE_S = 60.0
"""More than twenty times the longest silence of these runs, and than the limit above."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("alone")
    words = [
        *JOB,
        "job.params={width: 4}",
        f"length.steps={STEPS}",
        f"checkpoint.storage={folder}",
        "record.uri=off",
    ]
    return train(ROOT / SPEC, words, local=True)


@pytest.fixture
def started() -> Iterator[list[Processes]]:
    every: list[Processes] = []
    yield every
    for processes in every:
        processes.kill()


def saved(folder: Path) -> list[Path]:
    return list(folder.glob("runs/*/step-*/manifest.json"))


def client(folder: Path) -> Any:
    """Of the runs' store."""
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{folder}/mlflow.db")


def recorded(folder: Path) -> Any:
    """The only run of the store."""
    store = client(folder)
    (run,) = store.search_runs([each.experiment_id for each in store.search_experiments()])
    return run


def status(folder: Path) -> str:
    return str(recorded(folder).info.status)


def run_folder(folder: Path) -> Path:
    return folder / "runs" / str(recorded(folder).info.run_id)


def attempts(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run_folder(folder) / "attempts.json").read_text())
    return found


def columns(folder: Path) -> list[tuple[Any, ...]]:
    rows = read_parquet(folder / "ledger.parquet")
    return [tuple(getattr(row, name) for name in DETERMINISTIC) for row in rows]


def digest(folder: Path) -> str:
    """Of the weights, as the command has said it."""
    return re.findall(r"weights_digest\s+([0-9a-f]{64})", (folder / "output.txt").read_text())[-1]


def assert_same(folder: Path, undisturbed: Result) -> None:
    """Bits, rows, and one run in MLflow, each step of it once."""
    assert digest(folder) == undisturbed.weights_digest
    assert columns(run_folder(folder)) == columns(Path(undisturbed.folder))
    run = recorded(folder)
    assert run.info.status == "FINISHED"
    history = client(folder).get_metric_history(run.info.run_id, "train/loss")
    assert sorted(point.step for point in history) == list(range(1, STEPS + 1))


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("manifest", "grace"),
    [
        pytest.param("kueue/job.yaml", "enough", marks=pytest.mark.scenario),
        pytest.param("kueue/job.yaml", "none", marks=pytest.mark.scenario),
        pytest.param("volcano/job.yaml", "enough", marks=pytest.mark.exact),
    ],
)
def test_a_suspended_run_saves_and_goes_on_when_it_is_admitted(
    tmp_path: Path, undisturbed: Result, started: list[Processes], manifest: str, grace: str
) -> None:
    """Exit code 143 and a checkpoint of the step under way; without a grace the checkpoint before. Neither ends the Job."""
    pod = Pod(manifest, tmp_path, SLOW)
    started.append(pod.create())
    pod.processes.wait_for(lambda: len(saved(tmp_path)) > 1)
    code = pod.processes.end(pod.grace_s if grace == "enough" else 0.0)
    in_time = grace == "enough"
    assert code == (ExitCode.TERMINATED if in_time else 137), pod.processes.output.read_text()
    assert status(tmp_path) == ("KILLED" if in_time else "RUNNING")
    if manifest.startswith("kueue"):
        assert after_failure(pod.job, code, evicted=True) == "Ignore"
        assert after_failure(pod.job, code) == "Count"
    else:
        assert action(pod.job, "PodEvicted") == action(pod.job, "PodFailed", code) == "RestartJob"

    started.append(pod.create())
    assert pod.processes.first.wait(300) == ExitCode.DONE, pod.processes.output.read_text()
    assert len(attempts(tmp_path)) == 2
    if in_time:
        assert attempts(tmp_path)[1]["from_step"] == attempts(tmp_path)[0]["last_step"]
    assert_same(tmp_path, undisturbed)


@pytest.mark.exact  # a minute and more
def test_a_slurm_job_requeues_itself_near_the_end_of_its_time(
    tmp_path: Path, undisturbed: Result, started: list[Processes]
) -> None:
    """And not where a person cancels it."""
    store, gate = f"record.uri=sqlite:///{tmp_path}/mlflow.db", tmp_path / "gate"
    gate.touch()  # steps of a second, so that neither start ends before it is stopped
    slow = [*SLOW, f"job.params={{width: 4, pause_s: 1, gate: {gate}}}"]
    job = SlurmJob(CLUSTER / "slurm" / "train.sbatch", tmp_path, [*slow, store])
    started.append(job.start())
    job.processes.wait_for(lambda: saved(tmp_path))
    job.near_the_end_of_its_time()
    job.processes.wait_for(job.asked.exists)
    assert job.asked.read_text() == "requeue 17\n"
    assert status(tmp_path) == "KILLED"
    job.requeue()

    started.append(job.start())
    newest = max(saved(tmp_path))  # not their number: older ones are deleted
    job.processes.wait_for(lambda: max(saved(tmp_path)) > newest)
    assert job.cancel(120.0) == 128 + 15
    assert status(tmp_path) == "KILLED"
    assert job.asked.read_text() == "requeue 17\n"
    gate.unlink()

    started.append(job.start())
    assert job.processes.first.wait(300) == ExitCode.DONE, job.processes.output.read_text()
    starts = re.findall(r"digits-1: start (\d) of job 17", job.processes.output.read_text())
    assert starts == ["1", "2", "3"]
    assert_same(tmp_path, undisturbed)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "stopped",
    [
        pytest.param("everything", marks=pytest.mark.scenario),
        pytest.param("one worker", marks=pytest.mark.scenario),
        pytest.param("the driver", marks=pytest.mark.exact),
    ],
)
def test_a_run_that_is_stopped_as_a_whole_does_not_hang_and_a_worker_that_is_does(
    tmp_path: Path, undisturbed: Result, started: list[Processes], stopped: str
) -> None:
    """For the same time, by SIGTSTP and SIGSTOP as `scontrol suspend`; then SIGCONT comes, for the worker too late."""
    pod = Pod("kueue/job.yaml", tmp_path, SLOW)
    started.append(pod.create())
    pod.processes.wait_for(lambda: saved(tmp_path))
    everyone = pod.processes.all()
    workers: list[psutil.Process] = named("ray::RayTrainWorker", among=everyone)
    assert len(workers) == 2
    driver = [psutil.Process(pod.processes.first.pid)]
    groups = {"everything": everyone, "one worker": workers[-1:], "the driver": driver}
    pod.processes.stop_and_continue(PAUSE_S, groups[stopped])
    assert pod.processes.first.wait(300) == ExitCode.DONE, pod.processes.output.read_text()
    why = [attempt["why"] for attempt in attempts(tmp_path)]
    if stopped != "one worker":
        assert why == ["finished"]
        assert "no progress" not in pod.processes.output.read_text()
    else:
        assert why[0].startswith("no rank made progress for ")
        assert why[1:] == ["finished"]
    assert_same(tmp_path, undisturbed)


@pytest.mark.exact  # a minute and more
def test_a_suspended_rayjob_has_its_run_save_and_a_new_cluster_goes_on(
    tmp_path: Path, undisturbed: Result
) -> None:
    """What KubeRay does: the hook of the head's pod, all pods go, and another cluster runs the same entrypoint."""
    nodes, gate = Nodes(tmp_path / "state"), tmp_path / "gate"
    gate.touch()  # the first cluster's steps take seconds: the hook is a process that has to start before the last one
    words = [
        "submit", SPEC, "--run", "digits-1", *SLOW, f"job.params={{width: 4, pause_s: 5, gate: {gate}}}",
        "checkpoint.every.steps=1", "faults.longest_silence_s=60", f"checkpoint.storage={tmp_path}/runs", f"record.uri=sqlite:///{tmp_path}/mlflow.db",
    ]  # fmt: skip
    (document,) = documents(CLUSTER / "kueue" / "rayjob.yaml")
    head = document["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    hook = head["lifecycle"]["preStop"]["exec"]["command"]
    ended: list[int] = []
    try:
        for suspended in (True, False):
            up = nodes.call("cluster", "up", "--nodes", "2", "--cpus", "1", "--port", "0")
            assert up.returncode == 0, up.stderr
            job = nodes.start(*words)
            if suspended:
                until = time.monotonic() + 300
                while not saved(tmp_path):
                    assert time.monotonic() < until and job.poll() is None, job.communicate()
                    time.sleep(0.1)
                inside = {"RAY_ADDRESS": nodes.cluster.address, **nodes.cluster.access(), **LOOPBACK_ONLY}
                left = subprocess.run(
                    [sys.executable, "-m", *hook], cwd=ROOT, env={**nodes.environment, **inside},
                    capture_output=True, text=True, timeout=120, check=False,
                )  # fmt: skip
                assert left.returncode == 0, left.stderr
                assert "is told to end: its pod ends" in left.stderr
            done = finished(job)
            ended.append(done.returncode)
            if suspended:
                assert status(tmp_path) == "KILLED", done.stderr
                gate.unlink()
            nodes.call("cluster", "down")
    finally:
        nodes.call("cluster", "down")
    assert ended == [ExitCode.TERMINATED, ExitCode.DONE], done.stderr
    (tmp_path / "output.txt").write_text(done.stdout + done.stderr)
    assert_same(tmp_path, undisturbed)
