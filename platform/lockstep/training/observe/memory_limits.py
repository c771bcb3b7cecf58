"""The limits beyond which a process is ended or refused memory, and what is used of each: control groups, Ray's memory monitor, the machine."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]

CGROUPS = Path("/sys/fs/cgroup")
"""Where the kernel shows control groups."""

OWN_GROUPS = Path("/proc/self/cgroup")
"""Where it names those of this process."""

RAY_SHARE = 0.95
"""The share of a node's memory above which Ray's memory monitor kills workers, unless `RAY_memory_usage_threshold` names another."""


class Limit(NamedTuple):
    """A bound on memory and what is used of it, in bytes. A process beyond it is killed, or is refused memory."""

    what: str
    used: int
    bound: int

    @property
    def share(self) -> float:
        """The share that is used."""
        return self.used / self.bound if self.bound > 0 else 1.0


def killing_limits(environment: Mapping[str, str] = os.environ) -> Iterator[Limit]:
    """The limits beyond which a process is killed, without a word to it."""
    yield from group_limits()
    memory = psutil.virtual_memory()
    share = _ray_share(environment)
    what = (
        "this machine's memory"
        if share == 1.0
        else f"{share:.0%} of this node's memory, where Ray kills workers"
    )
    yield Limit(what, int(memory.total - memory.available), int(memory.total * share))


def _ray_share(environment: Mapping[str, str]) -> float:
    """The share of a node's memory that its workers may use; 1 outside of Ray, and where its monitor is off."""
    if not any(name.startswith("RAY_") for name in environment):
        return 1.0
    if environment.get("RAY_memory_monitor_refresh_ms") == "0":
        return 1.0
    try:
        return float(environment.get("RAY_memory_usage_threshold", RAY_SHARE))
    except ValueError:
        return RAY_SHARE


def address_space() -> Limit | None:
    """The limit on this process's address space (`ulimit -v`), at which an allocation fails; None without one."""
    bound, _ = resource.getrlimit(resource.RLIMIT_AS)
    if bound == resource.RLIM_INFINITY:
        return None
    return Limit("the address space of the process (ulimit -v)", psutil.Process().memory_info().vms, bound)


def group_limits(root: Path = CGROUPS, own: Path = OWN_GROUPS) -> Iterator[Limit]:
    """Of each control group of this process that has a limit: a container may be killed whole where it exceeds one."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, limit, used = (
            (root, "memory.max", "memory.current")
            if not controllers
            else (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        # In a container its own group may be shown as the root.
        for folder in sorted({top, *(top / path.strip("/")).parents, top / path.strip("/")}):
            if folder.is_relative_to(top) and (found := _limit_of(folder, limit, used)) is not None:
                yield found


def _limit_of(folder: Path, limit: str, used: str) -> Limit | None:
    try:
        most, now = (folder / limit).read_text().strip(), int((folder / used).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        bound = int(most)  # "max" is no number
    except (OSError, ValueError):
        return None
    if bound >= _NO_BOUND:
        return None
    # The kernel drops these first. In version 1 the plain names leave out the groups below, which the limit counts.
    files = int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))
    return Limit(f"the control group {str(folder)!r}", now - files, bound)


_NO_BOUND = 1 << 60
"""Version 1 writes the largest number of pages where there is no limit."""
