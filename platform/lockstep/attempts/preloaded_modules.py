"""The modules that a run's processes import before they need them."""

from __future__ import annotations

AHEAD = (
    "lockstep.attempts.worker_main",
    "torch._dynamo",  # deterministic algorithms and every optimizer import it: a second or two
    "ray.tune",  # needed by what Ray Train sends its workers
    "pyarrow.parquet",  # the rows in a checkpoint
)
"""The modules that a worker has imported by its first step."""
