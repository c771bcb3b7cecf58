"""The watchdog: it ends an attempt that makes no progress, once the stacks of its ranks are recorded.

A rank that hangs keeps all others waiting in their next collective, and the process group itself would wait a
quarter of an hour. Progress is a step, a micro-batch of an evaluation, or a second of waiting for a save.
The first step of an attempt has its own limit, because preparing data may take an hour.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache

import psutil  # type: ignore[import-untyped]
import ray

from lockstep.attempts import problems
from lockstep.attempts.restart_stages import underway
from lockstep.driver.hang_limit import Patience
from lockstep.driver.stacks import await_stacks, stacks_in, write_stacks_on_signal
from lockstep.errors import SilentError
from lockstep.process import started
from lockstep.record.events.union import Joined


def hung(patience: Patience, stage_ends: Mapping[str, float], stacks_file: str) -> SilentError:
    """The error of an attempt that was ended because it hung. `stacks_file` is the file of its record with the stacks; empty if there are none."""
    seconds = f"{patience.bound_s:.0f}"
    where = f"what each was doing is in {stacks_file}" if stacks_file else ""
    if patience.begun:
        return problems.NO_PROGRESS(seconds=seconds, where=where)
    return problems.NO_FIRST_STEP(seconds=seconds, stage=underway(stage_ends), where=where)


@cache
def listening(rank: int) -> Joined:
    """Make this process write the stacks of all its threads on SIGUSR1, even where python itself no longer runs. Returns what identifies it."""
    path = write_stacks_on_signal()
    context = ray.get_runtime_context()
    return Joined(
        rank,
        context.get_node_id(),
        os.getpid(),
        path,
        context.get_runtime_env_string(),
    )


def end_with_stacks(members: Sequence[Joined]) -> str:
    """Kill these workers, each from its own node. Returns what each was doing."""
    by_node: dict[str, list[Joined]] = {}
    for member in members:
        by_node.setdefault(member.node, []).append(member)
    calls = []
    for node, node_members in by_node.items():
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        remote = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=affinity)(end_here)
        calls.append(remote.remote(node_members))
    stacks: dict[int, str] = {}
    for call in calls:
        with suppress(ray.exceptions.RayError):  # if a node is gone, so are its workers
            stacks |= ray.get(call, timeout=30.0)
    return "\n\n".join(f"--- rank {rank}: {stack}" for rank, stack in sorted(stacks.items()))


def end_here(members: Sequence[Joined]) -> dict[int, str]:
    """Make the workers on this node write their stacks, then kill them. Returns the stacks by rank."""
    for member in members:
        with suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGUSR1)
    await_stacks([member.stacks_file for member in members if started(member.pid)])
    stacks = {member.rank: _stacks_of(member) for member in members}
    for member in members:
        with suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGKILL)
        member.stacks_file.unlink(missing_ok=True)
    return stacks


def _stacks_of(member: Joined) -> str:
    try:
        state = psutil.Process(member.pid).status()
    except psutil.NoSuchProcess:
        return f"process {member.pid} is gone"
    return f"process {member.pid}, {state}\n{stacks_in(member.stacks_file)}"
