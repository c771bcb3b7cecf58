"""Jobs on two real Ray nodes with token authentication: the same bits, honest exit codes, nothing open, nothing left."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep import train
from lockstep.checkpoint.runs.names import run_of_name
from lockstep.checkpoint.runs.run_checkpoints import steps_of
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.clusters.authentication import LOOPBACK_ONLY
from lockstep.clusters.local_cluster import LocalCluster, marked
from lockstep.clusters.ray_internals import fork_server
from tests.processes import named

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SPEC = "jobs/digits/train.yaml"
SHORT = [
    "job.use=tests.untraced_jobs:UntracedDigits", "job.params.width=8", "length.steps=6", "record.uri=off",
    "workers.min=2", "workers.max=2",
]  # fmt: skip

pytestmark = [
    pytest.mark.scenario,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
]


class Nodes:
    """The cluster under test, and the two commands that speak to it."""

    def __init__(self, state: Path) -> None:
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "LOCKSTEP_"))
        }
        self.environment = {
            **kept,
            "XDG_STATE_HOME": str(state),
            "PYTHONPATH": str(ROOT / "platform"),
            "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",  # for every job: Ray's own way to show one
        }
        self.state = state / "lockstep"

    @property
    def cluster(self) -> LocalCluster:
        return LocalCluster(**json.loads((self.state / "cluster.json").read_text()))

    def start(self, *words: str) -> subprocess.Popen[str]:
        return self._start([sys.executable, "-m", "lockstep", *words], self.environment)

    def call(self, *words: str, timeout: float = 480) -> subprocess.CompletedProcess[str]:
        return finished(self.start(*words), timeout)

    def ray(self, *words: str) -> subprocess.Popen[str]:
        """Ray's own command, told of the token as `cluster up` says."""
        access = {
            **self.environment,
            **self.cluster.access(),
            "RAY_API_SERVER_ADDRESS": self.cluster.dashboard,
        }
        return self._start([str(BIN / "ray"), *words], access)

    def _start(self, words: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


def finished(process: subprocess.Popen[str], timeout: float = 480) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    found = Nodes(tmp_path_factory.mktemp("state"))
    started = found.call("cluster", "up", "--nodes", "2", "--cpus", "2", "--port", "0", "--json")
    assert started.returncode == 0, started.stderr
    yield found
    found.call("cluster", "down")


def digest(text: str) -> str:
    (found,) = re.findall(r"weights_digest\s+([0-9a-f]{64})", text)
    return found


def alone(folder: Path, overrides: list[str]) -> str:
    """The same spec in one plain process."""
    result = train(ROOT / SPEC, [*overrides, f"checkpoint.storage={folder}/alone"], local=True)
    assert result.status == "FINISHED"  # a signal to the test session would cut it short
    return result.weights_digest


def listeners(nodes: Nodes) -> list[tuple[str, Any]]:
    """Process name and address of every port that the cluster listens on."""
    return [
        (process.name(), connection.laddr)
        for process in marked(nodes.cluster.mark)
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]


def test_the_nodes_are_there_and_listen_on_loopback_alone(nodes: Nodes) -> None:
    told = json.loads(nodes.call("cluster", "status", "--json").stdout)
    assert [node["resources"]["CPU"] for node in told["alive"] if node["alive"]] == [2, 2]
    until, listening = time.monotonic() + 60, listeners(nodes)
    while len(listening) < 8 and time.monotonic() < until:  # the nodes' agents come later
        time.sleep(0.5)
        listening = listeners(nodes)
    assert len(listening) >= 8
    open_ = [entry for entry in listening if not entry[1].ip.removeprefix("::ffff:").startswith("127.")]
    assert open_ == []


def test_one_process_imports_ahead_what_workers_and_recorders_need(nodes: Nodes) -> None:
    (ahead,) = named("serve_ahead", among=marked(nodes.cluster.mark))
    until = time.monotonic() + 120
    while not {"torch", "sqlalchemy"} <= {
        part for file in ahead.memory_maps() for part in Path(file.path).parts
    }:
        assert time.monotonic() < until
        time.sleep(0.5)


def test_its_nodes_set_up_workers_without_importing_ray_for_it(nodes: Nodes) -> None:
    raylets = named("raylet --raylet_socket_name", among=marked(nodes.cluster.mark))
    assert len(raylets) == 2
    assert raylets == named(
        f"--python_worker_command={sys.executable} {fork_server.__file__} ", among=raylets
    )


def test_another_cluster_on_this_machine_is_not_in_the_way(nodes: Nodes) -> None:
    """A job's driver finds this cluster, not any that runs here; no agent wants Ray's one port, without which no job is taken."""
    assert Path(nodes.cluster.folder, "ray", "ray_current_cluster").read_text() == nodes.cluster.address
    assert 52365 not in {place.port for _, place in listeners(nodes)}


def test_the_token_is_for_its_owner_alone_and_in_no_process_list(nodes: Nodes) -> None:
    file = Path(nodes.cluster.token or "")
    token = file.read_text()
    assert len(token) == 64
    for path in (file, nodes.state / "cluster.json"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(nodes.state.stat().st_mode) == 0o700
    assert not named(token, among=marked(nodes.cluster.mark))
    for process in marked(nodes.cluster.mark):
        assert token not in " ".join(process.environ().values())
    for path in Path(nodes.cluster.folder).rglob("*.log"):
        assert token not in path.read_text(errors="replace"), path


def train_runs(nodes: Nodes) -> list[dict[str, Any]]:
    """What Ray's dashboard shows on its page of Train runs."""
    token = Path(nodes.cluster.token or "").read_text()
    request = urllib.request.Request(
        f"{nodes.cluster.dashboard}/api/train/v2/runs/v1", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: list[dict[str, Any]] = json.loads(answer.read())["train_runs"]
    return found


def gauges(nodes: Nodes) -> dict[str, float]:
    """The metrics of runs that Prometheus would collect from the nodes now, each with its labels. A target that does not answer is passed over."""
    (found,) = json.loads(Path(nodes.cluster.folder, "prom_metrics_service_discovery.json").read_text())
    pages = []
    for place in found["targets"]:
        with suppress(urllib.error.URLError):
            pages.append(urllib.request.urlopen(f"http://{place}/metrics").read().decode())
    lines = re.findall(r"^(ray_lockstep_\w+\{.*\}) (\S+)$", "\n".join(pages), re.MULTILINE)
    return {name: float(value) for name, value in lines}


def asked(url: str, token: str | None) -> int:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(
    "path", ["/api/jobs/", "/nodes?view=summary", "/api/cluster_status", "/api/v0/actors", "/logical/actors"]
)
def test_every_endpoint_refuses_who_has_no_token(nodes: Nodes, path: str) -> None:
    url = nodes.cluster.dashboard + path
    assert asked(url, None) == 401
    assert asked(url, "0" * 64) == 403
    assert asked(url, Path(nodes.cluster.token or "").read_text()) == 200


def test_a_driver_and_a_job_without_the_token_are_refused(nodes: Nodes) -> None:
    """The negative control of every job below."""
    kept = {**nodes.environment, "RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    driver = subprocess.run(
        [sys.executable, "-c", f"import ray; ray.init({nodes.cluster.address!r}); print('let in')"],
        env=kept, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert driver.returncode != 0
    assert "let in" not in driver.stdout
    job = subprocess.run(
        [sys.executable, "-m", "lockstep", "submit", SPEC, "--address", nodes.cluster.dashboard],
        cwd=ROOT, env=kept, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert job.returncode == 1
    assert "RAY_AUTH_TOKEN_PATH" in job.stderr.splitlines()[-1]


JOB = """
import sys
import ray
from lockstep.clusters.connection import connected

def own_job():
    return ray.get_runtime_context().get_job_id()

with connected(sys.argv[1], verbose=False, preload=("ray.tune",)):
    assert ray.get(ray.remote(num_cpus=1)(own_job).remote(), timeout=45) == own_job()
"""


@pytest.mark.exact  # tests/unit/clusters/test_fork_server.py: the next job has a server of its own
def test_a_job_right_after_another_has_workers_of_its_own(nodes: Nodes) -> None:
    """They are forked from a process that has read, as it imported Ray, whose job it works for."""
    for _ in range(2):
        job = subprocess.run(
            [sys.executable, "-c", JOB, nodes.cluster.address],
            env=nodes.environment | nodes.cluster.access() | LOOPBACK_ONLY, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert job.returncode == 0, job.stderr


def test_a_submitted_job_has_the_bits_of_the_run_alone(nodes: Nodes, tmp_path: Path) -> None:
    """G1 on the cluster, and the run is listed there and on the dashboard's page of Train runs."""
    submitted = nodes.call("submit", SPEC, *SHORT, f"checkpoint.storage={tmp_path}/ours")
    assert submitted.returncode == 0, submitted.stderr
    assert digest(submitted.stderr) == alone(tmp_path, SHORT)
    (run_id,) = re.findall(r"^run\s+([0-9a-f]{32})$", submitted.stdout, re.MULTILINE)
    listed = {
        run["run_id"]: run for run in json.loads(nodes.call("cluster", "status", "--json").stdout)["runs"]
    }
    assert [listed[run_id][field] for field in ("status", "step", "workers")] == ["FINISHED", 6, 2]
    (shown,) = train_runs(nodes)
    assert (shown["name"], shown["status"]) == (f"digits {run_id}", "FINISHED")
    (attempt,) = shown["attempts"]
    assert [worker["world_rank"] for worker in attempt["workers"]] == [0, 1]
    assert "dropout" not in json.dumps(shown), "what a spec holds may be a secret"


@pytest.mark.exact  # two minutes
def test_two_jobs_at_once_one_of_them_raw_have_the_bits_of_the_run_alone(
    nodes: Nodes, tmp_path: Path
) -> None:
    """G1 on the cluster: `lockstep submit` and `ray job submit -- lockstep train` beside each other; the seed is the control."""
    ours = nodes.start("submit", SPEC, *SHORT, f"checkpoint.storage={tmp_path}/ours")
    raw = nodes.ray(
        "job", "submit", "--working-dir", ".", "--",
        "lockstep", "train", SPEC, *SHORT, "seed=18", f"checkpoint.storage={tmp_path}/raw",
    )  # fmt: skip
    submitted, plain = finished(ours), finished(raw)
    assert submitted.returncode == 0, submitted.stderr
    assert plain.returncode == 0, plain.stdout + plain.stderr
    assert digest(submitted.stderr) == alone(tmp_path, SHORT)
    assert digest(plain.stdout + plain.stderr) == alone(tmp_path, [*SHORT, "seed=18"])
    assert digest(submitted.stderr) != digest(plain.stdout + plain.stderr)
    (run_id,) = re.findall(r"^run\s+([0-9a-f]{32})$", submitted.stdout, re.MULTILINE)
    listed = [run["run_id"] for run in json.loads(nodes.call("cluster", "status", "--json").stdout)["runs"]]
    assert run_id in listed
    assert len(listed) >= 2


PACED = [
    *SHORT, "job.use=tests.untraced_jobs:PacedDigits", "job.params.pause_s=0.1", "length.steps=60", "checkpoint.every.steps=5",
]  # fmt: skip


@pytest.mark.exact  # a minute each
@pytest.mark.parametrize("before", ["nothing", "living", "killed"])
def test_of_several_commands_at_once_one_goes_on(nodes: Nodes, tmp_path: Path, before: str) -> None:
    """On a name that is free, on a run that lives, and on one whose driver was killed: the others are told, and change no bit."""
    storage = str(tmp_path / "runs")
    words = ["train", SPEC, *PACED, f"checkpoint.storage={storage}", "--run", "night", "--json"]
    commands, run_id = [], None
    if before != "nothing":
        first = nodes.start(*words)
        until = time.monotonic() + 300
        while run_id is None or not steps_of(storage, run_id):
            assert time.monotonic() < until and first.poll() is None, finished(first)
            time.sleep(0.1)
            run_id = run_of_name(open_storage(storage), "night")
        if before == "killed":
            first.kill()
            finished(first)
        else:
            commands.append(first)
    resume = ["resume", run_id or "", "--uri", "off", f"checkpoint.storage={storage}", "--json"]
    began = time.monotonic()
    commands += [nodes.start(*(resume if run_id and number % 2 else words)) for number in range(4)]
    ended = [finished(command) for command in commands]
    print(f"{before}: {time.monotonic() - began:.1f} s")
    (went_on,) = (json.loads(one.stdout) for one in ended if one.returncode == 0)
    for one in ended:
        if one.returncode:
            assert one.returncode == 2 and " is held by process " in one.stderr, one.stderr
    assert went_on["weights_digest"] == alone(tmp_path, PACED)
    assert went_on["attempts"] == (2 if before == "killed" else 1)


@pytest.mark.parametrize(
    ("overrides", "code", "cause"),
    [
        pytest.param(["job.use=tests.cluster.broken_jobs:LabelsOutOfRange"], 1, "a label is out of range", marks=pytest.mark.exact),
        (["job.params.widht=8"], 2, "did you mean 'width'?"),
    ],
)  # fmt: skip
def test_a_job_that_fails_ends_the_command_with_its_own_code_and_cause(
    nodes: Nodes, tmp_path: Path, overrides: list[str], code: int, cause: str
) -> None:
    failed = nodes.call(
        "submit", SPEC, "record.uri=off", f"checkpoint.storage={tmp_path}", *overrides, "--json"
    )
    assert failed.returncode == code, failed.stderr
    assert cause in failed.stderr
    (line,) = failed.stdout.splitlines()
    told = json.loads(line)
    assert told["exit_code"] == code
    assert list(jobs_of(nodes, told["job"])) == [told["job"]]  # its own mistake: not started again


@pytest.mark.exact  # minutes
def test_a_stopped_job_leaves_a_checkpoint_and_goes_on_when_it_is_submitted_again(
    nodes: Nodes, tmp_path: Path
) -> None:
    """`ray job stop` is a signal like any other; the name finds the run, and its end has the bits of the run alone."""
    go_on = tmp_path / "go on"
    held = [
        "length.steps=400",
        "evaluate.every.steps=400",
        "record.uri=off",
        "workers.min=2",
        "workers.max=2",
    ]
    held += [f"job={{use: 'tests.cluster.broken_jobs:Held', params: {{width: 8, until: '{go_on}'}}}}"]
    words = ["submit", SPEC, "--run", "kept", *held, f"checkpoint.storage={tmp_path}"]
    sent = json.loads(nodes.call(*words, "--no-wait", "--json").stdout)
    assert sent["exit_code"] is None
    following = nodes.start("submit", "--attach", sent["job"], "--json")
    until = time.monotonic() + 360  # a busy machine
    while not list(tmp_path.glob("*/environment.json")):
        assert time.monotonic() < until, "the run did not start"
        time.sleep(0.3)
    going_on = json.loads(nodes.call("cluster", "status", "--json").stdout)["runs"][0]
    assert (going_on["status"], going_on["workers"]) == ("RUNNING", 2)
    wait_for(lambda: gauges(nodes), "Ray collected no metrics of the run")
    told_by_ray = {name.partition("{")[0]: value for name, value in gauges(nodes).items()}
    assert (told_by_ray["ray_lockstep_workers"], told_by_ray["ray_lockstep_attempt"]) == (2, 1)
    assert told_by_ray["ray_lockstep_step"] >= 1
    assert all(f'run="{going_on["run_id"]}"' in name for name in gauges(nodes))
    stop = finished(nodes.ray("job", "stop", sent["job"]))
    assert stop.returncode == 0, stop.stderr
    followed = finished(following)
    assert followed.returncode == 143, stop.stdout + followed.stderr
    told = json.loads(followed.stdout)
    assert (told["status"], told["exit_code"]) == ("STOPPED", 143)
    (run,) = tmp_path.glob("*/run.json")
    assert json.loads(run.read_text())["status"] == "KILLED"
    assert run.parent.name == told["run_id"]
    assert list(run.parent.glob("step-*/manifest.json"))
    go_on.touch()
    again = nodes.call(*words)
    assert again.returncode == 0, again.stderr
    assert told["run_id"] in again.stdout
    first = int(re.findall(r"step (\d+)/", again.stderr)[0])
    assert 1 < first < 400, "it began anew"
    assert digest(again.stderr) == alone(tmp_path, held)


def held_run(folder: Path, *more: str) -> tuple[list[str], Path, list[str]]:
    """The words that submit a run which waits for a file, that file, and the overrides of the run alone."""
    go_on = folder / "go on"
    held = [
        "length.steps=300",
        "evaluate.every.steps=300",
        "record.uri=off",
        "workers.min=2",
        "workers.max=2",
    ]
    held += [f"job={{use: 'tests.cluster.broken_jobs:Held', params: {{width: 8, until: '{go_on}'}}}}"]
    words = ["submit", SPEC, *held, "checkpoint.every.steps=2", f"checkpoint.storage={folder}", *more]
    return words, go_on, held


def jobs_of(nodes: Nodes, first: str) -> dict[str, str]:
    """The jobs of a run, by their ids, and how they stand."""
    told = json.loads(nodes.call("cluster", "status", "--json").stdout)
    return {job["id"]: job["status"] for job in told["jobs"] if job["id"].startswith(first)}


def saved(folder: Path) -> int:
    """The newest checkpoint of the run in `folder`, 0 without one."""
    return max((int(path.parent.name[5:]) for path in folder.glob("*/step-*/manifest.json")), default=0)


def wait_for(happened: Callable[[], object], what: str) -> None:
    until = time.monotonic() + 360  # a busy machine
    while not happened():
        assert time.monotonic() < until, what
        time.sleep(0.3)


def processes_of(nodes: Nodes, *words: str) -> list[psutil.Process]:
    """The cluster's processes in whose command line all `words` are."""
    return named(*words, among=marked(nodes.cluster.mark))


@pytest.mark.exact  # minutes
def test_a_submitted_run_goes_on_by_itself_whatever_is_killed(nodes: Nodes, tmp_path: Path) -> None:
    """SIGKILL to its driver, then to its job's own process on the head, then SIGSTOP to its recorder: no command is given."""
    words, go_on, held = held_run(tmp_path, "--json")
    submitted = nodes.start(*words)
    try:
        wait_for(lambda: saved(tmp_path), "the run did not start")
        (run,) = tmp_path.glob("*/environment.json")
        run_id = run.parent.name
        for kill in (("lockstep train",), ("JobSupervisor",)):
            at = saved(tmp_path)
            for process in processes_of(nodes, *kill):
                process.kill()
            wait_for(lambda at=at: saved(tmp_path) > at, f"it did not go on after {kill} was killed")
        (recorder,) = processes_of(nodes, "ray::RecorderActor")
        recorder.suspend()
        go_on.touch()
        ended = finished(submitted)
    finally:
        submitted.kill()
    assert ended.returncode == 0, ended.stderr[-3000:]
    told = json.loads(ended.stdout)
    assert re.fullmatch(r".*-retry-2", told["job"])
    (at_work,) = jobs_of(nodes, told["job"].partition("-retry-")[0] + "-retry-2").values()
    assert at_work == "SUCCEEDED"
    assert digest(ended.stderr) == alone(tmp_path, held)
    assert told["run_id"] == run_id
    wait_for(
        lambda: not processes_of(nodes, "ray::DriverRestarter"),
        "the driver restarter did not end with the run",
    )


@pytest.mark.exact  # a minute
def test_a_run_without_retries_stays_as_it_was_left(nodes: Nodes, tmp_path: Path) -> None:
    """The control of the test above."""
    words, _, _ = held_run(tmp_path, "--retries", "0", "--json")
    submitted = nodes.start(*words)
    wait_for(lambda: saved(tmp_path), "the run did not start")
    for process in processes_of(nodes, "lockstep train"):
        process.kill()
    ended = finished(submitted)
    assert ended.returncode != 0
    time.sleep(10.0)
    assert len(jobs_of(nodes, json.loads(ended.stdout)["job"])) == 1


def test_down_ends_what_up_started_and_nothing_else(nodes: Nodes) -> None:
    """Last in this file: the cluster is gone after it. A process that looks like one of Ray's lives on."""
    bystander = subprocess.Popen(["bash", "-c", "exec -a ray::raylet sleep 600"])
    cluster = nodes.cluster
    try:
        assert marked(cluster.mark)
        before = {process.pid for process in psutil.process_iter()}
        ours = {process.pid for process in marked(cluster.mark)}
        down = nodes.call("cluster", "down")
        assert (down.returncode, down.stdout) == (0, "ended\n")
        assert marked(cluster.mark) == []
        assert not Path(cluster.folder).exists()
        assert not Path(cluster.token or "").exists()
        assert not (nodes.state / "cluster.json").exists()
        assert bystander.poll() is None
        assert not ours & {process.pid for process in psutil.process_iter()}
        assert bystander.pid in before
    finally:
        bystander.send_signal(signal.SIGKILL)
        bystander.wait()
    assert "no cluster" in nodes.call("cluster", "down").stdout
    assert "no cluster runs here" in nodes.call("cluster", "status").stdout
