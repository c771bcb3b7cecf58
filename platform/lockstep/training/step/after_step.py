"""What follows the updates of a step, the same on every rank: the job's own `after_step`, then the average of the weights."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from lockstep.job.interface import Job, overrides
from lockstep.randomness import seed_all
from lockstep.training.failure import job_at
from lockstep.training.state import TrainState


def follow_update(state: TrainState, *, seed: int, device: torch.device | None) -> None:
    """Call `after_step` and move the average. `state` has just counted the step, whose updates are done."""
    if has_after_step(state.job):
        with state.settings.followed():
            call_after_step(state, state.counters.step, seed=seed, device=device)
    if state.average is not None:
        state.average.move()


def has_after_step(job: Job) -> bool:
    """Whether the job has an `after_step` of its own."""
    return overrides(job, "after_step")


def call_after_step(state: TrainState, step: int, *, seed: int, device: torch.device | None) -> None:
    """Call the job's `after_step` without gradients, with the generators seeded from (seed, "after step", step - 1)."""
    seed_all(seed, "after step", step - 1, device=device)
    sharding = state.sharding
    with (
        nullcontext() if sharding is None else sharding.gathered(),
        job_at(f"after step {step}"),
        torch.no_grad(),
    ):
        state.job.after_step(state.model, step)
