"""Warnings of losses that depend on which samples share a micro-batch: a sound job, whose user may not know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

from lockstep.data.dataset_order import says_of_neighbours
from lockstep.data.sampler import MicroBatch
from lockstep.training.integrity.rehearsal.loss_sums import told_compared
from lockstep.training.integrity.rehearsal.repetition import Repetition
from lockstep.training.interleaved_samples import is_unsaid, told_interleaved
from lockstep.training.job_data import make_sampler
from lockstep.training.module_modes import evaluating
from lockstep.training.step.means import number
from lockstep.training.step.phase_step import LossModule


def interleaved(repetition: Repetition, modules: Sequence[LossModule]) -> Iterator[str]:
    """A text for each loss that depends on which samples share a micro-batch, where a dataset orders itself."""
    batches, state = repetition.batches, repetition.state
    samples, plan = batches.micro_batches.samples, batches.plan
    if plan.group > 1 or not is_unsaid(samples):
        return
    assigned = range(plan.position(0).micro_batches)
    keys = list(islice(make_sampler(batches.spec, plan, samples, assigned), len(assigned)))
    with evaluating(state.model), state.eager():
        for module in _within_micro_batches(modules):

            def total(key: MicroBatch, seed: int, module: LossModule = module) -> float:
                return number(repetition.forward(module, batches.fetch(key), seed).total)

            yield from told_interleaved(samples, keys, total, module.phase.loss_label)


def compared(repetition: Repetition, modules: Sequence[LossModule], key: MicroBatch) -> Iterator[str]:
    """A text for each loss that compares samples within its micro-batch, though a step has several. A dataset may say which ones share one."""
    batches, state = repetition.batches, repetition.state
    samples, plan = batches.micro_batches.samples, batches.plan
    if plan.group > 1 or plan.micro_batches == 1 or is_unsaid(samples) or says_of_neighbours(samples):
        return
    with evaluating(state.model), state.eager():
        for module in _within_micro_batches(modules):
            forward = partial(repetition.forward, module)
            yield from told_compared(batches.fetch, forward, key, module.phase.loss_label)


def _within_micro_batches(modules: Sequence[LossModule]) -> list[LossModule]:
    return [module for module in modules if module.phase.embed is None]
