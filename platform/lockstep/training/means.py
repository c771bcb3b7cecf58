"""The means of one micro-batch, checked: a wrong return value is refused before training, not at the first evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import SupportsFloat

import numpy as np
import torch

from lockstep.errors import JobError
from lockstep.job.interface import Loss, Mean

RECORDED = ("loss", "lr", "grad_norm", "clipped_norm", "scale", "skipped")
"""What is recorded of each step, or phase, beside the parts of its loss; `loss` of each evaluation as well."""


def means_of(loss: object, further: object) -> dict[str, Mean]:
    """The loss, its parts and the job's metrics by name. Raises JobError for what is no mean. Nothing waits for the device."""
    if not isinstance(loss, Loss):
        raise JobError(
            f"job.loss: returned {type(loss).__name__} in evaluation, wanted lockstep.Loss(total, weight) as in training"
        )
    check_parts("job.loss", loss.parts)
    own = {"loss": Mean(loss.total, loss.weight), **loss.parts}
    return {**own, **means_alone(further, own)}


def means_alone(further: object, taken: Mapping[str, Mean] = MappingProxyType({})) -> dict[str, Mean]:
    """The job's metrics by name, none of which may be `taken`. Raises JobError for what is no mean."""
    if not isinstance(further, Mapping):
        raise JobError(
            f"job.metrics: returned {_kind(further)}, wanted a dict of lockstep.Mean(total, weight) by name, empty for none"
        )
    for name, mean in further.items():
        _check(name, mean, taken)
    return dict(further)


def check_parts(told: str, parts: object, phase: str = "") -> None:
    """Raise JobError for parts that cannot be recorded beside their loss; `told` is the method that returned them."""
    if not isinstance(parts, Mapping):
        raise JobError(
            f"{told}: parts is {_kind(parts)}, wanted a dict of lockstep.Mean(total, weight) by name"
        )
    for name, part in parts.items():
        check_name(told, name)
        if name in RECORDED:
            raise JobError(
                f"{told}: {name!r} is no name for a part: {phase or 'train'}/{name} is recorded already; give it another name"
            )
        _check_mean(told, f"part {name!r}", part)


def check_name(told: str, name: object) -> None:
    """Raise JobError for an invalid name of a part or metric: checkpoints, tables and stores need text of one line."""
    if not isinstance(name, str):
        raise JobError(f"{told}: got {name!r} as a name, wanted text")
    if not name or not name.isprintable():
        raise JobError(f"{told}: got {name!r} as a name, wanted text that one line can show")


def _check(name: object, mean: object, taken: Mapping[str, Mean]) -> None:
    check_name("job.metrics", name)
    if name in taken:
        raise JobError(
            f"job.metrics: {name!r} is the name of the loss or of one of its parts; give the metric another name"
        )
    _check_mean("job.metrics", repr(name), mean)


def _check_mean(told: str, whose: str, mean: object) -> None:
    """Raise JobError for what is no mean, or whose total or weight is not one number; `told` is the method that returned it."""
    if not isinstance(mean, Mean):
        raise JobError(
            f"{told}: {whose} is {_kind(mean)}, wanted lockstep.Mean(total, weight): the sum over the micro-batch, and "
            "the number of samples or tokens that it is divided by in the end"
        )
    for field, value in (("total", mean.total), ("weight", mean.weight)):
        if isinstance(value, torch.Tensor):
            fits = value.numel() == 1
        else:
            fits = hasattr(value, "__float__") and np.size(value) == 1
        if not fits:
            raise JobError(f"{told}: {field} of {whose} is {_kind(value)}, wanted one number")
        if not isinstance(value, torch.Tensor):
            as_float(f"{told}: {field} of {whose}", value)


def as_float(what: str, value: SupportsFloat) -> float:
    """A number as a float64. Raises JobError for an int beyond its range."""
    try:
        return float(value)
    except OverflowError:
        raise JobError(
            f"{what} is {type(value).__name__} beyond 1.8e308, wanted a number that a float64 can hold"
        ) from None


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else type(value).__name__
