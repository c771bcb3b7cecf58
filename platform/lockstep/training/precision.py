"""fp32, bf16 and fp16: where autocast and the gradient scaler belong, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from lockstep.errors import NumericsError

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}

SMALLEST_NORMAL = 2.0**-14
"""Of fp16: what is smaller has fewer bits, and below 2**-24 none."""

MOST_SKIPS_IN_A_ROW = 50
"""Halving 2**16 so often leaves no scale at all: the gradients themselves are not finite."""


class Precision:
    """The arithmetic of forward and backward. Only fp16 scales its loss; the scale is always a power of two."""

    def __init__(self, name: Literal["fp32", "bf16", "fp16"], device: torch.device) -> None:
        self.name = name
        self.device = device
        self.scaler = GradScaler(device.type, enabled=name == "fp16")
        self.skips_in_a_row = 0
        # It makes its scale with the first loss; a worker whose first step is one that leaves it without a
        # micro-batch has none.
        self.scaled(torch.zeros((), device=device))

    def autocast(self) -> AbstractContextManager[None]:
        """The context of one forward pass, entered anew for each: weights cast in it are forgotten with it."""
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=_AUTOCAST[self.name])

    @property
    def scale(self) -> float:
        """The factor that the loss is multiplied by; 1 unless fp16."""
        return float(self.scaler.get_scale())

    def scaled(self, loss: Tensor) -> Tensor:
        return self.scaler.scale(loss) if self.scaler.is_enabled() else loss

    def state_dict(self) -> dict[str, Any]:
        """The scale and how it came about."""
        return {"scaler": self.scaler.state_dict(), "skips_in_a_row": self.skips_in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; another precision has no use for a scale."""
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(dict(state["scaler"]))
            self.skips_in_a_row = int(state["skips_in_a_row"])

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        if self.scaler.is_enabled():
            self.scaler.unscale_(optimizer)

    def update(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step an optimizer whose gradients are unscaled. False where the step was skipped for gradients that overflowed."""
        if not self.scaler.is_enabled():
            optimizer.step()
            return True
        # A fused optimizer is stepped either way, and skips by itself: whether it did is asked of the scaler.
        overflowed = self.scaler._found_inf_per_device(optimizer).values()
        self.scaler.step(optimizer)
        return not any(bool(found) for found in overflowed)

    def settle(self) -> None:
        """Set the scale anew, once every optimizer of the step was stepped: one that overflowed halves it for all."""
        if not self.scaler.is_enabled():
            return
        before = self.scale
        self.scaler.update()
        self.skips_in_a_row = 0 if self.scale >= before else self.skips_in_a_row + 1
        if self.skips_in_a_row >= MOST_SKIPS_IN_A_ROW:
            raise NumericsError(
                f"precision fp16: {self.skips_in_a_row} steps in a row overflowed and the loss scale fell to {self.scale:g}; "
                "the loss or its gradients are not finite at any scale: lower optimizer.lr, or use precision bf16 or fp32"
            )


def underflow(gradients: Sequence[Tensor], scale: float) -> float:
    """The share of their elements other than zero that fp16 has no full precision for, as they were in backward: times `scale`.

    On a CUDA device it waits for them, once. What has become zero on the way does not count: many a gradient is zero by right.
    """
    sizes = [gradient.abs() for gradient in gradients]
    small = torch.stack([((one > 0) & (one < SMALLEST_NORMAL / scale)).sum() for one in sizes]).sum()
    other = torch.stack([one.count_nonzero() for one in sizes]).sum()
    below, elements = torch.stack([small, other]).tolist()
    return below / elements if elements else 0.0
