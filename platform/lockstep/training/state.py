"""The state of a run: everything that the next step depends on, in one object."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.plan import Plan, Position
from lockstep.spec import EarlyStop
from lockstep.training.precision import Precision


@dataclass(slots=True)
class Counters:
    """How far a run is. Schedule, generators and data position are functions of these."""

    step: int = 0
    """Steps done, skipped ones included."""
    skipped: int = 0
    """Steps that the loss scaler skipped."""
    samples: int = 0
    """Training samples consumed."""
    weight_exponent: int | None = None
    """The last step's total weight as a power of two: what the next step's losses are scaled down by."""

    @property
    def updates(self) -> int:
        """Optimizer updates taken: what the schedule counts."""
        return self.step - self.skipped


@dataclass(slots=True)
class Best:
    """The best evaluation so far, and how long ago it was."""

    value: float | None = None
    step: int = 0
    evaluations_since: int = 0
    weights: dict[str, Tensor] | None = None

    def judge(self, rule: EarlyStop, value: float, step: int, model: nn.Module) -> bool:
        """Note one evaluation. True where `patience` of them have brought nothing better. NaN is never better."""
        better = not math.isnan(value) and (
            self.value is None or (value < self.value if rule.mode == "min" else value > self.value)
        )
        if better:
            self.value, self.step, self.evaluations_since = value, step, 0
            self.weights = {name: tensor.detach().cpu().clone() for name, tensor in tensors(model).items()}
        else:
            self.evaluations_since += 1
        return self.evaluations_since >= rule.patience


@dataclass(slots=True)
class TrainState:
    """Model, optimizer, scaler, counters and the best evaluation: one home for all that changes in a run."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    precision: Precision
    counters: Counters = field(default_factory=Counters)
    best: Best = field(default_factory=Best)

    def advance(self, position: Position, *, skipped: bool, weight: float) -> None:
        """Count one step. The only place where counters move."""
        self.counters.step += 1
        self.counters.skipped += skipped
        self.counters.samples += position.samples
        self.counters.weight_exponent = power_of_two(weight)

    def epoch(self, plan: Plan) -> int:
        """Whole epochs done."""
        return self.counters.step // plan.steps_per_epoch


def power_of_two(weight: float) -> int:
    """The exponent e with 2**e nearest below or at `weight` > 0."""
    return math.frexp(weight)[1] - 1


def tensors(model: nn.Module) -> dict[str, Any]:
    """The tensors of the model's `state_dict`."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
