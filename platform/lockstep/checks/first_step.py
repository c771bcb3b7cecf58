"""The first step's micro-batches from end to end, each once, on the bare model: what every rank will compute first."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from lockstep.checks.active_dropout import DropoutSeen
from lockstep.checks.fixture import Fixture
from lockstep.checks.loss_inputs import LossInputs, LossInputsMode
from lockstep.data.sampler import MicroBatch
from lockstep.training.evaluation.evaluation_pass import has_evaluation_loss
from lockstep.training.module_modes import Modes, evaluating
from lockstep.training.step.buffers import KeptBuffers
from lockstep.training.step.loss_form import LossForm
from lockstep.training.step.means import means_alone, means_of, number
from lockstep.training.step.sparse_gradients import numbers_of

LABELS_S = 1.0
"""How long further labels are looked at, of the training data and of the held-out data each."""


@dataclass(slots=True)
class PhaseSeen:
    """What the first step showed of one phase; of a job without phases, of its loss."""

    total: float = 0.0
    weight: float = 0.0
    """The sum of the micro-batches' weights."""
    samples: int = 0
    form: LossForm = field(default_factory=LossForm)
    """That of its newest loss, with all that any has shown."""
    loss_inputs: LossInputs = field(default_factory=LossInputs)
    """What torch's losses were given, in the first step alone."""

    @property
    def loss(self) -> float:
        return self.total / self.weight if self.weight else float("nan")


@dataclass(slots=True)
class FirstStep:
    """What the first step showed."""

    phases: dict[str, PhaseSeen] = field(default_factory=dict)
    """By name; the only one of a job without phases has none."""
    written: frozenset[int] = frozenset()
    silent: frozenset[str] = frozenset()
    """Parameters whose gradient was zero in every element, in every micro-batch and in every phase."""
    changed_mode: str = ""
    """A module with parameters that learn, whose mode the job's loss changed in training."""
    kept_mode: str = ""
    """A module that the job's loss or metrics put into training mode in evaluation."""
    drops: str = ""
    """A function for dropout that was at work in evaluation."""


def walk(fixture: Fixture) -> FirstStep:
    """Compute the first step's micro-batches, and the first of the evaluation. Raises the JobError or NumericsError that a run would."""
    state = fixture.fresh()
    modules, first_step = fixture.modules(fixture.job, state.model), FirstStep()
    first_step.phases = {module.phase.name: PhaseSeen() for module in modules}
    silent = {name for module in modules for name in module.names if name not in module.conditional}
    for key in fixture.step_keys():
        for module in modules:
            batch, modes, phase = (
                fixture.fetch(key),
                Modes(state.model),
                first_step.phases[module.phase.name],
            )
            with LossInputsMode(phase.loss_inputs):
                loss = fixture.backward(module, state, batch, key)
            first_step.changed_mode = first_step.changed_mode or modes.changed_where_it_learns()
            phase.total += number(loss.total)
            phase.weight += number(loss.weight)
            phase.samples += len(key.ids)
            gradients = {name: p.grad for name, p in state.model.named_parameters() if p.grad is not None}
            form = LossForm.of(loss, gradients, fixture.written)
            phase.form = replace(form, tables=phase.form.tables | form.tables)
            silent -= {name for name, gradient in gradients.items() if bool(numbers_of(gradient).any())}
            state.model.zero_grad(set_to_none=True)
            modes.restore()
    first_step.silent, first_step.written = frozenset(silent), fixture.written
    if fixture.evaluation_count:
        with DropoutSeen() as dropout:
            first_step.kept_mode = _evaluated(fixture, state.model, fixture.evaluation_micro_batch(0))
        first_step.drops = dropout.called
    return first_step


def _evaluated(fixture: Fixture, model: nn.Module, key: MicroBatch) -> str:
    """A module that one evaluation micro-batch puts into training mode."""
    batch, buffers = fixture.fetch(key), KeptBuffers(model)
    try:
        with evaluating(model), fixture.with_place(key):
            modes = Modes(model)
            if has_evaluation_loss(fixture.job):
                loss = fixture.evaluation_loss(fixture.job, model, key.micro_batch, batch)
                means_of(loss, fixture.job.metrics(model, batch))
            else:
                means_alone(fixture.job.metrics(model, batch))
            return modes.changed()
    finally:
        buffers.restore()


def labels_of(fixture: Fixture, phase: str | None) -> LossInputs:
    """The labels of as many micro-batches as a second allows, by the calls of torch's losses in evaluation mode.

    Those of the training data in a phase; for None those that evaluation holds out.
    """
    state, inputs, held_out = fixture.fresh(), LossInputs(), phase is None
    if held_out and not (fixture.evaluation_count and has_evaluation_loss(state.job)):
        return inputs
    modules = {module.phase.name: module for module in fixture.modules(state.job, state.model)}
    until = time.perf_counter() + LABELS_S
    evaluation_keys = (fixture.evaluation_micro_batch(i) for i in range(fixture.evaluation_count))
    keys = evaluation_keys if held_out else fixture.sampler(range(fixture.plan.micro_batches))
    with evaluating(state.model), LossInputsMode(inputs):
        for key in keys:
            if time.perf_counter() > until or (key.step > 0 and key.step >= fixture.plan.steps_in_epoch(0)):
                break
            buffers = KeptBuffers(state.model)
            # A loss of training may take gradients within itself, as a penalty on them does.
            with fixture.with_place(key), torch.set_grad_enabled(not held_out), state.precision.autocast():
                if phase is None:
                    fixture.evaluation_loss(state.job, state.model, key.micro_batch, fixture.fetch(key))
                else:
                    modules[phase].on_trial(key.micro_batch, fixture.fetch(key))
            buffers.restore()
    return inputs
