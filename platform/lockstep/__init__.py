"""Lockstep: distributed training for PyTorch in which a run is exact.

What a job needs (`Job`, `Params`, `Placement`, `Loss`, `Mean`, `Phase`, `Plateau`, `PerEpoch`, `Term`, `Updates`, `rng`) and what runs it (`train`, `resume`, `sweep`). Names are imported when
they are first used, so that `import lockstep` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lockstep.job.inputs.computed_imports import watch_computed_imports
from lockstep.job.inputs.system_calls import watch_calls
from lockstep.job.inputs.variables import watch

if TYPE_CHECKING:
    from lockstep.calls.resume import resume
    from lockstep.calls.train import train
    from lockstep.driver.result import Result
    from lockstep.errors import LockstepError
    from lockstep.job.interface import (
        Job,
        Loss,
        Mean,
        Params,
        PerEpoch,
        Phase,
        Placement,
        Plateau,
        Term,
        Updates,
    )
    from lockstep.randomness import rng
    from lockstep.spec.fields import Spec
    from lockstep.spec.loading import load_spec
    from lockstep.sweeps.driver import SweepResult, sweep

__all__ = [
    "Job",
    "LockstepError",
    "Loss",
    "Mean",
    "Params",
    "PerEpoch",
    "Phase",
    "Placement",
    "Plateau",
    "Result",
    "Spec",
    "SweepResult",
    "Term",
    "Updates",
    "load_spec",
    "resume",
    "rng",
    "sweep",
    "train",
]

_HOME = {
    "Job": "lockstep.job.interface",
    "LockstepError": "lockstep.errors",
    "Loss": "lockstep.job.interface",
    "Mean": "lockstep.job.interface",
    "Params": "lockstep.job.interface",
    "PerEpoch": "lockstep.job.interface",
    "Phase": "lockstep.job.interface",
    "Placement": "lockstep.job.interface",
    "Plateau": "lockstep.job.interface",
    "Result": "lockstep.driver.result",
    "Spec": "lockstep.spec.fields",
    "SweepResult": "lockstep.sweeps.driver",
    "Term": "lockstep.job.interface",
    "Updates": "lockstep.job.interface",
    "load_spec": "lockstep.spec.loading",
    "resume": "lockstep.calls.resume",
    "rng": "lockstep.randomness",
    "sweep": "lockstep.sweeps.driver",
    "train": "lockstep.calls.train",
}


watch()  # before the modules are imported that a job is made of
watch_calls()
watch_computed_imports()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    value = globals()[name] = getattr(
        importlib.import_module(_HOME[name]), name
    )  # asked once: a loss asks in each micro-batch
    return value
