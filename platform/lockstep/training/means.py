"""The means of one evaluation micro-batch, checked: what a job gives back is told before training, not at the first evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from lockstep.errors import JobError
from lockstep.job.interface import Loss, Mean


def means_of(loss: object, further: object) -> dict[str, Mean]:
    """The loss, its parts and the job's metrics by name. Raises JobError for what is no mean. Nothing waits for the device."""
    if not isinstance(loss, Loss):
        raise JobError(
            f"job.loss: returned {type(loss).__name__} in evaluation, wanted lockstep.Loss(total, weight) as in training"
        )
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


def _check(name: object, mean: object, taken: Mapping[str, Mean]) -> None:
    if not isinstance(name, str):
        raise JobError(f"job.metrics: {name!r} is {type(name).__name__}, wanted text for a metric's name")
    if name in taken:
        raise JobError(
            f"job.metrics: {name!r} is the name of the loss or of one of its parts; give the metric another name"
        )
    if not isinstance(mean, Mean):
        raise JobError(
            f"job.metrics: {name!r} is {_kind(mean)}, wanted lockstep.Mean(total, weight): the sum over the micro-batch, and "
            "the number of samples or tokens that it is divided by in the end"
        )
    check_numbers("job.metrics", repr(name), mean)


def check_numbers(told: str, whose: str, mean: Mean) -> None:
    """Raise JobError for a mean whose total or weight is not one number; `told` is the method that returned it."""
    for field, value in (("total", mean.total), ("weight", mean.weight)):
        if isinstance(value, torch.Tensor):
            fits = value.numel() == 1
        else:
            fits = hasattr(value, "__float__")
        if not fits:
            raise JobError(f"{told}: {field} of {whose} is {_kind(value)}, wanted one number")


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else type(value).__name__
