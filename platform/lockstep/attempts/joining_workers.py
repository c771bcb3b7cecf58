"""Workers that join an attempt while it trains: actors beside Ray Train's group, which knows nothing of them.

Each has a process of its own. It builds the run, waits to be let in, receives the state from a worker,
and then trains like any other. It ends with the attempt.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.runtime_env import RuntimeEnv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from lockstep.clusters.background import in_background


class JoiningWorkerPlace(NamedTuple):
    """Where a joining worker runs: on a node, in the `bundle` of Ray Train's placement group that a lost worker left there, or in free resources."""

    node: str
    bundle: int | None = None


class JoiningWorker:
    """The actor of a joining worker."""

    def train(self, config: dict[str, Any], number: int, node: str | None) -> None:
        """Run `worker_main.joining_worker_main`."""
        from lockstep.attempts.worker_main import joining_worker_main

        joining_worker_main(config, number, node)


class JoiningWorkers:
    """The joining workers of one attempt. `lost` is called with the number of one whose process is gone, and why, in a thread of its own."""

    def __init__(self, config: dict[str, Any], lost: Callable[[int, str], object]) -> None:
        self._config, self._lost = config, lost
        self._actors: dict[int, Any] = {}
        """The actors that are not known to have ended, by number."""
        self.places: dict[int, JoiningWorkerPlace] = {}
        self.failed: dict[int, str] = {}
        """The errors of those that ended by themselves, by number."""
        self._lock = threading.Lock()

    def start(
        self,
        places: Mapping[int, JoiningWorkerPlace],
        each: Mapping[str, float],
        runtime_env: str,
        group: Any,
        names: Mapping[str, str],
    ) -> None:
        """Start a joining worker at each of these places, by number. Each gets the resources `each` and the other workers' runtime environment, as Ray writes it.

        `group` is Ray Train's placement group. `names` names the nodes whose load nobody samples yet.
        """
        unsampled = dict(names)
        for number, location in places.items():
            where: Any = NodeAffinitySchedulingStrategy(location.node, soft=False)
            if location.bundle is not None:
                where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=location.bundle)
            remote = ray.remote(num_cpus=each["CPU"], num_gpus=each.get("GPU", 0.0), max_restarts=0)(
                JoiningWorker
            )
            environment = RuntimeEnv.deserialize(runtime_env)
            actor = remote.options(scheduling_strategy=where, runtime_env=environment).remote()
            with self._lock:
                self._actors[number], self.places[number] = actor, location
            work = actor.train.remote(self._config, number, unsampled.pop(location.node, None))
            in_background(self._await, number, work, name="lockstep-joining_worker")

    def living(self) -> frozenset[int]:
        """The numbers of the joining workers that are not known to have ended."""
        with self._lock:
            return frozenset(self._actors)

    def end(self, numbers: Sequence[int] | None = None) -> None:
        """Kill the joining workers with these numbers, or all."""
        with self._lock:
            ended = [
                self._actors.pop(number)
                for number in (list(self._actors) if numbers is None else numbers)
                if number in self._actors
            ]
        for actor in ended:
            ray.kill(actor)

    def _await(self, number: int, work: Any) -> None:
        try:
            ray.get(work)
        except ray.exceptions.RayTaskError as error:  # its own error, which it has reported if it was let in
            self.failed[number] = str(error.cause)
        except ray.exceptions.RayError as error:
            if self._gone(number):  # not killed here
                self._lost(number, str(error))
        self._gone(number)

    def _gone(self, number: int) -> bool:
        with self._lock:
            return self._actors.pop(number, None) is not None
