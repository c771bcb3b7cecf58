"""The machine as a bug report needs it, and what is known to be wrong with it. It is looked at, never changed."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import platform
import re
import resource
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lockstep.checks.start_checks import existing
from lockstep.record.environment import machine
from lockstep.record.redaction import redacted_variables
from lockstep.record.system_metrics import nvml
from lockstep.record.versions import DISTRIBUTION, versions
from lockstep.training.worker_environment import DECISIVE

SHARED_MEMORY = Path("/dev/shm")

SMALL_SHARED_MEMORY = 512 << 20
"""Bytes. A container of Docker has 64 MiB; each loader process hands over micro-batches through it."""

FEW_FILES = 4096
"""Open files. Loader processes and connections between ranks take some each; a process may raise its limit up to the hard one."""

LITTLE_SPACE = 1 << 30
"""Bytes that are left on a disk."""

_NO_NAMELESS_FILES = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL}
"""What a file system says that knows no file without a name."""

_INSTRUCTION_SETS = re.compile(r"sse4_2|avx|avx2|fma|avx512\w+|avx_vnni|amx_\w+|asimd|sve2?|i8mm|bf16")
_VARIABLES = re.compile(
    r"(PYTHONHASHSEED|PYTHONPATH|PYTHONOPTIMIZE|CUBLAS_WORKSPACE_CONFIG|GLIBC_TUNABLES|CUDA_VISIBLE_DEVICES|NVIDIA_TF32_OVERRIDE|LD_PRELOAD"
    r"|(?i:https?_proxy|no_proxy)|(MKL|OMP|KMP|GOMP|GLOO|NCCL|TORCH|PYTORCH|RAY|MLFLOW|LOCKSTEP)_\w+)"
)


def described() -> dict[str, Any]:
    """Processor, memory and limits. The name of the host is left out: a bug report goes to others."""
    import psutil  # type: ignore[import-untyped]

    facts = {name: value for name, value in machine().items() if name != "hostname"}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        **facts,
        "instruction_sets": instruction_sets(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "available_bytes": psutil.virtual_memory().available,
        "shared_memory_bytes": shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else None,
        "open_files": soft,
        "open_files_at_most": hard,
    }


def instruction_sets() -> list[str]:
    """Those that kernels of torch are chosen by, as the system names them. Empty where it does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []  # not a Linux
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return [flag for flag in flags[1].split() if _INSTRUCTION_SETS.fullmatch(flag)] if flags else []


def gpus() -> dict[str, Any]:
    """NVIDIA's GPUs and their driver; `driver` is None where there is none, and `why` says why."""
    library, version = nvml()
    if library is None:
        return {"driver": None, "devices": [], "why": version}
    devices = []
    for number in range(library.nvmlDeviceGetCount()):
        handle = library.nvmlDeviceGetHandleByIndex(number)
        memory = library.nvmlDeviceGetMemoryInfo(handle)
        devices.append({"name": str(library.nvmlDeviceGetName(handle)), "memory_bytes": int(memory.total)})
    return {"driver": str(library.nvmlSystemGetDriverVersion()), "devices": devices, "why": ""}


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of an environment that change what a run does or where it goes, without secrets."""
    chosen = {name: value for name, value in sorted(environment.items()) if _VARIABLES.fullmatch(name)}
    return redacted_variables(chosen)


def folder(path: Path) -> dict[str, Any]:
    """Whether files can be made in a folder, or in its nearest parent that exists; and the bytes that are free."""
    nearest = existing(path)
    problem = _refusal(nearest)
    return {
        "path": str(path),
        "writable": problem is None,
        "evidence": problem or ("" if nearest == path else f"not there yet; {nearest} is"),
        "free_bytes": shutil.disk_usage(nearest).free,
    }


def _refusal(path: Path) -> str | None:
    """Why no file can be made in a folder; None if one can. The file that is tried has no name, so it never appears in the folder."""
    nameless = getattr(os, "O_TMPFILE", None)
    try:
        if nameless is not None:
            os.close(os.open(path, nameless | os.O_WRONLY, 0o600))
            return None
    except OSError as error:
        if error.errno not in _NO_NAMELESS_FILES:
            return os.strerror(error.errno or 0)
    return None if path.is_dir() and os.access(path, os.W_OK | os.X_OK) else "it may not be written"


# --- what is known to be wrong ----------------------------------------------------------------------------


def wrong_versions() -> Iterator[str]:
    """What Lockstep needs and is not installed, or in a version that it does not work with."""
    try:
        package = importlib.metadata.metadata(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        yield "lockstep is not installed as a package: which versions it needs is not known"
        return
    needed = [Requirement(line) for line in package.get_all("Requires-Dist") or ()]
    installed = {requirement.name: _installed(requirement.name) for requirement in needed}
    python_range = "".join(package.get_all("Requires-Python") or ())
    yield from out_of_range(python_range, platform.python_version(), needed, installed)


def out_of_range(
    python_range: str, python: str, needed: Iterable[Requirement], installed: Mapping[str, str | None]
) -> Iterator[str]:
    """A line for each version that is out of range; `installed` has None for what is not installed. Requirements of extras are passed over."""
    if not SpecifierSet(python_range).contains(python, prereleases=True):
        yield f"python {python} is out of range: Lockstep needs python {python_range}"
    for requirement in needed:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed[requirement.name]
        if version is None:
            yield f"{requirement.name} is not installed: pip install '{requirement}'"
        elif not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} {version} is out of range: pip install '{requirement}'"


def wrong_limits(facts: Mapping[str, Any]) -> Iterator[str]:
    """Limits of the machine that runs run into. `facts` is `described()`."""
    shared = facts["shared_memory_bytes"]
    if shared is not None and shared < SMALL_SHARED_MEMORY:
        yield (
            f"{SHARED_MEMORY} has {shared >> 20} MiB, which is little for loader processes and for Ray; in docker: --shm-size=1g"
        )
    if 0 <= facts["open_files_at_most"] < FEW_FILES:
        yield (
            f"a process may open {facts['open_files_at_most']} files, which is few for loader processes and connections between "
            f"ranks; raise the hard limit (ulimit -Hn, LimitNOFILE=) to {FEW_FILES} or more"
        )


def wrong_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """Variables under which a run would have other bits than without them. `environment` is `variables()`."""
    for name, value in DECISIVE.items():
        if name != "PYTHONHASHSEED" and environment.get(name, value) != value:  # that one is forced
            yield f"{name} is {environment[name]}: where it is not set Lockstep sets {value}; another value may give other bits, and is another identity"


def wrong_build(devices: list[Any]) -> Iterator[str]:
    """A torch that cannot use the GPUs that are there."""
    torch = versions().get("torch", "")
    if devices and torch.endswith("+cpu"):
        yield f"torch {torch} is a build without CUDA, and this machine has {len(devices)} GPUs: install one with it"


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
