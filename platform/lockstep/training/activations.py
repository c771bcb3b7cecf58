"""Activation checkpointing: what a module computed in forward is computed again in backward, not kept."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.errors import JobError
from lockstep.job.interface import Job


def checkpoint_activations(job: Job, model: nn.Module) -> None:
    """Recompute the modules that the job names. The generators are put back for it, so dropout repeats itself."""
    modules = list(job.activation_checkpoints(model))
    if not modules:
        raise JobError(
            "activation_checkpointing: the job names no module for it; return some from activation_checkpoints(model)"
        )
    for module in modules:
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
