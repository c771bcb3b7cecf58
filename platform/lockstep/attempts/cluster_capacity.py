"""What room a cluster has for workers, which of its nodes are being drained, and what its autoscaler may add."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray

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
from lockstep.spec.fields import Spec


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


def workers_at_most(spec: Spec, without: frozenset[str]) -> int:
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
    excluded = {*draining(), *without}
    fit = {
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in excluded and answers(node)
    }
    return rooms_for_more(most, each, free_resources(), vacant, fit)


def room(spec: Spec, workers: int, each: Mapping[str, float]) -> int:
    """How many workers a run with `workers` could have, by what is free on the nodes."""
    free = [ray.available_resources()] if unavailable("nodes") else list(free_resources().values())
    return max(workers, min(most_of(spec), workers + room_on(each, free)))
