"""Where the next attempt's workers go: not to nodes that are gone, and to as few as hold them."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.attempts import problems
from lockstep.attempts.placement import WorkerPlacement, anywhere_but, fit_workers, nodes_for, rooms_for_more
from lockstep.errors import SpecError
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec
from tests.raised import raises


def placed(workers: int, *fit: str) -> WorkerPlacement:
    return WorkerPlacement(workers, {"CPU": 1.0}, frozenset(fit), frozenset())


def spec_with(**workers: Any) -> Spec:
    return load_spec({"job": {"use": "a:B"}, "batch": {"global": 64, "micro": 8}, "workers": workers})


def test_workers_go_to_any_node_but_these() -> None:
    assert anywhere_but(frozenset()) is None
    assert anywhere_but({"b", "a"}) == {"ray.io/node-id": "!in(a,b)"}


def test_joining_workers_go_first_where_a_lost_worker_has_left_its_place() -> None:
    """Then where most is free; to no node that goes, and to no place there."""
    free = {"a": {"CPU": 1.0}, "b": {"CPU": 2.0}, "gone": {"CPU": 8.0}}
    vacant = {3: "a", 1: "gone", 0: "b"}

    def rooms(most: int) -> list[tuple[str, int | None]]:
        return rooms_for_more(most, {"CPU": 1.0}, free, vacant, {"a", "b"})

    assert rooms(9) == [("b", 0), ("a", 3), ("b", None), ("b", None), ("a", None)]
    assert rooms(1) == [("b", 0)]
    assert rooms(0) == rooms(-1) == []


def test_each_worker_has_a_node_by_what_is_free() -> None:
    """On as few nodes as hold them, and none on a node that goes."""
    free = {
        node: {"CPU": cpus, "memory": 9.0}
        for node, cpus in {"a": 1.0, "b": 2.0, "c": 4.0, "gone": 8.0}.items()
    }

    def nodes(place: WorkerPlacement) -> str | None:
        found = nodes_for(place, free)
        return found and "".join(selector["ray.io/node-id"] for selector in found)

    assert nodes(placed(1, "a", "b", "c")) == "c"
    assert nodes(placed(5, "a", "b", "c")) == "ccccb"
    assert nodes(placed(7, "a", "b", "c")) == "ccccbba"
    assert nodes(placed(8, "a", "b", "c")) is None
    halves = placed(3, "a", "b")._replace(each={"CPU": 0.5, "memory": 4.0})
    assert nodes(halves) == "aab"


@pytest.mark.parametrize(
    ("nodes", "each", "workers"),
    [
        ([{"CPU": 16.0}, {"CPU": 4.0, "GPU": 8.0}], {"CPU": 1.0, "GPU": 1.0}, 4),  # a head without GPUs
        ([{"CPU": 3.0}, {"CPU": 3.0}], {"CPU": 2.0}, 2),
        ([{"CPU": 64.0}], {"CPU": 2.0}, 8),
    ],
)
def test_as_many_workers_are_planned_as_fit_on_the_nodes(
    nodes: list[dict[str, float]], each: dict[str, float], workers: int
) -> None:
    """Ray would wait for ever for a placement of more, though the cluster has the sum."""
    cpus = int(each["CPU"])
    assert fit_workers(spec_with(min=1, max=8, cpus_each=cpus), nodes) == (workers, each)
    free = {str(number): node for number, node in enumerate(nodes)}
    placed_there = WorkerPlacement(workers, each, frozenset(free), frozenset())
    assert nodes_for(placed_there, free)


def test_nodes_that_are_too_small_by_themselves_are_refused_in_one_line() -> None:
    with pytest.raises(SpecError) as caught:
        fit_workers(spec_with(min=3, max=8, cpus_each=2), [{"CPU": 3.0}, {"CPU": 3.0}])
    assert str(caught.value) == (
        "workers.min: got 3 workers of 2 CPU each, but the cluster has 6 CPU, enough for 2 on its 2 nodes; "
        "lower workers.min or workers.cpus_each, or add nodes"
    )
    with raises(problems.TOO_SMALL, have="4 CPU", fit=2):
        fit_workers(spec_with(min=3, max=8, cpus_each=2), [{"CPU": 2.0}, {"CPU": 2.0}])
