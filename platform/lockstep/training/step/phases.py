"""A job's phases on its model: what each learns and by which loss, which parameters rest, and the phases' optimizers and schedules as one.

A job without phases has a single one, without a name, over all parameters that require a gradient.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.errors import JobError, nearest
from lockstep.job.interface import Job, Loss, Phase, Rows, overrides
from lockstep.randomness import frozen_key, seed_all
from lockstep.spec.fields import Spec
from lockstep.training.failure import job_at
from lockstep.training.step import problems
from lockstep.training.step.learning_rate import RateSchedule
from lockstep.training.step.sharding import ShardedOptimizer

_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True)
class ModelPhase:
    """A phase on its model. `names` are its parameters that require a gradient, in the model's order."""

    name: str
    loss: Callable[[nn.Module, Any], Loss]
    """Of the model and a micro-batch; with `embed`, of the model and the rows of a whole global batch."""
    names: tuple[str, ...]
    key: tuple[str, ...] = ()
    """What its seeds are keyed by, beside step and micro-batch."""
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    embed: Callable[[nn.Module, Any], Rows] | None = None

    @property
    def loss_label(self) -> str:
        """Its loss, as messages name it."""
        method = "job.loss" if self.embed is None else "job.batch_loss"
        return f"the loss of phase {self.name!r}" if self.name else method

    @property
    def embed_label(self) -> str:
        """What gives its rows, as messages name it."""
        return f"embed of phase {self.name!r}" if self.name else "job.embed"

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """Its parameters, in the order of `names`."""
        every = dict(model.named_parameters())
        return [every[name] for name in self.names]


def phases_of(job: Job, model: nn.Module) -> tuple[ModelPhase, ...]:
    """The phases of a step, in order. JobError where a phase is invalid, or a parameter that requires a gradient is in none."""
    declared = own_phases(job)
    asking = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not declared and overrides(job, "batch_loss"):
        # By lambdas, here and below: a method may be put in the place of the job's own later.
        embed = lambda model, batch: job.embed(model, batch)  # noqa: E731
        return (ModelPhase("", lambda model, rows: job.batch_loss(model, rows), tuple(asking), embed=embed),)
    if not declared:
        return (ModelPhase("", lambda model, batch: job.loss(model, batch), tuple(asking)),)
    phases = tuple(_on_model(phase, declared, model, asking) for phase in declared)
    learning = {name for phase in phases for name in phase.names}
    missing = [name for name in asking if name not in learning]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise problems.NOT_IN_PHASE(got=f"{missing[0]!r}{others}")
    return phases


def own_phases(job: Job) -> list[Phase]:
    """What `job.phases()` returns, checked as far as is possible without a model."""
    if not overrides(job, "phases"):
        return []
    with job_at("while its phases were asked for"):
        phases: Any = job.phases()
    if not isinstance(phases, list | tuple) or not all(isinstance(phase, Phase) for phase in phases):
        raise problems.PHASES_KIND(got=type(phases).__name__)
    names = [phase.name for phase in phases]
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise problems.PHASE_NAME(got=f"the name {name!r}", wanted="letters, digits, '_', '-' and '.'")
    if len(set(names)) < len(names):
        raise problems.PHASE_NAME(got=f"the names {names}", wanted="each once")
    return list(phases)


def _on_model(phase: Phase, every: Iterable[Phase], model: nn.Module, asking: list[str]) -> ModelPhase:
    names = [candidate.name for candidate in every]
    if phase.draws_as is not None and phase.draws_as not in names:
        raise problems.DRAWS_AS(
            name=phase.name, got=phase.draws_as, wanted=names, hint=nearest(phase.draws_as, names)
        )
    chosen = selected(model, phase.parameters, f"job.phases: the parameters of phase {phase.name!r}")
    trainable = tuple(name for name in chosen if name in asking)
    if not trainable:
        raise problems.PHASE_LEARNS_NOTHING(got=phase.name)
    key = (phase.draws_as or phase.name,)
    return ModelPhase(phase.name, phase.loss, trainable, key, phase.optimizer, phase.embed)


def selected(model: nn.Module, names: Iterable[str], label: str) -> list[str]:
    """The parameters that `names` of parameters or modules stand for, in the order of `named_parameters`. JobError for an unknown name."""
    if isinstance(names, str):
        raise problems.NAMES_KIND(label=label, got=f"the text {names!r}")
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    chosen: set[str] = set()
    for requested in names:
        if not isinstance(requested, str):
            raise problems.NAMES_KIND(label=label, got=f"a {type(requested).__name__}")
        matches = {
            name for full, name in every.items() if full == requested or full.startswith(f"{requested}.")
        }
        if not matches:
            candidates = {full[:end] for full in every for end, sign in enumerate(f"{full}.") if sign == "."}
            raise problems.NO_SUCH_NAME(
                label=label,
                what="parameter and no module with parameters named",
                got=requested,
                hint=nearest(requested, candidates),
            )
        chosen |= matches
    return [name for name in first.values() if name in chosen]


