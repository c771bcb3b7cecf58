"""Units that say -1 or 1, trained by a straight-through estimator (Bengio et al. 2013).

The derivative of a sign is zero, so nothing before it would learn: with `straight_through: false`, `lockstep check` says so.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

import lockstep
from jobs.practice.points import CLASSES, FEATURES, Points


class SignFunction(torch.autograd.Function):
    """Forward the sign. Backward as if it were x between -1 and 1, and constant beyond."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return gradient * (x.abs() <= 1)


class Binary(nn.Module):
    def __init__(self, *, straight_through: bool) -> None:
        super().__init__()
        self.straight_through = straight_through

    def forward(self, x: Tensor) -> Tensor:
        if not self.straight_through:
            return x.sign()
        y: Tensor = SignFunction.apply(x)  # type: ignore[no-untyped-call]
        return y


class BinaryPoints(Points):
    """A perceptron whose hidden units say yes or no."""

    class Params(lockstep.Params):
        width: PositiveInt = 128
        straight_through: bool = True

    params: Params

    def model(self) -> nn.Module:
        width = self.params.width
        binary = Binary(straight_through=self.params.straight_through)
        return nn.Sequential(
            nn.Linear(FEATURES, width), nn.LayerNorm(width), binary, nn.Linear(width, CLASSES)
        )
