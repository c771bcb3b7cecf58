"""The first update of a run, taken on trial: what it computes, and which of its changes no checkpoint would keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.skeleton import unpack
from lockstep.checkpoint.tree import Shared, pack, sharing
from lockstep.job.interface import Job
from lockstep.randomness import seed_all
from lockstep.training.after_step import call_after_step, has_after_step
from lockstep.training.buffers import KeptBuffers
from lockstep.training.failure import as_lockstep_error
from lockstep.training.job_phases import optimizers_of
from lockstep.training.parameters import ModuleWatch, ParameterWatch
from lockstep.training.phase_step import LossModule
from lockstep.training.rehearsal.held import HOOKS, memory_of, named
from lockstep.training.rehearsal.layout import check_listed
from lockstep.training.rehearsal.memory import Memory, tensor_digest
from lockstep.training.sharding import ShardedOptimizer
from lockstep.training.state import TrainState, check_shared, restore_optimizer

LARGEST_WRITTEN = 1 << 28
"""Largest array, in bytes, in which a write by an update is detected and undone."""

_IN_STATE_DICT = (
    "optimizer._opt_called",
    "optimizer.state",
    "optimizer.param_groups",
    *(f"optimizer.{name}" for name in HOOKS),
)
"""Places of an optimizer that its `state_dict` covers, or that a process makes by itself."""


@dataclass(slots=True)
class FirstUpdate:
    """The first update of each phase, on the bare model, for given gradients. All that it changes is put back."""

    job: Job
    seed: int
    state: TrainState
    device: torch.device
    warn: Callable[[str], None]
    changed_data: list[str] = field(default_factory=list, init=False)
    """Places in the datasets that an update has changed."""

    def digests(
        self, module: LossModule, gradients: Sequence[Tensor], weight: float, *, tell: bool = False
    ) -> dict[str, str] | None:
        """Digests of the parameters and buffers after the first update of a phase with these gradients; everything is put back.

        None where the gradients are not finite: fp16 skips such a step, and any other precision fails in it. None for a sharded optimizer:
        its ranks update together, but each may rehearse to a different extent.
        """
        state, phase = self.state, module.phase
        optimizer = state.optimizer_of(phase.name)
        if isinstance(optimizer, ShardedOptimizer):
            return None
        if not weight > 0 or not all(bool(gradient.isfinite().all()) for gradient in gradients):
            return None
        model = state.model
        held, buffers = self._held(), KeptBuffers(model)
        inside = self._inside(optimizer)
        values = [parameter.detach().clone() for parameter in model.parameters()]
        try:
            for parameter, gradient in zip(module.parameters_that_learn, gradients, strict=True):
                parameter.grad = gradient / weight
            state.schedule_of(phase.name).set(0)
            seed_all(self.seed, "update", 0, *phase.key, device=self.device)
            watch, modules = ParameterWatch(model), ModuleWatch(model)
            try:
                optimizer.step()
            except (Exception, SystemExit) as error:
                raise as_lockstep_error(error, "first update, before training") from error
            if has_after_step(self.job):
                with state.settings.followed():
                    call_after_step(state, 1, seed=self.seed, device=self.device)
            watch.check_asking("after the first update, before training")
            watch.check_places()
            modules.check("after the first update, before training")
            check_listed(model, "after the first update, before training")
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
            state.settings.load({})
            held.restore()

    def _held(self) -> Memory:
        """What the job and its data hold, including large arrays, which an update may write to."""
        optimizers = list(optimizers_of(self.state.optimizer).values())
        return memory_of(self.job, self.state.model, optimizers, largest=LARGEST_WRITTEN, datasets=True)

    def _inside(self, optimizer: torch.optim.Optimizer) -> Memory:
        return Memory({"optimizer": optimizer}, apart=self.state.model.parameters(), largest=LARGEST_WRITTEN)

    def _tell_unsaved(
        self, module: LossModule, optimizer: torch.optim.Optimizer, held: Memory, inside: Memory
    ) -> None:
        """Warn of what an update changes and a resume from a checkpoint would not restore.

        `held` and `inside` are what the job and the optimizer held before the update, as a resumed run would begin with.
        """
        job, model, schedule = self.job, self.state.model, self.state.schedule_of(module.phase.name)

        def sections() -> dict[str, Any]:
            return {
                "optimizer": optimizer.state_dict(),
                "job": dict(job.state_dict()),
                "model": model.state_dict(),
                "schedule": schedule.state_dict(),
            }

        # so a state that no checkpoint can hold fails now
        given = sections()
        packed = {name: pack(section, name) for name, section in given.items()}
        shared = _shared_beyond_the_model(given)
        after, after_inside = self._held(), self._inside(optimizer)
        changed, changed_inside = after.changed_since(held), after_inside.changed_since(inside)
        self.changed_data = [place for place in changed if place in after.of_datasets]
        if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
            changed_inside = [place for place in changed_inside if not place.startswith(_IN_STATE_DICT)]
        if not changed and not changed_inside and not shared:
            return
        saved = {
            section: unpack(
                one.skeleton, {n: t.clone() for n, t in one.tensors.items() if isinstance(t, Tensor)}
            )
            for section, one in packed.items()
        }
        settings = self.state.settings.changed
        held.restore()
        inside.restore()
        try:
            self.state.settings.load(settings)
            model.load_state_dict(saved["model"])
            restore_optimizer(optimizer, saved["optimizer"], fork=False)
            schedule.load_state_dict(saved["schedule"], fork=False)
            if saved["job"]:
                job.load_state_dict(saved["job"])
        except (Exception, SystemExit) as error:
            raise as_lockstep_error(
                error, "taking back the state that it gives after the first update, before training"
            ) from error
        check_shared(shared, _shared_beyond_the_model(sections()))
        lost = [place for place in self._held().changed_since(after) if place in changed]
        lost += [p for p in self._inside(optimizer).changed_since(after_inside) if p in changed_inside]
        if lost:
            self.warn(
                f"rehearsal: {named(lost)} changes with an update, and no checkpoint keeps it: a resumed run would lose it; "
                "return it from job.state_dict() and restore it in job.load_state_dict(), or keep it in the optimizer's state"
            )


def _shared_beyond_the_model(sections: dict[str, Any]) -> Shared:
    """What shares memory and is not the model's alone: that is loaded into the memory of the model that the job has made."""
    return {one for one in sharing(sections, "") if any(not place.startswith("/model/") for place, _ in one)}
