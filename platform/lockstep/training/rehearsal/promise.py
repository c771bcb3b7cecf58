"""The promise tried on the user's own job: a micro-batch gives the same bits whatever its worker computed before it.

`off` computes the first micro-batch once: the run needs to know its parts and buffers. `quick` computes it again, and
in halves. `full` computes the second one between, takes the first update after either, and compares: worker 0 of two
never sees the second micro-batch, one worker alone sees it last.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lockstep.checkpoint.skeleton import unpack
from lockstep.checkpoint.tree import pack
from lockstep.data.dataset import is_fingerprinted
from lockstep.data.fingerprint import check_repeats
from lockstep.data.loader import Loader, MicroBatches
from lockstep.data.sampler import MicroBatch
from lockstep.errors import DeterminismError, JobError, LockstepError
from lockstep.job.interface import Job, Loss
from lockstep.plan import Plan
from lockstep.randomness import Draws, seed_all
from lockstep.spec.fields import Spec
from lockstep.training.after_step import call_after_step, has_after_step
from lockstep.training.buffers import KeptBuffers, statistics
from lockstep.training.compiled import CompiledLosses
from lockstep.training.determinism import filled_memory
from lockstep.training.failure import as_lockstep_error
from lockstep.training.job_data import make_sampler
from lockstep.training.job_phases import optimizers_of, phases_of
from lockstep.training.optimizer import make_optimizer
from lockstep.training.order import check_order, is_of_model, order_of
from lockstep.training.parameters import ParameterWatch
from lockstep.training.phase_step import LossModule
from lockstep.training.rehearsal.memory import LARGEST, Memory, tensor_digest
from lockstep.training.rehearsal.micro_batch import Computed, Rehearsal, compute
from lockstep.training.rehearsal.pools import out_of_order
from lockstep.training.rehearsal.sums import check_sum
from lockstep.training.sharding import ShardedOptimizer
from lockstep.training.state import TrainState, restore_optimizer

FULL_S, FULL_BYTES = 0.5, 1 << 28
"""`auto` is full where the first micro-batch takes at most so long and the parameters take at most so much memory."""

QUICK_BYTES = 1 << 32
"""`auto` is off where the parameters take more: hashing them would take longer than a few seconds."""

Extent = Literal["full", "quick", "off"]


def memory_of(
    job: Job,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    *,
    largest: int = LARGEST,
    datasets: bool = False,
) -> Memory:
    """What a job, its module, its model and the hooks of its optimizers hold; `largest` and `datasets` as in `Memory`."""
    kinds = [kind for kind in type(job).__mro__ if kind not in {Job, object}]
    module = sys.modules.get(type(job).__module__)
    hooks = [vars(optimizer).get(name) for optimizer in optimizers for name in _HOOKS]
    roots = {
        "model": model,
        "job": job,
        "optimizer hook": hooks,
        **{kind.__name__: kind for kind in kinds},
        **({type(job).__module__: module} if module is not None else {}),
    }
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    parameters = [parameter for group in groups for parameter in group["params"]]
    apart = [*parameters, *model.parameters(), *model.buffers(), *optimizers]
    return Memory(roots, apart=apart, watched=model.modules(), largest=largest, datasets=datasets)


_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def named(places: Sequence[str]) -> str:
    """The first of some places, and how many more there are."""
    return places[0] + (f" and {len(places) - 1} more" if len(places) > 1 else "")


@dataclass(slots=True)
class StepRehearsal:
    """The first step of a run, on the bare model, phase by phase, each from the initial weights and with nothing at rest.

    Whatever it changes after the first micro-batch is put back.
    """

    job: Job
    spec: Spec
    plan: Plan
    state: TrainState
    batches: MicroBatches
    device: torch.device
    warn: Callable[[str], None]
    _staged: list[str] = field(default_factory=list, init=False)
    """What of the data the first update changes."""

    def __call__(self) -> tuple[dict[str, Rehearsal], Extent]:
        """What the run needs to know of its first micro-batch, by the names of the phases, and how far the rehearsal went.

        Raises JobError or DeterminismError where the job breaks the promise, and names what does.
        """
        pack(dict(self.job.state_dict()), "job")  # what no checkpoint could hold is told now
        keys = self._keys()
        batch = self._fetched_twice(keys)
        compiled = self.state.compiled
        modules = self._modules()
        self._give_shapes(modules, keys[0])
        firsts = []
        for module in modules:
            batch = batch if module is modules[0] else self._fetch(keys[0])  # a job may write into it
            with filled_memory(True):
                firsts.append(self._computed(module, batch))
        if compiled is not None:
            self._compare_with_eager(compiled, modules, keys, firsts)
        found = {
            module.phase.name: Rehearsal(
                tuple(first.loss.parts), float(first.loss.total.detach()), first.written
            )
            for module, first in zip(modules, firsts, strict=True)
        }
        extent = self._extent()
        if extent == "off":
            return found, extent
        # What the very first call makes, such as a cache, stays: every worker has made it by now, from one seed.
        held = self._memory()
        try:
            for module, first in zip(modules, firsts, strict=True):
                extent = self._compare(module, keys, first, extent)
            self._compare_behind(modules, keys)
            self._compare_order()
            return found, extent
        finally:
            held.restore()

    def first_micro_batch(self) -> list[Computed]:
        """Micro-batch 0 of each phase, computed once more."""
        key = self._keys()[0]
        return [self._compute(module, key) for module in self._modules()]

    def _modules(self) -> list[LossModule]:
        model = self.state.model
        return [
            LossModule(self.job, model, phase, self.state.compiled) for phase in phases_of(self.job, model)
        ]

    def _compare_with_eager(
        self,
        compiled: CompiledLosses,
        modules: Sequence[LossModule],
        keys: Sequence[MicroBatch],
        firsts: Sequence[Computed],
    ) -> None:
        """Note how far the compiled first micro-batch is from an eager one, and warn where the second one is not compiled."""
        for module, first in zip(modules, firsts, strict=True):
            with compiled.off():
                eager = self._compute(module, keys[0])
            losses = (float(first.loss.total.detach()), float(eager.loss.total.detach()))
            compiled.compare(module.phase.name, losses, first.gradients, eager.gradients)
        of_one_size = len(keys) > 1 and len(keys[1].ids) == len(keys[0].ids)
        if of_one_size and not modules[0].compiles(self._fetch(keys[1])):
            self.warn(
                "compile: the second micro-batch has other shapes than the first, and only batches with the shapes of the first are "
                "compiled; the others run eager: have collate pad to one length, and give plain numbers as tensors"
            )

    def _compare_order(self) -> None:
        """Refuse an optimizer that holds the parameters of the same model in another order. One in the model's order is not made again."""
        state, seed = self.state, self.spec.seed
        if is_of_model(state.order, state.model):
            return
        seed_all(seed, "model")
        model = self.job.model()
        again = order_of(make_optimizer(self.job, model, self.spec.optimizer), model)
        check_order(state.order, "once", again, "when the optimizer is made again")

    # --- what is fetched --------------------------------------------------------------------------------------

    def _keys(self) -> list[MicroBatch]:
        """Micro-batches 0 and 1 of the first step; only the first where it has one. Those that `data.without` leaves empty are passed over."""
        count = range(min(2, self.plan.position(0).micro_batches))
        every = make_sampler(self.spec, self.plan, self.batches.samples, count)
        return list(islice((key for key in every if len(key.ids)), len(count)))

    def _fetch(self, key: MicroBatch) -> Any:
        return next(Loader(self.batches, [key], self.device))

    def _fetched_twice(self, keys: Sequence[MicroBatch]) -> Any:
        """Micro-batch 0. Under strict it is fetched again after the next one, and must be the same."""
        if self.spec.determinism != "strict":
            return self._fetch(keys[0])
        once, drawn = self._fetch_drawing(keys[0])
        if len(keys) > 1:
            self._fetch(keys[1])
        with nullcontext() if self.batches.draws_nothing else out_of_order():
            again, drawn_again = self._fetch_drawing(keys[0])
        check_repeats(once, again, opaque=is_fingerprinted(self.batches.samples))
        if drawn != drawn_again:
            raise JobError(
                "data: train_data keeps what it drew: the first micro-batch, fetched again under one seed, draws other random numbers, "
                "so each sample has the draw of the process that met it first; keep what is read, and draw anew at each fetch"
            )
        return once

    def _fetch_drawing(self, key: MicroBatch) -> tuple[Any, tuple[object, ...]]:
        """A micro-batch, and where the generators stand after it."""
        draws = Draws()
        return self._fetch(key), draws.state()

    def _give_shapes(self, modules: Sequence[LossModule], key: MicroBatch) -> None:
        """Make the parameters that a lazy module leaves to its first forward, from one seed on every worker."""
        model = self.state.model
        if not any(nn.parameter.is_lazy(one) for one in (*model.parameters(), *model.buffers())):
            return
        model.eval()
        compiled = self.state.compiled
        with torch.no_grad(), nullcontext() if compiled is None else compiled.off():
            for module in modules:
                self._loss(module, self._fetch(key), 0)
        model.train()

    # --- how far ----------------------------------------------------------------------------------------------

    def _extent(self) -> Extent:
        """What the spec asks for; nothing is compared without strict, which alone promises the same bits."""
        wanted, size = self.spec.rehearsal, _bytes(self.state.model)
        if self.spec.determinism != "strict":
            return "off"
        if wanted == "auto":
            return "full" if size <= FULL_BYTES else "quick" if size <= QUICK_BYTES else "off"
        return wanted

    # --- comparing --------------------------------------------------------------------------------------------

    def _compute(self, module: LossModule, key: MicroBatch) -> Computed:
        return self._computed(module, self._fetch(key), key.micro_batch)

    def _computed(self, module: LossModule, batch: Any, m: int = 0) -> Computed:
        return compute(module, batch, self.state.precision, seed=self.spec.seed, device=self.device, m=m)

    def _compare(
        self, module: LossModule, keys: Sequence[MicroBatch], first: Computed, extent: Extent
    ) -> Extent:
        began = time.perf_counter()
        again = self._compute(module, keys[0])
        if self.spec.rehearsal == "auto" and time.perf_counter() - began > FULL_S:
            extent = "quick"
        before = self._memory()
        forward = partial(self._forward, module)
        check_sum(self._fetch, forward, keys[0], again.loss, self.warn, module.phase.loss_told)
        if extent == "full":
            self._compare_across(module, keys, again, before)
        elif first.first_difference(again) is not None:
            self._same(again, self._compute(module, keys[0]), before)
        return extent

    def _compare_across(
        self, module: LossModule, keys: Sequence[MicroBatch], again: Computed, before: Memory
    ) -> None:
        """The first micro-batch after another one, and the update after either."""
        second = self._compute(module, keys[1]) if len(keys) > 1 else None
        if second is not None:
            self._tell_buffers(again, second)
        gradients = [again.gradients[name] for name in again.gradients]
        if second is not None:
            gradients = [a + b for a, b in zip(gradients, second.gradients.values(), strict=True)]
        weight = sum(float(one.loss.weight) for one in (again, second) if one is not None)
        alone = self._update(module, gradients, weight, tell=True)
        self._same(again, self._compute(module, keys[0]), before)
        if second is None or alone is None:
            return
        shared = self._update(module, gradients, weight)
        differing = [name for name, value in alone.items() if shared is None or shared[name] != value]
        if differing:
            raise JobError(
                f"job.optimizer: the first update of {named(differing)} depends on which micro-batch its worker ran last; "
                "a hook reads what the loss left behind: keep nothing from the loss for the update"
            )

    def _compare_behind(self, modules: Sequence[LossModule], keys: Sequence[MicroBatch]) -> None:
        """Each phase on the first micro-batch, where the phases before it end with that one, and with another.

        What they leave in the job is the last micro-batch's of their worker.
        """
        for i in range(1, len(modules) if len(keys) > 1 else 0):
            found = []
            for key in keys:
                held = self._memory()
                for module in modules[:i]:
                    self._compute(module, key)
                found.append(self._compute(modules[i], keys[0]))
            if found[0].first_difference(found[1]) is not None:
                self._same(found[0], found[1], held)

    def _same(self, before: Computed, after: Computed, held: Memory) -> None:
        """Refuse a micro-batch that came out different, and tell of what it left behind."""
        left = self._memory().changed_since(held)
        difference = before.first_difference(after)
        if difference is not None and left:
            raise JobError(
                f"{named(left)} is kept from one micro-batch to the next, and {difference} depends on it: workers that run other "
                "micro-batches get other bits; keep it in a buffer of the model, where the step's first micro-batch alone "
                "updates it, or change it once a step in job.after_step(model, step)"
            )
        if difference is not None and self._staged:
            raise JobError(
                f"data: {named(self._staged)} is changed by an update, and {difference} depends on it: a batch is fetched before the step "
                "that it is for, and in other processes where data.loader_processes says so, so which batch sees the change is not settled; "
                "let after_step(model, step) change nothing that the data read"
            )
        if difference is not None:
            raise DeterminismError(
                f"determinism strict: {difference}, computed again under one seed, has other bits; an operator is not "
                "deterministic, or the job draws from a generator of its own, reads a clock, or keeps something out of sight: "
                "draw from the default generators or from lockstep.rng()"
            )
        if left:
            self.warn(
                f"rehearsal: {named(left)} changes with every micro-batch, so it is not the same on every worker and no checkpoint "
                "keeps it; no loss, gradient or update may ever depend on it"
            )

    def _memory(self, **more: Any) -> Memory:
        optimizers = list(optimizers_of(self.state.optimizer).values())
        return memory_of(self.job, self.state.model, optimizers, **more)

    def _whole_memory(self) -> Memory:
        """With large arrays, which an update may write to and which are then put back."""
        return self._memory(largest=FULL_BYTES, datasets=True)

    def _forward(self, module: LossModule, batch: Any, seed: int) -> Loss:
        """The loss of a batch, forward only; buffers are put back. Seed 0 is that of the first micro-batch."""
        buffers = KeptBuffers(self.state.model)
        try:
            return self._loss(module, batch, seed)
        finally:
            buffers.restore()

    def _loss(self, module: LossModule, batch: Any, seed: int) -> Loss:
        more, device = ("again", seed) if seed else (), self.device
        seed_all(self.spec.seed, "rehearsal", *more, cuda=device if device.type == "cuda" else None)
        try:
            with self.state.precision.autocast():
                loss: Loss = module(batch)
        except LockstepError:
            raise
        except (Exception, SystemExit) as error:
            raise as_lockstep_error(error, "first micro-batch, before training") from error
        return loss

    def _tell_buffers(self, first: Computed, second: Computed) -> None:
        """Warn of buffers that take something from the samples, of which the step keeps the first micro-batch's."""
        model = self.state.model
        usual = statistics(model)
        names = [name for i, (name, _) in enumerate(model.named_buffers()) if i in first.written - usual]
        places = [f"the buffer {name!r}" for name in names]
        differing = [place for place in places if first.results.get(place) != second.results.get(place)]
        if differing:
            self.warn(
                f"rehearsal: {named(differing)} of the model takes up what the samples are; of the {self.plan.micro_batches} micro-batches "
                "of a step only the first one's is kept, on any number of workers: where it must see every sample, as the state "
                "of truncated back-propagation through time, set batch.micro = batch.global"
            )

    # --- the update -------------------------------------------------------------------------------------------

    def _update(
        self, module: LossModule, gradients: Sequence[Tensor], weight: float, *, tell: bool = False
    ) -> dict[str, str] | None:
        """Digests of the parameters and buffers after the first update of a phase with such gradients; all is put back.

        None where they are not finite: fp16 skips such a step, and any other fails in it. None for a sharded optimizer, whose ranks
        update together: each may rehearse to another extent.
        """
        state, spec, phase = self.state, self.spec, module.phase
        optimizer = state.optimizer_of(phase.name)
        if isinstance(optimizer, ShardedOptimizer):
            return None
        if not weight > 0 or not all(bool(gradient.isfinite().all()) for gradient in gradients):
            return None
        model = state.model
        held, buffers = self._whole_memory(), KeptBuffers(model)
        inside = self._inside(optimizer)
        values = [parameter.detach().clone() for parameter in model.parameters()]
        try:
            for parameter, gradient in zip(module.parameters_that_learn, gradients, strict=True):
                parameter.grad = gradient / weight
            state.schedule_of(phase.name).set(0)
            cuda = self.device if self.device.type == "cuda" else None
            seed_all(spec.seed, "update", 0, *phase.key, cuda=cuda)
            watch = ParameterWatch(model)
            try:
                optimizer.step()
            except (Exception, SystemExit) as error:
                raise as_lockstep_error(error, "first update, before training") from error
            if has_after_step(self.job):
                call_after_step(state, 1, seed=spec.seed, cuda=cuda)
            watch.check_asking("after the first update, before training")
            watch.check_places()
            named_tensors = [*model.named_parameters(), *model.named_buffers()]
            found = {f"{name!r}": tensor_digest(tensor) for name, tensor in named_tensors}
            if tell:
                self._tell_unsaved(module, optimizer, held, inside)
            return found
        finally:
            model.zero_grad(set_to_none=True)
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), values, strict=True):
                    parameter.copy_(value)
            buffers.restore()
            inside.restore()
            held.restore()

    def _inside(self, optimizer: torch.optim.Optimizer) -> Memory:
        return Memory({"optimizer": optimizer}, apart=self.state.model.parameters(), largest=FULL_BYTES)

    def _tell_unsaved(
        self, module: LossModule, optimizer: torch.optim.Optimizer, held: Memory, inside: Memory
    ) -> None:
        """Warn of what an update has changed, and is not as the update left it once a checkpoint is taken up.

        `held` and `inside` are what the job and the optimizer held before the update, as a resumed run would begin with.
        """
        job, model, schedule = self.job, self.state.model, self.state.schedule_of(module.phase.name)
        sections = {
            "optimizer": optimizer.state_dict(),
            "job": dict(job.state_dict()),
            "model": model.state_dict(),
            "schedule": schedule.state_dict(),
        }
        packed = pack(sections, "state")  # what no checkpoint could hold is told now
        after, after_inside = self._whole_memory(), self._inside(optimizer)
        changed, changed_inside = after.changed_since(held), after_inside.changed_since(inside)
        self._staged = [place for place in changed if place in after.of_datasets]
        if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
            changed_inside = [place for place in changed_inside if not place.startswith(_IN_STATE_DICT)]
        if not changed and not changed_inside:
            return
        copies = {name: one.clone() for name, one in packed.tensors.items() if isinstance(one, Tensor)}
        saved = unpack(packed.skeleton, copies)
        held.restore()
        inside.restore()
        try:
            model.load_state_dict(saved["model"])
            restore_optimizer(optimizer, saved["optimizer"], fork=False)
            schedule.load_state_dict(saved["schedule"], fork=False)
            if saved["job"]:
                job.load_state_dict(saved["job"])
        except (Exception, SystemExit) as error:
            raise as_lockstep_error(
                error, "taking back the state that it gives after the first update, before training"
            ) from error
        lost = [place for place in self._whole_memory().changed_since(after) if place in changed]
        lost += [p for p in self._inside(optimizer).changed_since(after_inside) if p in changed_inside]
        if lost:
            self.warn(
                f"rehearsal: {named(lost)} changes with an update, and no checkpoint keeps it: a resumed run would start it anew; "
                "give it in job.state_dict() and take it back in job.load_state_dict(), or keep it in the optimizer's state"
            )


_IN_STATE_DICT = (
    "optimizer._opt_called",
    "optimizer.state",
    "optimizer.param_groups",
    *(f"optimizer.{name}" for name in _HOOKS),
)
"""Places of an optimizer that its `state_dict` has, or that a process makes by itself."""


def _bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
