"""GELU as an autograd function with a backward of its own. Exercise: derive it, and have `torch.autograd.gradcheck` agree."""

from __future__ import annotations

import math
from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

import lockstep
from jobs.practice.points import CLASSES, FEATURES, Points


class GeluFunction(torch.autograd.Function):
    """x Φ(x), where Φ is the normal distribution's cumulative function (Hendrycks and Gimpel 2016). Its derivative is Φ(x) + x φ(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * cumulative(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        density = (-x.square() / 2).exp() / math.sqrt(2 * math.pi)
        return gradient * (cumulative(x) + x * density)


def cumulative(x: Tensor) -> Tensor:
    """Φ, element by element."""
    return (1 + torch.erf(x / math.sqrt(2))) / 2


class Gelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = GeluFunction.apply(x)  # type: ignore[no-untyped-call]
        return y


class GeluPoints(Points):
    """A perceptron with two layers of it."""

    class Params(lockstep.Params):
        width: PositiveInt = 64

    params: Params

    def model(self) -> nn.Module:
        width = self.params.width
        return nn.Sequential(
            nn.Linear(FEATURES, width), Gelu(), nn.Linear(width, width), Gelu(), nn.Linear(width, CLASSES)
        )
