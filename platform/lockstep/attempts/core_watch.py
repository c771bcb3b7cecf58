"""Watches the two processes of Ray on which a driver depends: the raylet of its node, and the cluster's GCS.

Ray ends a driver without a word some seconds after its raylet, and a minute after the GCS. Of a cluster that the driver has
started, the kernel tells at once that one of them has ended, and how. Of any other, both are asked now and then.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]
import ray

from lockstep.attempts.cluster_watch import answers
from lockstep.clusters.reachability import check_answers
from lockstep.errors import ClusterError

PARTS: Mapping[str, str] = {
    "raylet": "the raylet, Ray's process on this node,",
    "gcs_server": "the GCS, Ray's central process of the cluster,",
}
"""The processes, by their names in the system, as a person is told of them."""

LOOK_S = 0.5
"""How often it is looked whether the watch is over."""

ASK_S = 5.0
"""How often a cluster that others have started is asked."""

GCS_SILENT_S = 45.0
"""How long the GCS of such a cluster may be silent: Ray ends the driver after a minute, unless its setting says otherwise."""

RAYLET_SILENT_S = 8.0
"""How long the raylet may refuse connections; one that has ended does not come back."""

_RAYS_LIMIT, _BEFORE_RAY_S = "RAY_gcs_rpc_server_reconnect_timeout_s", 15.0

_lost: ClusterError | None = None


class Part(NamedTuple):
    """A process of the cluster that this driver has started."""

    name: str
    pid: int
    logs: str
    """The folder of its logs; empty if it is not known."""


def lost_core() -> ClusterError | None:
    """Why this driver's cluster is gone, once it is: from then on no call of Ray is answered."""
    return _lost


@contextmanager
def core_watched(when_lost: Callable[[ClusterError, str], object], *, started_here: bool) -> Iterator[None]:
    """In this block `when_lost` is called once, in a thread, with the error and its details, where one of the two processes is gone."""
    global _lost
    _lost = None
    over = threading.Event()

    def lost(error: ClusterError, details: str) -> None:
        global _lost
        if not over.is_set():
            _lost = error
            when_lost(error, details)

    if started_here:
        watch = partial(_watch_own, over, lost, own_parts())
    else:
        watch = partial(_watch_joined, over, lost, ray.get_runtime_context().gcs_address, _own_node())
    thread = threading.Thread(target=watch, name="lockstep-core", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def own_parts() -> list[Part]:
    """The processes that this driver has started."""
    found = []
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if process.name() in PARTS:
                words = [word.partition("=") for word in process.cmdline()]
                logs = next((value for name, _, value in words if name.lstrip("-") == "log_dir"), "")
                found.append(Part(process.name(), process.pid, logs))
    return found


def _watch_own(over: threading.Event, lost: Callable[[ClusterError, str], None], parts: list[Part]) -> None:
    with ExitStack() as stack:
        waits = select.poll()
        by_file = {}
        for part in parts:
            try:
                file = os.pidfd_open(part.pid)
            except ProcessLookupError:
                lost(*_ended(part))
                return
            stack.callback(os.close, file)
            waits.register(file, select.POLLIN)
            by_file[file] = part
        while not over.is_set():
            for file, _ in waits.poll(1000 * LOOK_S):
                error, details = _ended(by_file[file])
                if not over.is_set():
                    _end_workers(parts)
                lost(error, details)
                return


def _end_workers(parts: list[Part]) -> None:
    """End what the raylet has started: workers that go on would save what belongs to no run any more."""
    for part in parts:
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(part.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def _ended(part: Part) -> tuple[ClusterError, str]:
    logs = f"; its logs are in {part.logs!r}" if part.logs else ""
    text = f"ray: {PARTS[part.name]} {_how(part.pid)}; the run's workers are lost with it, and lockstep resume goes on with the run"
    return ClusterError(text), f"{part.name}, process {part.pid}{logs}"


def _how(pid: int) -> str:
    """How a child of this process has ended. It is not reaped: Ray does that."""
    with suppress(ChildProcessError):
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is not None and found.si_code == os.CLD_EXITED:
            return f"has ended (exit code {found.si_status})"
        if found is not None:
            name = signal.Signals(found.si_status).name
            more = (
                "; where the kernel's out-of-memory killer did it, dmesg says so" if name == "SIGKILL" else ""
            )
            return f"was ended by {name}{more}"
    return "has ended"


def _own_node() -> dict[str, Any]:
    own = ray.get_runtime_context().get_node_id()
    return next(node for node in ray.nodes() if node["NodeID"] == own)


def _watch_joined(
    over: threading.Event, lost: Callable[[ClusterError, str], None], address: str, node: Mapping[str, Any]
) -> None:
    def gcs_answers() -> bool:
        try:
            check_answers(address)
        except ClusterError:
            return False
        return True

    limit_s = GCS_SILENT_S
    with suppress(KeyError, ValueError):
        limit_s = max(GCS_SILENT_S, float(os.environ[_RAYS_LIMIT]) - _BEFORE_RAY_S)
    asked: dict[str, tuple[Callable[[], bool], float]] = {
        "raylet": (lambda: answers(node), RAYLET_SILENT_S),
        "gcs_server": (gcs_answers, limit_s),
    }
    silent_s = dict.fromkeys(asked, 0.0)
    while not over.wait(ASK_S if not any(silent_s.values()) else LOOK_S):
        for name, (ask, limit) in asked.items():
            began = time.monotonic()
            if ask():
                silent_s[name] = 0.0
                continue
            # Counted rather than timed: while this process is stopped, nobody is silent.
            silent_s[name] += min(time.monotonic() - began, ASK_S) + LOOK_S
            if silent_s[name] > limit:
                text = f"ray: {PARTS[name]} of the cluster at {address} has not answered for {silent_s[name]:.0f} s"
                lost(ClusterError(text), "")
                return
