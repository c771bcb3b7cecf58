"""What a process runs on: versions, machine, device and determinism flags.

These are facts to record. The host name is one of them, and never part of a run's identity.
"""

from __future__ import annotations

import os
import platform
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.record.system_metrics import nvml
from lockstep.record.versions import versions

if TYPE_CHECKING:
    import torch

_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTHONHASHSEED",
    "MKL_CBWR",
    "GLIBC_TUNABLES",
    "OMP_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
)


def environment(device: torch.device) -> dict[str, Any]:
    """Flat facts of this process, its machine, and the device that it trains on."""
    return {**versions(), **machine(), **_device(device), **_determinism()}


def machine() -> dict[str, Any]:
    """The processor, the memory and the system, as flat facts."""
    import psutil  # type: ignore[import-untyped]

    return {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "hostname": socket.gethostname(),
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(logical=False) or 0,
        "logical_cores": psutil.cpu_count() or 0,
        "memory_bytes": psutil.virtual_memory().total,
    }


def _cpu_model() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return match.group(1) if match else platform.processor()


def _device(device: torch.device) -> dict[str, Any]:
    import torch

    if device.type == "cpu":
        return {"device_kind": "cpu", "device_name": _cpu_model()}
    properties = torch.cuda.get_device_properties(device)
    driver = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", _text(Path("/proc/driver/nvidia/version")))
    return {
        "device_kind": "cuda",
        "device_name": properties.name,
        "device_count": torch.cuda.device_count(),
        "device_memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda or "",
        "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        "driver": driver.group(1) if driver else "",
        "nvml": nvml()[1],
    }


def _determinism() -> dict[str, Any]:
    """The current flags that may change the bits; an unset variable is left out."""
    import torch

    cudnn: Any = torch.backends.cudnn  # partly untyped
    matmul = torch.backends.cuda.matmul
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": cudnn.deterministic,
        "cudnn_benchmark": cudnn.benchmark,
        # Not `allow_tf32`: it raises where a job has set torch's newer `fp32_precision`.
        "cudnn_tf32": cudnn.conv.fp32_precision == "tf32",
        "matmul_tf32": matmul.fp32_precision == "tf32",
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        **{name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # not a Linux, or no such driver
