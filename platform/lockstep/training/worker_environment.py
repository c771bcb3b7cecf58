"""Environment variables that a process needs before its first matrix product. Imports nothing of torch: the driver needs it early."""

from __future__ import annotations

import os
import sys

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

WORKER_ENVIRONMENT = {**DECISIVE, **MEMORY}
"""What a worker process starts with."""


def sent_environment() -> dict[str, str]:
    """What workers on a cluster are given: WORKER_ENVIRONMENT, and in it what this process was given for their products and memory."""
    return {
        name: value if name == "PYTHONHASHSEED" else os.environ.get(name, value)
        for name, value in WORKER_ENVIRONMENT.items()
    }


def hashes_at_random() -> bool:
    """Whether this python hashes strings at random, so that each process orders sets of strings differently."""
    # Python started with a seed of 0 clears the flag: a flag beside a 0 means that someone set the variable later.
    return bool(sys.flags.hash_randomization) and os.environ.get("PYTHONHASHSEED", "random") in {
        "random",
        "0",
    }
