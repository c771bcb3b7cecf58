"""The first steps of a run, taken on trial: what they compute after different histories, and which of their changes no checkpoint keeps.

Each public method changes the job, the model and the optimizer for good. Call each in a forked process of its own.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.checkpoint.tree import Shared, pack, sharing
from lockstep.checkpoint.tree_decoder import unpack
from lockstep.data.fingerprint import difference
from lockstep.errors import LockstepError
from lockstep.job.interface import Job, overrides
from lockstep.randomness import seed_all, update_key
from lockstep.training.failure import as_lockstep_error
from lockstep.training.integrity import problems
from lockstep.training.integrity.rehearsal.memory_layout import check_listed
from lockstep.training.integrity.rehearsal.micro_batch import compute
from lockstep.training.integrity.rehearsal.names_of_objects import HOOKS, memory_of, named
from lockstep.training.integrity.rehearsal.object_state import Memory, tensor_digest
from lockstep.training.integrity.state_digest import tree_digest
from lockstep.training.state import TrainState, check_shared
from lockstep.training.step.after_step import follow_update
from lockstep.training.step.closures import step_once
from lockstep.training.step.joined_optimizer import JoinedOptimizer
from lockstep.training.step.means import number
from lockstep.training.step.parameters import ModuleWatch, ParameterWatch
from lockstep.training.step.phase_step import LossModule
from lockstep.training.step.phases import optimizers_of, sharded_of
from lockstep.training.step.sparse_gradients import numbers_of
from lockstep.training.step.statistics import rehearsed, takes_statistics

LARGEST_WRITTEN = 1 << 28
"""Largest array, in bytes, in which a write by an update is seen."""

_MADE_ANEW = ("_opt_called", "_numel_cache", "_need_device_dtype_check_for_fused")
"""What torch notes of an optimizer, and notes again in another process."""

_IN_STATE_DICT = (*_MADE_ANEW, "state", "param_groups", *HOOKS)
"""Attributes of an optimizer that its `state_dict` covers, or that a process makes by itself."""

Fetched = Callable[[], Iterable[tuple[int, Any]]]
"""Fetches the numbered micro-batches of a step on trial, anew at each call: a job may write into its batch."""

_WHERE = "after the first update, before training"
_TAKING_BACK = "taking back the state that it gives after the first update, before training"


class Saved(NamedTuple):
    """The state after the first step as a checkpoint has it: skeletons and tensors by section, in torch's file format, and what shares memory beyond the model."""

    sections: bytes
    shared: Shared


class Straight(NamedTuple):
    """The first two steps. Digests are of parameters and buffers by name; `values` are what the job and the optimizer hold, by place."""

    updated: dict[str, str]
    saved: Saved
    changed: list[str]
    """The places whose values the first step has changed."""
    values: dict[str, str]
    second: dict[str, str] | None
    """The digests after the second step; None where it gave no finite gradient."""


class Resumed(NamedTuple):
    """The second step of a process that has loaded the state after the first."""

    values: dict[str, str]
    shared: Shared
    second: dict[str, str] | None


