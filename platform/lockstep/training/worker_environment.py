"""Environment variables that a process needs before its first matrix product. Imports nothing of torch: the driver needs it early."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Mapping

DECISIVE = {
    "PYTHONHASHSEED": "0",  # the order of sets of strings
    "MKL_CBWR": "AUTO",  # matrix products that do not depend on alignment, with the processor's own instructions, as torch's kernels have them
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS needs it for deterministic products
}
"""Bits depend on them. Set before a worker process starts, or at the latest before its first matrix product."""

MEMORY = {
    "GLIBC_TUNABLES": ":".join(
        [
            "glibc.malloc.hugetlb=1",  # huge pages
            "glibc.malloc.arena_max=1",  # for threads too: Ray has a worker train in one of them
            # What is freed in one step stays for the next: blocks of less than 32 MiB, up to 1 GiB of them. These two belong together:
            # one alone has glibc leave the other at its least, for good.
            "glibc.malloc.mmap_threshold=33554432",
            "glibc.malloc.trim_threshold=1073741824",
        ]
    ),
}
"""How a process gets its memory: a step on a CPU takes up to a tenth less time, and no bits depend on it. Read as a process starts, and by glibc alone."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def return_freed_memory() -> None:
    """Have this process give memory back as soon as it is freed, from here on. Does nothing without glibc.

    MEMORY has glibc keep up to 1 GiB of it for the next step. Where parameters are sharded, that would be several times what a worker has in use: units of
    a few MiB come and go between the rows that stay.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)
        mallopt(_M_TRIM_THRESHOLD, 1 << 24)


WORKER_ENVIRONMENT = {**DECISIVE, **MEMORY}
"""What a worker process starts with."""


_KERNELS = re.compile(
    r"MKL_(?!NUM_THREADS|DOMAIN_NUM_THREADS|VERBOSE|SERVICE)\w+"
    r"|(?:OPENBLAS|BLIS)_(?!NUM_THREADS|VERBOSE)\w+|GOTO_\w+|VECLIB_\w+"
    r"|(?:ONEDNN|DNNL)_(?!VERBOSE|JIT|PRIMITIVE_CACHE|GRAPH_DUMP)\w+"
    r"|ATEN_CPU_CAPABILITY|ATEN_\w*NO_\w+|NPY_\w*CPU_FEATURES|NUMEXPR_\w+"
    r"|OMP_(?:DYNAMIC|SCHEDULE|THREAD_LIMIT|NESTED|MAX_ACTIVE_LEVELS)"
    r"|KMP_(?:DETERMINISTIC_REDUCTION|FORCE_REDUCTION|ALL_THREADS|DEVICE_THREAD_LIMIT|TEAMS_THREAD_LIMIT|DYNAMIC_MODE)"
    r"|TORCH_(?:ALLOW_TF32\w*|BLAS_PREFER\w*|LINALG_PREFER\w*|CUDNN_\w+)|NNPACK_\w+"
)
"""Variables by which libraries on a processor choose their kernels or the parts that these work on. Those of their threads are not among them: a
run sets their numbers itself. Nor are those of logs, memory and waiting."""

_CUDA_KERNELS = re.compile(
    r"(?:CUBLAS|CUBLASLT|CUDNN|NVIDIA_TF32|CUTLASS)_(?!LOG)\w+|TORCH_CUDNN_\w+|PYTORCH_NVFUSER\w*"
)


def kernel_variables(environment: Mapping[str, str], *, cuda: bool) -> dict[str, str]:
    """Those by which a process computes other bits: with their values a part of the identity."""
    variables = {
        name: value
        for name, value in sorted(environment.items())
        if _KERNELS.fullmatch(name) or (cuda and _CUDA_KERNELS.fullmatch(name))
    }
    tunables = environment.get("GLIBC_TUNABLES", "").split(":")
    if chosen := [
        tunable for tunable in tunables if tunable.startswith("glibc.cpu.")
    ]:  # which functions of libm there are
        variables["GLIBC_TUNABLES"] = ":".join(chosen)
    return variables


def sent_environment() -> dict[str, str]:
    """What workers are given: WORKER_ENVIRONMENT, and what this process was given for its kernels and memory. Strings are hashed alike everywhere."""
    variables = {name: os.environ.get(name, value) for name, value in WORKER_ENVIRONMENT.items()}
    kernels = {name: os.environ[name] for name in kernel_variables(os.environ, cuda=True)}
    return {**variables, **kernels, "PYTHONHASHSEED": DECISIVE["PYTHONHASHSEED"]}


def hashes_otherwise() -> bool:
    """Whether this python hashes strings in another way than every exact run, so that it orders sets of strings differently.

    Python looks at PYTHONHASHSEED as it starts, and only a seed of 0 clears the flag: a variable that was set later changes nothing.
    """
    return bool(sys.flags.hash_randomization)
