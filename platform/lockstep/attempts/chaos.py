"""Kills parts of a run on purpose, to test an installation: `--chaos "worker:0.02,node:0.005"`.

A rate is the chance of one kill at each step. The run's seed decides what is killed at which step.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from lockstep.attempts import problems
from lockstep.attempts.failed_nodes import node_label
from lockstep.clusters.background import in_background, leaving
from lockstep.record.events.union import Joined

TARGETS = ("worker", "node", "recorder", "driver")
LONGEST_DELAY_S = 1.0
"""A kill comes at a random moment within so many seconds after its step was seen."""


def parse(text: str) -> dict[str, float]:
    """Rates by target. SpecError for anything else."""
    rates = {}
    for entry in text.split(","):
        target, _, rate = entry.strip().partition(":")
        try:
            rates[target] = float(rate)
        except ValueError:
            rates[target] = -1.0
        if target not in TARGETS or not 0.0 <= rates[target] <= 1.0:
            raise problems.CHAOS(got=entry.strip(), wanted=", ".join(TARGETS))
    return rates


def due(rates: Mapping[str, float], seed: int, attempt: int, step: int) -> list[str]:
    """What to kill after a step of an attempt. Another attempt that takes the step again draws anew."""
    draw = random.Random(f"{seed}/{attempt}/{step}")
    return [target for target, rate in sorted(rates.items()) if draw.random() < rate]


class Chaos:
    """Kills parts of one run, and reports each kill to `say`."""

    def __init__(self, rates: Mapping[str, float], seed: int, say: Callable[[str], None]) -> None:
        self._rates, self._seed, self._say = rates, seed, say
        self._last_look: tuple[int, int] | None = None

    def look(
        self, attempt: int, step: int, members: Callable[[], Sequence[Joined]], recorder: Callable[[], Any]
    ) -> None:
        """Called when an attempt is seen at a step: kill what is due after it, and after the steps since the last look."""
        first = (
            self._last_look[1] + 1 if self._last_look is not None and self._last_look[0] == attempt else step
        )
        self._last_look = attempt, step
        for number in range(first, step + 1):
            for target in due(self._rates, self._seed, attempt, number):
                draw = random.Random(f"{self._seed}/{attempt}/{number}/{target}")
                in_background(self._kill, target, list(members()), recorder(), draw, name="lockstep-chaos")

    def _kill(self, target: str, members: Sequence[Joined], recorder: Any, draw: random.Random) -> None:
        if leaving.wait(draw.uniform(0.0, LONGEST_DELAY_S)):
            return  # the run is over
        driver_node = ray.get_runtime_context().get_node_id()
        if target == "node":
            members = [
                member for member in members if member.node != driver_node
            ]  # killing the driver's node would kill the driver
        if target == "driver":
            self._say("chaos: the driver is killed")
            os.kill(os.getpid(), signal.SIGKILL)
        elif target == "recorder":
            self._say("chaos: the recorder is killed")
            ray.kill(recorder)
        elif members:
            member = draw.choice(members)
            name = node_label(member.node) if target == "node" else f"rank {member.rank}"
            self._say(f"chaos: {name} is killed")
            affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(member.node, soft=False)
            kill = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=affinity)(kill_here)
            kill.remote(None if target == "node" else member.pid)  # its answer may be lost with its node


def kill_here(pid: int | None) -> None:
    """Send SIGKILL to a process on this node or, without a pid, to the node's raylet."""
    os.kill(node_here() if pid is None else pid, signal.SIGKILL)


def node_here() -> int:
    """The process of this node's raylet. It is no forked worker's parent."""
    return int(os.environ.get("RAY_RAYLET_PID") or os.getppid())
