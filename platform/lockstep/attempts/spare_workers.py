"""Standby workers: idle processes of Ray's own pool, started ahead with all that a worker imports.

When an attempt is lost, Ray gives its successor these processes instead of new ones: on a busy machine the start of a
process and its imports are the longest part of a restart. They hold memory (some 250 MB each) and no processor. Ray ends
them with the job.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import ray

from lockstep.attempts.cluster_watch import spare
from lockstep.attempts.placement import WorkerPlacement
from lockstep.attempts.preloaded import AHEAD
from lockstep.attempts.worker_output import keep_private
from lockstep.clusters.background import in_background
from lockstep.clusters.ray_internals import unavailable
from lockstep.clusters.ray_internals.fork_server import preloading
from lockstep.clusters.ray_internals.nodes import prestart, setup_hook
from lockstep.errors import ClusterError, first_line
from lockstep.record.events.union import Joined

IMPORTS, IMPORTED = "LOCKSTEP_IMPORTS", "LOCKSTEP_IMPORTED"


def imports_ahead(folder: str, module: str, workers: int, *, private: bool) -> dict[str, str]:
    """The environment that has a worker's process import, as it starts, what the job needs, and be ready for the connections to so many workers.

    Empty where Ray has no such way. `workers` is the most that the run may have: all its attempts need the same environment.
    With `private` only this user can read what the job prints as it is imported.
    """
    if unavailable("standbys"):
        return {}
    imports = {IMPORTS: json.dumps([folder, module, workers, private]), **preloading(AHEAD)}
    return {**setup_hook(f"{__name__}.import_ahead"), **imports}


def import_ahead() -> None:
    """Called by Ray in a process that has just started."""
    folder, module, workers, private = json.loads(os.environ[IMPORTS])
    if private:
        keep_private()
    sys.path.insert(0, folder)
    for name in AHEAD:
        importlib.import_module(name)
    from lockstep.communication.group import ensure_descriptors  # torch: not for the driver

    # Ray forms the first group before the worker's own code runs.
    with suppress(
        ClusterError
    ):  # the attempt may have fewer workers than the run's most: a worker tells it as it joins
        ensure_descriptors(workers, groups=2)
    with suppress(Exception):  # whatever is wrong with it, `load_job` tells it with its place
        importlib.import_module("lockstep.job.loading").import_job(module)
    os.environ[IMPORTED] = str(time.time())


def imported_at() -> float:
    """When this process had imported all that, in Unix seconds; infinity where it was not started for it."""
    return float(os.environ.get(IMPORTED, math.inf))


class Standbys:
    """Keeps as many standby workers on each node as an attempt has workers there, and some on a node to spare. `warn` is told once why it cannot."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._idle: Counter[str] = Counter()
        self._filled_for = 0
        self._failed = False

    def first(self, place: WorkerPlacement) -> WorkerPlacement:
        """The placement with the nodes where processes stand by as those that are tried first."""
        nodes = [node for node, idle in self._idle.most_common() for _ in range(idle) if node in place.fit]
        return place._replace(first=tuple(nodes[: place.workers]))

    def took(self, members: Sequence[Joined], asked_at: float) -> int:
        """An attempt that was asked for then has begun: how many of its workers are processes that stood by."""
        # One that was still importing is taken as well, though it saved no time.
        self._idle -= Counter(member.node for member in members)
        return sum(member.imported_at < asked_at for member in members)

    def fill(self, attempt: int, members: Sequence[Joined], each: Mapping[str, float]) -> None:
        """Have the nodes of an attempt's workers, of `each` so much, start what is missing, and one node that could take the place of another: in the background, once an attempt."""
        if attempt == self._filled_for or unavailable("standbys"):
            return
        self._filled_for = attempt
        used = Counter(member.node for member in members)
        missing = used + spare(each, used) - self._idle
        if missing and not self._failed:
            self._idle += missing
            in_background(self._start, missing, members[0].runtime_env, name="lockstep-standby")

    def _start(self, wanted: Mapping[str, int], runtime_env: str) -> None:
        addresses = {
            node["NodeID"]: f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}" for node in ray.nodes()
        }
        for node, count in wanted.items():
            try:
                prestart(addresses[node], count, runtime_env)
            except Exception as error:  # noqa: BLE001 - without them a restart takes longer, and nothing else
                self._idle[node] -= count
                if not self._failed:
                    self._failed = True
                    self._warn(
                        f"no standby workers, so that a lost one takes longer to replace: {first_line(error)}"
                    )
