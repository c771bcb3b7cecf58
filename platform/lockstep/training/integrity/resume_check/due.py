"""When the next checkpoint is tried: all that a run keeps of its checks from one group of workers to the next."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.training.spare_process import ProcessContext


@dataclass(slots=True)
class Due:
    """When a check is due, by the monotonic clock."""

    at: float | None = None
    """None before the process has trained."""
    began_in: ProcessContext | None = None
    told: bool = False
    """Whether the run's owner has been told of a check that came to nothing."""
    off: bool = False
    """Whether this process makes no more checks."""
