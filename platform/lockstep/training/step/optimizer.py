"""The optimizer that a spec names, or the job's own; with phases, one for each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.communication.group import Group
from lockstep.job.interface import Job
from lockstep.spec.fields import Spec
from lockstep.spec.optimizers import Optimizer
from lockstep.training import problems
from lockstep.training.failure import job_at
from lockstep.training.step import problems as step_problems
from lockstep.training.step.closures import needs_closure
from lockstep.training.step.element_wise import check_shardable
from lockstep.training.step.joined_optimizer import JoinedOptimizer
from lockstep.training.step.mirrored_optimizer import MirroredOptimizer
from lockstep.training.step.phases import ModelPhase, Optimizers, PhaseOptimizers, phases_of
from lockstep.training.step.sharding import FullyShardedOptimizer, ShardedOptimizer
from lockstep.training.step.weight_average import has_modes


def make_optimizer(job: Job, model: nn.Module, spec: Spec, group: Group | None = None) -> Optimizers:
    """An optimizer over all parameters that require a gradient, or one for each phase. A job's own must hold each of them once.

    JobError or SpecError where the job's own does not fit.
    """
    phases = phases_of(job, model)
    if phases[0].name:
        of_phases = _of_phases(phases, model, spec.optimizer).items()
        return PhaseOptimizers({name: _shared_out(each, spec, group) for name, each in of_phases})
    return _shared_out(_whole_optimizer(job, model, spec.optimizer), spec, group)


def _shared_out(optimizer: torch.optim.Optimizer, spec: Spec, group: Group | None) -> torch.optim.Optimizer:
    """What stands in for the optimizer where the `group` shares its state out."""
    if spec.sharding.mode == "none":
        return optimizer
    # On one worker as well: whether a spec is valid must not depend on the number of workers.
    check_shardable(optimizer, by_rows=spec.sharding.mode == "full")
    if group is not None and spec.sharding.mode == "optimizer" and spec.faults.mirror:
        return MirroredOptimizer(optimizer, group)  # a single worker may be joined by others
    if group is None or (group.size == 1 and not spec.mirrors_parameters):
        return optimizer
    kind = FullyShardedOptimizer if spec.sharding.mode == "full" else ShardedOptimizer
    return kind(optimizer, group)


def _of_phases(
    phases: Sequence[ModelPhase], model: nn.Module, spec: Optimizer
) -> dict[str, torch.optim.Optimizer]:
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for phase in phases:
        parameters, label = phase.parameters(model), f"job.phases: the optimizer of phase {phase.name!r}"
        if phase.optimizer is None:
            optimizers[phase.name] = _named_by_spec(parameters, spec)
            continue
        optimizer = _made(
            phase.optimizer, parameters, f"while the optimizer of phase {phase.name!r} was made"
        )
        optimizer = _joined(optimizer, label)
        named = dict(zip(phase.names, parameters, strict=True))
        if any(optimizer is earlier for earlier in optimizers.values()):
            raise step_problems.OPTIMIZER_TWICE(label=label)
        optimizers[phase.name] = _checked(optimizer, named, parameters, label)
    return optimizers


def _whole_optimizer(job: Job, model: nn.Module, spec: Optimizer) -> torch.optim.Optimizer:
    optimizer = _made(job.optimizer, model, "while its optimizer was made")
    asking = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if optimizer is None:
        return _named_by_spec(list(asking.values()), spec)
    label = "job.optimizer"
    return _checked(_joined(optimizer, label), asking, list(model.parameters()), label)


def _joined(returned: object, label: str) -> object:
    """Several optimizers as one; anything else as it is. JobError where one evaluates the loss again, has weights of its own to evaluate, or holds another's parameter."""
    if not isinstance(returned, list | tuple) or not all(
        isinstance(one, torch.optim.Optimizer) for one in returned
    ):
        return returned
    if len(returned) == 1:
        return returned[0]
    for one in returned:
        if isinstance(one, torch.optim.LBFGS) or needs_closure(one) or has_modes(one):
            what = "has weights of its own to evaluate" if has_modes(one) else "evaluates the loss again"
            raise problems.JOINED_KIND(label=label, kind=type(one).__name__, why=what)
    try:
        return JoinedOptimizer(returned)
    except ValueError as error:
        raise problems.JOINED_TWICE(label=label) from error


def _made(make: Callable[[Any], Any], over: Any, where: str) -> Any:
    with job_at(where):
        return make(over)


def _named_by_spec(parameters: list[nn.Parameter], spec: Optimizer) -> torch.optim.Optimizer:
    arguments = spec.arguments()
    if spec.fuses:
        arguments["fused"] = all(p.is_cuda and p.is_floating_point() for p in parameters) or None
    kind: type[torch.optim.Optimizer] = getattr(torch.optim, spec.torch_class)
    return kind(parameters, **arguments)


def _checked(
    optimizer: object, learning: Mapping[str, Tensor], allowed: Sequence[Tensor], label: str
) -> torch.optim.Optimizer:
    """Check an optimizer of the job's own: it must hold all of `learning`, and nothing that is not `allowed`."""
    if isinstance(optimizer, list | tuple | dict):
        raise step_problems.OPTIMIZER_KIND(label=label, got=f"a {type(optimizer).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise step_problems.OPTIMIZER_KIND(label=label, got=type(optimizer).__name__)
    if "_optimizer_step_pre_hooks" not in vars(optimizer):
        raise step_problems.NO_SUPER_INIT(label=label, got=type(optimizer).__name__)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    allowed_ids = set(map(id, allowed))
    strange = [parameter for parameter in parameters if id(parameter) not in allowed_ids]
    if strange:
        whose = "the model's" if label == "job.optimizer" else "the phase's"
        raise step_problems.STRANGE_PARAMETER(
            label=label,
            got=f"{tuple(strange[0].shape)}{_others(strange)}",
            wanted=whose,
            source="the model" if label == "job.optimizer" else "the parameters",
        )
    ids = {id(parameter) for parameter in parameters}
    missing = [name for name, parameter in learning.items() if id(parameter) not in ids]
    if missing:
        raise step_problems.NO_GROUP(label=label, got=f"{missing[0]!r}{_others(missing)}")
    _check_no_scheduler(optimizer, label)
    if any("lr" not in group for group in optimizer.param_groups):
        raise step_problems.NO_RATE(label=label, got=type(optimizer).__name__)
    if has_modes(optimizer):
        optimizer.train()  # type: ignore[attr-defined]
    return optimizer


def _check_no_scheduler(optimizer: torch.optim.Optimizer, label: str) -> None:
    """Refuse an attached scheduler, which torch marks in the groups of its optimizer: no checkpoint would have its state."""
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise step_problems.SCHEDULER_CARRIED(label=label)


def _others(found: list[Any]) -> str:
    return f" and {len(found) - 1} more" if len(found) > 1 else ""
