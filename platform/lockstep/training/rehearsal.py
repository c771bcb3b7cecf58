"""One micro-batch from end to end before a long run: what would fail in an hour fails in the first second."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import JobError, LockstepError, NumericsError
from lockstep.job.interface import Loss, Mean
from lockstep.plan import Plan
from lockstep.randomness import seed_all
from lockstep.training.determinism import filled_memory
from lockstep.training.failure import as_lockstep_error
from lockstep.training.precision import Precision
from lockstep.training.step import LossModule, missing_gradient


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What the micro-batch showed: the names of the loss's parts, its value to compare between ranks, and which
    buffers (by index) it wrote to.
    """

    parts: tuple[str, ...]
    loss: float
    written: frozenset[int]


def check_model(model: nn.Module, plan: Plan) -> None:
    """Refuse what cannot be exact, and what would break in the ragged tail of an epoch."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise JobError("job.model: no parameter asks for a gradient; there is nothing to train")
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise JobError(
                f"job.model: {name!r} is a SyncBatchNorm, whose statistics depend on how many workers share a step; "
                "use BatchNorm (statistics of a micro-batch) or GroupNorm"
            )
        tail = plan.smallest_micro_batch
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and tail == 1 < plan.micro_batch:
            raise JobError(
                f"job.model: {name!r} is a BatchNorm, and the last step of an epoch of {plan.samples} samples has a micro-batch of "
                "one sample, which has no variance; set data.drop_last=true or change batch.global"
            )


def rehearse(
    module: LossModule, batch: Any, precision: Precision, *, seed: int, device: torch.device
) -> Rehearsal:
    """Run micro-batch 0 forward and backward on the bare model, and leave no trace of it.

    Raises the JobError, NumericsError or DeterminismError that the first step would meet, before it does.
    Newly allocated memory is filled with NaN meanwhile, so that a job that reads what it never wrote is found.
    """
    where = "first micro-batch, before training"
    seed_all(seed, "rehearsal", cuda=device if device.type == "cuda" else None)
    with _untouched(module.model) as before, filled_memory(True):
        try:
            with precision.autocast():
                loss = module(batch)
            _check_loss(loss, precision)
            loss.total.backward()
        except LockstepError:
            raise
        except (Exception, SystemExit) as error:  # a job may end the process
            raise as_lockstep_error(error, where) from error
        missing = [name for name, p in module.model.named_parameters() if p.requires_grad and p.grad is None]
        if missing:
            raise missing_gradient(missing, where)
        sparse = [
            name for name, p in module.model.named_parameters() if p.grad is not None and p.grad.is_sparse
        ]
        if sparse:
            raise JobError(
                f"parameter {sparse[0]!r} has a sparse gradient, which has no fixed sum; use sparse=False"
            )
        pairs = enumerate(zip(module.model.buffers(), before, strict=True))
        written = frozenset(i for i, (buffer, value) in pairs if not torch.equal(buffer, value))
    return Rehearsal(tuple(loss.parts), float(loss.total.detach()), written)


def _check_loss(loss: object, precision: Precision) -> None:
    if not isinstance(loss, Loss):
        raise JobError(f"job.loss: returned {type(loss).__name__}, wanted lockstep.Loss(total, weight)")
    total = loss.total
    if not isinstance(total, torch.Tensor) or total.dim() != 0:
        got = (
            f"a tensor of shape {tuple(total.shape)}"
            if isinstance(total, torch.Tensor)
            else type(total).__name__
        )
        raise JobError(f"job.loss: total is {got}, wanted a tensor of no dimension: the sum of the losses")
    if not total.requires_grad:
        raise JobError(
            "job.loss: total has no gradient; it must come from the model, without detach() or no_grad()"
        )
    value, weight = float(total.detach()), float(loss.weight)
    if not math.isfinite(value) and precision.name != "fp16":
        raise NumericsError(
            f"job.loss: total is {value} on the very first micro-batch; look for inputs or labels that are not finite, "
            "a division by zero or a logarithm of zero"
        )
    if not math.isfinite(weight) or weight < 0:
        raise JobError(f"job.loss: weight is {weight}, wanted a number of samples or tokens, at least 0")
    for name, part in loss.parts.items():
        if not isinstance(part, Mean):
            raise JobError(
                f"job.loss: part {name!r} is {type(part).__name__}, wanted lockstep.Mean(total, weight)"
            )


@contextmanager
def _untouched(model: nn.Module) -> Iterator[list[Tensor]]:
    """Put buffers and gradients back as they were; gives the buffers as they were."""
    before = [buffer.detach().clone() for buffer in model.buffers()]
    try:
        yield before
    finally:
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)
        model.zero_grad(set_to_none=True)
