"""The promise, tried on the user's own job: a micro-batch gives the same bits whatever its worker computed before it.

The training process computes the first micro-batch once, whatever the extent: the run needs the names of its parts and its buffers,
and what a first call makes, such as a cache or a compiled program, is there from one seed on every worker. All else happens in forked
processes, so it can leave no trace. Where a device forbids forks, the training process computes the first micro-batch once more after the
second one, whatever the extent, and the rest is left out. `off` tries the evaluation alone. `quick` computes the first micro-batch again, and in halves.
`full` also computes the second one in between, and takes the first step in several histories, each in a process of its own:

    straight   micro-batches 0 and 1, then the update; and on to a second step
    other      the same, with micro-batch 0 computed once more just before each update: what worker 0 of two computes last
    resumed    the state after the straight first step, loaded by a process that has not taken it; then the second step
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from lockstep.checkpoint.tree import pack
from lockstep.data.micro_batches import MicroBatches
from lockstep.data.sampler import MicroBatch
from lockstep.errors import LockstepError
from lockstep.job.interface import Job, Loss, Rows
from lockstep.plan import Plan
from lockstep.randomness import model_key, rehearsal_key, seed_all
from lockstep.spec.fields import Spec
from lockstep.training.auxiliary_state import unlisted_tensors
from lockstep.training.deferred_model import DeferredModel
from lockstep.training.determinism import filled_memory
from lockstep.training.evaluation.held_out_sets import EvaluationSets
from lockstep.training.failure import job_at
from lockstep.training.integrity import problems
from lockstep.training.integrity.rehearsal import sample_neighbours
from lockstep.training.integrity.rehearsal.child_process import (
    LIMIT_S,
    TIMES_AS_LONG,
    NoChildError,
    can_fork,
    in_child,
)
from lockstep.training.integrity.rehearsal.evaluation import EvaluationRehearsal
from lockstep.training.integrity.rehearsal.first_steps import FirstSteps
from lockstep.training.integrity.rehearsal.micro_batch import (
    Computed,
    Rehearsal,
    check_norms,
    compute_sharded,
)
from lockstep.training.integrity.rehearsal.names_of_objects import named
from lockstep.training.integrity.rehearsal.repetition import Repetition
from lockstep.training.integrity.rehearsal.trial_batches import TrialBatches
from lockstep.training.job_data import make_sampler
from lockstep.training.module_modes import evaluating
from lockstep.training.state import TrainState
from lockstep.training.step.buffers import KeptBuffers
from lockstep.training.step.compiled import CompiledLosses
from lockstep.training.step.full_sharding import FullSharding
from lockstep.training.step.optimizer import make_optimizer
from lockstep.training.step.parameter_order import check_order, is_of_model, order_of
from lockstep.training.step.phase_step import LossModule
from lockstep.training.step.phases import FrozenRule, phases_of
from lockstep.training.step.sharding_units import Calls, members_of
from lockstep.training.step.sparse_gradients import check_optimizer, numbers_of
from lockstep.training.step.trial_rows import TrialRows, among_others

FULL_S, FULL_BYTES = 0.5, 1 << 28
"""`auto` is full where the first micro-batch takes at most so many seconds and the parameters take at most so many bytes."""

QUICK_BYTES = 1 << 32
"""`auto` is off where the parameters take more bytes: hashing them would take more than a few seconds."""

Extent = Literal["full", "quick", "off"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the rehearsal in other processes found of a sound job."""

    warnings: list[str]
    evaluation: EvaluationRehearsal | None
    """What the evaluation showed; None where the job has none, or no process could try it."""


