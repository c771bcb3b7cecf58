"""The optimizer that a spec names, or the job's own."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.errors import JobError
from lockstep.job.interface import Job
from lockstep.spec.fields import SGD, AdamW, Optimizer


def make_optimizer(job: Job, model: nn.Module, spec: Optimizer) -> torch.optim.Optimizer:
    """Over all parameters that ask for a gradient. A job's own optimizer must hold each of them once."""
    own = job.optimizer(model)
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


def _check_own(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
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
            "return it without one, and use the spec's schedule (its warmup_steps, linear, cosine or step)"
        )


def _others(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
