"""Activation checkpointing: a module's activations are recomputed in backward, not kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard

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


def of_forward(module: nn.Module, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the forward of a module by what `change` makes of it; of one that is recomputed, the forward inside of that."""
    forward = module.forward
    if _is_recomputed(forward):
        module.forward = partial(_recomputed, change(forward.args[0]))
    else:
        module.forward = change(forward)


def _is_recomputed(forward: Any) -> TypeGuard[partial[Any]]:
    return isinstance(forward, partial) and forward.func is _recomputed


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
        if _is_recomputed(forward := vars(module).get("forward"))
    }
    for module, forward in checkpointed.items():
        module.forward = forward.args[0]
    try:
        yield
    finally:
        for module, forward in checkpointed.items():
            module.forward = forward
