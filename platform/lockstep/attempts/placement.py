"""Where the workers of an attempt run: how many, and on which nodes. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from lockstep.attempts import problems
from lockstep.spec.fields import Spec

NODE_ID = "ray.io/node-id"
"""Ray's label for the id of a node."""


class WorkerPlacement(NamedTuple):
    """`workers` workers with the resources `each`, on any node but the `unfit` ones."""

    workers: int
    each: dict[str, float]
    fit: frozenset[str]
    """Nodes that are alive and will stay."""
    unfit: frozenset[str]


def anywhere_but(nodes: Collection[str]) -> dict[str, str] | None:
    """Ray's selector of all nodes but these. Ray would still place workers on a dead node that it has not noticed yet."""
    return {NODE_ID: f"!in({','.join(sorted(nodes))})"} if nodes else None


def room_for(each: Mapping[str, float], resources: Mapping[str, float]) -> int:
    """How many workers with the resources `each` fit into these resources."""
    return min(int(resources.get(kind, 0.0) / amount + 1e-9) for kind, amount in each.items())


def nodes_for(
    placement: WorkerPlacement, free: Mapping[str, Mapping[str, float]]
) -> list[dict[str, str]] | None:
    """Ray's selector of one node for each worker, by what is free on the nodes: those with the most room, as few as hold the workers.

    None if there is no room for all of them.
    """
    room = {node: room_for(placement.each, free[node]) for node in free.keys() & placement.fit}
    nodes: list[str] = []
    for node in sorted(room, key=lambda node: (-room[node], node)):
        nodes += [node] * min(room[node], placement.workers - len(nodes))
    return [{NODE_ID: node} for node in nodes] if len(nodes) == placement.workers else None


def rooms_for_more(
    most: int,
    each: Mapping[str, float],
    free: Mapping[str, Mapping[str, float]],
    vacant: Mapping[int, str],
    fit: Collection[str],
) -> list[tuple[str, int | None]]:
    """Where up to `most` more workers could run now: a node each, with the index of the bundle that a lost worker left there, if any.

    `vacant` has the node of each such bundle, and `free` what else is free. Only nodes in `fit` count; those with the most room come first.
    """
    slots: list[tuple[str, int | None]] = [
        (node, index) for index, node in sorted(vacant.items()) if node in fit
    ]
    room = {node: room_for(each, free[node]) for node in free.keys() & set(fit)}
    for node in sorted(room, key=lambda node: (-room[node], node)):
        slots += [(node, None)] * room[node]
    return slots[: max(0, most)]


def each_of(spec: Spec, resources: Mapping[str, float]) -> dict[str, float]:
    """The resources of one worker in a cluster with these resources."""
    workers = spec.workers
    gpus = float(resources.get("GPU", 0.0) >= 1) if workers.gpus_each == "auto" else float(workers.gpus_each)
    return {"CPU": float(workers.cpus_each)} | ({"GPU": gpus} if gpus else {})


def most_of(spec: Spec) -> int:
    """The most workers that a run can use."""
    return min(spec.workers.max, spec.batch.micro_batches)


def total(nodes: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The resources of all these nodes together."""
    totals: dict[str, float] = {}
    for resources in nodes:
        for kind, amount in resources.items():
            totals[kind] = totals.get(kind, 0.0) + amount
    return totals


def room_on(each: Mapping[str, float], nodes: Iterable[Mapping[str, float]]) -> int:
    """How many workers with the resources `each` fit on nodes with these resources: none is on two of them."""
    return sum(room_for(each, resources) for resources in nodes)


def fit_workers(spec: Spec, nodes: Sequence[Mapping[str, float]]) -> tuple[int, dict[str, float]]:
    """How many workers fit on nodes with these resources, and the resources of each worker. SpecError for fewer than `workers.min`."""
    resources = total(nodes)
    limits, each = spec.workers, each_of(spec, resources)
    fit = room_on(each, nodes)
    workers = min(most_of(spec), fit)
    if workers < limits.min:
        have = ", ".join(f"{resources.get(kind, 0.0):g} {kind}" for kind in each)
        need = ", ".join(f"{amount:g} {kind}" for kind, amount in each.items())
        split = f" on its {len(nodes)} nodes" if fit < room_for(each, resources) else ""
        raise problems.TOO_SMALL(got=limits.min, need=need, have=have, fit=f"{fit}{split}")
    return workers, each
