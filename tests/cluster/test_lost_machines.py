"""Machines that are lost: the head's, with its state in Redis; two at once; and those beyond a cut of the network."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep import train
from tests.cluster.machines import ROOT, running
from tests.network import can_simulate

pytestmark = [pytest.mark.usefixtures("simulated")]

SPEC = [
    "jobs/digits/train.yaml", "job.use=tests.cluster.broken_jobs:SlowDigits", "record.uri=off",
    "workers.min=1", "workers.max=3", "evaluate.every.steps=100", "checkpoint.every.steps=20",
]  # fmt: skip


@pytest.fixture(scope="module")
def simulated() -> None:
    reason = can_simulate(slow=True)
    if reason is not None:
        pytest.skip(reason)


def words(storage: Path, steps: int, pause_s: float) -> list[str]:
    return [
        *SPEC, f"length={{steps: {steps}}}", f"job.params={{width: 8, pause_s: {pause_s}}}", f"checkpoint.storage={storage}"
    ]  # fmt: skip


def wait_until(
    run: subprocess.Popen[str], log: Path, reached: Callable[[], Any], timeout_s: float = 180.0
) -> None:
    until = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < until, log.read_text()[-4000:]
        assert run.poll() is None, log.read_text()[-4000:]
        time.sleep(0.1)


def saved(storage: Path) -> int:
    """The newest step with a checkpoint."""
    return max((int(path.parent.name[5:]) for path in storage.glob("*/step-*/manifest.json")), default=0)


def finished(run: subprocess.Popen[str], log: Path) -> dict[str, Any]:
    assert run.wait(400) == 0, log.read_text()[-4000:]
    told: dict[str, Any] = json.loads(log.with_suffix(".json").read_text())
    return told


def accounts(told: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(Path(told["folder"], "attempts.json").read_text())
    return found


def alone(folder: Path, steps: int) -> str:
    spec = words(folder / "alone", steps, 0.0)
    return train(ROOT / spec[0], spec[1:], local=True).weights_digest


@pytest.mark.scenario
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="wants redis-server")
def test_a_run_goes_on_through_the_loss_of_a_head_whose_state_is_in_redis(tmp_path: Path) -> None:
    """All of the head's processes are killed, and the head is started again; the driver is on another machine. No worker is lost by it."""
    log = tmp_path / "log"
    with running(3, redis=True) as machines:
        run = machines.lockstep(1, log, "train", *words(tmp_path / "runs", 400, 0.05))
        wait_until(run, log, lambda: saved(tmp_path / "runs") >= 20)
        before = [process.pid for machine in (1, 2) for process in machines.workers(machine)]
        machines.kill_node(0)
        time.sleep(5)
        machines.start_head()
        mark = saved(tmp_path / "runs")
        wait_until(run, log, lambda: saved(tmp_path / "runs") > mark)
        after = [process.pid for machine in (1, 2) for process in machines.workers(machine)]
        told = finished(run, log)
    assert after == before
    assert len(before) == 2
    assert [account["why"] for account in accounts(told)] == ["finished"]
    assert told["weights_digest"] == alone(tmp_path, 400)


