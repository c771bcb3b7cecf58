"""The command with a Ray cluster of its own, as the README starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from lockstep.record.ledger.tables import DETERMINISTIC, read_parquet
from lockstep.training.worker_environment import WORKER_ENVIRONMENT
from tests.cluster.commands import result_of
from tests.cluster.test_connecting import Listener
from tests.processes import named, started_for_exact_runs

ROOT = Path(__file__).parents[2]


@pytest.fixture
def silent() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


@pytest.fixture
def strangers(silent: Listener) -> Iterator[Path]:
    """A folder for Ray, in which `ray start` has noted a cluster that does not answer."""
    # Not under pytest's own folder: the paths of Ray's sockets must stay short.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        Path(folder, "ray").mkdir()
        Path(folder, "ray", "ray_current_cluster").write_text(silent.address)
        yield Path(folder)


@pytest.mark.scenario
def test_sigterm_to_all_processes_of_a_command_ends_the_run_as_killed(
    tmp_path: Path, strangers: Path, silent: Listener, request: pytest.FixtureRequest
) -> None:
    """Exit code 143, a checkpoint, the run marked KILLED, and one JSON object that says so; a stranger's cluster is left alone.

    The signal comes to the cluster's processes too, and first, as where Slurm or systemd ends a job; at the end of a job's time Slurm sends it twice. All its processes on Ray are forked from a server that the process ahead has forked. Both end with the command, and its processes are as urgent as the command.
    The memory of a worker is set as its process starts, or not at all.
    """
    words = [
        "jobs/digits/train.yaml",
        "job.use=tests.untraced_jobs:UntracedDigits",
        "--json",
        "--notify",
        f"echo $LOCKSTEP_EVENT $LOCKSTEP_STATUS >> '{tmp_path}/told'",
        "length.epochs=100000",
        "record.uri=off",
    ]
    left_out = {*WORKER_ENVIRONMENT, "RAY_ADDRESS", "RAY_worker_niceness"}
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "train", *words, f"checkpoint.storage={tmp_path}"],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT / "platform"), "RAY_TMPDIR": str(strangers)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    request.addfinalizer(process.kill)  # it would train for days
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("*/environment.json")):
        assert time.monotonic() < deadline, "the run did not start"
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)
    (ahead,) = named("serve_ahead", among=psutil.Process(process.pid).children())
    (server,) = ahead.children()
    forked = [" ".join(child.cmdline()) for child in server.children()]
    for name in ("ray::Mailbox", "ray::RecorderActor", "ray::RayTrainWorker"):
        assert any(words.startswith(name) for words in forked), forked
    assert {child.nice() for child in server.children()} == {psutil.Process().nice()}
    assert started_for_exact_runs(server)
    everyone = psutil.Process(process.pid).children(recursive=True)
    assert named("raylet/raylet", among=everyone)
    assert named("gcs_server", among=everyone)
    for _ in range(2):
        for one in [*everyone, process]:
            with suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 143, err
    assert not ahead.is_running()
    server.wait(30)
    (line,) = out.splitlines()
    assert json.loads(line)["status"] == "KILLED"
    (record,) = tmp_path.glob("*/run.json")
    assert json.loads(record.read_text())["status"] == "KILLED"
    assert list(tmp_path.glob("*/step-*/manifest.json"))
    assert [one for one in psutil.wait_procs(everyone, timeout=30)[1] if one.is_running()] == []
    assert (tmp_path / "told").read_text() == "start RUNNING\nend KILLED\n"
    assert not silent.asked.is_set()


def test_wrong_params_are_told_before_a_run_exists(tmp_path: Path) -> None:
    """Ray is not started: no run, no folder, and no process is left."""
    words = ["jobs/digits/train.yaml", "--address", "local", "job.params.widht=8", "record.uri=off"]
    kept = {name: value for name, value in os.environ.items() if name not in WORKER_ENVIRONMENT}
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "train", *words, f"checkpoint.storage={tmp_path}/runs"],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT / "platform"), "OF_THIS_TEST": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, ""), err
    assert err.splitlines()[-1] == "lockstep: job.params.widht: unknown key; did you mean 'width'?"
    assert list(tmp_path.iterdir()) == []
    deadline = time.monotonic() + 30
    while left := _marked(str(tmp_path)):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def _marked(mark: str) -> list[psutil.Process]:
    """Every process that inherited the environment of the command with this mark."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("OF_THIS_TEST") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def call(folder: Path, *words: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if name not in WORKER_ENVIRONMENT}
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", *words, "--uri", f"sqlite:///{folder}/mlflow.db", "--json"],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT / "platform")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("sharding", "other"),
    [  # a minute each; tests/chaos kills a driver in the default run
        pytest.param("none", "none", marks=pytest.mark.exact),
        pytest.param("full", "optimizer", marks=pytest.mark.scenario),
        pytest.param("optimizer", "full", marks=pytest.mark.exact),
        pytest.param("none", "full", marks=pytest.mark.exact),
    ],
)
def test_a_run_whose_whole_tree_was_killed_goes_on_with_other_workers(
    tmp_path: Path, sharding: str, other: str
) -> None:
    """SIGKILL of the driver, of Ray and of two workers; then three workers take the run up, in the same record, and share out something else."""
    spec = [
        "jobs/digits/train.yaml", "job.use=tests.untraced_jobs:UntracedDigits", "length.epochs=12", "job.params.width=8",
        "checkpoint.every.steps=5",
    ]  # fmt: skip
    on_ray = ["--address", "local", "workers={min: 1, max: 3, cpus_each: 0.5}"]
    process = call(
        tmp_path, "train", *spec, "--address", "local", "workers.min=2", f"sharding={sharding}",
        f"checkpoint.storage={tmp_path}/runs",
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("runs/*/step-*/manifest.json")):
        assert time.monotonic() < deadline, "no checkpoint appeared"
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    tree = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in tree:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.communicate()
    psutil.wait_procs(tree, timeout=30)
    (owner,) = tmp_path.glob("runs/*/owner.json")
    run_id = owner.parent.name

    resumed = result_of(call(tmp_path, "resume", run_id, *on_ray, f"sharding={other}"))
    whole = result_of(call(tmp_path, "train", *spec, "--local", f"checkpoint.storage={tmp_path}/whole"))
    assert (resumed["run_id"], resumed["attempts"], resumed["workers"]) == (run_id, 2, 3)
    assert resumed["lost_worker_h"] > whole["lost_worker_h"] == 0
    assert 0 < resumed["effective"] < whole["effective"] < 1
    assert resumed["weights_digest"] == whole["weights_digest"]
    assert resumed["metrics"] == whole["metrics"]
    ledgers = [
        [tuple(getattr(row, name) for name in DETERMINISTIC) for row in read_parquet(path)]
        for path in (
            owner.with_name("ledger.parquet"),
            tmp_path / "whole" / whole["run_id"] / "ledger.parquet",
        )
    ]
    assert ledgers[0] == ledgers[1]
    assert len(ledgers[0]) == whole["step"]
    if "full" in (
        sharding,
        other,
    ):  # one process, which has no shards, takes the last steps again from a checkpoint
        words = ["--local", "--workers", "1", "--steps", "3", "--storage", f"{tmp_path}/runs"]
        verified = result_of(call(tmp_path, "verify", run_id, *words))
        assert (verified["same"], verified["first_difference"]) == (True, None)
        assert verified["steps"] >= 3


