"""What every node of a cluster sees of a run, checked before the run starts."""

from __future__ import annotations

from typing import Any

from lockstep.attempts.node_health import fleet_health
from lockstep.attempts.shared_files import check_shared, patience_s
from lockstep.checks.findings import Finding, advised, failure_of
from lockstep.checks.machine_health import findings as health_findings
from lockstep.checks.node_view import Sight, compared, look_from_here
from lockstep.clusters.bounded_calls import get_within
from lockstep.clusters.connection import connected
from lockstep.driver.signals import StopSignal
from lockstep.errors import LockstepError, SpecError, first_line
from lockstep.running_time import running_s
from lockstep.spec.fields import Spec


def seen_from_nodes(spec: Spec, address: str | None, *, health: bool = False) -> list[Finding]:
    """Findings of all nodes that could run workers, with their `health` on request. Raises ClusterError where the cluster does not answer."""
    with connected(address, verbose=False, for_workers=True):
        findings = []
        try:
            findings += [advised("folders", text) for text in check_shared(spec, StopSignal())]
        except SpecError as error:  # the spec may be right for another cluster
            findings.append(failure_of("folders", error))
        measured = health_findings(fleet_health(spec)) if health else []
        return [*findings, *compared(_asked(spec)), *measured]


def _asked(spec: Spec) -> dict[str, Sight]:
    """What each node sees, by its address. For a node that is lost or late, its `Sight` has that as the problem."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0, max_retries=0)(sight_of)
    refs: dict[str, Any] = {}
    for node in ray.nodes():
        resources = node["Resources"]
        if node["Alive"] and resources.get("CPU", 0) > 0:
            gpus = min(1.0, resources.get("GPU", 0.0)) if spec.workers.gpus_each != 0 else 0.0
            refs[node["NodeManagerAddress"]] = look.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False), num_gpus=gpus
            ).remote(spec.document())
    until = running_s() + patience_s(spec)
    sights = {}
    for address, answer in refs.items():
        try:
            sights[address] = get_within(answer, until - running_s())
        except ray.exceptions.RayError as error:
            line = f"it did not answer within {patience_s(spec):g} s ({first_line(error)}); look at the nodes with ray list nodes"
            sights[address] = Sight({"answer": line})
    return sights


def sight_of(document: dict[str, Any]) -> Sight:
    """Called in a process of the node: what it sees."""
    try:
        return look_from_here(Spec.model_validate(document))
    except LockstepError as error:
        return Sight({"job": str(error)})
