"""Several Ray nodes on this machine, each a target: their raylets, and what runs on them, can be killed one by one."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from lockstep.clusters.authentication import LOOPBACK_ONLY
from lockstep.clusters.ray_internals.address_file import default_folder
from lockstep.clusters.ray_settings import RAY_SETTINGS
from lockstep.training.worker_environment import WORKER_ENVIRONMENT
from tests.processes import named

ENVIRONMENT = RAY_SETTINGS | WORKER_ENVIRONMENT | LOOPBACK_ONLY | {"RAY_AUTH_MODE": "disabled"}
"""Of the nodes and of every driver."""


class Nodes:
    """A head without workers, to which drivers belong, and nodes of one CPU each, on loopback addresses of their own."""

    def __init__(self, cluster: Any, count: int) -> None:
        self.cluster = cluster
        self.nodes: list[Any] = []
        self._added = 0
        for _ in range(count):
            self.add()

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self) -> None:
        """One more node."""
        self._added += 1
        self.nodes.append(
            self.cluster.add_node(
                wait=False,
                num_cpus=1,
                object_store_memory=100 * 1024 * 1024,
                node_ip_address=f"127.0.0.{1 + self._added}",
            )
        )

    def workers(self, node: Any) -> list[psutil.Process]:
        """The processes of workers on a node: Ray Train's, and those that have joined."""
        return self.named(node, "RayTrainWorker") + self.named(node, "JoiningWorker")

    def busy(self) -> list[Any]:
        """The nodes with workers."""
        return [node for node in self.nodes if self.workers(node)]

    def recorders(self) -> list[psutil.Process]:
        """The recorder's process, on the driver's node."""
        return self.named(self.cluster.head_node, "RecorderActor")

    def named(self, node: Any, name: str) -> list[psutil.Process]:
        """The processes of actors of this class on a node."""
        raylet = node.all_processes["raylet"][0].process.pid
        return named(f"ray::{name}", among=psutil.Process(raylet).children(recursive=True))

    def kill(self, node: Any) -> None:
        """SIGKILL to the raylet; its workers end with it."""
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)


@contextmanager
def started(count: int) -> Iterator[Nodes]:
    """So many nodes beside the head; Ray adds nodes on the main thread alone."""
    set_before = ENVIRONMENT.items() <= os.environ.items()
    assert set_before or "ray" not in sys.modules, "Ray reads its environment as it is imported"
    os.environ |= ENVIRONMENT
    from ray.cluster_utils import Cluster

    default_folder().mkdir(parents=True, exist_ok=True)  # Ray notes the address there, and does not make it
    # Not under pytest's own folder: the paths of Ray's sockets must stay short.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "temp_dir": folder,
                "include_dashboard": False,
                "node_ip_address": "127.0.0.1",
                "object_store_memory": 100 * 1024 * 1024,
            },
        )
        try:
            nodes = Nodes(cluster, count)
            cluster.wait_for_nodes()
            yield nodes
        finally:
            cluster.shutdown()
