"""The first step's micro-batches from end to end, each once, on the bare model: what every rank will compute first."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import nn

from lockstep.checks.losses_seen import LossesSeen, Seen
from lockstep.checks.specimen import Specimen
from lockstep.data.sampler import MicroBatch
from lockstep.training.buffers import KeptBuffers
from lockstep.training.evaluate import evaluating
from lockstep.training.means import means_of
from lockstep.training.phase_step import LossModule

LABELS_S = 1.0
"""How long further labels are looked at, of the training data and of the held-out data each."""


@dataclass(slots=True)
class FirstStep:
    """What the first step showed."""

    loss: float = 0.0
    weight: float = 0.0
    """The sum of the micro-batches' weights."""
    samples: int = 0
    parts: tuple[str, ...] = ()
    written: frozenset[int] = frozenset()
    seen: Seen = field(default_factory=Seen)
    """What torch's losses were given, in the first step alone."""
    silent: frozenset[str] = frozenset()
    """Parameters whose gradient was zero in every element, in every micro-batch."""
    changed_mode: str = ""
    """A module whose mode the job's loss changed in training."""
    kept_mode: str = ""
    """A module that was in training mode after the job's loss or metrics in evaluation."""
    compute_s: float = float("inf")
    """The fastest micro-batch, forward and backward."""


def walk(specimen: Specimen) -> FirstStep:
    """Compute the first step's micro-batches, and the first of the evaluation. Raises the JobError or NumericsError that a run would."""
    state = specimen.fresh()
    module = LossModule(specimen.job, state.model)
    found, total, weight = FirstStep(), 0.0, 0.0
    silent = {name for name, p in state.model.named_parameters() if p.requires_grad} - set(module.conditional)
    for key in specimen.micro_batches():
        batch = specimen.fetch(key)
        modes = modes_of(state.model)
        began = time.perf_counter()
        with LossesSeen(found.seen):
            loss = specimen.backward(module, state, batch, key)
        found.compute_s = min(found.compute_s, time.perf_counter() - began)
        found.changed_mode = found.changed_mode or first_change(modes, modes_of(state.model))
        total, weight = total + float(loss.total.detach()), weight + float(loss.weight)
        found.parts, found.samples = tuple(loss.parts), found.samples + len(key.ids)
        silent -= {n for n, p in state.model.named_parameters() if p.grad is not None and bool(p.grad.any())}
        state.model.zero_grad(set_to_none=True)
        state.model.train()
    found.loss, found.weight = total / weight if weight else float("nan"), weight
    found.silent, found.written = frozenset(silent), specimen.written
    if specimen.evaluation_count:
        found.kept_mode = _evaluated(specimen, state.model, specimen.evaluation_micro_batch(0))
    return found


def _evaluated(specimen: Specimen, model: nn.Module, key: MicroBatch) -> str:
    """A module that is in training mode after one evaluation micro-batch."""
    batch, buffers = specimen.fetch(key), KeptBuffers(model)
    try:
        with evaluating(model), specimen.told(key):
            loss = specimen.job.loss(model, batch)
            means_of(loss, specimen.job.metrics(model, batch))
            return next((name or "the model" for name, on in modes_of(model).items() if on), "")
    finally:
        buffers.restore()


def labels_of(specimen: Specimen, held_out: bool) -> Seen:
    """The labels of as many micro-batches as a second allows, by the calls of torch's losses in evaluation mode."""
    state, seen = specimen.fresh(), Seen()
    module, until = LossModule(specimen.job, state.model), time.perf_counter() + LABELS_S
    count = specimen.plan.micro_batches
    held = (specimen.evaluation_micro_batch(i) for i in range(specimen.evaluation_count))
    keys = held if held_out else specimen.sampler(range(count))
    with evaluating(state.model), LossesSeen(seen):
        for key in keys:
            if time.perf_counter() > until or (key.step > 0 and key.step >= specimen.plan.steps_per_epoch):
                break
            buffers = KeptBuffers(state.model)
            with specimen.told(key), torch.no_grad(), state.precision.autocast():
                module.job.loss(state.model, specimen.fetch(key))
            buffers.restore()
    return seen


def modes_of(model: nn.Module) -> dict[str, bool]:
    """Which modules are in training mode, by name."""
    return {name: module.training for name, module in model.named_modules()}


def first_change(before: dict[str, bool], after: dict[str, bool]) -> str:
    """The first module whose mode differs, or nothing."""
    return next((name or "the model" for name, on in before.items() if after.get(name) != on), "")
