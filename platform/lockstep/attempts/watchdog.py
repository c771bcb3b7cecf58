"""The watchdog: it ends an attempt that makes no progress, once the stacks of its ranks are recorded.

A rank that hangs keeps all others waiting in their next collective, and the process group itself would wait a
quarter of an hour. Progress is a step, a micro-batch of an evaluation, or a second of waiting for a save.
The first step of an attempt has its own limit, because preparing data may take an hour.
"""

from __future__ import annotations

import atexit
import faulthandler
import math
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import ray

from lockstep.files import own_folder
from lockstep.record.events import Joined

TIMES_THE_LONGEST = 20.0
"""A silence may last so many times the longest one so far."""

STACKS_S = 3.0
"""How long a rank may take to write its stacks; one that is stopped or gone never does."""


class Patience:
    """How long an attempt may be silent: `start_s` until its first step, then a multiple of its longest silence, at least `floor_s`. In seconds."""

    def __init__(self, floor_s: float, start_s: float) -> None:
        self.floor_s, self.start_s = floor_s, start_s
        self._longest_s = 0.0
        self._seen = 0
        self._since: float | None = None

    @property
    def begun(self) -> bool:
        """Whether the attempt has done its first step."""
        return self._seen > 0

    @property
    def bound_s(self) -> float:
        """The silence that is too long, in seconds."""
        return max(self.floor_s, TIMES_THE_LONGEST * self._longest_s) if self.begun else self.start_s

    def silent_s(self, alive: int, now: float) -> float:
        """Seconds since the last sign of life. The count `alive` grows with every sign, and is 0 before the first step."""
        if self._since is None:
            self._since = now
        if alive != self._seen:
            if self._seen and alive > self._seen:
                self._longest_s = max(self._longest_s, now - self._since)
            self._seen, self._since = alive, now
        return now - self._since

    def is_over(self, alive: int, now: float) -> bool:
        """Whether the attempt is considered hung."""
        return self.silent_s(alive, now) > self.bound_s


@cache
def listening(rank: int, imported_at: float = math.inf) -> Joined:
    """Make this process write the stacks of all its threads on SIGUSR1, even where python itself no longer runs. Returns what identifies it."""
    path = _stacks_file()
    stream = path.open("x", encoding="utf-8")  # open as long as the process lives
    atexit.register(path.unlink, missing_ok=True)
    faulthandler.register(signal.SIGUSR1, file=stream, all_threads=True)
    context = ray.get_runtime_context()
    return Joined(
        rank,
        context.get_node_id(),
        os.getpid(),
        path,
        imported_at,
        context.get_runtime_env_string(),
    )


def _stacks_file() -> Path:
    """The file of this process in the user's own temporary folder. Deletes the files of processes that are gone."""
    folder = own_folder(Path(tempfile.gettempdir()))
    for path in folder.glob("stacks-*.txt"):
        pid = path.stem.removeprefix("stacks-")
        if pid == str(os.getpid()) or (pid.isdigit() and not psutil.pid_exists(int(pid))):
            path.unlink(missing_ok=True)
    return folder / f"stacks-{os.getpid()}.txt"


def end(members: Sequence[Joined]) -> str:
    """Kill these workers, each from its own node. Returns what each was doing."""
    by_node: dict[str, list[Joined]] = {}
    for member in members:
        by_node.setdefault(member.node, []).append(member)
    calls = []
    for node, own in by_node.items():
        there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        remote = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(end_here)
        calls.append(remote.remote(own))
    found: dict[int, str] = {}
    for call in calls:
        with suppress(ray.exceptions.RayError):  # if a node is gone, so are its workers
            found |= ray.get(call, timeout=30.0)
    return "\n\n".join(f"--- rank {rank}: {stack}" for rank, stack in sorted(found.items()))


def end_here(members: Sequence[Joined]) -> dict[int, str]:
    """Make the workers on this node write their stacks, then kill them. Returns the stacks by rank."""
    for member in members:
        with suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGUSR1)
    time.sleep(STACKS_S)
    found = {member.rank: _stacks_of(member) for member in members}
    for member in members:
        with suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGKILL)
        member.stacks_file.unlink(missing_ok=True)
    return found


def _stacks_of(member: Joined) -> str:
    try:
        state = psutil.Process(member.pid).status()
    except psutil.NoSuchProcess:
        return f"process {member.pid} is gone"
    stacks = (
        member.stacks_file.read_text(encoding="utf-8", errors="replace")
        if member.stacks_file.exists()
        else ""
    )
    return f"process {member.pid}, {state}\n{stacks or 'it wrote no stacks: stopped, or deaf to signals'}"
