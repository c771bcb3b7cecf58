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


def _others(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
