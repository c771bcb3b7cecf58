"""What an attempt is told to do as the cluster around it changes, from what Ray says of its nodes."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.attempts import cluster_capacity, resizing
from lockstep.attempts.placement import WorkerPlacement
from lockstep.attempts.resizing import Advice, Resizing
from lockstep.spec.loading import load_spec


class Nodes:
    """A cluster as Ray tells of it: what each node has and what is free there, which nodes answer, and which are to go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **has: dict[str, float]) -> None:
        self.has, self.free = has, {node: dict(resources) for node, resources in has.items()}
        self.answer, self.to_go = set(has), dict[str, float]()
        monkeypatch.setattr(
            cluster_capacity, "ray", SimpleNamespace(nodes=self._nodes, available_resources=self._available)
        )
        monkeypatch.setattr(cluster_capacity, "free_resources", lambda: self.free)
        for module in (cluster_capacity, resizing):
            monkeypatch.setattr(module, "draining", lambda: self.to_go)
        monkeypatch.setattr(cluster_capacity, "answers", lambda node: node["NodeID"] in self.answer)
        monkeypatch.setattr(resizing, "RoomRequest", NoRequest)
        monkeypatch.setattr(resizing, "LOOK_S", 0.0)

    def _nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": node, "Alive": True, "Resources": resources} for node, resources in self.has.items()
        ]

    def _available(self) -> dict[str, float]:
        found = Counter[str]()
        for free in self.free.values():
            found.update(free)
        return dict(found)


class NoRequest:
    def want(self, *_: Any) -> None: ...


def spec(**workers: Any) -> Any:
    return load_spec({"job": {"use": "a:B"}, "batch": {"global": 64, "micro": 8}, "workers": workers})


def member(node: str) -> Any:
    return SimpleNamespace(node=node)


def watch(spec: Any, workers: int, **each: float) -> Resizing:
    return Resizing(spec, WorkerPlacement(workers, each, frozenset(), frozenset()))


def test_a_node_that_is_gone_without_ray_knowing_ends_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes that answer have no room for `workers.min` then; until Ray notices the loss, the attempt is left alone."""
    nodes = Nodes(monkeypatch, a={"CPU": 2.0}, b={"CPU": 2.0}, c={"CPU": 2.0})
    nodes.free = {"a": {}, "b": {}, "c": {"CPU": 2.0}}
    nodes.to_go["c"] = time.time() + 100
    attempt = watch(spec(min=2, max=4, cpus_each=2), 2, CPU=2.0)
    members = [member("a"), member("b")]
    assert attempt.advice(members) == Advice()
    nodes.answer.discard("a")
    assert attempt.advice(members) == Advice()


def test_room_that_no_single_node_has_is_no_room_to_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """One CPU is left on each of two nodes, of which a worker needs two; the control is a node with two."""
    monkeypatch.setattr(resizing, "STEADY_S", 0.0)
    nodes = Nodes(monkeypatch, a={"CPU": 3.0}, b={"CPU": 3.0}, c={"CPU": 2.0})
    nodes.free = {"a": {"CPU": 1.0}, "b": {"CPU": 1.0}, "c": {}}
    attempt = watch(spec(min=2, max=4, cpus_each=2), 2, CPU=2.0)
    members = [member("a"), member("b")]
    assert attempt.advice(members) == Advice()
    nodes.free["c"] = {"CPU": 2.0}
    assert attempt.advice(members) == Advice(move="there is room for 3 workers, 1 more")
