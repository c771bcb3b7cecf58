"""The memory that tensors take, as torch's own allocator reports it: on a CPU, every block that it gives and takes back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C._autograd import DeviceType, _disable_profiler, _enable_profiler, _prepare_profiler
from torch._C._profiler import ProfilerActivity, ProfilerConfig, ProfilerState, _ExperimentalConfig


class LiveBytes:
    """What was allocated while it was counted, beyond what was there before: `peak` the most at a time, `left` at the end."""

    def __init__(self) -> None:
        self.peak = self.left = 0


@contextmanager
def counted(device: str = "cpu") -> Iterator[LiveBytes]:
    """Count the bytes of live tensors of this process, those of backward and of DDP's buckets among them.

    What was there before and is freed meanwhile counts as freed on CUDA, and is not seen on a CPU.
    `torch.profiler.profile` reports the same, but takes half a minute to make tables of all operators.
    """
    if device == "cuda":
        yield from _on_cuda()
    else:
        yield from _on_cpu()


def _on_cuda() -> Iterator[LiveBytes]:
    found, before = LiveBytes(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    yield found
    found.peak = torch.cuda.max_memory_allocated() - before
    found.left = torch.cuda.memory_allocated() - before


def _on_cpu() -> Iterator[LiveBytes]:
    found, activities = LiveBytes(), {ProfilerActivity.CPU}
    config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig())
    _prepare_profiler(config, activities)
    _enable_profiler(config, activities)
    try:
        yield found
    finally:
        every = _disable_profiler().events()
    for event in sorted((one for one in every if one.name() == "[memory]"), key=lambda one: one.start_ns()):
        if event.device_type() == DeviceType.CPU:
            found.left += event.nbytes()
            found.peak = max(found.peak, found.left)
