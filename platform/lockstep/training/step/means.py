"""The means of one micro-batch, checked: a wrong return value is refused before training, not at the first evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, SupportsFloat

import numpy as np
import torch

from lockstep.job.interface import Loss, Mean
from lockstep.training import problems
from lockstep.training.step import problems as step_problems

RECORDED = ("loss", "lr", "grad_norm", "clipped_norm", "scale", "skipped")
"""What is recorded of each step, or phase, beside the parts of its loss; `loss` of each evaluation as well."""


def means_of(loss: object, further: object) -> dict[str, Mean]:
    """The loss, its parts and the job's metrics by name. Raises JobError for what is no mean. Nothing waits for the device."""
    if not isinstance(loss, Loss):
        raise step_problems.EVALUATION_LOSS(got=type(loss).__name__)
    check_parts("job.loss", loss.parts)
    means = {"loss": Mean(loss.total, loss.weight), **loss.parts}
    return {**means, **means_alone(further, means)}


def check_form(loss: object, label: str, where: str = "") -> None:
    """Raise JobError for what is no loss with one total and named parts. `label` is the method that returned it, `where` a place in brackets."""
    if not isinstance(loss, Loss):
        raise problems.NO_LOSS(label=label, got=type(loss).__name__, where=where)
    total: object = loss.total
    if not isinstance(total, torch.Tensor) or total.dim() != 0:
        got = (
            f"a tensor of shape {tuple(total.shape)}"
            if isinstance(total, torch.Tensor)
            else type(total).__name__
        )
        raise problems.TOTAL_FORM(label=label, got=got, where=where)
    _check_mapping(label, loss.parts, where)


def has_form(loss: Loss, parts: Set[str]) -> bool:
    """Whether a loss passes `check_form` and has exactly these parts. It is asked of each micro-batch: nothing waits for the device."""
    is_loss = isinstance(loss, Loss) and isinstance(loss.total, torch.Tensor) and loss.total.dim() == 0
    return is_loss and isinstance(loss.parts, Mapping) and loss.parts.keys() == parts


def check_same_parts(loss: Loss, parts: Sequence[str], label: str, where: str) -> None:
    """Raise JobError where a loss has other parts than the first one, whose `parts` every step records."""
    got, wanted = (", ".join(map(repr, names)) or "none" for names in (loss.parts, parts))
    if loss.parts.keys() != set(parts):
        raise problems.OTHER_PARTS(label=label, got=got, wanted=wanted, where=where)


def means_alone(further: object, taken: Mapping[str, Mean] = MappingProxyType({})) -> dict[str, Mean]:
    """The job's metrics by name, none of which may be `taken`. Raises JobError for what is no mean."""
    if not isinstance(further, Mapping):
        raise step_problems.NO_MAPPING(what="job.metrics: returned", got=_kind(further))
    for name, mean in further.items():
        _check(name, mean, taken)
    return dict(further)


def check_parts(label: str, parts: object, phase: str = "") -> None:
    """Raise JobError for parts that cannot be recorded beside their loss; `label` is the method that returned them."""
    for name, part in _check_mapping(label, parts).items():
        check_name(label, name)
        if name in RECORDED:
            raise problems.PART_NAME_TAKEN(label=label, got=name, recorded=f"{phase or 'train'}/{name}")
        _check_mean(label, f"part {name!r}", part)


def _check_mapping(label: str, parts: object, where: str = "") -> Mapping[Any, object]:
    if not isinstance(parts, Mapping):
        raise step_problems.NO_MAPPING(what=f"{label}: parts is", got=f"{_kind(parts)}{where}")
    return parts


def check_name(label: str, name: object) -> None:
    """Raise JobError for an invalid name of a part or metric: checkpoints, tables and stores need text of one line."""
    if not isinstance(name, str) or not name or not name.isprintable():
        raise step_problems.MEAN_NAME(label=label, got=repr(name))


def _check(name: object, mean: object, taken: Mapping[str, Mean]) -> None:
    check_name("job.metrics", name)
    if name in taken:
        raise step_problems.METRIC_NAME_TAKEN(got=name)
    _check_mean("job.metrics", repr(name), mean)


def _check_mean(label: str, whose: str, mean: object) -> None:
    """Raise JobError for what is no mean, or whose total or weight is not one number; `label` is the method that returned it."""
    if not isinstance(mean, Mean):
        raise step_problems.NO_MEAN(label=label, name=whose, got=_kind(mean))
    for field, value in (("total", mean.total), ("weight", mean.weight)):
        if isinstance(value, torch.Tensor):
            fits = value.numel() == 1
        else:
            fits = hasattr(value, "__float__") and np.size(value) == 1
        if not fits:
            raise step_problems.MEAN_NUMBER(label=label, part=field, name=whose, got=_kind(value))
        if not isinstance(value, torch.Tensor):
            as_float(f"{label}: {field} of {whose}", value)


def as_float(what: str, value: SupportsFloat) -> float:
    """A number as a float64. Raises JobError for an int beyond its range."""
    try:
        return float(value)
    except OverflowError:
        raise step_problems.TOO_LARGE(what=what, got=type(value).__name__) from None


def number(value: torch.Tensor | float) -> float:
    """A total or a weight as a number. torch warns of a tensor with a graph, which a job may give as it is."""
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else type(value).__name__
