"""Learning rate as a pure function of the number of updates done: there is no scheduler state to save.

Updates are optimizer steps that were really taken: a step skipped by the loss scaler does not count.
"""

from __future__ import annotations

import math

import torch

from lockstep.errors import JobError
from lockstep.spec.fields import Constant, Cosine, Linear, Schedule, StepDecay


def rate_factor(schedule: Schedule, update: int, total: int) -> float:
    """Factor on the learning rate for update number `update` (from 0) of at most `total`.

    The warm-up rises in a straight line and reaches the full rate with update `warmup_steps - 1`. The fall
    then ends at `final` just after the last update (Loshchilov & Hutter 2017, eq. 5, for the cosine).
    """
    warmup = schedule.warmup_steps
    if update < warmup:
        return (update + 1) / warmup
    match schedule:
        case Constant():
            return 1.0
        case StepDecay():
            return float(schedule.gamma ** ((update - warmup) // schedule.every))
        case Linear() | Cosine():
            progress = min(1.0, (update - warmup) / max(1, total - warmup))
            fall = (
                1.0 - progress if isinstance(schedule, Linear) else 0.5 * (1.0 + math.cos(math.pi * progress))
            )
            return schedule.final + (1.0 - schedule.final) * fall


def base_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """The full learning rate of each parameter group, as the optimizer was made with it."""
    return [float(group["lr"]) for group in optimizer.param_groups]


class Rates:
    """The learning rates of an optimizer: set before each update, and read where it uses them.

    A hook of the job's optimizer may change them before an update, and then its rate is the one that is recorded; one
    that changes them after it wants a schedule of its own, which the next update would overwrite.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, base: list[float]) -> None:
        self.optimizer = optimizer
        self.base = base
        self._set: list[float] = []
        self._used: list[float] = []
        optimizer.register_step_pre_hook(self._note)  # behind the job's own

    def _note(self, *_: object) -> None:
        self._used = base_rates(self.optimizer)

    def set(self, factor: float) -> None:
        """Set every group's rate to its base times `factor`."""
        set_rates(self.optimizer, self.base, factor)
        self._set = self._used = base_rates(self.optimizer)

    def used(self) -> float:
        """The first group's rate in the update since `set`, or the one that was set where it was skipped."""
        for i, (left, was_set, used) in enumerate(
            zip(base_rates(self.optimizer), self._set, self._used, strict=True)
        ):
            if left not in (was_set, used):
                raise JobError(
                    f"job.optimizer: an update left the learning rate of group {i} at {left:g}, it was {used:g}; the schedule is a function "
                    "of the number of updates, and sets it anew: use the spec's schedule, or set the rate in a hook before the "
                    "update (register_step_pre_hook)"
                )
        return self._used[0]


def set_rates(optimizer: torch.optim.Optimizer, base: list[float], factor: float) -> float:
    """Set every group's rate to its base times `factor`. Returns the first group's, the one that is recorded."""
    for group, full in zip(optimizer.param_groups, base, strict=True):
        group["lr"] = full * factor
    return base[0] * factor
