"""Several real Ray nodes on this machine, for testing: `lockstep cluster up | status | down`.

One process, the holder, starts the nodes and waits. Its process id and start time stand in a state file (mode 0600), and
all that it starts carries a mark in its environment: `down` ends what carries it, and nothing else. Ray's own `ray stop`
would end every cluster on the machine.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil  # type: ignore[import-untyped]

from lockstep.clusters import problems
from lockstep.clusters.authentication import LOOPBACK_ONLY, is_loopback, refuse_open, write_token
from lockstep.clusters.ray_internals import fork_server, unavailable
from lockstep.clusters.ray_internals.address_file import address_file
from lockstep.clusters.ray_internals.fork_server import py_executable
from lockstep.clusters.ray_settings import RAY_SETTINGS
from lockstep.clusters.warm_server import AHEAD_OF_RAY, server_ahead
from lockstep.exit_codes import ExitCode
from lockstep.process import started
from lockstep.training.worker_environment import sent_environment

START_S = 300.0
"""How long the nodes may take to start; three take some 10 s on two idle cores."""

AGENTS_S = 180.0
"""How long the nodes' agents may take to start, after the nodes; `lockstep submit` waits for them as well."""

AGENT_S = 5
"""How long an agent may take to answer."""

STOP_S = 20.0
"""How long the processes of a cluster may take to end by themselves."""

MARK = "LOCKSTEP_CLUSTER"
"""Environment variable of everything that a local cluster has started."""

STORE_BYTES = 128 * 1024 * 1024
"""Ray's object store, for each node: Lockstep passes messages through it, not tensors."""


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """What is known of a cluster that was started here."""

    mark: str
    pid: int
    started: float
    """When the holder started, as `started_at` tells it: process ids are used again."""
    folder: str
    address: str
    dashboard: str
    """Empty, as the address, while the nodes start."""
    nodes: int
    cpus: float
    token: str | None
    """The file with the token."""

    @property
    def ports(self) -> set[int]:
        """The ports by which the cluster is spoken to."""
        return {int(self.address.rpartition(":")[2]), int(self.dashboard.rpartition(":")[2])}

    def access(self) -> dict[str, str]:
        """The environment that opens the cluster."""
        if self.token is None:
            return {"RAY_AUTH_MODE": "disabled"}
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": self.token}

    def running(self) -> bool:
        """Whether the holder is alive, and still the process that it was."""
        try:
            return abs(started_at(self.pid) - self.started) < 1.0
        except psutil.NoSuchProcess:
            return False


def started_at(pid: int) -> float:
    """When a process started, on Linux in ticks since boot: in seconds of Unix time it changes with each step of the machine's clock."""
    ticks = started(pid)
    return float(ticks) if ticks else float(psutil.Process(pid).create_time())


