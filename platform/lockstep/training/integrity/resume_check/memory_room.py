"""Whether there is memory for a second process of the run beside this one: on the GPU, on the machine, and in the control groups that bound a container."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

CONTEXT_BYTES = 1 << 30
"""What a process takes of a GPU's memory before its first tensor: context, kernels, and the workspaces of cuBLAS."""

LEFT_FREE = 20
"""One part in so many of all memory stays free: a node or container that is nearly full has its processes killed, by the kernel or by Ray."""

_CGROUPS = Path("/sys/fs/cgroup")


def lacking_memory(device: torch.device) -> str:
    """Why there is no room for a process that takes as much as this one has at most; empty where there is."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if free < (wanted := torch.cuda.max_memory_reserved(device) + CONTEXT_BYTES):
            return f"it wants {_mb(wanted)} of the GPU's memory, of which {_mb(free)} are free"
    wanted = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    free = min(_of_machine(), *_of_groups(_CGROUPS, Path("/proc/self/cgroup")))
    return (
        f"it wants {_mb(wanted)} of memory, of which {_mb(max(0, free))} can be had" if free < wanted else ""
    )


def _of_machine() -> int:
    memory = psutil.virtual_memory()
    return int(memory.available - memory.total // LEFT_FREE)


def _of_groups(root: Path, own: Path) -> Iterator[int]:
    """What each control group of this process has left below its limit; at least one value. A container may be killed whole where it exceeds one."""
    yield 1 << 62
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
        for folder in {top, *(top / path.strip("/")).parents, top / path.strip("/")}:
            if folder.is_relative_to(top) and (left := _left(folder, limit, used)) is not None:
                yield left


def _left(folder: Path, limit: str, used: str) -> int | None:
    try:
        most, now = (folder / limit).read_text().strip(), int((folder / used).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        bound = int(most)  # "max" is no number
    except (OSError, ValueError):
        return None
    files = int(statistics.get("inactive_file", 0))  # the kernel drops these first
    return bound - bound // LEFT_FREE - now + files


def _mb(size: int) -> str:
    return f"{size / 1e6:.0f} MB"
