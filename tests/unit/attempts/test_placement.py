"""Where the next attempt's workers go: not to nodes that are gone, and first to those where processes stand by."""

from __future__ import annotations

import math
from pathlib import Path

from lockstep.attempts.placement import WorkerPlacement, anywhere_but, only_on
from lockstep.attempts.standby import Standbys
from lockstep.clusters.ray_internals.preferred_nodes import PreferredNodes
from lockstep.record.events import Joined


def standing_by(**nodes: int) -> Standbys:
    standbys = Standbys(lambda text: None)
    standbys._idle.update(nodes)
    return standbys


def placed(workers: int, *fit: str) -> WorkerPlacement:
    return WorkerPlacement(workers, {"CPU": 1.0}, frozenset(fit), frozenset())


def member(node: str, imported_at: float) -> Joined:
    return Joined(0, node, 1, Path("none"), imported_at, "")


def test_workers_go_to_any_node_but_these() -> None:
    assert anywhere_but(frozenset()) is None
    assert anywhere_but({"b", "a"}) == {"ray.io/node-id": "!in(a,b)"}


def test_workers_go_first_where_processes_stand_by() -> None:
    assert standing_by(a=1, b=2).first(placed(4, "a", "b", "c")).first == ("b", "b", "a")
    assert standing_by(a=1, b=2).first(placed(2, "a", "b", "c")).first == ("b", "b")
    assert standing_by(a=1, b=2).first(placed(4, "a", "c")).first == ("a",)  # b is gone
    assert standing_by().first(placed(4, "a")).first == ()


def test_the_first_workers_have_a_node_each_and_the_others_any() -> None:
    scaling = PreferredNodes(num_workers=3, preferred=only_on(("a", "b")))
    node = "ray.io/node-id"
    assert scaling.narrowed(None) == [{node: "a"}, {node: "b"}, {}]
    assert scaling.narrowed([{node: "!in(x)"}] * 3) == [{node: "a"}, {node: "b"}, {node: "!in(x)"}]


def test_a_worker_stood_by_if_its_imports_were_done_when_it_was_asked_for() -> None:
    """One whose imports were not is gone from those that stand by all the same."""
    standbys = standing_by(a=2, b=1)
    assert standbys.took([member("a", 9.0), member("b", 11.0), member("c", math.inf)], 10.0) == 1
    assert standbys.first(placed(3, "a", "b")).first == ("a",)
