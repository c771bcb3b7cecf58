"""Environment variables that a process needs before its first matrix product. Imports nothing of torch: the driver needs it early."""

from __future__ import annotations

import os
import sys

WORKER_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # the order of sets of strings
    "MKL_CBWR": "AVX2",  # matrix products that depend neither on alignment nor on whether there is AVX-512, which would be faster
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS needs it for deterministic products
}
"""Set before a worker process starts, or at the latest before its first matrix product."""


def hashes_at_random() -> bool:
    """Whether this python hashes strings at random, so that each process orders sets of strings differently."""
    # Python started with a seed of 0 clears the flag: a flag beside a 0 means that someone set the variable later.
    return bool(sys.flags.hash_randomization) and os.environ.get("PYTHONHASHSEED", "random") in {
        "random",
        "0",
    }