def state_folder() -> Path:
    """Where this user's clusters are remembered."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state", "lockstep")


def recorded_cluster() -> LocalCluster | None:
    """The cluster that was started last and not taken down, whether it runs or not."""
    try:
        state = json.loads(Path(state_folder(), "cluster.json").read_text())
        return LocalCluster(**state)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise problems.STATE_UNREADABLE(file=state_folder() / "cluster.json", got=error) from error


def running_cluster() -> LocalCluster | None:
    """The cluster that was started here and runs, once it can be reached."""
    cluster = recorded_cluster()
    return cluster if cluster is not None and cluster.dashboard and cluster.running() else None


def up(nodes: int, cpus: float, *, host: str, port: int, token: bool) -> LocalCluster:
    """Start `nodes` Ray nodes of `cpus` CPUs each on this machine, and wait until they are there.

    SpecError where one runs already or where it would be open to others; ClusterError where it does not start. It is remembered
    from its first process on: whatever ends this one, `down` ends that.
    """
    refuse_open(host, token=token)
    previous = recorded_cluster()
    if previous is not None and previous.running():
        where = (
            f"is already running at {previous.dashboard}"
            if previous.dashboard
            else "is already being started"
        )
        raise problems.CLUSTER_RUNS(got=where)
    if previous is not None:
        down()
    state_folder().mkdir(parents=True, exist_ok=True, mode=0o700)
    mark = uuid.uuid4().hex
    # Not below the state folder: the paths of Ray's sockets must stay short.
    folder = Path(tempfile.mkdtemp(prefix="lockstep-"))
    token_file = state_folder() / "cluster_token" if token else None
    if token_file is not None:
        write_token(token_file)
    config = {"nodes": nodes, "cpus": cpus, "host": host, "port": port, "folder": str(folder)}
    with Path(folder, "holder.log").open("wb") as log:
        holder = subprocess.Popen(
            [sys.executable, "-P", "-m", "lockstep.clusters.local_cluster", json.dumps(config)],
            env=_environment(mark, token_file, host, folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C in this terminal is not for the cluster
        )
    began = started_at(holder.pid)
    cluster = LocalCluster(
        mark, holder.pid, began, str(folder), "", "", nodes, cpus, str(token_file) if token_file else None
    )
    try:
        _remember(cluster)
        cluster = _when_ready(holder, cluster)
        _remember(cluster)
    except BaseException:
        _take_down(cluster)
        raise
    return cluster


def _environment(mark: str, token: Path | None, host: str, folder: Path) -> dict[str, str]:
    """What the nodes, their workers and the drivers of jobs are started with."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    access = {"RAY_AUTH_MODE": "disabled"} if token is None else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}  # fmt: skip
    local = LOOPBACK_ONLY if is_loopback(host) else {}
    return {
        **inherited,
        **RAY_SETTINGS,
        **sent_environment(),
        **access,
        **local,
        "RAY_TMPDIR": str(
            folder
        ),  # else `ray.init()` of anybody else on this machine would find this cluster
        "RAY_JOB_STOP_WAIT_TIME_S": "60",  # 3 s by default: no time for a checkpoint
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",  # jobs find `lockstep` and `python`
        MARK: mark,
    }


def _when_ready(holder: subprocess.Popen[bytes], cluster: LocalCluster) -> LocalCluster:
    ready, until = Path(cluster.folder, "ready.json"), time.monotonic() + START_S
    while not ready.exists():
        if holder.poll() is not None or time.monotonic() > until:
            lines = Path(cluster.folder, "holder.log").read_text(errors="replace").strip().splitlines()
            raise problems.NOT_STARTED(got=lines[-1] if lines else "no message")
        time.sleep(0.1)
    return LocalCluster(**{**asdict(cluster), **json.loads(ready.read_text())})


def _remember(cluster: LocalCluster) -> None:
    path = state_folder() / "cluster.json"
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(asdict(cluster), file)
    new.replace(path)


def described(cluster: LocalCluster) -> dict[str, Any]:
    """Plain data for people and scripts; of the token only where its file lies."""
    return {
        "running": True,
        "address": cluster.address,
        "dashboard": cluster.dashboard,
        "nodes": cluster.nodes,
        "cpus": cluster.cpus,
        "pid": cluster.pid,
        "environment": {**cluster.access(), "RAY_API_SERVER_ADDRESS": cluster.dashboard},
    }


def down() -> LocalCluster | None:
    """End the cluster that was started here, and all that runs in it. None where there is none."""
    cluster = recorded_cluster()
    if cluster is not None:
        _take_down(cluster)
    return cluster


def _take_down(cluster: LocalCluster) -> None:
    _end(cluster)
    Path(state_folder(), "cluster.json").unlink(missing_ok=True)
    if cluster.token is not None:
        Path(cluster.token).unlink(missing_ok=True)


def _end(cluster: LocalCluster) -> None:
    processes = {process.pid: process for process in marked(cluster.mark)}
    if cluster.running():
        os.kill(cluster.pid, signal.SIGTERM)
        until = time.monotonic() + STOP_S
        while cluster.running() and time.monotonic() < until and not _reaped(cluster.pid):
            time.sleep(0.1)
    processes |= {process.pid: process for process in marked(cluster.mark)}
    for process in processes.values():
        with suppress(psutil.NoSuchProcess):  # it has ended; a new process with its id is not meant either
            process.kill()
    psutil.wait_procs(list(processes.values()), timeout=STOP_S)
    shutil.rmtree(cluster.folder, ignore_errors=True)  # a temporary folder; a file that is left hurts nobody