@dataclass(slots=True)
class FirstSteps:
    """Steps of at most two micro-batches on the bare model: `modules` are the losses of their phases, in turn."""

    job: Job
    seed: int
    state: TrainState
    device: torch.device
    modules: Sequence[LossModule]
    global_batch: int
    """How many samples a step has, and so how many rows its statistics."""
    _statistics: dict[str, Any] = field(default_factory=dict, init=False)

    @property
    def can_update(self) -> bool:
        """Whether this process can update by itself: the ranks of a sharded optimizer do it together."""
        return not sharded_of(self.state.optimizer)

    def straight(self, fetched: Fetched) -> Straight | None:
        """Take the first step and the second. None where a gradient is not finite: fp16 skips such a step, any other precision fails in it.

        JobError where the first changes what the data give: a batch is fetched before its step.
        """
        before = self._memories()
        batches = [batch for _, batch in fetched()]
        updated = self._step(0, fetched)
        if updated is None:
            return None
        after = self._memories()
        changed = [
            place
            for memory, earlier in zip(after, before, strict=True)
            for place in memory.changed_since(earlier)
        ]
        changed = [place for place in changed if not self._in_state_dict(place)]
        self._check_data([place for place in changed if place in after[0].of_datasets], batches, fetched)
        saved = self._save()
        self._check_saving(after)
        return Straight(updated, saved, changed, _values(after), self._step(1, fetched))

    def other_last(self, fetched: Fetched) -> dict[str, str] | None:
        """The first step, with the first micro-batch computed once more before each update."""
        return self._step(0, fetched, again=True)

    def resumed(self, saved: Saved, fetched: Fetched) -> Resumed:
        """Load the state after the first step, and take the second."""
        packed = torch.load(
            io.BytesIO(saved.sections), weights_only=False
        )  # written by this process's own fork
        sections = {name: unpack(skeleton, tensors) for name, (skeleton, tensors) in packed.items()}
        try:
            self.state.restore(sections)
        except LockstepError as error:
            if error.__cause__ is None:
                raise
            raise as_lockstep_error(error.__cause__, _TAKING_BACK) from error
        except (Exception, SystemExit) as error:
            raise as_lockstep_error(error, _TAKING_BACK) from error
        values, shared = _values(self._memories()), _shared_beyond_the_model(self.state.sections())
        return Resumed(values, shared, self._step(1, fetched))

    def check_resumed(
        self, straight: Straight, resumed: Resumed, warn: Callable[[str], None], known: Collection[str]
    ) -> None:
        """JobError where the second step has other bits once the state was loaded; a warning for what is lost without an effect so far.

        The places `known` are those of which the run is warned already.
        """
        check_shared(straight.saved.shared, resumed.shared)
        lost = [
            place for place in straight.changed if resumed.values.get(place) != straight.values.get(place)
        ]
        advice = "return it from job.state_dict() and restore it in job.load_state_dict(), or keep it in the optimizer's state"
        if straight.second is not None and straight.second != resumed.second:
            names = [name for name, v in straight.second.items() if (resumed.second or {}).get(name) != v]
            cause = (
                f"{named(lost)} changes with an update, and no checkpoint keeps it"
                if lost
                else "something that changes with an update is in no checkpoint"
            )
            raise problems.NOT_RESUMED(name=named(names), got=cause)
        within = tuple(f"{place}{mark}" for place in known for mark in ".[")
        if any(place not in known and not place.startswith(within) for place in lost):
            warn(
                f"rehearsal: {named(lost)} changes with an update, and no checkpoint keeps it: a resumed run would lose it; {advice}"
            )

    # --- one step ---------------------------------------------------------------------------------------------

    def _step(self, step: int, fetched: Fetched, *, again: bool = False) -> dict[str, str] | None:
        """Take a step, phase by phase. Returns the digests of the parameters and buffers after it; None where a gradient is not finite."""
        model = self.state.model
        watch, modules = ParameterWatch(model), ModuleWatch(model)
        for module in self.modules:
            if not self._update(module, step, fetched, again):
                return None
        self.state.counters.step = step + 1
        statistics, self._statistics = self._statistics, {}
        follow_update(self.state, seed=self.seed, device=self.device, statistics=statistics)
        watch.check_asking(_WHERE)
        watch.check_places()
        modules.check(_WHERE)
        check_listed(model, _WHERE)
        tensors = [*model.named_parameters(), *model.named_buffers()]
        return {f"{name!r}": tensor_digest(tensor) for name, tensor in tensors}

    def _update(self, module: LossModule, step: int, fetched: Fetched, again: bool) -> bool:
        """Sum the gradients of a phase, and update. False where there is nothing finite to update with."""
        state, phase = self.state, module.phase
        computed: list[Any] = []

        @torch.enable_grad()
        def evaluate() -> Tensor:
            """Leave the gradient of the mean in the parameters, where it is finite. Returns the mean."""
            # Only now: after_step may read the gradients of the step before.
            state.model.zero_grad(set_to_none=True)
            computed[:] = [self._compute(module, m, batch) for m, batch in fetched()]
            sums = [
                sum(gradients[1:], gradients[0])
                for gradients in zip(*(result.gradients.values() for result in computed), strict=True)
            ]
            weight = sum(number(result.loss.weight) for result in computed)
            total = sum(number(result.loss.total) for result in computed)
            finite = weight > 0 and all(bool(numbers_of(gradient).isfinite().all()) for gradient in sums)
            for parameter, gradient in zip(module.parameters_that_learn, sums, strict=True):
                parameter.grad = gradient / weight if finite else None
            return torch.tensor(total / weight if finite else torch.nan, dtype=torch.float64)

        evaluate()
        if takes_statistics(self.job):
            statistics = rehearsed([result.statistics for result in computed], self.global_batch)
            self._statistics = {**statistics, **self._statistics}
        if again:
            gradients = [parameter.grad for parameter in module.parameters_that_learn]
            state.model.zero_grad(set_to_none=True)
            self._compute(module, *next(iter(fetched())))
            for parameter, gradient in zip(module.parameters_that_learn, gradients, strict=True):
                parameter.grad = gradient
        if any(parameter.grad is None for parameter in module.parameters_that_learn):
            return False
        state.schedule_of(phase.name).set(step)
        seed_all(update_key(self.seed, step, phase.key), self.device)
        try:
            step_once(self.job, state.optimizer_of(phase.name), evaluate)
        except (Exception, SystemExit) as error:
            raise as_lockstep_error(error, "first update, before training", check="optimizer") from error
        return True

    def _compute(self, module: LossModule, m: int, batch: Any) -> Any:
        return compute(module, batch, self.state.precision, seed=self.seed, device=self.device, m=m)

    # --- what it changes --------------------------------------------------------------------------------------

    def _check_data(self, changed: list[str], batches: Sequence[Any], fetched: Fetched) -> None:
        """JobError where an update has `changed` places of the data, and the samples follow them."""
        if not changed:
            return
        for before, (_, after) in zip(batches, fetched(), strict=True):
            if (location := difference(before, after)) is not None:
                raise problems.DATA_CHANGED(name=named(changed), where=location)

    def _check_saving(self, earlier: Sequence[Memory]) -> None:
        """JobError where the state that a save takes depends on the saves before it: how often a run saves is placement.

        A value that is noted at a save alone is none of it, such as a cache or a time.
        """
        modules = self.state.model.modules()
        extra_state = any(type(module).get_extra_state is not nn.Module.get_extra_state for module in modules)
        if not extra_state and not overrides(self.job, "state_dict"):
            return
        saved = self._memories()
        noted = [
            place for memory, old in zip(saved, earlier, strict=True) for place in memory.changed_since(old)
        ]
        if noted and tree_digest(self.state.sections()) != tree_digest(self.state.sections()):
            first, second = _values(saved), _values(self._memories())
            if moved := [place for place in noted if first.get(place) != second.get(place)]:
                raise problems.SAVING_CHANGES(name=named(moved))

    def _memories(self) -> list[Memory]:
        """What the job and its data hold, and what each optimizer does, including large arrays, which an update may write to."""
        optimizers = list(optimizers_of(self.state.optimizer).values())
        around = memory_of(self.job, self.state.model, optimizers, largest=LARGEST_WRITTEN, datasets=True)
        parameters = list(self.state.model.parameters())
        names = ["optimizer"] if len(optimizers) == 1 else [f"optimizer {i}" for i in range(len(optimizers))]
        return [
            around,
            *(
                Memory({name: optimizer}, apart=parameters, largest=LARGEST_WRITTEN)
                for name, optimizer in zip(names, optimizers, strict=True)
            ),
        ]

    def _in_state_dict(self, place: str) -> bool:
        """Whether a place in an optimizer is covered by its `state_dict`, where that is torch's own."""
        for i, optimizer in enumerate(every := list(optimizers_of(self.state.optimizer).values())):
            root = "optimizer" if len(every) == 1 else f"optimizer {i}"
            joined = optimizer.members if isinstance(optimizer, JoinedOptimizer) else ()
            members = {f"{root}.members[{j}]": member for j, member in enumerate(joined)}
            for name, member in {root: optimizer, **members}.items():
                covered = tuple(f"{name}.{attribute}" for attribute in _IN_STATE_DICT)
                if type(member).state_dict is torch.optim.Optimizer.state_dict and place.startswith(covered):
                    return True
        return False

    def _save(self) -> Saved:
        """The state as a checkpoint has it. JobError for a state that none can hold."""
        sections = self.state.sections()
        packed = {name: pack(section, name) for name, section in sections.items()}
        content, file = {}, io.BytesIO()
        for name, part in packed.items():
            tensors = {n: t.clone() for n, t in part.tensors.items() if isinstance(t, Tensor)}
            content[name] = (part.skeleton, tensors)
        torch.save(content, file)
        return Saved(file.getvalue(), _shared_beyond_the_model(sections))


def _values(memories: Iterable[Memory]) -> dict[str, str]:
    values: dict[str, str] = {}
    for memory in memories:
        values |= memory.values
    return values


def _shared_beyond_the_model(sections: Mapping[str, Any]) -> Shared:
    """What shares memory and is not the model's alone: that is loaded into the memory of the model that the job has made.

    An optimizer's state may be the memory of its parameter, as SAM leaves it; whether that has an effect the second step shows.
    """
    sections = {**sections, "model": sections["model"]["state"]}
    return {
        group
        for group in sharing(dict(sections), "")
        if any(not path.startswith(("/model/", "/optimizer/state/")) for path, _ in group)
    }
