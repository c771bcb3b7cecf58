"""Lockstep: distributed training for PyTorch in which a run is exact.

What a job needs (`Job`, `Params`, `Placement`, `Loss`, `Mean`, `rng`) and what runs it (`train`, `resume`, `sweep`). Names are imported when
they are first used, so that `import lockstep` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.errors import LockstepError
    from lockstep.job import Job, Loss, Mean, Params, Placement
    from lockstep.orchestration.result import Result
    from lockstep.orchestration.resumption import resume
    from lockstep.orchestration.runs import train
    from lockstep.orchestration.sweeps.driver import SweepResult, sweep
    from lockstep.randomness import rng
    from lockstep.spec import Spec, load_spec

__all__ = [
    "Job",
    "LockstepError",
    "Loss",
    "Mean",
    "Params",
    "Placement",
    "Result",
    "Spec",
    "SweepResult",
    "load_spec",
    "resume",
    "rng",
    "sweep",
    "train",
]

_HOME = {
    "Job": "lockstep.job",
    "LockstepError": "lockstep.errors",
    "Loss": "lockstep.job",
    "Mean": "lockstep.job",
    "Params": "lockstep.job",
    "Placement": "lockstep.job",
    "Result": "lockstep.orchestration.result",
    "Spec": "lockstep.spec",
    "SweepResult": "lockstep.orchestration.sweeps.driver",
    "load_spec": "lockstep.spec",
    "resume": "lockstep.orchestration.resumption",
    "rng": "lockstep.randomness",
    "sweep": "lockstep.orchestration.sweeps.driver",
    "train": "lockstep.orchestration.runs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
