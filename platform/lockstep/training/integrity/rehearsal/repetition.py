"""The first micro-batches of a run, computed again: after itself, after another one and behind other phases a micro-batch gives the same bits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lockstep.data.sampler import MicroBatch
from lockstep.job.interface import Loss
from lockstep.randomness import Draws, rehearsal_key, seed_all
from lockstep.training.failure import job_at
from lockstep.training.integrity import problems
from lockstep.training.integrity.rehearsal.loss_sums import check_sum
from lockstep.training.integrity.rehearsal.micro_batch import Computed, compute
from lockstep.training.integrity.rehearsal.names_of_objects import memory_of, named
from lockstep.training.integrity.rehearsal.object_state import Memory
from lockstep.training.integrity.rehearsal.trial_batches import TrialBatches
from lockstep.training.state import TrainState
from lockstep.training.step.buffers import KeptBuffers, statistics
from lockstep.training.step.phase_step import LossModule
from lockstep.training.step.phases import optimizers_of


@dataclass(slots=True)
class Repetition:
    """Computes micro-batches of the first step, and compares what they give each time. DeterminismError where that differs."""

    state: TrainState
    batches: TrialBatches
    warn: Callable[[str], None]
    left: set[str] = field(default_factory=set, init=False)
    """The places of which a warning has said that they change with every micro-batch."""

    def compute(self, module: LossModule, key: MicroBatch) -> Computed:
        """Forward and backward of a micro-batch that is fetched for it."""
        return self.compute_batch(module, self.batches.fetch(key), self.batches.number(key))

    def compute_batch(self, module: LossModule, batch: Any, m: int = 0) -> Computed:
        """Forward and backward of micro-batch `m`."""
        spec, device = self.batches.spec, self.batches.device
        return compute(module, batch, self.state.precision, seed=spec.seed, device=device, m=m)

    def compare_all(
        self, modules: Sequence[LossModule], keys: Sequence[MicroBatch], *, others: bool, within_s: float
    ) -> bool:
        """Compare each phase's first micro-batch with itself, with `others` also after another one.

        Returns whether others were computed, too: not once a micro-batch has taken longer than `within_s`.
        """
        for module in modules:
            others = self._compare(module, keys, others, within_s)
        self._compare_behind(modules, keys)
        return others

    def compare_after(
        self,
        keys: Sequence[MicroBatch],
        first: Computed,
        compute: Callable[[MicroBatch], Computed],
    ) -> None:
        """Compare the first micro-batch with itself after the others."""
        before = self._memory()
        for key in keys[1:]:
            compute(key)
        self._same(first, compute(keys[0]), before)

    def _compare(self, module: LossModule, keys: Sequence[MicroBatch], others: bool, within_s: float) -> bool:
        memory_before, began = self._memory(), time.perf_counter()
        again = self.compute(module, keys[0])
        others &= time.perf_counter() - began <= within_s
        # Halves are of other rows than the whole, where others go with them.
        if module.settle_on_trial is None:
            forward, fetch = partial(self.forward, module), self.batches.fetch
            check_sum(fetch, forward, keys[0], again.loss, self.warn, module.phase.loss_label)
        if others and len(keys) > 1:
            self._tell_buffers(again, self._repeated(module, keys[1], memory_before))
        self._same(again, self.compute(module, keys[0]), memory_before)
        return others

    def _repeated(self, module: LossModule, key: MicroBatch, before: Memory) -> Computed:
        """A further micro-batch. What it draws when it is first computed, it draws again, unless the job has kept it for whoever asks next."""
        draws = Draws()
        once, drawn = self.compute(module, key), draws.state()
        draws = Draws()
        again, drawn_again = self.compute(module, key), draws.state()
        if drawn != drawn_again:
            raise problems.KEEPS_DRAWS(label=module.phase.loss_label)
        if once.first_difference(again) is not None:
            self._same(once, again, before)
        return once

    def _compare_behind(self, modules: Sequence[LossModule], keys: Sequence[MicroBatch]) -> None:
        """Compare each phase on the first micro-batch after earlier phases that ended with that micro-batch, and with another.

        What the earlier phases leave in the job comes from their worker's last micro-batch.
        """

        def behind(i: int, key: MicroBatch) -> Computed:
            for module in modules[:i]:
                self.compute(module, key)
            return self.compute(modules[i], keys[0])

        for i in range(1, len(modules) if len(keys) > 1 else 0):
            memory_before = self._memory()
            first, second = behind(i, keys[0]), behind(i, keys[1])
            if first.first_difference(second) is not None:
                self._same(first, second, memory_before)

    def _same(self, before: Computed, after: Computed, held: Memory) -> None:
        """Raise for a micro-batch whose second result differs, and warn of what it left behind."""
        changed = self._memory().changed_since(held)
        difference = before.first_difference(after)
        if difference is not None and changed:
            raise problems.KEPT(name=named(changed), got=difference)
        if difference is not None:
            raise problems.REPEATED_OTHERWISE(got=difference)
        if changed:
            self.left |= {*changed}
            self.warn(
                f"rehearsal: {named(changed)} changes with every micro-batch, so it is not the same on every worker and no checkpoint "
                "keeps it; as soon as a loss, a gradient or an update depends on it, other workers or a resume give other bits"
            )

    def _memory(self) -> Memory:
        optimizers = list(optimizers_of(self.state.optimizer).values())
        return memory_of(self.batches.job, self.state.model, optimizers)

    def forward(self, module: LossModule, batch: Any, seed: int) -> Loss:
        """The loss of a batch, by forward alone; buffers are put back. Seed 0 is that of the first micro-batch."""
        buffers = KeptBuffers(self.state.model)
        try:
            return self.loss(module, batch, seed)
        finally:
            buffers.restore()

    def loss(self, module: LossModule, batch: Any, seed: int) -> Loss:
        """As `forward`, with what it does to the buffers."""
        again = ("again", seed) if seed else ()
        seed_all(rehearsal_key(self.batches.spec.seed, *again), self.batches.device)
        with job_at("first micro-batch, before training"), self.state.precision.autocast():
            return module.on_trial(0, batch)

    def _tell_buffers(self, first: Computed, second: Computed) -> None:
        """Warn of buffers that depend on the samples: a step keeps only those of its first micro-batch."""
        model = self.state.model
        usual = statistics(model)
        names = [name for i, (name, _) in enumerate(model.named_buffers()) if i in first.written - usual]
        labels = [f"the buffer {name!r}" for name in names]
        differing = [label for label in labels if first.results.get(label) != second.results.get(label)]
        if differing:
            self.warn(
                f"rehearsal: {named(differing)} of the model depends on the samples; of the {self.batches.plan.micro_batches} micro-batches "
                "of a step only the first one's value is kept, on any number of workers: if it must see every sample, as the state "
                "of truncated back-propagation through time, set batch.micro = batch.global"
            )
