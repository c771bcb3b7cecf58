"""What has to stand in a process's environment before its first matrix product. Imports nothing: the driver needs it early."""

from __future__ import annotations

WORKER_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # the order of sets of strings
    "MKL_CBWR": "AVX2",  # matrix products that do not depend on where the inputs lie; no measurable cost
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # what cuBLAS needs for deterministic products
}
"""Set before a worker process starts, or at the latest before its first matrix product."""
