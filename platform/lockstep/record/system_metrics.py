"""The load of a node: processor, memory, disk, network and GPU, sampled by a thread that sleeps most of the time."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

from lockstep.periodic import periodically

EVERY_S = 10.0
"""Seconds between two samples of a node."""


def sampled(
    tell: Callable[[dict[str, float]], None], every_s: float = EVERY_S
) -> AbstractContextManager[None]:
    """Sample this node while the block runs; `tell` is called from a thread with each sample."""

    def begin() -> Callable[[], None]:
        sampler = Sampler()  # made in the thread, because psutil keeps CPU times per thread
        return lambda: tell(sampler.sample())

    return periodically(begin, every_s, "lockstep-system")


class Sampler:
    """Takes samples. Rates are means since the previous sample."""

    def __init__(self) -> None:
        import psutil  # type: ignore[import-untyped]

        self._psutil = psutil
        self._gpus = Gpus()
        self._at = time.monotonic()
        self._previous = self._counters()
        psutil.cpu_percent()

    def sample(self) -> dict[str, float]:
        """The current figures, under MLflow's names."""
        memory = self._psutil.virtual_memory()
        now, counters = time.monotonic(), self._counters()
        seconds = max(now - self._at, 1e-9)
        rates = {name: (counters[name] - self._previous.get(name, 0.0)) / seconds for name in counters}
        self._at, self._previous = now, counters
        return {
            "cpu_utilization_percentage": float(self._psutil.cpu_percent()),
            "system_memory_usage_megabytes": memory.used / 1e6,
            "system_memory_usage_percentage": float(memory.percent),
            **rates,
            **self._gpus.sample(),
        }

    def _counters(self) -> dict[str, float]:
        network, disk = self._psutil.net_io_counters(), self._psutil.disk_io_counters()
        counters = {}
        if network is not None:
            counters["network_receive_megabytes_per_s"] = network.bytes_recv / 1e6
            counters["network_transmit_megabytes_per_s"] = network.bytes_sent / 1e6
        if disk is not None:
            counters["disk_read_megabytes_per_s"] = disk.read_bytes / 1e6
            counters["disk_write_megabytes_per_s"] = disk.write_bytes / 1e6
        return counters


def nvml() -> tuple[Any, str]:
    """NVIDIA's monitoring library (NVML), initialised, or None; and its version, or why there is none."""
    import pynvml  # type: ignore[import-untyped]

    try:
        pynvml.nvmlInit()
        return pynvml, str(pynvml.nvmlSystemGetNVMLVersion())
    except pynvml.NVMLError as error:  # no driver, or no permission
        return None, f"none: {error}"


class Gpus:
    """The node's GPUs. Without NVML only their memory is known, and only to a process that uses them."""

    def __init__(self) -> None:
        self._nvml, self.version = nvml()

    def sample(self) -> dict[str, float]:
        """The current figures of each GPU; what a GPU does not report is left out."""
        if self._nvml is None:
            return _memory_seen_by_torch()
        figures: dict[str, float] = {}
        for number in range(self._nvml.nvmlDeviceGetCount()):
            handle = self._nvml.nvmlDeviceGetHandleByIndex(number)
            for ask in (self._utilization, self._memory, self._power):
                with suppress(self._nvml.NVMLError):  # a slice of a GPU does not report everything
                    figures |= {f"gpu_{number}_{name}": value for name, value in ask(handle).items()}
        return figures

    def _utilization(self, handle: Any) -> dict[str, float]:
        rates = self._nvml.nvmlDeviceGetUtilizationRates(handle)
        return {"utilization_percentage": float(rates.gpu)}

    def _memory(self, handle: Any) -> dict[str, float]:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        return _memory(memory.used, memory.total)

    def _power(self, handle: Any) -> dict[str, float]:
        return {"power_usage_watts": self._nvml.nvmlDeviceGetPowerUsage(handle) / 1000}


def _memory(used: int, total: int) -> dict[str, float]:
    return {"memory_usage_megabytes": used / 1e6, "memory_usage_percentage": 100 * used / total}


def _memory_seen_by_torch() -> dict[str, float]:
    """The memory, as torch sees it, of the GPUs that this process uses; empty if it does not use CUDA, which asking would initialise."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    figures: dict[str, float] = {}
    for number in range(torch.cuda.device_count()):
        # Asking opens a context on a GPU, of hundreds of MB. The current device of this thread says nothing: each thread has its own.
        if not torch.cuda.memory_reserved(number):
            continue
        free, total = torch.cuda.mem_get_info(number)
        figures |= {f"gpu_{number}_{name}": value for name, value in _memory(total - free, total).items()}
    return figures
