"""A folder that is another one on another node is found out before training, with the field to change; and a node is lost."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep import train
from lockstep.attempts import problems
from lockstep.driver.signals import StopSignal
from tests.raised import raises

ROOT = Path(__file__).parents[2]

SCRIPT = """
import json, logging, os, sys, tempfile, threading, time
from pathlib import Path
from lockstep.attempts.preloaded_modules import AHEAD
from lockstep.clusters.connection import on_this_machine
from lockstep.clusters.ray_settings import RAY_SETTINGS
os.environ |= RAY_SETTINGS | {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
import ray
from ray.cluster_utils import Cluster
from lockstep import train
from lockstep.attempts.node_checks import seen_from_nodes
from lockstep.errors import LockstepError
from lockstep.spec.loading import load_spec

here, there, *runs = sys.argv[1:]

def kill(cluster, node, storage, go_on):
    while not list(Path(storage).glob("*/step-*/manifest.json")):
        time.sleep(0.05)
    cluster.remove_node(node, allow_graceful=False)
    while all(node["Alive"] for node in ray.nodes()):
        time.sleep(0.1)
    time.sleep(1.0)
    Path(go_on).touch()

with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as own:
    os.chdir(here)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "temp_dir": own, "include_dashboard": False})
    os.chdir(there)
    node = cluster.add_node(num_cpus=1, node_ip_address="127.0.0.2")
    os.chdir(here)
    ray.init(
        address=cluster.address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=on_this_machine(AHEAD)
    )
    told = []
    for spec in map(json.loads, runs):
        if spec.pop("only checked", False):
            told.append({"findings": [[f.name, f.result, f.evidence] for f in seen_from_nodes(load_spec(spec), None)]})
            continue
        if spec.pop("node is killed", False):
            places = spec["checkpoint"]["storage"], spec["job"]["params"]["until"]
            threading.Thread(target=kill, args=(cluster, node, *places), daemon=True).start()
        try:
            result = train(spec)
            told.append({"status": result.status, "workers": result.workers, "attempts": result.attempts, "weights_digest": result.weights_digest})
        except LockstepError as error:
            told.append({"error": str(error)})
    lost = [node for node in ray.nodes() if not node["Alive"]]
    tried = [group["stats"]["scheduling_attempt"] for group in ray.util.placement_group_table().values()]
    print(json.dumps({"runs": told, "lost": len(lost), "tried": tried}))
    ray.shutdown()
    cluster.shutdown()
