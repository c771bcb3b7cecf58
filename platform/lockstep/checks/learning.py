"""One micro-batch, over and over, with the run's own optimizer at its full rate: whatever can learn at all learns that."""

from __future__ import annotations

import math
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from lockstep.checks.first_step import FirstStep
from lockstep.checks.fixture import Fixture
from lockstep.errors import NumericsError
from lockstep.job.interface import Job
from lockstep.plan import Plan
from lockstep.training.integrity.rehearsal.object_state import tensor_digest
from lockstep.training.integrity.state_digest import tree_digest
from lockstep.training.state import TrainState
from lockstep.training.step.after_step import has_after_step
from lockstep.training.step.buffers import statistics
from lockstep.training.step.learning_rate import FunctionOfUpdates
from lockstep.training.step.optimizer_step import Stepper
from lockstep.training.step.phase_step import PhaseStep
from lockstep.training.step.phases import PhaseOptimizers, PhaseSchedules, optimizers_of, phases_of
from lockstep.training.step.sparse_gradients import numbers_of

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
    followed: str = ""
    """What has moved beside the parameters that learn, where the job has an `after_step`: the loss may follow it."""
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


def learn(fixture: Fixture, first: FirstStep, faster: float = 1.0, *, after_step: bool = True) -> Learning:
    """Take the updates on the first micro-batch, from a fresh state, and see what becomes of its loss.

    A loss over the whole batch has the first step instead. Without `after_step` nothing follows an update.
    """
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
    if not after_step:
        state.job.after_step = partial(Job.after_step, state.job)  # type: ignore[method-assign]
    over_batch = any(phase.embed is not None for phase in phases_of(state.job, state.model))
    keys = fixture.step_keys() if over_batch else [key]
    size = len(key.ids)
    plan = (
        replace(fixture.plan, total_steps=UPDATES)
        if over_batch
        else Plan.of(size, size, size, drop_last=False, steps=UPDATES)
    )
    forms = {name: phase.form for name, phase in first.phases.items()}
    step = Stepper(exact, plan, fixture.group, state, forms)
    if over_batch:
        step.compute.places = fixture.sampler(range(plan.position(0).micro_batches)).places
    batches = [fixture.fetch(each) for each in keys]
    if over_batch:
        fetched = {each.micro_batch: batch for each, batch in zip(keys, batches, strict=True)}
        batches = [fetched.get(m) for m in range(plan.position(0).micro_batches)]
    outcome = Learning(state.schedule.base[0])
    usual, phases = statistics(state.model), step.each_phase
    outcome.phases = tuple(phase.name for phase in phases)
    buffers = [name for name, _ in state.model.named_buffers()]
    outcome.moving = next((buffers[i] for i in sorted(first.written - usual)), "")
    beside = _Beside(state, {buffers[i] for i in first.written})
    silent, began = set(first.silent), time.perf_counter()
    for update in range(UPDATES):
        at = time.perf_counter()
        if update >= LEAST and at - began > SECONDS:
            break
        try:
            result = step(plan.position(0), iter(batches))
        except NumericsError as error:
            outcome.broke = str(error)
            break
        outcome.step_s = min(outcome.step_s, time.perf_counter() - at)
        outcome.losses.append(result.row.loss)
        outcome.skipped += result.row.skipped
        silent -= {name for name, parameter in _learning(phases).items() if _any(parameter.grad)}
    # Those that rest in the first step are not judged.
    learning = _learning(phases)
    outcome.followed = beside.moved()
    outcome.silent, outcome.names = frozenset(silent & learning.keys()), tuple(learning)
    outcome.matrices = frozenset(name for name, parameter in learning.items() if parameter.dim() > 1)
    return outcome


class _Beside:
    """What an `after_step` may move beside the parameters that learn: other tensors of the model, and the state of the job."""

    def __init__(self, state: TrainState, written: Container[str]) -> None:
        """`written` are the names of buffers that each forward writes."""
        self._state, self._written = state, written
        self._start = self._digests()

    def _digests(self) -> dict[str, str]:
        model, job = self._state.model, self._state.job
        if not has_after_step(job):
            return {}
        tensors = [
            *model.named_buffers(),
            *((n, p) for n, p in model.named_parameters() if not p.requires_grad),
        ]
        digests = {repr(name): tensor_digest(tensor) for name, tensor in tensors if name not in self._written}
        return digests | {"what job.state_dict() gives": tree_digest(dict(job.state_dict()))}

    def moved(self) -> str:
        """The first of them that is no longer what it was."""
        return next((name for name, digest in self._digests().items() if self._start[name] != digest), "")


def _learning(phases: Sequence[PhaseStep]) -> dict[str, nn.Parameter]:
    """What learns in any phase, by name."""
    return {
        name: parameter
        for phase in phases
        for name, parameter in (
            *zip(phase.names, phase.parameters, strict=True),
            *zip(phase.tables.names, phase.tables.parameters, strict=True),
        )
    }


def _any(gradient: Any) -> bool:
    return gradient is not None and bool(numbers_of(gradient).any())
