"""Takes the Ray nodes of this machine out of their cluster: they get no new work, and the runs that have workers there are notified."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import psutil  # type: ignore[import-untyped]

from lockstep.clusters import problems
from lockstep.clusters.connection import connected
from lockstep.clusters.ray_internals import nodes, unavailable
from lockstep.errors import first_line

WAIT_S = 3600.0
"""How long to wait for the nodes to be empty if nobody said how long the machine remains."""

LOOK_S = 0.5
"""Seconds between two looks whether a node is empty."""


def leave(
    address: str | None,
    node: str | None,
    why: str,
    seconds: float | None,
    say: Callable[[str], None],
    *,
    wait: bool,
    stop_runs: bool = False,
) -> list[str]:
    """Drain the nodes of this machine, or the one whose id begins with `node`. Returns their ids.

    `seconds` is how long the machine remains at most. With `wait` this returns when the nodes have nothing left to do, or the
    time is over. With `stop_runs` the drivers on this machine get SIGTERM: their runs save and end, which `wait` waits for too.
    SpecError if this machine is in no cluster, and for `stop_runs` with the `node` of another one; ClusterError if there is no such node, or it cannot be
    drained.
    """
    if stop_runs and node is not None:
        raise problems.DRIVERS_ELSEWHERE(got=node)
    problem = unavailable("nodes")
    if problem is not None:
        raise problems.CANNOT_DRAIN(got=problem)
    deadline = time.time() + (WAIT_S if seconds is None else seconds)
    with connected(address or "auto", verbose=False):  # only a running cluster, never a new one
        node_ids = _nodes_here(node)
        # First: a run that hears of the drained node alone would look for room elsewhere.
        drivers = _signalled(_drivers_here(say), why, say) if stop_runs else []
        for each in node_ids:
            nodes.drain(each, why, 0 if seconds is None else int(deadline * 1000))
            say(f"node {each[:12]} is drained: {why}")
        while wait and time.time() < deadline and (any(map(_lives, drivers)) or any(map(_busy, node_ids))):
            time.sleep(LOOK_S)
    return node_ids


def _drivers_here(say: Callable[[str], None]) -> list[psutil.Process]:
    """The drivers of the cluster's jobs that run on this machine, without this process; none, said so, where Ray does not list its jobs."""
    import ray
    from ray.util.state import list_jobs
    from ray.util.state.exception import RayStateApiException

    address = ray.util.get_node_ip_address()
    try:
        jobs = list_jobs(filters=[("status", "=", "RUNNING")], limit=10_000)
    except (RayStateApiException, OSError) as error:
        say(f"no driver is told to end: Ray's dashboard does not list the jobs ({first_line(error)})")
        return []
    drivers = []
    for job in jobs:
        driver = job.driver_info
        if driver is None or driver.node_ip_address != address or int(driver.pid) == os.getpid():
            continue
        with suppress(psutil.NoSuchProcess):
            drivers.append(psutil.Process(int(driver.pid)))
    return drivers


def _signalled(drivers: list[psutil.Process], why: str, say: Callable[[str], None]) -> list[psutil.Process]:
    """Send SIGTERM to the drivers. Returns those that got it."""
    signalled = []
    for driver in drivers:
        try:
            driver.send_signal(signal.SIGTERM)
        except psutil.NoSuchProcess:
            continue
        except psutil.AccessDenied:
            say(f"driver {driver.pid} belongs to another user, and is not told to end")
            continue
        say(f"driver {driver.pid} is told to end: {why}")
        signalled.append(driver)
    return signalled


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _nodes_here(node: str | None) -> list[str]:
    import ray

    own_address = ray.util.get_node_ip_address()
    alive = [each for each in ray.nodes() if each["Alive"]]
    if node is None:
        node_ids = [each["NodeID"] for each in alive if each["NodeManagerAddress"] == own_address]
        missing = f"on this machine ({own_address})"
    else:
        node_ids = [each["NodeID"] for each in alive if each["NodeID"].startswith(node)]
        missing = f"with an id that begins with {node!r}"
    if not node_ids:
        raise problems.NO_LIVE_NODE(got=missing)
    return node_ids


def _busy(node: str) -> bool:
    """Whether something holds resources of a live node."""
    import ray

    total: dict[str, float] = next(
        (each["Resources"] for each in ray.nodes() if each["NodeID"] == node and each["Alive"]), {}
    )
    free = nodes.free_resources().get(node, {})
    return any(free.get(kind, 0.0) < total.get(kind, 0.0) for kind in ("CPU", "GPU"))
