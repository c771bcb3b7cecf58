"""The first micro-batches of a run, fetched on trial: the same samples and the same draws each time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from lockstep.data.dataset import is_fingerprinted
from lockstep.data.fingerprint import check_repeats
from lockstep.data.loader import Loader
from lockstep.data.micro_batches import MicroBatches
from lockstep.data.sampler import MicroBatch
from lockstep.job.interface import Job
from lockstep.plan import Plan
from lockstep.randomness import Draws
from lockstep.spec.fields import Spec
from lockstep.training.integrity import problems
from lockstep.training.integrity.rehearsal.generators import of_training
from lockstep.training.integrity.rehearsal.thread_pools import out_of_order
from lockstep.training.job_data import make_sampler
from lockstep.training.step.phase_step import copied


@dataclass(slots=True)
class TrialBatches:
    """Fetches the first micro-batches of a run as its loader would, and reads nothing ahead."""

    job: Job
    spec: Spec
    plan: Plan
    micro_batches: MicroBatches
    device: torch.device
    _keys: list[MicroBatch] = field(default_factory=list, init=False)
    _first: tuple[Any, tuple[object, ...]] = field(default=(None, ()), init=False)
    """A copy of the first micro-batch as it was fetched first, and the state of the generators after it."""

    def keys(self) -> list[MicroBatch]:
        """The first two micro-batches that `data.without` leaves a sample, however they are shared out; the only one of a run with one in each step."""
        if not self._keys:
            sampler = make_sampler(self.spec, self.plan, self.micro_batches.samples)
            every = (
                sampler.at(position, m)
                for position in self.plan.positions()
                for m in range(position.micro_batches)
            )
            count = min(2, self.plan.position(0).micro_batches)
            self._keys = list(islice((key for key in every if len(key.ids)), count))
        if not self._keys:
            raise problems.NO_SAMPLE_TO_REHEARSE()
        return self._keys

    def number(self, key: MicroBatch) -> int:
        """The number by which a micro-batch is computed on trial: 0 for the first of `keys`, whatever is empty before it."""
        first = self.keys()[0]
        return int((key.step, key.micro_batch) != (first.step, first.micro_batch))

    def fetch(self, key: MicroBatch) -> Any:
        """A micro-batch, anew at each call: a job may write into it."""
        return next(Loader(self.micro_batches, [key], self.device))

    def fetch_first(self, key: MicroBatch) -> Any:
        """As `fetch`, and note what came, which `check` compares."""
        batch, drawn = self._fetch_drawing(key)
        self._first = copied(batch), drawn
        return batch

    def check(self, keys: Sequence[MicroBatch]) -> None:
        """Fetch micro-batch 0 again after others: JobError unless it has the same samples and draws the same numbers as when it was fetched first."""
        generators = of_training(self.job, self.micro_batches.samples)
        once, drawn = self._first
        generators.look()
        if len(keys) > 1:
            self.fetch(keys[1])
            generators.look()
        if not self.micro_batches.draws_nothing:
            # Of another step: the same draws in the same places would hide what a fetch changes in the data themselves.
            self.fetch(keys[0]._replace(step=keys[0].step + 1, due=()))
            generators.look()
        with nullcontext() if self.micro_batches.draws_nothing else out_of_order():
            again, drawn_again = self._fetch_drawing(keys[0])
        generators.look()
        if gone_on := generators.gone_on():
            # Or it belongs to samples that are read anew now and then, for they are kept.
            self.fetch(keys[0])
            generators.look()
            generators.refuse(gone_on)
        check_repeats(once, again, opaque=is_fingerprinted(self.micro_batches.samples))
        if drawn != drawn_again:
            raise problems.DATA_KEEP_DRAWS()

    def _fetch_drawing(self, key: MicroBatch) -> tuple[Any, tuple[object, ...]]:
        """A micro-batch, and the state of the generators after it."""
        draws = Draws()
        return self.fetch(key), draws.state()
