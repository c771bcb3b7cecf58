"""The load of a node where there is no NVML: what torch says of the GPUs that this process uses."""

from __future__ import annotations

import pytest
import torch

from lockstep.record import system_metrics
from lockstep.record.system_metrics import Gpus


def test_without_nvml_no_gpu_is_asked_that_this_process_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking a GPU opens a context there, which takes its memory from the process that uses it."""
    asked = []

    def memory_of(number: int) -> tuple[int, int]:
        asked.append(number)
        return 30_000_000, 40_000_000

    monkeypatch.setattr(system_metrics, "nvml", lambda: (None, "none"))
    gpus = Gpus()
    assert gpus.sample() == {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda number: 1000 * (number == 2))
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory_of)
    assert gpus.sample() == {"gpu_2_memory_usage_megabytes": 10.0, "gpu_2_memory_usage_percentage": 25.0}
    assert asked == [2]
