"""What follows the updates of a step, the same on every rank: the job's own `after_step`, then the average of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch

from lockstep.job.interface import Job, overrides
from lockstep.randomness import after_step_key, seed_all
from lockstep.training.failure import job_at
from lockstep.training.state import TrainState
from lockstep.training.step.refused_state import state_refused
from lockstep.training.step.statistics import takes_statistics


def follow_update(
    state: TrainState,
    *,
    seed: int,
    device: torch.device | None,
    statistics: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Call `after_step` and move the average. `state` has just counted the step, whose updates are done; `statistics` are those of the step."""
    if has_after_step(state.job):
        with state.settings.followed():
            call_after_step(state, state.counters.step, seed=seed, device=device, statistics=statistics)
    if state.average is not None:
        state.average.move()


def has_after_step(job: Job) -> bool:
    """Whether the job has an `after_step` of its own."""
    return overrides(job, "after_step")


def call_after_step(
    state: TrainState,
    step: int,
    *,
    seed: int,
    device: torch.device | None,
    statistics: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Call the job's `after_step` without gradients, with the generators seeded from (seed, "after step", step - 1)."""
    seed_all(after_step_key(seed, step - 1), device)
    sharding = state.sharding
    with (
        nullcontext() if sharding is None else sharding.gathered(f"after step {step}"),
        state_refused(state.optimizer),
        job_at(f"after step {step}"),
        torch.no_grad(),
    ):
        if takes_statistics(state.job):
            state.job.after_step(state.model, step, dict(statistics))
        else:
            state.job.after_step(state.model, step)
