"""An actor on which the processes of an attempt hang: a call to it never answers, and fails when one of the two ends."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import suppress
from typing import Any

import ray


class Lifeline:
    """The actor, which the driver keeps. It imports nothing that takes time."""

    async def hold(self) -> None:
        """Never returns: the call fails with the end of this actor, and for others with the end of the process that made it."""
        await asyncio.Event().wait()

    async def is_there(self) -> bool:
        """True; the call fails where the attempt is over."""
        return True


def start_lifeline() -> Any:
    """A lifeline on this node; it takes no CPU from the workers."""
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    return ray.remote(num_cpus=0, scheduling_strategy=strategy)(Lifeline).remote()


def end_with(reference: Any) -> None:
    """Have this process end with the lifeline on which it made the call `hold`, even while a thread of it hangs."""

    def wait() -> None:
        with suppress(ray.exceptions.RayError):
            ray.get(reference)
        os._exit(1)

    threading.Thread(target=wait, name="lockstep-lifeline", daemon=True).start()


def is_over(lifeline: Any) -> bool:
    """Whether the lifeline has ended."""
    try:
        ray.get(lifeline.is_there.remote())
    except ray.exceptions.RayError:
        return True
    return False
