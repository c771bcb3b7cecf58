"""What the process imports that the tests' processes are forked from: seconds of work, done once instead of in each.

Ray is not among it: it reads its environment when it is imported.
"""

from __future__ import annotations

import os
import warnings
from importlib import import_module

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # its thread would not be in the forked processes

MODULES = (
    "torch.distributed",
    "torch._dynamo",  # an optimizer imports it
    "torch._inductor.config",  # `use_deterministic_algorithms` does
    "sklearn.datasets",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "uvicorn",  # before mlflow.server, which asks whether it is there
    "mlflow.server.fastapi_app",
    "mlflow.cli",
    "lockstep.cli.main",
    "lockstep.driver.local",
    "lockstep.training.loop",
    "lockstep.record.mirror.mlflow.models",
    "jobs.digits.job",
)

with warnings.catch_warnings(action="ignore"):  # theirs, about each other
    for name in MODULES:
        import_module(name)
