"""What the processes of a run import before they are needed."""

from __future__ import annotations

AHEAD = (
    "lockstep.attempts.worker_main",
    "torch._dynamo",  # deterministic algorithms and every optimizer ask for it: a second or two
    "ray.tune",  # what Ray Train sends its workers does
    "pyarrow.parquet",  # the rows in a checkpoint
)
"""What a worker imports by its first step."""
