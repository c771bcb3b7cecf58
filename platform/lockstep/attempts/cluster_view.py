"""What a supervisor meets on its cluster: room, the workers of an attempt, the nodes around them, and where others see the run.

They are handed to it, so that it can be driven without a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lockstep.attempts.cluster_capacity import find_place
from lockstep.attempts.first_placement import Say, first_place, next_place
from lockstep.attempts.hung_workers import end_with_stacks
from lockstep.attempts.node_health import fleet_health
from lockstep.attempts.placement import WorkerPlacement
from lockstep.attempts.planned_change import Members, joining_workers_for
from lockstep.attempts.ray_metrics import Gauges
from lockstep.attempts.resizing import Resizing
from lockstep.attempts.worker_group import WorkerGroup
from lockstep.checks.machine_health import Health
from lockstep.clusters.run_registry import RunRegistry
from lockstep.driver.signals import StopSignal
from lockstep.record.events.union import Joined
from lockstep.spec.fields import Spec


class ClusterView(NamedTuple):
    """By default, those of the Ray cluster that this process is connected to."""

    first_place: Callable[[Spec, StopSignal, Say], WorkerPlacement] = first_place
    next_place: Callable[[Spec, frozenset[str], StopSignal, Say], WorkerPlacement] = next_place
    find_place: Callable[[Spec, frozenset[str]], WorkerPlacement] = find_place
    workers: Callable[..., WorkerGroup] = WorkerGroup
    watch: Callable[[Spec, WorkerPlacement, frozenset[str]], Resizing] = Resizing
    run_registry: Callable[[str, str, float], RunRegistry] = RunRegistry
    gauges: Callable[[str], Gauges] = Gauges
    start_joining: Callable[..., Members | None] = joining_workers_for
    health: Callable[[Spec], list[Health]] = fleet_health
    end_workers: Callable[[Sequence[Joined]], str] = end_with_stacks


ON_RAY = ClusterView()
