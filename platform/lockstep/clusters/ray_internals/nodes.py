"""What Ray knows of its nodes beyond `ray.nodes()`. See `unavailable`."""

from __future__ import annotations

from collections.abc import Mapping

import ray

from lockstep.clusters import problems


def draining_nodes() -> dict[str, int]:
    """The nodes that are to go, with their deadlines in Unix milliseconds, 0 if unknown."""
    return dict(ray._private.state.state.get_draining_nodes() or {})


def largest_cluster() -> dict[str, float] | None:
    """The resources of the cluster once its autoscaler has added all the nodes it may; None without an autoscaler."""
    resources: dict[str, float] | None = ray._private.state.state.get_max_resources_from_cluster_config()
    return resources


def drain(node: str, why: str, deadline_ms: int) -> None:
    """Drain a node by `deadline_ms` (Unix milliseconds; 0 if unknown). ClusterError where the cluster refuses.

    It does what `ray drain-node` does for a preempted node.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated import autoscaler_pb2

    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, problem = client.drain_node(node, reason, why, deadline_ms)
    if not accepted:
        raise problems.NOT_DRAINED(node=node[:12], got=problem)


def free_resources() -> dict[str, Mapping[str, float]]:
    """What is free on each node."""
    return dict(ray._private.state.available_resources_per_node())
