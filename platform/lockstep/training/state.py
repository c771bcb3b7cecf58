"""The state of a run: everything that the next step depends on, in one object."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint.snapshot import writers
from lockstep.errors import SpecError, StorageError
from lockstep.job.interface import Job
from lockstep.plan import Plan, Position
from lockstep.spec.fields import EarlyStop
from lockstep.training.average import Average
from lockstep.training.compiled import CompiledLosses
from lockstep.training.job_phases import Optimizers, PhaseOptimizers, PhaseSchedules, optimizers_of
from lockstep.training.order import Order, check_order, order_of
from lockstep.training.precision import Precision
from lockstep.training.schedule import FunctionOfUpdates, RateSchedule
from lockstep.training.sharding import ShardedOptimizer


@dataclass(slots=True)
class Counters:
    """How far a run is. The schedule, the generators and the place in the data are functions of these."""

    step: int = 0
    """Steps done, skipped ones included."""
    skipped: int = 0
    """Steps that the loss scaler skipped."""
    samples: int = 0
    """Training samples consumed."""
    weight_exponent: int | None = None
    """The total weight of the last step, rounded down to a power of two: the next step's losses are divided by it."""
    evaluated: int = 0
    """Steps done at the last evaluation."""

    @property
    def updates(self) -> int:
        """Optimizer updates taken, which is what the schedule counts."""
        return self.step - self.skipped


@dataclass(slots=True)
class Best:
    """The best evaluation so far, and how long ago it was."""

    value: float | None = None
    step: int = 0
    evaluations_since: int = 0
    weights: dict[str, Tensor] | None = None

    def judge(self, rule: EarlyStop, value: float, step: int, model: nn.Module) -> bool:
        """Note one evaluation. True where the last `patience` evaluations were no improvement. NaN is never better."""
        better = not math.isnan(value) and (
            self.value is None or (value < self.value if rule.mode == "min" else value > self.value)
        )
        if better:
            self.value, self.step, self.evaluations_since = value, step, 0
            self.weights = {name: tensor.detach().cpu().clone() for name, tensor in tensors(model).items()}
        else:
            self.evaluations_since += 1
        return self.enough(rule)

    def enough(self, rule: EarlyStop) -> bool:
        """Whether the last `patience` evaluations were no improvement."""
        return self.evaluations_since >= rule.patience


@dataclass(slots=True)
class TrainState:
    """Model, optimizer, scaler, counters and the best evaluation: one home for all that changes in a run.

    `metrics` has the newest value of each metric. `average` is that of the weights, where the spec has `ema`.
    With phases, `optimizer` and `schedule` stand for those of all phases.
    """

    job: Job
    model: nn.Module
    optimizer: Optimizers
    precision: Precision
    counters: Counters = field(default_factory=Counters)
    best: Best = field(default_factory=Best)
    metrics: dict[str, float] = field(default_factory=dict)
    average: Average | None = None
    schedule: RateSchedule = None  # type: ignore[assignment]
    """Sets the learning rates; unless given, they stay at their full values."""
    compiled: CompiledLosses | None = None
    """Computes the losses, where the spec has `compile`."""

    order: Order = field(init=False)
    """The order in which the optimizers hold the parameters: their state is saved by position."""

    def __post_init__(self) -> None:
        self.order = order_of(self.optimizer, self.model)
        if self.schedule is None:
            self.schedule = FunctionOfUpdates(self.optimizer_of(""), lambda _: 1.0)

    def optimizer_of(self, phase: str) -> torch.optim.Optimizer:
        """The optimizer of a phase. A job without phases has one, under the empty name."""
        return optimizers_of(self.optimizer)[phase]

    def schedule_of(self, phase: str) -> RateSchedule:
        """The schedule of a phase. A job without phases has one for any name."""
        return self.schedule.by_phase[phase] if isinstance(self.schedule, PhaseSchedules) else self.schedule

    def advance(self, position: Position, *, skipped: bool, weight: float) -> None:
        """Count one step. The only place where counters move."""
        self.counters.step += 1
        self.counters.skipped += skipped
        self.counters.samples += position.samples
        self.counters.weight_exponent = power_of_two(weight)

    def epoch(self, plan: Plan) -> int:
        """Whole epochs done."""
        return self.counters.step // plan.steps_per_epoch

    def averaged(self) -> AbstractContextManager[None]:
        """The model as it is evaluated: with the average in the place of its weights, where there is one."""
        return nullcontext() if self.average is None else self.average.shown()

    def sections(self) -> dict[str, Any]:
        """The state as trees of tensors and plain values, by name: what a checkpoint holds. Nothing is copied."""
        return {
            "model": {
                "state": self.model.state_dict(),
                "unlisted_buffers": unlisted_buffers(self.model),
                "order": self.order,
            },
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.precision.state_dict(),
            "counters": asdict(self.counters),
            "best": {name: getattr(self.best, name) for name in Best.__slots__},
            "metrics": dict(self.metrics),
            "job": dict(self.job.state_dict()),
            **({} if self.average is None else {"ema": self.average.state_dict()}),
            **({"schedule": schedule} if (schedule := self.schedule.state_dict()) else {}),
        }

    def assembled(self, sections: Mapping[str, Any], ranks: int) -> dict[str, Any]:
        """`sections` with the tensors of a sharded optimizer that this rank writes. All ranks call it."""
        if not isinstance(self.optimizer, ShardedOptimizer):
            return dict(sections)
        by_rank = writers(sections, ranks)
        return {**sections, "optimizer": self.optimizer.assembled(sections["optimizer"], by_rank)}

    def restore(self, sections: Mapping[str, Any], *, fork: bool = False) -> None:
        """Load what `sections` gave, in place. A `fork` keeps the optimizer's own hyperparameters.

        StorageError where the state does not fit this model or optimizer, SpecError where a fork asks for another optimizer,
        JobError where the optimizer holds its parameters in another order.
        """
        saved_order = sections["model"].get("order", {})  # checkpoints of older versions have none
        if not fork or saved_order.keys() == self.order.keys():
            check_order(self.order, "here", saved_order, "in the state that is taken over")
        try:
            self.model.load_state_dict(sections["model"]["state"])
            with torch.no_grad():
                for name, buffer in unlisted_buffers(self.model).items():
                    buffer.copy_(sections["model"]["unlisted_buffers"][name])
            restore_optimizer(self.optimizer, sections["optimizer"], fork=fork)
            self.schedule.load_state_dict(sections.get("schedule", {}), fork=fork)
            if self.average is not None:
                self.average.load_state_dict(sections["ema"] if not fork else sections.get("ema", {}))
            self.precision.load_state_dict(sections["scaler"])
            self.counters = Counters(**sections["counters"])
            self.best = Best(**sections["best"])
            self.metrics = dict(sections["metrics"])
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise StorageError(
                f"checkpoint: its state does not fit this run: {' '.join(str(error).split())}"
            ) from error
        if sections["job"]:
            self.job.load_state_dict(sections["job"])


