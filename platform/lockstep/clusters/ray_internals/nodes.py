"""What Ray knows of its nodes beyond `ray.nodes()`, and the call that starts processes ahead on a node. See `unavailable`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from lockstep.errors import ClusterError

KEEP_S = 30 * 24 * 3600
"""How long Ray keeps an idle process."""

CALL_S = 5.0
"""How long a node may take to answer."""


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
        raise ClusterError(f"leave: the cluster does not drain node {node[:12]}: {problem}")


def free_resources() -> dict[str, Mapping[str, float]]:
    """What is free on each node."""
    return dict(ray._private.state.available_resources_per_node())


def setup_hook(function: str) -> dict[str, str]:
    """The environment that makes a worker's process call `module.function` at its start."""
    from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR

    return {WORKER_PROCESS_SETUP_HOOK_ENV_VAR: function}


def prestart(address: str, count: int, runtime_env: str) -> None:
    """Make the raylet at `address` start `count` idle processes with exactly this environment, by a call of Ray's that has no Python function."""
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import common_pb2, node_manager_pb2, node_manager_pb2_grpc
    from ray.core.generated.runtime_environment_pb2 import RuntimeEnvInfo

    with init_grpc_channel(address) as channel:
        node_manager_pb2_grpc.NodeManagerServiceStub(channel).PrestartWorkers(
            node_manager_pb2.PrestartWorkersRequest(
                language=common_pb2.PYTHON,
                job_id=bytes.fromhex(ray.get_runtime_context().get_job_id()),
                runtime_env_info=RuntimeEnvInfo(serialized_runtime_env=runtime_env),
                keep_alive_duration_secs=KEEP_S,
                num_workers=count,
            ),
            timeout=CALL_S,
        )


def agents_known(head: Any) -> int:
    """How many nodes have an agent that the head node of a `ray.cluster_utils.Cluster` knows."""
    from ray._private.ray_constants import KV_NAMESPACE_DASHBOARD
    from ray.dashboard.consts import DASHBOARD_AGENT_ADDR_NODE_ID_PREFIX

    prefix = DASHBOARD_AGENT_ADDR_NODE_ID_PREFIX.encode()
    return len(head.get_gcs_client().internal_kv_keys(prefix, namespace=KV_NAMESPACE_DASHBOARD))
