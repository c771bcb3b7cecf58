"""The weights that a job evaluates in the place of those that it trains: its `eval_weights`.

Whatever the job's context does to the model is undone here, and not by the job: parameters, buffers and modes come back bit for bit. Arithmetic
that swaps weights back, as a schedule-free optimizer's, would round; statistics of batch norms would stay.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from lockstep.communication.group import Group
from lockstep.data.loader import Loader
from lockstep.data.micro_batches import MicroBatches
from lockstep.data.sampler import MicroBatchSampler
from lockstep.job.interface import Job, overrides
from lockstep.plan import Plan
from lockstep.randomness import eval_weights_key, seed_all
from lockstep.training import problems
from lockstep.training.auxiliary_state import unlisted_tensors
from lockstep.training.failure import job_at
from lockstep.training.integrity.state_digest import tree_digest
from lockstep.training.module_modes import Modes
from lockstep.training.step.buffers import KeptBuffers
from lockstep.training.step.refused_state import state_refused


def has_eval_weights(job: Job) -> bool:
    """Whether the job says which weights are evaluated."""
    return overrides(job, "eval_weights")


class JobWeights:
    """Enters a job's `eval_weights`. All ranks do so together, and compare what they get."""

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        optimizer: Any,
        batches: MicroBatches,
        sampler: MicroBatchSampler,
        plan: Plan,
        group: Group,
        seed: int,
    ) -> None:
        self.job, self.model, self.optimizer = job, model, optimizer
        self.batches, self.sampler, self.plan = batches, sampler, plan
        self.group, self.seed = group, seed
        self.takes_batches = "batches" in inspect.signature(job.eval_weights).parameters
        self.step: Callable[[], int] = lambda: 0
        """The number of the newest step, for messages."""

    @contextmanager
    def shown(self, *, alone: bool = False) -> Iterator[None]:
        """Put the weights to evaluate into the model. All ranks do and compare them, unless it is done on this one `alone`."""
        trained = [(parameter, parameter.detach().clone()) for parameter in self.model.parameters()]
        buffers, modes = KeptBuffers(self.model), Modes(self.model)
        try:
            with torch.no_grad():
                context = self._entered()
            try:
                modes.restore()
                if not alone:
                    self._check_same()
                yield
            except BaseException:
                if not context.__exit__(*sys.exc_info()):
                    raise
            else:
                with torch.no_grad(), job_at("in eval_weights"):
                    context.__exit__(None, None, None)
        finally:
            modes.restore()
            with torch.no_grad():
                for parameter, value in trained:
                    parameter.copy_(value)
            buffers.restore()

    def _entered(self) -> AbstractContextManager[Any]:
        seed_all(eval_weights_key(self.seed), self.group.device)
        with state_refused(self.optimizer), job_at("in eval_weights"):
            arguments = (self.first,) if self.takes_batches else ()
            context = self.job.eval_weights(self.model, self.optimizer, *arguments)
            if not isinstance(context, AbstractContextManager):
                raise problems.EVAL_WEIGHTS_KIND(got=type(context).__name__)
            context.__enter__()
        return context

    def first(self, count: int) -> Iterator[Any]:
        """The first `count` micro-batches of the run in order, on the device; each after a seed of its own."""
        if count < 0:
            raise ValueError(f"batches: got {count}, wanted at least 0 micro-batches")
        keys = []
        for position in self.plan.positions():
            keys += [self.sampler.at(position, m) for m in range(position.micro_batches)]
            if len(keys) >= count:
                break
        for i, batch in enumerate(Loader(self.batches, keys[:count], self.group.device)):
            if batch is not None:  # all of its samples are left out
                seed_all(eval_weights_key(self.seed, i), self.group.device)
                yield batch

    def _check_same(self) -> None:
        """DriftError where the ranks have got different weights."""
        if self.group.size == 1:
            return
        digests = self.group.gather(
            tree_digest({"state": self.model.state_dict(), "unlisted": unlisted_tensors(self.model)})
        )
        strays = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if strays:
            raise problems.EVAL_WEIGHTS_DIFFER(got=strays, step=self.step())
