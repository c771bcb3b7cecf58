"""Watches the cluster around an attempt: room for more workers, and nodes that are being drained."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import ray

from lockstep.attempts.demand import RoomRequest
from lockstep.attempts.placement import (
    WorkerPlacement,
    fit_workers,
    most_of,
    room_on,
    rooms_for_more,
    total,
)
from lockstep.clusters.ray_internals import unavailable
from lockstep.clusters.ray_internals.nodes import draining_nodes, free_resources, largest_cluster
from lockstep.clusters.reachability import reached
from lockstep.errors import SpecError
from lockstep.record.events.union import Joined
from lockstep.spec.fields import Spec

LOOK_S = 1.0
"""Seconds between two looks at the cluster."""

NEAR_S = 20.0
"""If nodes are about to go and nothing else has room: seconds before their deadline at which the last checkpoint is requested."""

STEADY_S = 3.0
"""How long room must persist before an attempt moves for it."""

REFILL_S = 10.0
"""How long workers that outlived others go on before they move to be as many again: a loss seldom comes alone."""


def find_place(spec: Spec, without: frozenset[str] = frozenset()) -> WorkerPlacement:
    """As many workers as there is room for on nodes that are alive and will stay. SpecError for fewer than `workers.min`.

    Nodes in `without` are left out where the others have room for `workers.min`.
    """
    if without:
        with suppress(SpecError):
            return _place_outside(spec, without)
    return _place_outside(spec, frozenset())


def _place_outside(spec: Spec, without: frozenset[str]) -> WorkerPlacement:
    drained = draining()
    fit, unfit, resources = set[str](), set[str](), list[dict[str, float]]()
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        if node["NodeID"] in drained or node["NodeID"] in without or not answers(node):
            unfit.add(node["NodeID"])
        else:
            fit.add(node["NodeID"])
            resources.append(node["Resources"])
    return WorkerPlacement(*fit_workers(spec, resources), frozenset(fit), frozenset(unfit))


def _workers_at_most(spec: Spec, without: frozenset[str]) -> int:
    """How many workers `find_place` would place; 0 where that is fewer than `workers.min`, as while Ray has not noticed yet that a node is gone."""
    try:
        return find_place(spec, without).workers
    except SpecError:
        return 0


def can_grow(spec: Spec) -> bool:
    """Whether the cluster's autoscaler may add nodes until there is room for `workers.min`."""
    largest = None if unavailable("nodes") else largest_cluster()
    if largest is None:
        return False
    try:
        fit_workers(spec, [largest])  # which nodes the autoscaler would add is not known
    except SpecError:
        return False
    return True


def node_resources() -> list[dict[str, float]]:
    """What each node that is alive has."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def most_resources() -> list[dict[str, float]]:
    """What the nodes have once the cluster's autoscaler has added all that it may, as if they were one; without one, what each has now."""
    largest = None if unavailable("nodes") else largest_cluster()
    return node_resources() if largest is None else [{**total(node_resources()), **largest}]


def answers(node: Mapping[str, Any]) -> bool:
    """Whether the node's raylet can be reached: Ray takes up to half a minute to notice that a node is gone."""
    return reached(node["NodeManagerAddress"], node["NodeManagerPort"])


def draining() -> dict[str, float]:
    """The nodes that are to go (preempted, scaled down, or drained by hand), each with its deadline: Unix seconds, infinity if unknown."""
    if unavailable("nodes"):
        return {}
    return {
        node: deadline_ms / 1000 if deadline_ms else math.inf
        for node, deadline_ms in draining_nodes().items()
    }


def rooms_left(
    most: int, each: Mapping[str, float], vacant: Mapping[int, str], without: frozenset[str]
) -> list[tuple[str, int | None]]:
    """Where up to `most` more workers could run now; see `placement.rooms_for_more`. Never on nodes in `without`, or that are about to go."""
    if unavailable("nodes"):
        return []
    drained = draining()
    gone = {*drained, *without}
    fit = {
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in gone and answers(node)
    }
    return rooms_for_more(most, each, free_resources(), vacant, fit)