"""


def spec(storage: str, **more: Any) -> dict[str, Any]:
    return {
        "job": {"use": "tests.untraced_jobs:UntracedDigits", "params": {"width": 4}},
        "length": {"steps": 2},
        "workers": {"min": 2, "max": 2},
        "evaluate": {"every": {"steps": 2}},
        "checkpoint": {"storage": storage},
        "record": {"uri": "off"},
        **more,
    }


def trained(folder: Path, *specs: dict[str, Any]) -> dict[str, Any]:
    """What became of runs on two nodes with working directories of their own, each with a worker; how many nodes were lost; how often each group was placed."""
    for name in ("here", "there"):
        (folder / name).mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder / "here"), str(folder / "there"), *map(json.dumps, specs)],
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONHASHSEED": "0", "PYTHONPATH": f"{ROOT / 'platform'}:{ROOT}"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [
        line for line in done.stdout.splitlines() if line.startswith('{"runs"')
    ]  # Ray tells of lost nodes too
    told: dict[str, Any] = json.loads(line)
    return told


@pytest.mark.exact  # two nodes; below one is asked as if it were another, and test_supervisor.py loses a worker
def test_a_folder_that_the_other_node_does_not_see_is_refused_and_a_lost_node_costs_no_bit(
    tmp_path: Path,
) -> None:
    """`/proc/self/cwd` leads each process to its own working directory, and a raylet hands on its own.

    Then a run whose folder both see, of which a node is killed: G1 and G4.
    """
    go_on = str(tmp_path / "go on")
    held = {
        "job": {"use": "tests.cluster.broken_jobs:Held", "params": {"width": 4, "until": go_on}},
        "length": {"steps": 40},
        "batch": {"global": 64, "micro": 32},
        "workers": {"min": 1, "max": 2},
        "evaluate": {"every": {"steps": 20}},
    }
    shared = spec(str(tmp_path / "runs"), **held)
    checkpoint = {**shared["checkpoint"], "every": {"steps": 2}}
    told = trained(
        tmp_path,
        spec("/proc/self/cwd/runs"),
        {**shared, "checkpoint": checkpoint, "node is killed": True},
    )
    refused, lost = told["runs"]
    assert (
        "'/proc/self/cwd/runs' on this node is another folder on 127.0.0.2, where workers run"
        in refused["error"]
    )
    assert "set record.folder to a folder that all nodes share" in refused["error"]
    assert not list(tmp_path.glob("*/runs/*"))
    whole = train(spec(str(tmp_path / "whole"), **held), local=True)
    assert (lost["status"], lost["workers"], lost["attempts"]) == ("FINISHED", 1, 2)
    assert lost["weights_digest"] == whole.weights_digest
    assert told["lost"] == 1
    assert max(told["tried"]) < 10, "a place that cannot be filled is tried without a pause"


@pytest.mark.exact  # the control of the one above
def test_a_folder_that_both_nodes_see_is_taken(tmp_path: Path) -> None:
    """A check of the run says so of either before: it asks both nodes."""
    seen = {**spec(str(tmp_path / "runs")), "only checked": True}
    unseen = {**spec("/proc/self/cwd/runs"), "only checked": True}
    sound, faulty, told = trained(tmp_path, seen, unseen, spec(str(tmp_path / "runs")))["runs"]
    assert [(name, result) for name, result, _ in sound["findings"]] == [("nodes", "pass")]
    assert "2 nodes" in sound["findings"][0][2]
    ((name, result, evidence), *others) = faulty["findings"]
    assert (name, result) == ("folders", "failure")
    assert "is another folder on 127.0.0.2" in evidence
    assert all(result == "pass" for _, result, _ in others)
    assert (told["status"], told["workers"], told["attempts"]) == ("FINISHED", 2, 1)


@pytest.mark.usefixtures("cluster")
def test_a_node_that_is_lost_while_it_is_asked_is_left_out(tmp_path: Path) -> None:
    """No worker will be placed there. The node that is there is heard, of what it sees and of what not."""
    import ray

    from lockstep.attempts.shared_files import _seen_from

    (tmp_path / "probe").touch()
    probes = {"seen": str(tmp_path / "probe"), "unseen": str(tmp_path / "nothing")}
    here = ray.get_runtime_context().get_node_id()
    nodes = {"127.0.0.1": here, "192.0.2.7": "0" * len(here)}
    assert _seen_from(nodes, probes, 60.0, StopSignal(), print) == {"127.0.0.1": ["unseen"]}


@pytest.mark.scenario  # it waits for a task that sleeps
@pytest.mark.usefixtures("cluster")
def test_a_node_that_does_not_answer_is_told_waited_for_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the spec waits for workers, unless the run is asked to stop: what starts there may have an environment to install."""
    import ray

    from lockstep.attempts import shared_files

    def silent(probes: dict[str, str]) -> list[str]:
        time.sleep(8.0)
        return []

    monkeypatch.setattr(shared_files, "unseen", silent)
    monkeypatch.setattr(shared_files, "ANNOUNCED_S", 0.5)
    node = {"192.0.2.7": ray.get_runtime_context().get_node_id()}
    said: list[str] = []
    with raises(problems.NODE_SILENT, nodes="192.0.2.7", seconds=2):
        shared_files._seen_from(node, {}, 2.0, StopSignal(), said.append)
    (line,) = said
    assert line.startswith("waiting for 192.0.2.7, starting a process there")

    stop = StopSignal()
    threading.Timer(0.5, stop.ask).start()
    assert shared_files._seen_from(node, {}, 600.0, stop, said.append) == {}
    assert shared_files._seen_from(node, {}, 600.0, StopSignal(), said.append) == {"192.0.2.7": []}


@pytest.mark.usefixtures("cluster")
def test_a_folder_that_another_node_does_not_see_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster's node, asked as another one: its working directory is not this process's. One that both see is taken."""
    import ray

    from lockstep.attempts.shared_files import check_shared
    from lockstep.spec.loading import load_spec

    other = ray.util.get_node_ip_address()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "192.0.2.7")
    with raises(problems.OTHER_FOLDER, folder="/proc/self/cwd/runs", node=other):
        check_shared(load_spec(spec("/proc/self/cwd/runs")), StopSignal())
    check_shared(load_spec(spec(str(tmp_path / "runs"))), StopSignal())
    assert not list(tmp_path.glob("runs/.lockstep-*"))


@pytest.mark.usefixtures("cluster")
def test_every_node_is_asked_what_it_sees_of_a_run(tmp_path: Path) -> None:
    """On the node of the session's own cluster: what a sound job shows, and what a job without its data does."""
    from lockstep.attempts.node_checks import seen_from_nodes
    from lockstep.spec.loading import load_spec

    document = {
        "job": {"use": "tests.faulty_jobs.jobs:Sound"},
        "batch": {"global": 32, "micro": 8},
        "record": {"uri": "off"},
        "checkpoint": {"storage": str(tmp_path / "runs")},
    }
    (seen,) = seen_from_nodes(load_spec(document), None)
    assert (seen.name, seen.result) == ("nodes", "pass"), seen
    (failure,) = seen_from_nodes(load_spec(document, ["job.use=tests.faulty_jobs.jobs:Detached"]), None)
    assert failure.result == "failure"
    assert "total has no gradient" in failure.evidence
