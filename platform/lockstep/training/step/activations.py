"""Activation checkpointing: a module's activations are recomputed in backward, not kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.job.interface import Job
from lockstep.randomness import drawing_alike
from lockstep.training.step import problems


def checkpoint_activations(job: Job, model: nn.Module) -> None:
    """Recompute the activations of the modules that the job names, with the random numbers of their first computation.

    JobError where the job names no module.
    """
    modules = list(job.activation_checkpoints(model))
    if not modules:
        raise problems.NO_MODULE_RECOMPUTED()
    for module in modules:
        module.forward = partial(_recomputed, module.forward)


def _recomputed(forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """A forward whose activations are recomputed. torch puts its own generators back for that, and no others: a layer that is dropped by python's would stay.

    It puts back those of the devices that it finds in positional arguments alone, so all arguments are given as such.
    """
    if torch.compiler.is_compiling():
        return checkpoint(forward, *given, use_reentrant=False, **named)
    alike = drawing_alike(forward)
    return checkpoint(lambda args, words: alike(*args, **words), given, named, use_reentrant=False)


@contextmanager
def kept_activations(model: nn.Module) -> Iterator[None]:
    """Have the model's modules compute by their own `forward`, as before `checkpoint_activations`."""
    checkpointed = {
        module: forward
        for module in model.modules()
        if isinstance(forward := vars(module).get("forward"), partial) and forward.func is _recomputed
    }
    for module, forward in checkpointed.items():
        module.forward = forward.args[0]
    try:
        yield
    finally:
        for module, forward in checkpointed.items():
            module.forward = forward
