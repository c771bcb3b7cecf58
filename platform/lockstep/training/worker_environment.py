"""What has to stand in a process's environment before its first matrix product. Imports nothing of torch: the driver needs it early."""

from __future__ import annotations

import os
import sys

WORKER_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # the order of sets of strings
    "MKL_CBWR": "AVX2",  # matrix products that do not depend on where the inputs lie; no measurable cost
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # what cuBLAS needs for deterministic products
}
"""Set before a worker process starts, or at the latest before its first matrix product."""


def hashes_at_random() -> bool:
    """Whether this python hashes strings at random, so that the order of sets of strings is another one in each process."""
    # A seed of 0 clears the flag: beside a set one it was put there by someone, after python had started.
    return bool(sys.flags.hash_randomization) and os.environ.get("PYTHONHASHSEED", "random") in {
        "random",
        "0",
    }