def room(spec: Spec, workers: int, each: Mapping[str, float]) -> int:
    """How many workers a run with `workers` could have, by what is free on the nodes."""
    free = [ray.available_resources()] if unavailable("nodes") else list(free_resources().values())
    return max(workers, min(most_of(spec), workers + room_on(each, free)))


class Advice(NamedTuple):
    """What an attempt should do, with the reason: save and go on, or save, end, and go on elsewhere."""

    save: str | None = None
    move: str | None = None
    leaving: frozenset[str] = frozenset()
    """The nodes that the move leaves."""


class ClusterWatch:
    """Watches the cluster for one attempt, which runs at `placement`; nodes in `without` are left out."""

    def __init__(self, spec: Spec, placement: WorkerPlacement, without: frozenset[str] = frozenset()) -> None:
        self._without = without
        self.spec, self.workers, self.each = spec, placement.workers, placement.each
        self._looked = 0.0
        self._noticed = 0
        """Saves so far for a notice without room elsewhere: 1 after the first, 2 after the one near the deadline."""
        self._roomy_since: float | None = None
        self._living, self._lost_at = placement.workers, 0.0
        self._request = RoomRequest()

    def close(self) -> None:
        """End the watch: request no more room."""
        self._request.release()

    def outlived(self, workers: int) -> None:
        """Note that only so many workers go on, after a loss. From `REFILL_S` later on, a move may replace the others."""
        self._living, self._lost_at = workers, time.monotonic()

    def changed(self, workers: int) -> None:
        """Note that the attempt has so many workers after a planned change."""
        self.workers = self._living = workers
        self._roomy_since = None

    def advice(self, members: Sequence[Joined]) -> Advice:
        """What the attempt of these workers should do now; at most one look per `LOOK_S`."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return Advice()
        self._looked = now
        gone = draining()
        leaving = {node: gone[node] for node in {member.node for member in members} if node in gone}
        return self._on_notice(leaving) if leaving else Advice(move=self._room_to_grow(now))

    def _on_notice(self, leaving: Mapping[str, float]) -> Advice:
        """Nodes with workers are about to go: move at once if there is room elsewhere, else save now and once more near their deadline."""
        names = ", ".join(sorted(node[:8] for node in leaving))
        notice = f"node {names} is being drained"
        try:
            find_place(self.spec, self._without)
        except SpecError as error:
            self._request.want(self.workers, self.each)
            near = min(leaving.values()) - time.time() < NEAR_S
            if self._noticed < 1 + near:
                self._noticed = 1 + near
                return Advice(save=f"{notice}, and nowhere else is room ({error})")
            return Advice()
        return Advice(move=notice, leaving=frozenset(leaving))

    def _room_to_grow(self, now: float) -> str | None:
        most = most_of(self.spec)
        self._request.want(most - self.workers, self.each)
        if self._living < self.workers:
            return self._room_to_refill(now)
        if self.workers >= most:
            return None
        possible = room(self.spec, self.workers, self.each)
        if possible > self.workers:  # part of what is free may be about to go
            possible = min(possible, _workers_at_most(self.spec, self._without))
        if possible <= self.workers:
            self._roomy_since = None
            return None
        self._roomy_since = self._roomy_since or now
        if now - self._roomy_since < STEADY_S:
            return None
        return f"there is room for {possible} workers, {possible - self.workers} more"

    def _room_to_refill(self, now: float) -> str | None:
        """Whether to move for lost workers. Ray still reserves what they held for the attempt, so the nodes' totals count, not what is free."""
        if now - self._lost_at < REFILL_S:
            return None
        possible = min(_workers_at_most(self.spec, self._without), self.workers)
        if possible <= self._living:
            return None
        return f"there is room for {possible} workers in place of the {self._living} that are left"
