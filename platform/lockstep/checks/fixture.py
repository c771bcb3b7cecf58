"""A run as a fixture: its job, data, plan and states, built as training builds them, in one process and leaving nothing behind.

Parts are made when a check first asks for them, so an error is told by the check that met it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Dataset

from lockstep.communication.group import Group, local_device
from lockstep.data.loader import Loader
from lockstep.data.micro_batches import MicroBatches
from lockstep.data.sampler import EVALUATION, MicroBatch, MicroBatchSampler
from lockstep.job.interface import Job, Loss, Rows
from lockstep.job.loading import load_job
from lockstep.plan import Plan
from lockstep.randomness import seed_all, step_key
from lockstep.spec.fields import Spec
from lockstep.training.evaluation.evaluation_pass import evaluation_loss, has_evaluation_loss, stretch_of
from lockstep.training.failure import job_at
from lockstep.training.initial_model import make_model
from lockstep.training.initial_state import make_state
from lockstep.training.integrity.rehearsal.micro_batch import check_loss
from lockstep.training.job_data import JobData, check_rules, dataset_size, make_sampler, open_data
from lockstep.training.module_modes import evaluating
from lockstep.training.planning import make_plan
from lockstep.training.state import TrainState
from lockstep.training.step.buffers import KeptBuffers
from lockstep.training.step.parameters import missing_gradient
from lockstep.training.step.phase_step import LossModule
from lockstep.training.step.phases import phases_of
from lockstep.training.step.precision import Precision
from lockstep.training.step.trial_rows import among_others


class Fixture:
    """What the checks of one spec share. Enter `determinism` and `others_out_of_sight` around all of its use."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.device = local_device(spec)
        self.group = Group(rank=0, size=1, device=self.device)
        self.written: frozenset[int] = frozenset()
        """Indices of the buffers that a forward in training has written."""

    def beside(self, spec: Spec) -> Fixture:
        """The fixture of another spec of the same job on the same data, which are not opened again."""
        fixture = Fixture(spec)
        fixture.job, fixture.opened = self.job, self.opened
        return fixture

    @cached_property
    def job(self) -> Job:
        return load_job(self.spec.job.use, self.spec.job.params)

    @cached_property
    def opened(self) -> JobData:
        """The job's datasets."""
        opened = open_data(self.job, self.spec.seed)
        check_rules(self.spec, opened)
        return opened

    @property
    def data(self) -> tuple[Dataset[Any], Dataset[Any] | None]:
        """Training data, and the first set of the evaluation."""
        return self.opened.train, next(iter(self.opened.evaluated.values()), None)

    @cached_property
    def plan(self) -> Plan:
        return make_plan(self.spec, self.job, self.data[0])

    @property
    def workers(self) -> int:
        """The most workers that may share a step."""
        return min(self.spec.workers.max, self.plan.micro_batches)

    @cached_property
    def batches(self) -> MicroBatches:
        return MicroBatches(self.data[0], self.job.collate, seed=self.spec.seed, purpose="data")

    @cached_property
    def eval_batches(self) -> MicroBatches | None:
        if self.data[1] is None:
            return None
        return MicroBatches(self.data[1], self.job.collate, seed=self.spec.seed, purpose="eval data")

    def sampler(self, assigned: range, plan: Plan | None = None, start: int = 0) -> MicroBatchSampler:
        """The micro-batches of a worker from step `start` on."""
        return make_sampler(self.spec, plan or self.plan, self.data[0], assigned, start)

    @property
    def epoch_steps(self) -> int:
        """Steps of the first epoch that the run takes."""
        return min(self.plan.steps_in_epoch(0), self.plan.total_steps)

    def step_keys(self, step: int = 0) -> list[MicroBatch]:
        """The micro-batches of one step, whoever runs them, without those that `data.without` leaves no sample."""
        count = self.plan.position(step).micro_batches
        every = iter(self.sampler(range(count), start=step))
        return [key for key in islice(every, count) if len(key.ids)]

    @property
    def evaluation_count(self) -> int:
        """Micro-batches of an evaluation."""
        return (
            0
            if self.data[1] is None
            else -(-dataset_size(self.data[1], "eval_data") // self.plan.evaluation_micro_batch)
        )

    def evaluation_loss(self, job: Job, model: torch.nn.Module, i: int, batch: Any) -> Loss:
        """The loss of evaluation micro-batch `i`; one over the whole batch sees the rows of all of its stretch."""
        fetch = lambda index: self.fetch(self.evaluation_micro_batch(index))  # noqa: E731
        stretch = stretch_of(
            i, self.plan.global_batch // self.plan.evaluation_micro_batch, self.evaluation_count
        )
        return evaluation_loss(job, model, i, batch, fetch, stretch)

    def evaluation_micro_batch(self, i: int) -> MicroBatch:
        """Micro-batch `i` of an evaluation; the last one may be short."""
        assert self.data[1] is not None
        micro, size = self.plan.evaluation_micro_batch, dataset_size(self.data[1], "eval_data")
        return MicroBatch(EVALUATION, i, list(range(i * micro, min((i + 1) * micro, size))))

    def fetch(self, key: MicroBatch) -> Any:
        """A micro-batch on the device."""
        batches = self.eval_batches if key.step == EVALUATION else self.batches
        assert batches is not None
        return next(Loader(batches, [key], self.device))

    def fresh_model(self) -> tuple[Job, torch.nn.Module]:
        """The model of the run before its first step, and the job of its own that it belongs to."""
        job = load_job(self.spec.job.use, self.spec.job.params)
        model = make_model(self.spec, job, self.device)
        self._give_shapes(job, model)
        return job, model

    def fresh(self) -> TrainState:
        """The state of the run before its first step, with a job of its own."""
        job, model = self.fresh_model()
        evaluates = self.data[1] is not None and has_evaluation_loss(job)
        return make_state(self.spec, job, self.plan, model, self.device, evaluates=evaluates)

    def _give_shapes(self, job: Job, model: torch.nn.Module) -> None:
        """Make the parameters that a lazy module leaves to its first forward."""
        if any(torch.nn.parameter.is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
            key = self.step_keys()[0]
            with evaluating(model), self.with_place(key):
                for module in self.modules(job, model):
                    module.on_trial(key.micro_batch, self.fetch(key))

    def modules(self, job: Job, model: torch.nn.Module) -> list[LossModule]:
        """The losses of a step's phases in turn; of a job without phases its only one."""
        modules = [LossModule(job, model, phase) for phase in phases_of(job, model)]
        for module in modules:
            if module.phase.embed is not None:
                self._try_among_others(module)
        return modules

    def _try_among_others(self, module: LossModule) -> None:
        """Have a loss over the whole batch see the rows of all micro-batches of the first step, those of the others as constants."""
        keys, precision = self.step_keys(), Precision(self.spec.precision, self.device)

        def embedded(m: int) -> Rows:
            seed_all(step_key(self.spec.seed, 0, keys[m].micro_batch, module.phase.key), self.device)
            with self.with_place(keys[m]), torch.no_grad(), precision.autocast():
                assert module.phase.embed is not None
                return module.phase.embed(module.model, self.fetch(keys[m]))

        places = self.sampler(range(len(keys))).places(self.plan.position(0))
        trial = among_others(module, embedded, [each for each in places if len(each)], all_of_them=True)
        numbers = {key.micro_batch: i for i, key in enumerate(keys)}
        beyond = len(
            keys
        )  # a micro-batch without samples, or one of another step, goes with those of this one
        settle = None if trial is None else lambda m: trial.settle(numbers.get(m, beyond), module)
        module.settle_on_trial = settle

    def forward(self, module: LossModule, state: TrainState, batch: Any, key: MicroBatch) -> Loss:
        """The loss of a micro-batch, seeded as in its step."""
        seed_all(step_key(self.spec.seed, key.step, key.micro_batch, module.phase.key), self.device)
        with self.with_place(key), state.precision.autocast():
            loss = module.on_trial(key.micro_batch, batch)
        check_loss(loss, state.precision, first=True, label=module.phase.loss_label)
        return loss

    def backward(self, module: LossModule, state: TrainState, batch: Any, key: MicroBatch) -> Loss:
        """The loss of a micro-batch, whose gradients are left in the model. Buffers are put back."""
        buffers = KeptBuffers(state.model)
        try:
            with self.with_place(key):
                loss = self.forward(module, state, batch, key)
                module.backward(state.precision.scaled(loss.total))
        finally:
            self.written |= buffers.written()
            buffers.restore()
        learning = zip(module.names, module.parameters_that_learn, strict=True)
        may_rest = module.conditional.keys() & module.tables
        missing = [name for name, p in learning if p.grad is None and name not in may_rest]
        if missing:
            raise missing_gradient(missing, self.where(key))
        return loss

    def with_place(self, key: MicroBatch) -> AbstractContextManager[None]:
        """Whatever the job raises in the block as a LockstepError with the place of the micro-batch."""
        return job_at(self.where(key))

    def where(self, key: MicroBatch) -> str:
        """The place of a micro-batch in the run, with the rank that will have it on the most workers."""
        if key.step == EVALUATION:
            return f"evaluation micro-batch {key.micro_batch}"
        ranges = self.plan.ranges(self.workers, self.plan.position(key.step).micro_batches)
        rank = next(rank for rank, micro_batches in enumerate(ranges) if key.micro_batch in micro_batches)
        return f"step {key.step_number}, micro-batch {key.micro_batch}, rank {rank} of {self.workers}"


@dataclass(slots=True)
class Timed:
    """What something took, as the least of several tries: other programs only ever add to it."""

    least_s: float = float("inf")

    def __call__(self, action: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = action()
        self.least_s = min(self.least_s, time.perf_counter() - began)
        return result