@pytest.mark.scenario
def test_two_machines_that_are_lost_at_once_are_outlived(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running(4) as machines:
        run = machines.lockstep(0, log, "train", *words(tmp_path / "runs", 400, 0.03))
        wait_until(run, log, lambda: saved(tmp_path / "runs") >= 20)
        machines.kill_node(2)
        machines.kill_node(3)
        told = finished(run, log)
    found = accounts(told)
    assert [account["workers"] for account in found][-1] == 1
    assert found[0]["workers"] == 3
    assert all(account["in_memory"] for account in found[1:]), found
    assert told["weights_digest"] == alone(tmp_path, 400)


@pytest.mark.exact  # minutes: a node that falls silent is noticed late
def test_the_smaller_side_of_a_cut_ends_by_itself_and_the_larger_goes_on(tmp_path: Path) -> None:
    """One of three workers is cut off for good. It writes nothing from then on, and its processes end; the others train to the end."""
    log = tmp_path / "log"
    with running(4) as machines:
        run = machines.lockstep(0, log, "train", *words(tmp_path / "runs", 1500, 0.03))
        wait_until(run, log, lambda: saved(tmp_path / "runs") >= 20)
        (cut_off,) = machines.workers(3)
        machines.link(3, "down")
        _, alive = psutil.wait_procs([cut_off], timeout=150)
        assert not alive, "the worker that was cut off lives on"
        told = finished(run, log)
    found = accounts(told)
    assert (found[0]["workers"], found[-1]["workers"]) == (3, 2)
    assert told["weights_digest"] == alone(tmp_path, 1500)


@pytest.mark.exact  # minutes: a node that falls silent is noticed late
def test_a_worker_of_a_trial_beyond_a_cut_ends_by_itself_and_the_others_go_on(tmp_path: Path) -> None:
    """A node that does not end without its head: so nothing but the worker's own rule ends it."""
    log, lr = tmp_path / "log", 0.01
    document = {
        "spec": {
            "job": {"use": "tests.cluster.broken_jobs:SlowDigits", "params": {"width": 8, "pause_s": 0.03}},
            "length": {"steps": 400},
            "batch": {"global": 192, "micro": 32},
            "workers": {"min": 3},
            "checkpoint": {"storage": f"{tmp_path}/runs", "every": {"steps": 20}},
            "record": {"uri": "off"},
        },
        "space": {"optimizer.lr": {"choice": [lr]}},
        "trials": 1,
        "metric": "eval/loss",
        "mode": "min",
    }
    (tmp_path / "sweep.yaml").write_text(json.dumps(document))
    with running(4, RAY_gcs_rpc_server_reconnect_timeout_s="600") as machines:
        run = machines.lockstep(0, log, "sweep", f"{tmp_path}/sweep.yaml")
        wait_until(run, log, lambda: saved(tmp_path / "runs") >= 20)
        machine = next(m for m in (3, 2, 1) if machines.named(m, "ray::Peer"))
        (cut_off,) = machines.named(machine, "ray::Peer")
        machines.link(machine, "down")
        _, alive = psutil.wait_procs([cut_off], timeout=180)
        assert not alive, "the worker that was cut off lives on"
        (trial,) = finished(run, log)["trials"]
    whole = document["spec"] | {"optimizer": {"lr": lr}, "workers": {"min": 1}}  # type: ignore[operator]
    whole["checkpoint"] = {"storage": f"{tmp_path}/alone"}
    whole["job"]["params"]["pause_s"] = 0.0
    assert (trial["status"], trial["restarts"]) == ("finished", 0)
    assert trial["weights_digest"] == train(whole, local=True).weights_digest


@pytest.mark.scenario
def test_a_run_whose_drivers_machine_is_lost_is_resumed_on_another_with_the_same_bits(tmp_path: Path) -> None:
    """The driver, its guardian, its recorder and a worker are gone at once. The run was not submitted: a person resumes it."""
    log, again = tmp_path / "log", tmp_path / "again"
    with running(3) as machines:
        run = machines.lockstep(1, log, "train", *words(tmp_path / "runs", 200, 0.05))
        wait_until(run, log, lambda: saved(tmp_path / "runs") >= 20)
        machines.power_off(1)
        assert run.wait(30) != 0
        (folder,) = [path.parent for path in tmp_path.glob("runs/*/owner.json")]
        assert json.loads((folder / "run.json").read_text())["status"] == "RUNNING"
        mark = saved(tmp_path / "runs")
        resumed = machines.lockstep(
            2,
            again,
            "resume",
            folder.name,
            "--uri",
            "off",
            "workers.max=1",
            f"checkpoint.storage={tmp_path}/runs",
        )
        told = finished(resumed, again)
    assert (told["run_id"], told["status"], told["attempts"]) == (folder.name, "FINISHED", 2)
    assert mark >= 20
    assert told["lost_worker_h"] > 0
    assert told["weights_digest"] == alone(tmp_path, 200)
