"""Whether there is memory for a second process of the run beside this one: on the GPU, on the machine, and in the control groups that bound a container."""

from __future__ import annotations

import resource

import psutil  # type: ignore[import-untyped]
import torch

from lockstep.training.observe.memory_limits import group_limits

CONTEXT_BYTES = 1 << 30
"""What a process takes of a GPU's memory before its first tensor: context, kernels, and the workspaces of cuBLAS."""

LEFT_FREE = 20
"""One part in so many of all memory stays free: a node or container that is nearly full has its processes killed, by the kernel or by Ray."""


def lacking_memory(device: torch.device) -> str:
    """Why there is no room for a process that takes as much as this one has at most; empty where there is."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if free < (wanted := torch.cuda.max_memory_reserved(device) + CONTEXT_BYTES):
            return f"it wants {_mb(wanted)} of the GPU's memory, of which {_mb(free)} are free"
    wanted = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    free = min(
        [_of_machine(), *(limit.bound - limit.bound // LEFT_FREE - limit.used for limit in group_limits())]
    )
    return (
        f"it wants {_mb(wanted)} of memory, of which {_mb(max(0, free))} can be had" if free < wanted else ""
    )


def _of_machine() -> int:
    memory = psutil.virtual_memory()
    return int(memory.available - memory.total // LEFT_FREE)


def _mb(size: int) -> str:
    return f"{size / 1e6:.0f} MB"
