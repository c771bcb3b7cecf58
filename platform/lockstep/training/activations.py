"""Activation checkpointing: a module's activations are recomputed in backward, not kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.errors import JobError
from lockstep.job.interface import Job


def checkpoint_activations(job: Job, model: nn.Module) -> None:
    """Recompute the activations of the modules that the job names. torch restores the generators for it, so dropout repeats itself.

    JobError where the job names no module.
    """
    modules = list(job.activation_checkpoints(model))
    if not modules:
        raise JobError(
            "activation_checkpointing: the job names no module for it; return some from activation_checkpoints(model)"
        )
    for module in modules:
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)


@contextmanager
def kept_activations(model: nn.Module) -> Iterator[None]:
    """Have the model's modules compute by their own `forward`, as before `checkpoint_activations`."""
    own = {
        module: forward
        for module in model.modules()
        if isinstance(forward := vars(module).get("forward"), partial) and forward.func is checkpoint
    }
    for module, forward in own.items():
        module.forward = forward.args[0]
    try:
        yield
    finally:
        for module, forward in own.items():
            module.forward = forward
