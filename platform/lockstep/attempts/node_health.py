"""The health of every node of a cluster, measured in actors there: all nodes at the same time, so that what they share is shared alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.attempts.shared_files import patience_s
from lockstep.checks.machine_health import Health, Link, Vitals, judged, measure, measure_link
from lockstep.clusters.bounded_calls import get_within
from lockstep.errors import first_line
from lockstep.running_time import running_s
from lockstep.spec.fields import Spec

SECONDS = 2.0
"""For which each device computes."""


class Examiner:
    """The actor on one node."""

    def clock(self) -> float:
        return time.time()

    def free_port(self) -> tuple[str, int]:
        """An address at which the others meet this one."""
        import socket

        import ray

        with socket.socket() as listening:
            listening.bind(("", 0))
            return ray.util.get_node_ip_address(), listening.getsockname()[1]

    def vitals(self, folder: str, threads: int) -> Vitals:
        return measure(Path(folder), SECONDS, threads)

    def link(self, rank: int, size: int, host: str, port: int, limit_s: float) -> Link:
        from datetime import timedelta

        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore(host, port, size, is_master=rank == 0, timeout=timedelta(seconds=limit_s))
        return measure_link(rank, size, store)


def fleet_health(spec: Spec) -> list[Health]:
    """The health of the nodes that could run workers, each by its Ray id. A node that does not answer in time is unwell."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    limit_s = patience_s(spec)
    until = running_s() + limit_s
    actors: dict[str, Any] = {}
    for node in ray.nodes():
        resources = node["Resources"]
        if node["Alive"] and resources.get("CPU", 0) > 0:
            gpus = resources.get("GPU", 0.0) if spec.workers.gpus_each != 0 else 0.0
            actors[node["NodeID"]] = (
                ray.remote(num_cpus=0, max_restarts=0)(Examiner)
                .options(
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
                    num_gpus=gpus,
                )
                .remote()
            )

    problems: dict[str, str] = {}

    def answer(call: Any) -> Any:
        return get_within(call, until - running_s())

    def answers(asked: dict[str, Callable[[], Any]]) -> dict[str, Any]:
        """What the nodes answer; of those that fail or are late, `problems` gets why."""
        answered = {}
        for name, ask in asked.items():
            try:
                answered[name] = ask()
            except ray.exceptions.RayError as error:
                problems[name] = f"it did not answer within {limit_s:g} s ({first_line(error)})"
        return answered

    try:
        started = {name: actor.clock.remote() for name, actor in actors.items()}
        ready = answers({name: partial(answer, call) for name, call in started.items()})
        clocks = answers({name: partial(_offset, actors[name], answer) for name in ready})
        storage = spec.checkpoint.storage
        folder = str(spec.folder) if "://" in storage else storage
        examined = {name: actors[name].vitals.remote(folder, spec.threads) for name in clocks}
        vitals = answers({name: partial(answer, call) for name, call in examined.items()})
        links: dict[str, Any] = {}
        if len(vitals) > 1:
            names = list(vitals)
            # A link that cannot be measured is no reason to leave a node out.
            with suppress(ray.exceptions.RayError):
                host, port = answer(actors[names[0]].free_port.remote())
                measured = {
                    name: actors[name].link.remote(rank, len(names), host, port, limit_s)
                    for rank, name in enumerate(names)
                }
                for name, call in measured.items():
                    with suppress(ray.exceptions.RayError):
                        links[name] = answer(call)
        fleet = {
            name: replace(
                vitals[name],
                clock_offset_s=clocks[name][0],
                clock_error_s=clocks[name][1],
                link=links.get(name),
            )
            if name in vitals
            else Vitals("", problem=problems[name])
            for name in actors
        }
        return judged(fleet)
    finally:
        for actor in actors.values():
            ray.kill(actor)


def _offset(actor: Any, answer: Callable[[Any], float]) -> tuple[float, float]:
    """How far a node's clock is ahead of this one's, and how far that may be off, in seconds: of five measurements, the one with the fastest answer."""
    best = (0.0, float("inf"))
    for _ in range(5):
        asked = time.time()
        node_time = answer(actor.clock.remote())
        answered = time.time()
        best = min(
            best,
            (node_time - (asked + answered) / 2, (answered - asked) / 2),
            key=lambda measurement: measurement[1],
        )
    return best
