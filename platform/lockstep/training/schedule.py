"""Learning rate as a pure function of the number of updates done: there is no scheduler state to save.

Updates are optimizer steps that were really taken: a step skipped by the loss scaler does not count.
"""

from __future__ import annotations

import math

import torch

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


def set_rates(optimizer: torch.optim.Optimizer, base: list[float], factor: float) -> float:
    """Set every group's rate to its base times `factor`. Returns the first group's, the one that is recorded."""
    for group, full in zip(optimizer.param_groups, base, strict=True):
        group["lr"] = full * factor
    return base[0] * factor