@pytest.mark.exact  # a minute; the kinds of failure have tests of their own
def test_a_worker_without_memory_is_told_as_such(tmp_path: Path) -> None:
    """Ray's own memory monitor ends the worker; the one line says that, and what would help."""
    memory = psutil.virtual_memory()
    if memory.available < 9_000_000_000:
        pytest.skip("the job takes 6 GB before it is ended, and less than 9 are free")
    bound = (memory.total - memory.available + 6_000_000_000) / memory.total
    done = subprocess.run(
        [
            sys.executable, "-m", "lockstep", "train", "jobs/digits/train.yaml", "--address", "local", "--json", "record.uri=off",
            "job.use=tests.cluster.broken_jobs:Greedy", "job.params={width: 8}", "length.epochs=1000", "workers.min=1", "workers.max=1",
            "faults.max_worker_failures=0", f"checkpoint.storage={tmp_path}",
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "platform"),
            "RAY_memory_usage_threshold": f"{bound:.3f}",
            "RAY_memory_monitor_refresh_ms": "100",
        },
        capture_output=True, text=True, timeout=480, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    error = json.loads(done.stdout)["error"]
    assert error.startswith("rank 0 of 1 was killed: its node ran out of memory; lower data.loader_processes")
    (account,) = json.loads(next(tmp_path.glob("*/attempts.json")).read_text())
    assert "ran out of memory" in account["why"]
