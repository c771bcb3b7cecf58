"""What the cluster around an attempt looks like: room for more workers, and nodes that are being drained."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from lockstep.orchestration.ray_trainer import place
from lockstep.orchestration.watchdog import Member
from lockstep.spec import Spec

LOOK_S = 1.0
"""How often it is looked at."""

CONNECT_S = 2.0
"""How long a node may take to answer."""

STEADY_S = 3.0
"""How long room has to be there before an attempt moves for it."""


def live_resources() -> dict[str, float]:
    """What the nodes have that are alive and stay so."""
    drained = draining()
    total: Counter[str] = Counter()
    for node in ray.nodes():
        if node["Alive"] and node["NodeID"] not in drained and answers(node):
            total.update(node["Resources"])
    return dict(total)


def answers(node: Mapping[str, Any]) -> bool:
    """Whether the node's raylet can be reached: Ray takes up to half a minute to notice that a node is gone."""
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), CONNECT_S).close()
    except OSError:
        return False
    return True


def draining() -> frozenset[str]:
    """The nodes that have been told to go: preempted, scaled down, or drained by hand."""
    return frozenset(ray._private.state.state.get_draining_nodes() or ())


def room(spec: Spec, workers: int, each: Mapping[str, float], free: Mapping[str, float]) -> int:
    """How many workers a run could have that has so many now, where so much more is free."""
    more = min(int(free.get(kind, 0.0) / amount + 1e-9) for kind, amount in each.items())
    return max(workers, min(spec.workers.max, spec.batch.micro_batches, workers + more))


class Surroundings:
    """Watches the cluster for one attempt on `workers` workers of `each` so many resources."""

    def __init__(self, spec: Spec, workers: int, each: Mapping[str, float]) -> None:
        self.spec, self.workers, self.each = spec, workers, each
        self._looked = 0.0
        self._roomy_since: float | None = None

    def reason_to_move(self, members: Sequence[Member]) -> str | None:
        """Why the attempt should end after a checkpoint and go on elsewhere; None as long as it should not."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return None
        self._looked = now
        leaving = draining() & {member.node for member in members}
        if leaving:
            return f"node {', '.join(sorted(node[:8] for node in leaving))} is being drained"
        if self.workers >= min(self.spec.workers.max, self.spec.batch.micro_batches):
            return None
        possible = room(self.spec, self.workers, self.each, ray.available_resources())
        if possible > self.workers:  # of what is free, a part may be about to go
            possible = min(possible, place(self.spec, live_resources())[0])
        if possible <= self.workers:
            self._roomy_since = None
            return None
        self._roomy_since = self._roomy_since or now
        if now - self._roomy_since < STEADY_S:
            return None
        return f"there is room for {possible} workers, {possible - self.workers} more"
