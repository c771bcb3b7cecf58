"""What a node is busy with: processor, memory, disk, network and GPU, sampled by a thread that sleeps nearly always."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

EVERY_S = 10.0
"""How often a node is sampled."""


@contextmanager
def sampled(tell: Callable[[Mapping[str, float]], None], every_s: float = EVERY_S) -> Iterator[None]:
    """Sample this node while the block runs; `tell` is called from a thread."""
    over = threading.Event()

    def watch() -> None:
        sampler = Sampler()  # here: psutil keeps the processor's times of each thread apart
        while not over.wait(every_s):
            tell(sampler.sample())

    thread = threading.Thread(target=watch, name="lockstep-system", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Sampler:
    """Rates are means since the sample before."""

    def __init__(self) -> None:
        import psutil  # type: ignore[import-untyped]

        self._psutil = psutil
        self._at = time.monotonic()
        self._before = self._counters()
        psutil.cpu_percent()

    def sample(self) -> dict[str, float]:
        """Figures of this moment, by the names under which MLflow knows them."""
        memory = self._psutil.virtual_memory()
        now, counters = time.monotonic(), self._counters()
        seconds = max(now - self._at, 1e-9)
        rates = {name: (counters[name] - self._before.get(name, 0.0)) / seconds for name in counters}
        self._at, self._before = now, counters
        return {
            "cpu_utilization_percentage": float(self._psutil.cpu_percent()),
            "system_memory_usage_megabytes": memory.used / 1e6,
            "system_memory_usage_percentage": float(memory.percent),
            **rates,
            **_gpu_memory(),
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


def _gpu_memory() -> dict[str, float]:
    """Of the GPUs, where this process uses them; asking would begin CUDA elsewhere."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    found = {}
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        found[f"gpu_{number}_memory_usage_megabytes"] = (total - free) / 1e6
        found[f"gpu_{number}_memory_usage_percentage"] = 100 * (total - free) / total
    return found