def check_combination(job: Job, spec: Spec) -> None:
    """SpecError for settings that phases or frozen parameters rule out."""
    phased, rests = bool(own_phases(job)), overrides(job, "frozen_parameters")
    if not phased and not rests:
        return
    feature = "phases" if phased else "frozen_parameters"
    if phased and spec.sharding.mode == "optimizer" and spec.faults.mirror:
        raise problems.MIRROR(reason="the job has phases: the state of one optimizer alone is mirrored")
    if spec.reduction == "native":
        raise problems.NATIVE(feature=feature)
    if phased and spec.recheck:
        raise problems.RECHECK(got=f"{spec.recheck:g}")


def refuse_phases(job: Job, who: str) -> None:
    """SpecError for a job with phases; `who` can only look at one loss and one optimizer."""
    phases = own_phases(job)
    if phases:
        raise problems.PROBED_PHASES(got=len(phases), who=who)


class FrozenRule:
    """Which parameters rest in a step, by `job.frozen_parameters`; none where the job has no such rule."""

    def __init__(self, job: Job, model: nn.Module, seed: int) -> None:
        self._job, self._model, self._seed = job, model, seed
        self._known: dict[Any, frozenset[str]] = {}
        """Parameter names, by what the rule returned."""
        self.there = overrides(job, "frozen_parameters")

    def __call__(self, step: int) -> frozenset[str]:
        """The names of the parameters that rest in step number `step`, counted from 1. The generators are seeded from (seed, "frozen", step - 1)."""
        if not self.there:
            return frozenset()
        seed_all(frozen_key(self._seed, step - 1))
        with job_at(f"while it was asked what rests in step {step}"):
            returned = self._job.frozen_parameters(self._model, step)
            names = returned if isinstance(returned, str) else tuple(returned)
        frozen = self._known.get(names) if all(isinstance(name, str) for name in names) else None
        if frozen is None:
            label = f"job.frozen_parameters (step {step})"
            frozen = self._known[names] = frozenset(selected(self._model, names, label))
        return frozen

    def check(self, total: int, learning: Iterable[str]) -> None:
        """Ask for the first steps and the last one, twice. JobError where the answers differ, or where nothing of `learning` is left."""
        steps = sorted({*range(1, min(8, total) + 1), total}) if self.there else []
        once = [self(step) for step in steps]
        again = [self(step) for step in steps]
        for step, first, second in zip(steps, once, again, strict=True):
            if first != second:
                raise problems.FROZEN_DIFFER(wanted=sorted(first), step=step, got=sorted(second))
            if first >= set(learning):
                raise all_rest(step)


def all_rest(step: int) -> JobError:
    """The error for a step in which nothing would learn."""
    return problems.ALL_REST(step=step)


class PhaseOptimizers:
    """The optimizers of the phases, by phase name; takes the place of a single optimizer in the state."""

    def __init__(self, by_phase: Mapping[str, torch.optim.Optimizer]) -> None:
        self.by_phase = dict(by_phase)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all, one optimizer after another."""
        return [group for optimizer in self.by_phase.values() for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The `state_dict` of each, by the names of the phases."""
        return {name: optimizer.state_dict() for name, optimizer in self.by_phase.items()}


Optimizers = torch.optim.Optimizer | PhaseOptimizers


def optimizers_of(optimizer: Optimizers) -> dict[str, torch.optim.Optimizer]:
    """Each optimizer by the name of its phase; without phases, the only one by the empty name."""
    return optimizer.by_phase if isinstance(optimizer, PhaseOptimizers) else {"": optimizer}


def sharded_of(optimizer: Optimizers) -> dict[str, ShardedOptimizer]:
    """As `optimizers_of`, where the workers share them out; empty where they do not."""
    every = optimizers_of(optimizer).items()
    return {name: member for name, member in every if isinstance(member, ShardedOptimizer)}


class PhaseSchedules:
    """The schedules of the phases' optimizers, by the names of the phases: a `RateSchedule` over all of them."""

    def __init__(self, by_phase: Mapping[str, RateSchedule]) -> None:
        self.by_phase = dict(by_phase)
        self.base = [rate for schedule in self.by_phase.values() for rate in schedule.base]

    def set(self, update: int) -> None:
        for schedule in self.by_phase.values():
            schedule.set(update)

    def follow(self) -> None:
        for schedule in self.by_phase.values():
            schedule.follow()

    def epoch_ended(self) -> None:
        for schedule in self.by_phase.values():
            schedule.epoch_ended()

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        for schedule in self.by_phase.values():
            schedule.evaluated(metrics)

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(name for schedule in self.by_phase.values() for name in schedule.metrics)

    def standing(self, update: int) -> dict[str, Any]:
        return {name: schedule.standing(update) for name, schedule in self.by_phase.items()}

    def state_dict(self) -> dict[str, Any]:
        states = {name: schedule.state_dict() for name, schedule in self.by_phase.items()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state: Mapping[str, Any], *, fork: bool) -> None:
        for name, schedule in self.by_phase.items():
            schedule.load_state_dict(state.get(name, {}), fork=fork)
