"""What one micro-batch and an update of it take in memory: counted, or measured as tensors come and go (`live_bytes`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from lockstep.checks.fixture import Fixture
from lockstep.checks.live_bytes import peak_of
from lockstep.data.sampler import MicroBatch
from lockstep.errors import JobError
from lockstep.training.failure import as_lockstep_error
from lockstep.training.observe.worker_memory import (
    average_bytes,
    checkpoint_bytes,
    gradient_bytes,
    nbytes,
    summed_bytes,
    tensors_in,
)
from lockstep.training.step.closures import step_once
from lockstep.training.step.host_memory import may_divide
from lockstep.training.step.norm import workspace_bytes
from lockstep.training.step.phase_step import LossModule
from lockstep.training.step.phases import optimizers_of
from lockstep.training.step.sharding import SCALARS, Span
from lockstep.training.step.sharding_units import Calls, units_of
from lockstep.training.step.span_gathering import flat
from lockstep.training.step.uncut_parameters import NO_UNITS, UnitBytes, unit_bytes


class ParameterState(NamedTuple):
    """What an optimizer keeps of one parameter, and what decides how a sharded one cuts it."""

    elements: int
    """0 for a parameter that is not trained."""
    width: int
    """Bytes of an element."""
    may_cut: bool
    scalars: int
    """Bytes of state that every span of the parameter has."""
    others: int
    """Bytes of state that has an element for each of the parameter's."""
    on_all: int = 0
    """Bytes of state that every worker keeps, as of a table with sparse gradients."""

    def bytes(self, span: Span) -> int:
        """Bytes of the state of a span."""
        return self.scalars + self.others * (span.stop - span.start) // max(1, self.elements)


@dataclass(frozen=True, slots=True)
class Measured:
    """One micro-batch of `samples`, forward and backward, and an update, in bytes."""

    samples: int
    parameters: int
    buffers: int
    gradients: int
    optimizer: tuple[ParameterState, ...]
    """Of each parameter, in the order of the optimizer's groups."""
    average: int
    checkpoint: int
    workspace: int
    """Where the norm of the gradients is taken."""
    batch: int
    activations: int
    """What forward holds at its peak."""
    computing: int
    """What forward and backward hold at their peak, the gradients included."""
    updating: int
    """What an update makes and lets go of."""
    phases: int = 1
    """Of a step. With several, a worker holds all its micro-batches of the step until the last phase has had them."""
    unit_bytes: UnitBytes = NO_UNITS
    """Parameters that are gathered where they are sharded."""
    units: int = 0
    """Modules that are gathered one at a time."""
    tables: int = 0
    """Parameters with sparse gradients, which every worker has whole."""
    table_rows: int = 0
    """Gradients of theirs."""
    updated_at_once: int = 0
    """Parameters that an update needs at once, at least: the largest one, or all of those that an optimizer of the job's own updates."""
    apart: int = 0
    """Bytes of the gradients that are not of the phase with most of them: sums wait for one phase at a time."""

    @property
    def summed(self) -> int:
        """Bytes of the gradients that are summed at once, at most."""
        return self.gradients - self.apart