def unlisted_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that `state_dict` leaves out (`persistent=False`): a later step may read them all the same."""
    listed = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name not in listed}


def restore_optimizer(optimizer: Optimizers, saved: Mapping[str, Any], *, fork: bool) -> None:
    """Load an optimizer's `state_dict` bit for bit: torch itself casts the state to its parameter's type.

    A fork keeps what the optimizer was made with (learning rates, decay, …) and takes the rest of its groups.
    """
    if isinstance(optimizer, PhaseOptimizers) or "param_groups" not in saved:
        phases = set(optimizers_of(optimizer)) - {""}
        of_saved = set() if "param_groups" in saved else set(saved)
        if phases != of_saved:
            raise SpecError(
                f"fork: the run that is forked has optimizers of the phases {sorted(of_saved)}, and this job of {sorted(phases)}; "
                "keep its phases, or start a new run from its weights with initial_weights"
            )
        for name, one in optimizers_of(optimizer).items():
            restore_optimizer(one, saved[name], fork=fork)
        return
    own = [{name: group[name] for name in optimizer.defaults} for group in optimizer.param_groups]
    if fork:
        known = {name for group in saved["param_groups"] for name in group}
        if foreign := sorted(set(optimizer.defaults) - known):
            raise SpecError(
                f"optimizer.name: the state of the run that is forked is that of another optimizer, without {foreign[0]!r}; "
                "keep its optimizer, or start a new run from its weights with initial_weights"
            )
    optimizer.load_state_dict(dict(saved))
    for group, saved_group, made_with in zip(optimizer.param_groups, saved["param_groups"], own, strict=True):
        for parameter, number in zip(group["params"], saved_group["params"], strict=True):
            # A sharded optimizer loads its part without a cast.
            whole = {} if isinstance(optimizer, ShardedOptimizer) else saved["state"].get(number, {})
            for name, value in whole.items():
                held = optimizer.state[parameter][name]
                if isinstance(value, Tensor) and held.dtype != value.dtype:
                    optimizer.state[parameter][name] = value.to(held.device)
        if fork:
            group.update(made_with)


def power_of_two(weight: float) -> int:
    """The exponent e of the largest power of two 2**e that is at most `weight`, which is > 0."""
    return math.frexp(weight)[1] - 1


def tensors(model: nn.Module) -> dict[str, Any]:
    """The tensors of the model's `state_dict`."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