def _reaped(pid: int) -> bool:
    """Whether a child of this process has ended, and take note of it."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False


def marked(mark: str) -> list[psutil.Process]:
    """The processes of one cluster: those with the mark in their environment, and all that they have started.

    Ray's workers rename themselves, and with a long name write over their environment.
    """
    processes: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            if process.pid not in processes and process.environ().get(MARK) == mark:
                processes |= {child.pid: child for child in (process, *process.children(recursive=True))}
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # gone, or another user's
    return list(processes.values())


# --- the holder -------------------------------------------------------------------------------------------


def hold(config: dict[str, Any]) -> None:
    """Start the nodes, report where they are, and keep them until SIGTERM, with the process that imports ahead for their workers."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(ExitCode.DONE)

    signal.signal(signal.SIGTERM, stop)
    host, folder = config["host"], Path(config["folder"])
    each = {
        "num_cpus": config["cpus"],
        "object_store_memory": STORE_BYTES,
        # Ray's own choice for a head, 52365, may be another cluster's: then no job is ever taken.
        "dashboard_agent_listen_port": 0,
    }
    if not is_loopback(host) and host != "0.0.0.0":
        each["node_ip_address"] = host
    modules = *AHEAD_OF_RAY, "lockstep.record.mirror.preloaded_store"
    with server_ahead(os.environ, modules) if is_loopback(host) else nullcontext():
        _keep_nodes(config, folder, each)


def set_up_workers_quickly() -> None:
    """Have the nodes that this process starts from now on set up their workers without importing Ray for it."""
    if py_executable() and not unavailable("forked workers"):
        from lockstep.clusters.ray_internals.worker_setup import set_up_workers_by

        set_up_workers_by(fork_server.__file__)


def _keep_nodes(config: dict[str, Any], folder: Path, each: dict[str, Any]) -> None:
    """Start the nodes, `each` with these settings, and keep them."""
    from ray.cluster_utils import Cluster

    set_up_workers_quickly()
    cluster = Cluster()
    try:
        cluster.add_node(
            **each,
            include_dashboard=True,
            dashboard_host=config["host"],
            dashboard_port=config["port"],
            temp_dir=str(folder / "ray"),  # Ray opens it to all users, and only this one may enter `folder`
        )
        # A job's driver looks for the address here; without it Ray takes any cluster that runs on this machine.
        address_file(folder / "ray").write_text(cluster.address)
        for number in range(1, config["nodes"]):
            # A folder of each node's own for what jobs bring along: in one, the nodes delete each other's copies.
            cluster.add_node(**each, runtime_env_dir_name=f"runtime_resources_{number}")
        _wait_for_agents(cluster)
        ready = {"address": cluster.address, "dashboard": f"http://{cluster.webui_url}"}
        new = folder / "ready.new"
        new.write_text(json.dumps(ready))
        new.replace(folder / "ready.json")
        while True:
            signal.pause()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        cluster.shutdown()


def _wait_for_agents(cluster: Any) -> None:
    """Until every node's agent answers: before that the job API answers "No available agent". ClusterError after AGENTS_S."""
    from ray.util.state import list_logs
    from ray.util.state.exception import RayStateApiException

    until = time.monotonic() + AGENTS_S
    for node in cluster.list_all_nodes():
        while True:
            try:  # an agent lists the logs of its node
                list_logs(address=cluster.address, node_id=node.node_id, glob_filter="-", timeout=AGENT_S)
                break
            except (RayStateApiException, OSError, RuntimeError, ValueError) as error:
                if time.monotonic() > until:
                    raise problems.NO_AGENTS(seconds=f"{AGENTS_S:.0f}") from error
            time.sleep(0.1)


if __name__ == "__main__":
    hold(json.loads(sys.argv[1]))
