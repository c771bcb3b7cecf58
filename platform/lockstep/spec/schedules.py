"""The schedules that a spec can name: each is a class here, with its settings and the factor on the learning rate that follows from them.

A factor is a pure function of the number of updates done, of which a run takes at most `total`. A new schedule is a class and its
name in `Schedule`.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from lockstep.spec import problems
from lockstep.spec.section import Section, named


class ScheduleRule(Section):
    """A schedule. Where it has `warmup_steps`, the rate rises linearly and is full with update `warmup_steps - 1`."""

    @property
    def warmup(self) -> int:
        """Updates before the full rate."""
        return int(getattr(self, "warmup_steps", 0))

    def factor(self, update: int, total: int) -> float:
        """Factor on the learning rate for update number `update`, counted from 0."""
        return (update + 1) / self.warmup if update < self.warmup else self.after_warmup(update, total)

    def after_warmup(self, update: int, total: int) -> float:
        """The same for an update after the warm-up."""
        raise NotImplementedError

    def progress(self, update: int, total: int) -> float:
        """Which part of the run after the warm-up lies before this update, from 0 to 1."""
        return min(1.0, (update - self.warmup) / max(1, total - self.warmup))

    def check_length(self, total: int) -> None:
        """SpecError where a run of `total` updates is too short for it."""


def _fallen(final: float, remaining: float) -> float:
    """The factor of a fall to `final`, of which the part `remaining` is still to come."""
    return final + (1.0 - final) * remaining


def _half_cosine(progress: float) -> float:
    """Loshchilov & Hutter 2017, eq. 5."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


class Constant(ScheduleRule):
    """The learning rate stays, after an optional linear warm-up."""

    name: Literal["constant"] = "constant"
    warmup_steps: NonNegativeInt = 0

    def after_warmup(self, update: int, total: int) -> float:
        return 1.0


class Linear(ScheduleRule):
    """Falls in a straight line to `final` times the learning rate just after the last update."""

    name: Literal["linear"] = "linear"
    warmup_steps: NonNegativeInt = 0
    final: NonNegativeFloat = 0.0

    def after_warmup(self, update: int, total: int) -> float:
        return _fallen(self.final, 1.0 - self.progress(update, total))


class Cosine(ScheduleRule):
    """Falls along half a cosine to `final` times the learning rate just after the last update."""

    name: Literal["cosine"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    final: NonNegativeFloat = 0.0

    def after_warmup(self, update: int, total: int) -> float:
        return _fallen(self.final, _half_cosine(self.progress(update, total)))


class StepDecay(ScheduleRule):
    """Multiplied by `gamma` after every `every` steps that follow the warm-up."""

    name: Literal["step"] = "step"
    warmup_steps: NonNegativeInt = 0
    every: PositiveInt = Field(examples=[1000])
    gamma: PositiveFloat = 0.1

    def after_warmup(self, update: int, total: int) -> float:
        return float(self.gamma ** ((update - self.warmup_steps) // self.every))


class WarmupStableDecay(ScheduleRule):
    """Full rate after the warm-up, and a fall to `final` times it over the last `decay_steps` updates."""

    name: Literal["wsd"] = "wsd"
    warmup_steps: NonNegativeInt = 0
    decay_steps: PositiveInt = Field(examples=[1000])
    decay: Literal["linear", "cosine", "sqrt"] = "linear"
    final: NonNegativeFloat = 0.0

    def after_warmup(self, update: int, total: int) -> float:
        start = total - self.decay_steps
        progress = max(0.0, min(1.0, (update - start) / self.decay_steps))
        if self.decay == "cosine":
            return _fallen(self.final, _half_cosine(progress))
        # `sqrt` is Hägele et al. 2024, eq. 3.
        return _fallen(self.final, 1.0 - (math.sqrt(progress) if self.decay == "sqrt" else progress))

    def check_length(self, total: int) -> None:
        if self.warmup_steps + self.decay_steps > total:
            raise problems.DECAY_STEPS(got=self.decay_steps, warmup=self.warmup_steps, total=total)


class OneCycle(ScheduleRule):
    """torch.optim.lr_scheduler.OneCycleLR over the whole run, without a cycle of the momentum; `optimizer.lr` is its peak."""

    name: Literal["one_cycle"] = "one_cycle"
    pct_start: float = Field(default=0.3, gt=0, lt=1)
    anneal_strategy: Literal["cos", "linear"] = "cos"
    div_factor: PositiveFloat = 25.0
    final_div_factor: PositiveFloat = 1e4

    def after_warmup(self, update: int, total: int) -> float:
        """Smith & Topin 2018 as torch computes it, for a peak of 1."""
        update = min(update, total - 1)
        first = 1.0 / self.div_factor
        last = first / self.final_div_factor
        peak = self.pct_start * total - 1.0
        if update <= peak:
            start, end, begun, done = first, 1.0, 0.0, peak
        else:
            start, end, begun, done = 1.0, last, peak, total - 1.0
        progress = (update - begun) / (done - begun) if done > begun else 1.0
        if self.anneal_strategy == "linear":
            return (end - start) * progress + start
        return end + (start - end) / 2.0 * (math.cos(math.pi * progress) + 1)


class Polynomial(ScheduleRule):
    """Falls to `final` times the learning rate just after the last update, as a power of what is left of the run."""

    name: Literal["polynomial"] = "polynomial"
    warmup_steps: NonNegativeInt = 0
    power: PositiveFloat = 1.0
    final: NonNegativeFloat = 0.0

    def after_warmup(self, update: int, total: int) -> float:
        return _fallen(self.final, (1.0 - self.progress(update, total)) ** self.power)


class InverseSquareRoot(ScheduleRule):
    """Falls as one over the square root of the number of updates, from the full rate at the end of the warm-up."""

    name: Literal["inverse_sqrt"] = "inverse_sqrt"
    warmup_steps: NonNegativeInt = 0

    def after_warmup(self, update: int, total: int) -> float:
        """Vaswani et al. 2017, eq. 3, with the full rate at the end of the warm-up."""
        return math.sqrt(max(1, self.warmup_steps) / (update + 1))


class CosineRestarts(ScheduleRule):
    """Falls along half a cosine to `final` times the learning rate within `period` updates, and begins anew at the full rate after each."""

    name: Literal["cosine_restarts"] = "cosine_restarts"
    warmup_steps: NonNegativeInt = 0
    period: PositiveInt = Field(examples=[1000])
    final: NonNegativeFloat = 0.0

    def after_warmup(self, update: int, total: int) -> float:
        """Loshchilov & Hutter 2017, with periods of one length."""
        return _fallen(self.final, _half_cosine((update - self.warmup_steps) % self.period / self.period))


Schedule = Annotated[
    Annotated[
        Constant
        | Linear
        | Cosine
        | StepDecay
        | WarmupStableDecay
        | OneCycle
        | Polynomial
        | InverseSquareRoot
        | CosineRestarts,
        Field(discriminator="name"),
    ],
    named("constant"),
]