def measured(fixture: Fixture, key: MicroBatch) -> Measured:
    """Forward, backward and two updates with the micro-batch `key`, phase by phase, on a fresh state. What the first pass makes for good is no part of it."""
    state, batch = fixture.fresh(), fixture.fetch(key)
    modules = fixture.modules(state.job, state.model)
    model, optimizers = state.model, list(optimizers_of(state.optimizer).values())
    batch_bytes = nbytes(tensors_in(batch))
    calls = Calls(LossModule)
    try:
        for module in modules:
            with calls.counted():
                fixture.backward(module, state, batch, key)
            batch = fixture.fetch(key) if len(modules) > 1 else batch  # a job may write into it
    except JobError:
        whole = fixture.step_keys()[0]  # a job may need whole micro-batches
        if len(key.ids) in (fixture.plan.micro_batch, len(whole.ids)):
            raise
        return measured(fixture, whole)
    for optimizer in optimizers:
        try:
            step_once(state.job, optimizer, lambda: torch.zeros(()))  # it makes its state
        except (Exception, SystemExit) as error:
            raise as_lockstep_error(error, "first update", check="optimizer") from error
    if state.average is not None:
        state.average.move()
    if len(modules) == 1:
        model.zero_grad(set_to_none=True)
    forward = computing = updating = 0
    for module, optimizer in zip(modules, optimizers, strict=True):
        for parameter in module.parameters_that_learn:
            parameter.grad = None
        others = gradient_bytes(model)
        with peak_of(fixture.device) as peak:
            loss = fixture.forward(module, state, batch, key)
        del loss
        forward = max(forward, peak.bytes)
        batch = fixture.fetch(key) if len(modules) > 1 else batch
        with peak_of(fixture.device) as peak:
            fixture.backward(module, state, batch, key)
        computing = max(computing, others + peak.bytes)
        with peak_of(fixture.device) as peak:
            step_once(state.job, optimizer, lambda: torch.zeros(()))
        updating = max(updating, peak.bytes)
        batch = fixture.fetch(key) if len(modules) > 1 else batch
    units = units_of(model, calls, fixture.spec.sharding.units)
    tables = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and parameter.grad.is_sparse
    }
    return Measured(
        samples=len(key.ids),
        parameters=nbytes(model.parameters()),
        buffers=nbytes(model.buffers()),
        gradients=gradient_bytes(model),
        optimizer=tuple(
            parameter_state
            for optimizer in optimizers
            for parameter_state in states_of(optimizer, tables.values())
        ),
        average=average_bytes(state),
        checkpoint=checkpoint_bytes(state),
        workspace=len(modules) * workspace_bytes(fixture.device),
        batch=batch_bytes,
        activations=forward,
        computing=computing,
        updating=updating,
        phases=len(modules),
        unit_bytes=unit_bytes(model, units, frozenset(tables)),
        units=len(units),
        tables=nbytes(tables.values()),
        updated_at_once=max(
            (_updated_at_once(optimizer, tables.values()) for optimizer in optimizers),
            default=0,
        ),
        table_rows=sum(part.nbytes for table in tables.values() for part in tensors_in(table.grad)),
        apart=gradient_bytes(model) - summed_bytes(state),
    )


def states_of(optimizer: torch.optim.Optimizer, tables: Iterable[torch.Tensor]) -> Iterator[ParameterState]:
    """What an optimizer that has taken a step keeps, parameter by parameter. That of `tables` is whole on every worker."""
    ids = set(map(id, tables))
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        state = optimizer.state.get(parameter, {})
        if id(parameter) in ids:
            on_all = sum(tensor.nbytes for tensor in tensors_in(state))
            yield ParameterState(0, parameter.element_size(), False, 0, 0, on_all)
            continue
        scalars = sum(t.nbytes for name, value in state.items() if name in SCALARS for t in tensors_in(value))
        yield ParameterState(
            parameter.numel() if parameter.requires_grad else 0,
            parameter.element_size(),
            flat(parameter.detach()) is not None,
            scalars,
            sum(tensor.nbytes for tensor in tensors_in(state)) - scalars,
        )


def _updated_at_once(optimizer: torch.optim.Optimizer, tables: Iterable[torch.Tensor]) -> int:
    """Bytes of the parameters but `tables` that an update needs at once, at least."""
    ids = set(map(id, tables))
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    sizes = [parameter.nbytes for parameter in parameters if id(parameter) not in ids]
    return max(sizes, default=0) if may_divide(optimizer) else sum(sizes)


def at(whole: Measured, half: Measured, samples: int) -> Measured:
    """What another number of samples would measure: along the line through the two that were."""
    span = whole.samples - half.samples

    def along(first: int, second: int) -> int:
        slope = (first - second) / span if span else first / whole.samples
        return max(0, round(first + slope * (samples - whole.samples)))

    return replace(
        whole,
        samples=samples,
        batch=along(whole.batch, half.batch),
        activations=along(whole.activations, half.activations),
        computing=along(whole.computing, half.computing),
    )


def with_units(whole: Measured, units: int) -> Measured:
    """What a model of so many units would measure, each like the average one: all that is in units grows with their number, activations among it."""
    sizes, factor = whole.unit_bytes, units / whole.units
    in_units = sizes.every - sizes.outside
    more = 1 + (factor - 1) * in_units / max(1, whole.parameters)

    activations = round(whole.activations * factor)

    def grown(size: int) -> int:
        return round(size * more)

    return replace(
        whole,
        parameters=grown(whole.parameters),
        gradients=grown(whole.gradients),
        optimizer=tuple(
            state._replace(elements=grown(state.elements), others=grown(state.others))
            for state in whole.optimizer
        ),
        average=grown(whole.average),
        checkpoint=grown(whole.checkpoint),
        activations=activations,
        computing=whole.computing
        + (grown(whole.gradients) - whole.gradients)
        + (activations - whole.activations),
        updating=grown(whole.updating),
        unit_bytes=sizes._replace(every=sizes.outside + round(in_units * factor)),
        units=units,
        apart=grown(whole.apart),
    )
