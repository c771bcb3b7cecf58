"""Which nodes get no more workers of a run."""

from __future__ import annotations

from lockstep.attempts.failed_nodes import FailedNodes


def test_a_node_whose_devices_fail_twice_is_left_out() -> None:
    nodes = FailedNodes()
    assert nodes.failed(["a"]) == frozenset()
    assert nodes.failed(["b", "b"]) == frozenset()  # two ranks of one attempt are one failure
    assert nodes.failed(["a"]) == {"a"}
    assert nodes.failed(["a"]) == frozenset()  # told once
    assert nodes.left_out == {"a"}


def test_a_node_that_had_wrong_bits_is_left_out_at_once() -> None:
    nodes = FailedNodes()
    nodes.failed(["b"])
    assert nodes.computed_wrong(["a"]) == {"a"}
    assert nodes.computed_wrong(["a"]) == frozenset()
    assert nodes.left_out == {"a"}
