"""The optimizer that a spec names, or the job's own."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from lockstep.errors import JobError, LockstepError
from lockstep.job.interface import Job
from lockstep.spec.fields import SGD, AdamW, Optimizer
from lockstep.training.failure import as_lockstep_error
from lockstep.training.group import Group
from lockstep.training.sharding import ShardedOptimizer, check_shardable


def make_optimizer(
    job: Job, model: nn.Module, spec: Optimizer, group: Group | None = None
) -> torch.optim.Optimizer:
    """Over all parameters that ask for a gradient. A job's own optimizer must hold each of them once."""
    whole = _whole_optimizer(job, model, spec)
    if not spec.sharded:
        return whole
    check_shardable(whole)  # on one worker as well: what a run may be does not depend on how many execute it
    return whole if group is None or group.size == 1 else ShardedOptimizer(whole, group)


def _whole_optimizer(job: Job, model: nn.Module, spec: Optimizer) -> torch.optim.Optimizer:
    try:
        own = job.optimizer(model)
    except LockstepError:
        raise
    except (Exception, SystemExit) as error:
        raise as_lockstep_error(error, "while its optimizer was made") from error
    if own is not None:
        _check_own(own, model)
        _check_no_scheduler(own)
        return own
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if isinstance(spec, SGD):
        return torch.optim.SGD(
            parameters,
            lr=spec.lr,
            momentum=spec.momentum,
            weight_decay=spec.weight_decay,
            nesterov=spec.nesterov,
        )
    kind = torch.optim.AdamW if isinstance(spec, AdamW) else torch.optim.Adam
    return kind(parameters, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay)


def _check_own(optimizer: object, model: nn.Module) -> None:
    if isinstance(optimizer, list | tuple | dict):
        raise JobError(
            f"job.optimizer: returned a {type(optimizer).__name__}, wanted one torch.optim.Optimizer; give its parameters "
            "in several groups, and set the schedule in the spec"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(f"job.optimizer: returned {type(optimizer).__name__}, wanted a torch.optim.Optimizer")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise JobError(
            f"job.optimizer: {type(optimizer).__name__} evaluates the loss several times in one step (it needs a closure), and "
            "Lockstep computes each step's gradient once; use one that steps from the gradient alone, such as AdamW"
        )
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    known = {id(parameter) for parameter in model.parameters()}
    strange = [parameter for parameter in held if id(parameter) not in known]
    if strange:
        raise JobError(
            f"job.optimizer: a parameter of shape {tuple(strange[0].shape)}{_others(strange)} is none of the model's and would get "
            "no gradient; build the optimizer from the model that it is given"
        )
    ids = {id(parameter) for parameter in held}
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in ids]
    if missing:
        raise JobError(
            f"job.optimizer: parameter {missing[0]!r}{_others(missing)} is in no group and would never learn; "
            "add it, or set requires_grad to False"
        )


def _check_no_scheduler(optimizer: torch.optim.Optimizer) -> None:
    """A scheduler of torch marks the groups of its optimizer. Its own state would be in no checkpoint."""
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise JobError(
            "job.optimizer: the optimizer carries a learning-rate scheduler, which the schedule of the spec would overwrite; "
            "return it without one: use the spec's schedule, or return the scheduler from job.schedule(optimizer, updates)"
        )


def _others(found: list[Any]) -> str:
    return f" and {len(found) - 1} more" if len(found) > 1 else ""
