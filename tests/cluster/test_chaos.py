"""What `--chaos node` would kill."""

from __future__ import annotations

import psutil  # type: ignore[import-untyped]
import pytest

from lockstep.attempts.chaos import node_here


@pytest.mark.scenario
def test_a_node_is_its_raylet_though_workers_are_forked(cluster: None) -> None:
    """The parent of a forked worker is the process that forks: killed was that one, and the node was told to be."""
    import ray

    assert psutil.Process(ray.get(ray.remote(num_cpus=0)(node_here).remote())).name() == "raylet"
