"""Takes the Ray nodes of this machine out of their cluster: they get no new work, and the runs that have workers there are notified."""

from __future__ import annotations

import time
from collections.abc import Callable

from lockstep.clusters import problems
from lockstep.clusters.connection import connected
from lockstep.clusters.ray_internals import nodes, unavailable

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
) -> list[str]:
    """Drain the nodes of this machine, or the one whose id begins with `node`. Returns their ids.

    `seconds` is how long the machine remains at most. With `wait` this returns when the nodes have nothing left to do, or the
    time is over. SpecError if this machine is in no cluster; ClusterError if there is no such node, or it cannot be drained.
    """
    problem = unavailable("nodes")
    if problem is not None:
        raise problems.CANNOT_DRAIN(got=problem)
    deadline = time.time() + (WAIT_S if seconds is None else seconds)
    with connected(address or "auto", verbose=False):  # only a running cluster, never a new one
        node_ids = _nodes_here(node)
        for each in node_ids:
            nodes.drain(each, why, 0 if seconds is None else int(deadline * 1000))
            say(f"node {each[:12]} is drained: {why}")
        while wait and time.time() < deadline and any(_busy(each) for each in node_ids):
            time.sleep(LOOK_S)
    return node_ids


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
