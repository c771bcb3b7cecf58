"""An attempt through Ray's public `TorchTrainer`, for a Ray version whose private parts Lockstep does not know.

Its controller is an actor, which costs one more process and cannot be asked for its workers. So each worker holds a
lifeline: a call to an actor of the driver that never answers. When that actor is killed, the call fails and the worker
ends itself, even while its training thread hangs.
"""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import suppress
from typing import Any

import ray
from ray.train.torch import TorchTrainer

from lockstep.attempts.worker_main import worker_main


class Lifeline:
    """The actor that the workers of an attempt hold on to."""

    async def held(self) -> None:
        """Never returns: the call fails with the actor's end."""
        await asyncio.Event().wait()


def _end_with(lifeline: Any) -> None:
    with suppress(ray.exceptions.RayError):
        ray.get(lifeline.held.remote())
    os._exit(1)


def held_worker_main(config: dict[str, Any]) -> None:
    """`worker_main` in a process that ends with the lifeline."""
    threading.Thread(
        target=_end_with, args=(config["lifeline"],), name="lockstep-lifeline", daemon=True
    ).start()
    worker_main(config)


class PublicTrainer:
    """Ray's own trainer, with the methods that `DriverTrainer` has beside `fit`. `settings` are those of TorchTrainer."""

    def __init__(self, config: dict[str, Any], **settings: Any) -> None:
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        self._lifeline = ray.remote(num_cpus=0, scheduling_strategy=strategy)(Lifeline).remote()
        self._trainer = TorchTrainer(
            held_worker_main, train_loop_config={**config, "lifeline": self._lifeline}, **settings
        )

    def fit(self) -> None:
        """Train until the attempt ends. Raises Ray's error for an early end."""
        try:
            self._trainer.fit()
        finally:
            self.end_workers()

    def end_workers(self) -> None:
        """Make the current workers end themselves; the controller treats it as their loss."""
        ray.kill(self._lifeline)
