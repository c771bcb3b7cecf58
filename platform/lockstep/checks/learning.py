"""One micro-batch, over and over, with the run's own optimizer at its full rate: whatever can learn at all learns that."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from lockstep.checks.first_step import FirstStep
from lockstep.checks.fixture import Fixture
from lockstep.errors import NumericsError
from lockstep.training.step.buffers import statistics
from lockstep.training.step.optimizer_step import Stepper
from lockstep.training.step.phase_step import PhaseStep
from lockstep.training.step.phases import PhaseOptimizers, PhaseSchedules, optimizers_of
from lockstep.training.step.schedule import FunctionOfUpdates

UPDATES, SECONDS, LEAST = 60, 6.0, 8
"""So many updates, or as many as this time allows, and at least so many."""

FASTER = 30.0
"""How many times the rate a second try has, where the first one did not move the loss."""


@dataclass(slots=True)
class Learning:
    """The losses before each update, and which parameters never had a gradient other than zero."""

    rate: float
    losses: list[float] = field(default_factory=list)
    phases: tuple[str, ...] = ()
    """Their names; the losses and the rate are those of the first."""
    names: tuple[str, ...] = ()
    """All trainable parameters."""
    matrices: frozenset[str] = frozenset()
    """Those of two dimensions or more."""
    silent: frozenset[str] = frozenset()
    skipped: int = 0
    step_s: float = math.inf
    moving: str = ""
    """A buffer, other than a norm's statistics, that each forward writes: the loss may follow it rather than the weights."""
    broke: str = ""
    """What ended it early: a loss or gradient that was not finite."""

    @property
    def start(self) -> float:
        return self.losses[0] if self.losses else math.nan

    @property
    def end(self) -> float:
        """The mean of the last losses, which noise moves less than one of them."""
        last = self.losses[-3:]
        return sum(last) / len(last) if last else math.nan

    @property
    def fall(self) -> float:
        """How far the loss fell, as a share of where it began; negative where it rose."""
        return (self.start - self.end) / (abs(self.start) or 1.0)


def learn(fixture: Fixture, first: FirstStep, faster: float = 1.0) -> Learning:
    """Take the updates on the first micro-batch, from a fresh state, and see what becomes of its loss."""
    spec = fixture.spec
    exact = spec.model_copy(update={"reduction": "exact"})
    state, key = fixture.fresh(), fixture.step_keys()[0]
    for group in state.optimizer.param_groups:
        group["lr"] *= faster
    full = {
        name: FunctionOfUpdates(optimizer, lambda _: 1.0)
        for name, optimizer in optimizers_of(state.optimizer).items()
    }
    state.schedule = PhaseSchedules(full) if isinstance(state.optimizer, PhaseOptimizers) else full[""]
    size = len(key.ids)
    plan = replace(fixture.plan, global_batch=size, micro_batch=size, total_steps=UPDATES)
    parts = {name: phase.parts for name, phase in first.phases.items()}
    step = Stepper(
        state.job,
        exact,
        plan,
        fixture.group,
        state,
        parts=parts,
        terms={name: phase.terms for name, phase in first.phases.items()},
        statistics=any(phase.statistics for phase in first.phases.values()),
        written_buffers=first.written,
    )
    batch, outcome = fixture.fetch(key), Learning(state.schedule.base[0])
    usual, phases = statistics(state.model), step.each_phase
    outcome.phases = tuple(phase.name for phase in phases)
    buffers = [name for name, _ in state.model.named_buffers()]
    outcome.moving = next((buffers[i] for i in sorted(first.written - usual)), "")
    silent, began = set(first.silent), time.perf_counter()
    for update in range(UPDATES):
        at = time.perf_counter()
        if update >= LEAST and at - began > SECONDS:
            break
        try:
            result = step(plan.position(0), iter([batch]))
        except NumericsError as error:
            outcome.broke = str(error)
            break
        outcome.step_s = min(outcome.step_s, time.perf_counter() - at)
        outcome.losses.append(result.loss)
        outcome.skipped += result.skipped
        silent -= {name for name, parameter in _learning(phases).items() if _any(parameter.grad)}
    # Those that rest in the first step are not judged.
    learning = _learning(phases)
    outcome.silent, outcome.names = frozenset(silent & learning.keys()), tuple(learning)
    outcome.matrices = frozenset(name for name, parameter in learning.items() if parameter.dim() > 1)
    return outcome


def _learning(phases: Sequence[PhaseStep]) -> dict[str, nn.Parameter]:
    """What learns in any phase, by name."""
    return {
        name: parameter
        for phase in phases
        for name, parameter in zip(phase.names, phase.parameters, strict=True)
    }


def _any(gradient: Any) -> bool:
    return gradient is not None and bool(gradient.any())
