"""A gated linear unit as an autograd function that keeps no more than its inputs. Exercise: both gradients, and `gradcheck`."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

import lockstep
from jobs.practice.points import CLASSES, FEATURES, Points


class GluFunction(torch.autograd.Function):
    """value · σ(gate), element by element (Dauphin et al. 2016)."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(value, gate)
        return value * gate.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        value, gate = ctx.saved_tensors
        opened = gate.sigmoid()
        return gradient * opened, gradient * value * opened * (1 - opened)


class Glu(nn.Module):
    """A linear layer from (B, inputs) to (B, outputs), each output with a gate of its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, 2 * outputs)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.linear(x).chunk(2, dim=-1)
        y: Tensor = GluFunction.apply(value, gate)  # type: ignore[no-untyped-call]
        return y


class GluPoints(Points):
    """A perceptron whose only non-linear part is the gates."""

    class Params(lockstep.Params):
        width: PositiveInt = 64

    params: Params

    def model(self) -> nn.Module:
        width = self.params.width
        return nn.Sequential(Glu(FEATURES, width), Glu(width, width), nn.Linear(width, CLASSES))