@dataclass(slots=True)
class StepRehearsal:
    """The first step of a run, on the bare model, from the initial weights and with no parameter frozen."""

    job: Job
    spec: Spec
    plan: Plan
    state: TrainState
    batches: MicroBatches
    device: torch.device
    warn: Callable[[str], None]
    forked: Callable[[], None] = lambda: None
    """Called first in each other process."""
    _fetched: TrialBatches = field(init=False)
    _repetition: Repetition = field(init=False)
    _trials: dict[str, TrialRows] = field(default_factory=dict, init=False)
    """Of each phase with a loss over the whole batch that needs more than one micro-batch, the rows among which it is tried."""
    _took_s: float = field(default=0.0, init=False)
    """Seconds that the first micro-batch took, at least."""

    def __post_init__(self) -> None:
        self._fetched = TrialBatches(self.job, self.spec, self.plan, self.batches, self.device)
        self._repetition = Repetition(self.state, self._fetched, self.warn)

    def first(self) -> dict[str, Rehearsal]:
        """Compute the first micro-batch in this process. Returns what the run must know of it, by phase name.

        Raises JobError or DeterminismError where the job breaks the promise, and names the cause.
        """
        pack(dict(self.job.state_dict()), "job")  # so a state that no checkpoint can hold fails now
        model, key = self.state.model, self._fetched.keys()[0]
        self.batches.check_draws_nothing(key)
        modules = self._modules()
        self._give_shapes(modules, key)
        firsts = []
        batch = self._fetched.fetch_first(key)
        self._check_norms(modules, key)
        self._among_others(modules)
        for module in modules:
            batch = batch if module is modules[0] else self._fetched.fetch(key)  # a job may write into it
            began = time.perf_counter()
            with filled_memory(True):
                firsts.append(self._repetition.compute_batch(module, batch))
            self._took_s = max(self._took_s, time.perf_counter() - began)
        for module, first in zip(modules, firsts, strict=True):
            named = dict(zip(module.names, module.parameters_that_learn, strict=True))
            tables = {name: named[name] for name in first.rehearsal.form.tables}
            check_optimizer(self.state.optimizer_of(module.phase.name), tables)
        for tree in (model.state_dict(), unlisted_tensors(model)):
            pack(tree, "model")  # only now: the first forward makes what is lazy
        if self.state.compiled is not None:
            self._compare_with_eager(
                self.state.compiled, modules, self._fetched.keys(), firsts, self._repetition.compute_batch
            )
        if not can_fork(self.device) and self.spec.determinism == "strict":
            self._compare_here(modules, firsts)
        return {module.phase.name: first.rehearsal for module, first in zip(modules, firsts, strict=True)}

    def first_sharded(self, sharding: FullSharding) -> dict[str, Rehearsal]:
        """As `first`, where each worker has its rows of the parameters alone. All ranks call it.

        With `rehearsal: auto` the first micro-batch is compared with itself after the second one, in this process: no other could gather the parameters.
        """
        pack(dict(self.job.state_dict()), "job")
        keys = self._fetched.keys()
        self.batches.check_draws_nothing(keys[0])
        modules, firsts = self._modules(), list[Computed]()
        batch = self._fetched.fetch(keys[0])

        def computed(module: LossModule, batch: Any, m: int = 0) -> Computed:
            return compute_sharded(
                module,
                batch,
                self.state.precision,
                sharding,
                seed=self.spec.seed,
                device=self.device,
                m=m,
                keep_gradients=self.state.compiled is not None and m == 0,
            )

        for module in modules:
            batch = batch if module is modules[0] else self._fetched.fetch(keys[0])  # a job may write into it
            with filled_memory(True):
                firsts.append(computed(module, batch))
        pack(unlisted_tensors(self.state.model), "model")
        if self.state.compiled is not None:
            self._compare_with_eager(
                self.state.compiled, modules, keys, firsts, computed, sharding.group.gather
            )
        if self.spec.rehearsal != "off" and self.spec.determinism == "strict":
            for module, first in zip(modules, firsts, strict=True):

                def again(key: MicroBatch, module: LossModule = module) -> Computed:
                    return computed(module, self._fetched.fetch(key), self._fetched.number(key))

                self._repetition.compare_after(keys, first, again)
        return {module.phase.name: first.rehearsal for module, first in zip(modules, firsts, strict=True)}

    def units(self, deferred: DeferredModel) -> list[str]:
        """The names of the modules that the loss of the first micro-batch calls once, found out in another process, which has memory for one member's parameters at a
        time. A loss that differentiates or maps its model needs all of them at once. SpecError where none can.
        """
        try:
            return in_child(
                partial(self._units, deferred), self.job, forked=self.forked, limit_s=self._limit_s()
            )
        except NoChildError as reason:
            raise problems.UNITS_UNKNOWN(got=reason) from reason

    def _units(self, deferred: DeferredModel) -> list[str]:
        model = deferred.model
        members = [
            member for member in members_of(model, self.spec.sharding.units) if deferred.names_in([member])
        ]
        inside = {name for member in members for name in deferred.names_in([member])}
        shared = {
            name for name in inside if sum(name in deferred.names_in([member]) for member in members) > 1
        }
        deferred.fill(
            [name for name in deferred.names_in([model]) if name not in inside - shared], again=True
        )
        hooks = []
        for member in members:
            names = [name for name in deferred.names_in([member]) if name not in shared]
            hooks += [
                member.register_forward_pre_hook(lambda *_, names=names: deferred.fill(names, again=True)),
                member.register_forward_hook(lambda *_, names=names: deferred.empty(names)),
            ]
        try:
            with torch.no_grad():
                return self._called_once(model, members)
        except LockstepError:
            for hook in hooks:
                hook.remove()
            deferred.fill(deferred.names_in([model]), again=True)
            with torch.enable_grad():
                return self._called_once(model, members)

    def _called_once(self, model: nn.Module, members: Sequence[nn.Module]) -> list[str]:
        """The names of those members that the loss of the first micro-batch calls once."""
        modules, key, calls = self._modules(), self._fetched.keys()[0], Calls(LossModule)

        def forward() -> None:
            for module in modules:
                batch = self._fetched.fetch(key)
                seed_all(rehearsal_key(self.spec.seed), self.device)
                with self.state.precision.autocast(), job_at("first micro-batch, before training"):
                    module(batch)

        with self.state.eager():
            check_norms(model, self.plan, len(key.ids), forward)
            with calls.counted():
                forward()
        return [name for name, member in model.named_modules() if member in members and calls.once(member)]

    def _compare_here(self, modules: Sequence[LossModule], firsts: Sequence[Computed]) -> None:
        """Compare the first micro-batch with itself after the second one, in this process, where no other can be forked.

        It is the same whatever the extent, so a trace that it leaves in a job does not depend on the extent either.
        """
        keys = self._fetched.keys()
        for module, first in zip(modules, firsts, strict=True):
            self._repetition.compare_after(keys, first, partial(self._repetition.compute, module))

    def elsewhere(self, evaluate: EvaluationSets | None, *, steps: bool = True) -> Verdict:
        """Try the rest of the promise in other processes, and pass on what they warn of: the steps, and an evaluation. Call it after `first`.

        Raises as `first` does. Where no process can be forked, or a fork cannot use what the job has open, the run goes on with a warning.
        """
        verdict = Verdict([], None)
        if not can_fork(self.device):
            return verdict
        try:
            verdict = in_child(
                partial(self._in_child, evaluate, steps),
                self.job,
                forked=self.forked,
                limit_s=self._limit_s(),
            )
        except NoChildError as reason:
            self.warn(f"rehearsal: only the first micro-batch was tried before training: {reason}")
        for text in verdict.warnings:
            self.warn(text)
        return verdict

    def _limit_s(self) -> float:
        return max(LIMIT_S, TIMES_AS_LONG * self._took_s)

    # --- in another process -----------------------------------------------------------------------------------

    def _in_child(self, evaluate: EvaluationSets | None, steps: bool) -> Verdict:
        warnings: list[str] = []
        self.warn = self._repetition.warn = warnings.append
        extent, modules, keys = self._extent(), self._modules(), self._fetched.keys()
        if steps:
            self._try_steps(extent, modules, keys)
        shown = None
        if evaluate is not None:
            training = partial(self._after_evaluation, modules, keys[0])
            shown = evaluate.rehearse(
                self.state.model, repeat=extent != "off", warn=self.warn, training=training
            )
        if steps and extent != "off":
            # Last: in evaluation mode a loss may leave what the rehearsal of an evaluation looks for.
            warnings += sample_neighbours.compared(self._repetition, modules, keys[0])
        return Verdict(warnings, shown)

    def _try_steps(self, extent: Extent, modules: Sequence[LossModule], keys: Sequence[MicroBatch]) -> None:
        if self.spec.determinism == "strict" and self.spec.rehearsal != "off":
            self._fetched.check(keys)
        if extent != "off":
            within_s = FULL_S if self.spec.rehearsal == "auto" else math.inf
            is_full = self._repetition.compare_all(modules, keys, others=extent == "full", within_s=within_s)
            extent = "full" if is_full else "quick"
            self._compare_order()
            for text in sample_neighbours.interleaved(self._repetition, modules):
                self.warn(text)
        if extent == "full":
            self._compare_histories(modules, keys)
        learning = [name for module in modules for name in module.phase.names]
        FrozenRule(self.job, self.state.model, self.spec.seed).check(self.plan.total_steps, learning)

    def _after_evaluation(self, modules: Sequence[LossModule], key: MicroBatch) -> list[dict[str, str]]:
        """The results of micro-batch 0 of each phase."""
        return [self._repetition.compute(module, key).results for module in modules]

    def _compare_histories(self, modules: Sequence[LossModule], keys: Sequence[MicroBatch]) -> None:
        """Take the first steps in each history and compare. A sharded optimizer is not tried: its ranks update together."""
        steps = FirstSteps(
            self.job, self.spec.seed, self.state, self.device, modules, self.plan.position(0).samples
        )
        if not steps.can_update:
            return
        fetched = partial(self._fetch_again, keys)
        run = partial(in_child, job=self.job, limit_s=self._limit_s())
        straight = run(partial(steps.straight, fetched))
        if straight is None:
            return
        other_last = run(partial(steps.other_last, fetched))
        if differing := [n for n, v in straight.updated.items() if other_last is None or other_last[n] != v]:
            raise problems.LAST_MICRO_BATCH(name=named(differing))
        resumed = run(partial(steps.resumed, straight.saved, fetched))
        steps.check_resumed(straight, resumed, self.warn, self._repetition.left)

    def _fetch_again(self, keys: Sequence[MicroBatch]) -> list[tuple[int, Any]]:
        return [(self._fetched.number(key), self._fetched.fetch(key)) for key in keys]

    def _modules(self) -> list[LossModule]:
        model = self.state.model
        modules = [
            LossModule(self.job, model, phase, self.state.compiled) for phase in phases_of(self.job, model)
        ]
        for module in modules:
            module.settle_on_trial = self._on_trial(module)
        return modules

    def _on_trial(self, module: LossModule) -> Callable[[int], Callable[[Any], Loss]] | None:
        trial = self._trials.get(module.phase.name)
        return None if trial is None else lambda m: trial.settle(m, module)

    def _check_norms(self, modules: Sequence[LossModule], key: MicroBatch) -> None:
        """Look at what each BatchNorm is given of a sample: the last step of an epoch may have micro-batches of one."""
        model = self.state.model

        def forward(module: LossModule) -> None:
            buffers = KeptBuffers(model)
            batch = self._fetched.fetch(key)
            seed_all(rehearsal_key(self.spec.seed), self.device)
            try:
                with job_at("first micro-batch, before training"), self.state.precision.autocast():
                    (module.phase.embed or module.phase.loss)(model, batch)
            finally:
                buffers.restore()

        with self.state.eager():
            for module in modules:
                check_norms(model, self.plan, len(key.ids), partial(forward, module))

    def _among_others(self, modules: Sequence[LossModule]) -> None:
        """For losses over the whole batch, keep the rows among which their micro-batches are tried."""
        if all(module.phase.embed is None for module in modules):
            return
        position = self.plan.position(self._fetched.keys()[0].step)
        sampler = make_sampler(self.spec, self.plan, self.batches.samples)
        places = sampler.places(position)
        filled = [m for m, ids in enumerate(places) if len(ids)]
        for module in modules:

            def embedded(m: int, module: LossModule = module) -> Rows:
                batch = self._fetched.fetch(sampler.at(position, filled[m]))
                seed_all(rehearsal_key(self.spec.seed, *([m] if m else [])), self.device)
                with job_at("first step, before training"), torch.no_grad(), self.state.precision.autocast():
                    assert module.phase.embed is not None
                    return module.phase.embed(module.model, batch)

            if module.phase.embed is not None:
                trial = among_others(module, embedded, [places[m] for m in filled])
                if trial is not None and trial.with_others:
                    self._trials[module.phase.name] = trial
                    module.settle_on_trial = self._on_trial(module)

    def _compare_with_eager(
        self,
        compiled: CompiledLosses,
        modules: Sequence[LossModule],
        keys: Sequence[MicroBatch],
        firsts: Sequence[Computed],
        computed: Callable[[LossModule, Any], Computed],
        gather: Callable[[Any], list[Any]] = lambda part: [part],
    ) -> None:
        """Record how far the compiled first micro-batch is from an eager one, and warn if the second one would not be compiled."""
        for module, first in zip(modules, firsts, strict=True):
            with compiled.off():
                eager = computed(module, self._fetched.fetch(keys[0]))
            losses = (float(first.loss.total.detach()), float(eager.loss.total.detach()))
            gradients, eager_gradients = (
                {name: numbers_of(gradient) for name, gradient in each.gradients.items()}
                for each in (first, eager)
            )
            compiled.compare(module.phase.name, losses, gradients, eager_gradients, gather)
        of_one_size = len(keys) > 1 and len(keys[1].ids) == len(keys[0].ids)
        if of_one_size and not modules[0].compiles(self._fetched.fetch(keys[1])):
            self.warn(
                "compile: the second micro-batch has other shapes than the first, and only batches with the shapes of the first are "
                "compiled; the others run eager: have collate pad to one length, and give plain numbers as tensors"
            )

    def _compare_order(self) -> None:
        """JobError for an optimizer that orders the parameters differently each time it is made. One in the model's order is not made again."""
        state, seed = self.state, self.spec.seed
        if is_of_model(state.order, state.model):
            return
        seed_all(model_key(seed), self.device)
        model = self.job.model()
        again = order_of(make_optimizer(self.job, model, self.spec), model)
        check_order(state.order, "once", again, "when the optimizer is made again")

    def _give_shapes(self, modules: Sequence[LossModule], key: MicroBatch) -> None:
        """Run a forward for lazy modules, which make their parameters in it, from one seed on every worker."""
        model = self.state.model
        if not any(nn.parameter.is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
            return
        with evaluating(model), self.state.eager():
            for module in modules:
                self._repetition.loss(module, self._fetched.fetch(key), 0)

    # --- how far ----------------------------------------------------------------------------------------------

    def _extent(self) -> Extent:
        """The extent that the spec asks for. Without strict nothing is compared, for only strict promises the same bits."""
        extent, size = self.spec.rehearsal, _bytes(self.state.model)
        if self.spec.determinism != "strict":
            return "off"
        if extent == "auto":
            return "full" if size <= FULL_BYTES else "quick" if size <= QUICK_BYTES else "off"
        return extent


def _bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
