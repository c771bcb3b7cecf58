"""When the next checkpoint is tried, and how much of the run's processor time that may take: all that a run keeps of its checks from one group of workers to the next."""

from __future__ import annotations

import time
from dataclasses import dataclass

from lockstep.training.spare_process import ProcessContext

SHARE = 300
"""A check is due once so many times the processor time of the last one have passed: 0.33 % of the run at most."""

SOONER = 30
"""How many times sooner another check is due while a difference waits to be confirmed."""


@dataclass(slots=True)
class CheckSchedule:
    """When a check is due, by the monotonic clock."""

    at: float | None = None
    """None before the process has trained."""
    began_in: ProcessContext | None = None
    told: bool = False
    """Whether the run's owner has been told of a check that came to nothing."""
    off: bool = False
    """Whether this process makes no more checks."""

    def wait(self, cost_s: float, *, sooner: bool = False) -> None:
        """Have the next check wait until that of `cost_s` seconds, which ends now, is a small part of the run; `sooner` where it left a doubt."""
        self.at = time.monotonic() + SHARE * cost_s / (SOONER if sooner else 1)
