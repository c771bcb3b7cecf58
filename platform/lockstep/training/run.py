"""A run that is ready to be trained, and what watches its bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.communication.group import Group
from lockstep.data.loader import Loader
from lockstep.data.micro_batches import MicroBatches
from lockstep.data.sampler import MicroBatch, MicroBatchSampler
from lockstep.job.interface import Job
from lockstep.plan import Plan, Position
from lockstep.record.events.union import Tell
from lockstep.record.ledger.history import History
from lockstep.spec.fields import Spec
from lockstep.training.checkpoints import Checkpoints, LastSave
from lockstep.training.driver_requests import Requests
from lockstep.training.evaluation.held_out_sets import EvaluationSets
from lockstep.training.identity_inputs import Inputs
from lockstep.training.integrity.recheck import Recheck
from lockstep.training.integrity.rehearsal.names_of_objects import memory_of
from lockstep.training.integrity.resume_check.check_schedule import CheckSchedule
from lockstep.training.job_data import (
    make_sampler,
)
from lockstep.training.start import Start
from lockstep.training.state import TrainState
from lockstep.training.step.optimizer_step import Stepper


@dataclass(frozen=True, slots=True)
class Run:
    """One run, ready to be trained: everything that `fit` works on."""

    spec: Spec
    job: Job
    plan: Plan
    group: Group
    state: TrainState
    step: Stepper
    evaluate: EvaluationSets | None
    batches: MicroBatches
    facts: dict[str, Any]
    start: Start | None
    history: History
    inputs: Inputs
    last_save: LastSave = field(default_factory=LastSave)
    check_schedule: CheckSchedule = field(default_factory=CheckSchedule)
    activations_bytes: int = 0
    """What the graph of the first micro-batch keeps for backward, in the phase that keeps most; 0 where it is not known."""

    def in_group(self, group: Group, tell: Tell, origin: AttemptOrigin | None) -> Run:
        """The run of this worker in another group, from the current state. All ranks of the group call it."""
        old = self.step
        plan = replace(self.plan, in_passes=self.state.sharding is not None)
        step = Stepper(self.spec, plan, group, self.state, old.forms)
        step.compute.settings = old.compute.settings
        if self.evaluate is not None:
            self.evaluate.join(group)
            self.evaluate.shard(self.state.sharding)
            self.evaluate.restore_buffers_by(step.compute.buffers.restore)
        if self.state.job_weights is not None:
            self.state.job_weights.group = group
        watch_bits(step, self.spec, plan, self.batches, tell, origin)
        facts = {**self.facts, "workers": group.size}
        return replace(self, group=group, plan=plan, step=step, facts=facts, start=None)

    def loader(self) -> Loader:
        """The worker's micro-batches from the state's step to the end of the run."""
        samples, start = self.batches.samples, self.state.counters.step
        rank, workers = self.group.rank, self.group.size

        def assigned(micro_batches: int) -> range:
            return self.plan.ranges(workers, micro_batches)[rank]

        sampler = make_sampler(self.spec, self.plan, samples, assigned, start)
        processes = self.spec.data.loader_processes
        strict = self.spec.determinism == "strict"
        return Loader(
            self.batches,
            sampler,
            self.group.device,
            processes,
            self.group.let_go,
            self._compared(start) if strict else None,
            partial(self._check_order, sampler) if strict and sampler.may_change else None,
        )

    def _check_order(self, sampler: MicroBatchSampler, key: MicroBatch) -> None:
        """Refuse an order that training has changed, also before a micro-batch is computed again: samples are asked for anew for that, and no device is to be blamed."""
        recheck = self.step.accumulation.recheck
        sampler.check_unchanged(
            key, due=recheck is not None and bool(recheck.chosen(self.plan.position(key.step)))
        )

    def _compared(self, start: int) -> Callable[[MicroBatch], bool]:
        """Which micro-batches are fetched twice: the worker's first one of the steps 1, 2, 4, 8 … after `start`, and of the last step."""
        last = self.plan.total_steps - 1

        def compared(key: MicroBatch) -> bool:
            done = key.step - start
            if done <= 0 or (done & (done - 1) and key.step != last):
                return False
            return key.micro_batch == self.step.accumulation.assigned(self.plan.position(key.step)).start

        return compared

    def ahead(self, over: bool) -> Iterator[Position]:
        """The remaining steps; none where the run is `over`."""
        return iter(()) if over else self.plan.positions(self.state.counters.step)

    def checkpoints(self, tell: Tell, requests: Requests, origin: AttemptOrigin | None) -> Checkpoints:
        """The saver of this run's state. An attempt whose origin says so saves nothing."""
        if origin is not None and not origin.saves:
            origin = None
        return Checkpoints(
            self.spec,
            self.plan,
            self.group,
            self.state,
            self.facts,
            self.history,
            tell,
            requests,
            origin,
            self.start,
            self.step.digests.for_checkpoint,
            self.last_save,
        )


def watch_bits(
    step: Stepper,
    spec: Spec,
    plan: Plan,
    batches: MicroBatches,
    tell: Tell,
    origin: AttemptOrigin | None,
) -> None:
    """Set a worker's steps up to detect wrong bits, and to name the samples of a micro-batch that fails."""
    sampler = make_sampler(spec, plan, batches.samples)
    step.compute.samples = lambda position, m: sampler.at(position, m).ids
    step.compute.places = sampler.places
    compares = spec.determinism == "strict" and spec.reduction == "exact" and spec.rehearsal != "off"
    compares &= not spec.data.loader_processes  # the loader compares what it fetches
    replays = origin is not None and origin.replay is not None
    by_default = spec.recheck is None and compares and len(step.each_phase) == 1 and not replays
    if spec.recheck or by_default:
        memory = partial(memory_of, step.state.job, step.state.model)
        (phase,) = step.each_phase
        step.accumulation.recheck = Recheck(
            spec,
            plan,
            step.group,
            batches,
            sampler,
            step.agreement,
            partial(step.accumulation.recomputed, phase),
            memory,
            together=step.state.sharding is not None,
        )
    if origin is not None:
        from_checkpoint = not origin.in_memory
        step.agreement.begin(tell, origin.attempt, origin.doubts, from_checkpoint=from_checkpoint)
