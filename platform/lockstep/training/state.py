"""The state of a run: everything that the next step depends on, in one object."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path

from lockstep.checkpoint.snapshot import writers
from lockstep.checkpoint.stored_tensor import in_memory
from lockstep.checkpoint.tree import Elsewhere, Shared, sharing
from lockstep.communication.group import Group
from lockstep.job.interface import Job
from lockstep.plan import Plan, Position
from lockstep.spec.fields import EarlyStop
from lockstep.training import problems
from lockstep.training.auxiliary_state import beside_weights, copied, give_shape, unlisted_tensors
from lockstep.training.module_modes import ModuleSettings
from lockstep.training.optimizer_state import assembled_optimizer, restore_optimizer
from lockstep.training.step.compiled import CompiledLosses
from lockstep.training.step.full_sharding import FullSharding
from lockstep.training.step.job_weights import JobWeights
from lockstep.training.step.learning_rate import FunctionOfUpdates, RateSchedule
from lockstep.training.step.mirrored_optimizer import MirroredOptimizer
from lockstep.training.step.mirrored_shards import MirroredShards
from lockstep.training.step.parameter_order import Order, check_order, order_of
from lockstep.training.step.phases import (
    Optimizers,
    PhaseSchedules,
    optimizers_of,
    sharded_of,
)
from lockstep.training.step.precision import Precision
from lockstep.training.step.sharding import FullyShardedOptimizer
from lockstep.training.step.shards import Shard
from lockstep.training.step.weight_average import Average, has_modes, shown_by_optimizers


@dataclass(slots=True)
class Counters:
    """How far a run is. The schedule, the generators and the place in the data are functions of these."""

    step: int = 0
    """Steps done, skipped ones included."""
    skipped: int = 0
    """Steps that the loss scaler skipped."""
    samples: int = 0
    """Training samples consumed."""
    weight_exponent: int | None = None
    """The total weight of the last step, rounded down to a power of two: the next step's losses are divided by it."""
    evaluated: int = 0
    """Steps done at the last evaluation."""

    @property
    def updates(self) -> int:
        """Optimizer updates taken, which is what the schedule counts."""
        return self.step - self.skipped


@dataclass(slots=True)
class Best:
    """The best evaluation so far, and how long ago it was."""

    value: float | None = None
    step: int = 0
    evaluations_since: int = 0
    weights: dict[str, Any] | None = None
    """Tensors, and a `Shard` of each that is sharded."""
    beside: dict[str, Any] | None = None
    """What the model computed with besides; None before the first evaluation."""

    def judge(
        self,
        rule: EarlyStop,
        value: float,
        step: int,
        weights: Mapping[str, Any],
        beside: Callable[[], dict[str, Any]],
    ) -> bool:
        """Note one evaluation of `weights`, and what is `beside` them. True where the run has evaluated `enough`. NaN is never better."""
        better = not math.isnan(value) and (self.value is None or rule.cost(value) < rule.cost(self.value))
        if better:
            self.value, self.step, self.evaluations_since = value, step, 0
            self.weights = {name: _copied(value) for name, value in weights.items()}
            self.beside = copied(beside())
        else:
            self.evaluations_since += 1
        return self.enough(rule)

    def enough(self, rule: EarlyStop) -> bool:
        """Whether the last `patience` evaluations were no improvement, or the best one has reached the threshold."""
        if self.value is not None and rule.reached_by(self.value):
            return True
        return rule.patience is not None and self.evaluations_since >= rule.patience


@dataclass(slots=True)
class Pending:
    """An evaluation that has begun after a step and that decides at a later one, with what it evaluates, as copies in host memory."""

    step: int
    epoch: int
    labels: list[str]
    """Of the sets that it takes."""
    weights: dict[str, Any] | None
    """Tensors, and a `Shard` of each that is sharded. None where they are those of the state that has just been restored."""
    beside: dict[str, Any]
    """What the model computes with besides."""

    @classmethod
    def of(cls, state: TrainState, epoch: int, labels: Sequence[str]) -> Pending:
        """An evaluation of what the model holds now. Call it within `state.averaged()`."""
        beside = copied(beside_weights(state.model, state.job, state.settings.changed))
        weights = {name: _copied(value) for name, value in tensors(state).items()}
        return cls(state.counters.step, epoch, [*labels], weights, beside)


@dataclass(slots=True)
class TrainState:
    """Model, optimizer, scaler, counters and the best evaluation: one home for all that changes in a run.

    `metrics` has the newest value of each metric. `average` is that of the weights, where the spec has `ema`.
    With phases, `optimizer` and `schedule` stand for those of all phases.
    """

    job: Job
    model: nn.Module
    optimizer: Optimizers
    precision: Precision
    counters: Counters = field(default_factory=Counters)
    best: Best = field(default_factory=Best)
    metrics: dict[str, float] = field(default_factory=dict)
    average: Average | None = None
    schedule: RateSchedule = None  # type: ignore[assignment]
    """Sets the learning rates; unless given, they stay at their full values."""
    compiled: CompiledLosses | None = None
    """Computes the losses, where the spec has `compile`."""

    pending: Pending | None = field(init=False, default=None)
    """The evaluation that has begun and has not decided yet, if there is one."""
    job_weights: JobWeights | None = field(init=False, default=None)
    """The weights that the job evaluates, where it has an `eval_weights`."""
    sharding: FullSharding | None = field(init=False, default=None)
    """The sharded parameters, where the spec has `sharding: full` and there are several workers; set by `shard`."""
    order: Order = field(init=False)
    """The order in which the optimizers hold the parameters: their state is saved by position."""
    mirrored_shards: MirroredShards | None = field(init=False, default=None)
    """What keeps another worker's rows of the state too, where the spec has `sharding: full` and mirrors."""
    lacks_evaluation: bool = field(init=False, default=False)
    """Whether the shards that an evaluation has left were put back, and all else of it was not: another rank has to hand that over."""
    settings: ModuleSettings = field(init=False)
    """What updates have changed of the modules' plain attributes."""

    _placed: dict[int, tuple[Elsewhere, Shard]] = field(init=False, default_factory=dict)
    """The shards of the newest `sections`, by the id of what stands for each."""
    _shapes: dict[str, tuple[int, ...]] = field(init=False)
    """The shapes of the buffers as `job.model()` made them."""

    def __post_init__(self) -> None:
        self.settings = ModuleSettings(self.model)
        lazy = nn.parameter.is_lazy
        self._shapes = {
            name: tuple(buffer.shape) for name, buffer in self.model.named_buffers() if not lazy(buffer)
        }
        self.order = order_of(self.optimizer, self.model)
        if self.schedule is None:
            self.schedule = FunctionOfUpdates(self.optimizer_of(""), lambda _: 1.0)

    def optimizer_of(self, phase: str) -> torch.optim.Optimizer:
        """The optimizer of a phase. A job without phases has one, under the empty name."""
        return optimizers_of(self.optimizer)[phase]

    def schedule_of(self, phase: str) -> RateSchedule:
        """The schedule of a phase. A job without phases has one for any name."""
        return self.schedule.by_phase[phase] if isinstance(self.schedule, PhaseSchedules) else self.schedule

    def advance(self, position: Position, *, skipped: bool, weight: float) -> None:
        """Count one step. The only place where counters move."""
        self.counters.step += 1
        self.counters.skipped += skipped
        self.counters.samples += position.samples
        self.counters.weight_exponent = power_of_two(weight)

    def epoch(self, plan: Plan) -> int:
        """Whole epochs done."""
        return plan.position(self.counters.step).epoch

    @property
    def evaluation_begun(self) -> int:
        """Steps done when the newest evaluation began."""
        return self.counters.evaluated if self.pending is None else self.pending.step

    @property
    def mirrored(self) -> MirroredOptimizer | MirroredShards | None:
        """What has another worker's part of the state too, where each worker keeps that."""
        return self.optimizer if isinstance(self.optimizer, MirroredOptimizer) else self.mirrored_shards

    def names_by_phase(self) -> dict[str, list[str]]:
        """The names of the parameters of each phase, in the order of its optimizer."""
        return {phase: [name for group in groups for name in group] for phase, groups in self.order.items()}

    def have_pending(self, weights: dict[str, Any]) -> None:
        """Have the pending evaluation these weights. On a rank that joins, all else of it comes with the state."""
        self.pending = (
            Pending(0, 0, [], weights, {}) if self.pending is None else replace(self.pending, weights=weights)
        )

    def eager(self) -> AbstractContextManager[None]:
        """Within the block losses are computed without `compile`."""
        return nullcontext() if self.compiled is None else self.compiled.off()

    @property
    def has_average(self) -> bool:
        """Whether other weights are evaluated than those that are trained."""
        return (
            self.average is not None
            or self.job_weights is not None
            or any(map(has_modes, optimizers_of(self.optimizer).values()))
        )

    def averaged(self, *, alone: bool = False) -> AbstractContextManager[None]:
        """The model as it is evaluated: with the average in the place of its weights, where there is one. `alone`: on this rank, and no other."""
        if self.average is not None:
            return self.average.shown()
        if self.job_weights is not None:
            return self.job_weights.shown(alone=alone)
        return shown_by_optimizers(self.model, [*optimizers_of(self.optimizer).values()])

    def shard(self, sharding: FullSharding | None, group: Group) -> None:
        """Go on with the shards of the parameters: in the optimizer, and in the average. Without `sharding` they are whole, on one worker."""
        self.sharding = sharding
        local: Mapping[str, Tensor] = dict(self.model.named_parameters())
        whole, mirrors, mirrored = frozenset(local), dict[str, nn.Parameter](), 0
        host = None if sharding is None else sharding.host
        if sharding is not None:
            local, whole, mirrors = sharding.local, sharding.whole, sharding.mirrors
            mirrored = 0 if sharding.mirrored is None else sharding.mirrored
        for phase, optimizer in sharded_of(self.optimizer).items():
            assert isinstance(optimizer, FullyShardedOptimizer)
            names = [name for of_group in self.order[phase] for name in of_group]
            optimizer.take(names, local, whole, mirrors, mirrored, group, host)
        if self.average is not None:
            self.average.local = {} if sharding is None else local
            self.average.mirrored = mirrors
            self.average.host, self.average.rows = host, () if sharding is None else sharding.shards

    @property
    def shared_by(self) -> Group | None:
        """The group whose ranks have shards of the state's tensors; None where every rank has all of them."""
        return None if self.sharding is None else self.sharding.group

    def model_state(self) -> dict[str, Any]:
        """The model's `state_dict`, with a `Shard` of each tensor that is sharded."""
        return self.model.state_dict() if self.sharding is None else self.sharding.state()

    def average_state(self) -> dict[str, Any]:
        """The average by the names of its parameters, as `model_state`; empty where there is none."""
        average = {} if self.average is None else self.average.state_dict()
        shards = {} if self.sharding is None else self.sharding.shards
        mirror = {} if self.average is None else self.average.mirror
        return {
            name: shards[name].like(value, mirror.get(name)) if name in shards else value
            for name, value in average.items()
        }

    def _standing(self, values: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """`values` with an `Elsewhere` for each shard; `assembled` puts tensors in their places."""
        if values is None or self.sharding is None:
            return None if values is None else dict(values)
        standing: dict[str, Any] = {}
        places: dict[int, Elsewhere] = {}  # tied weights are one shard, and stored once
        for name, value in values.items():
            standing[name] = value
            if isinstance(value, Shard):
                place = places.setdefault(id(value), Elsewhere(value.local.dtype, value.shape, None))
                standing[name] = place
                self._placed[id(place)] = place, value
        return standing

    def sections(self) -> dict[str, Any]:
        """The state as trees of tensors and plain values, by name: what a checkpoint holds. Nothing is copied."""
        return self._sections(self.optimizer.state_dict())

    def _sections(self, optimizer: dict[str, Any]) -> dict[str, Any]:
        self._placed = {}
        job = self._job_section()
        return {
            "model": {
                "state": self._standing(self.model_state()),
                "unlisted_buffers": unlisted_tensors(self.model),
                "order": self.order,
                **({"settings": self.settings.changed} if self.settings.changed else {}),
                **({"resized": resized} if (resized := self._resized()) else {}),
                **({"shared_with_job": shared} if (shared := self._shared_with_job(job)) else {}),
            },
            "optimizer": optimizer,
            "scaler": self.precision.state_dict(),
            "counters": asdict(self.counters),
            "best": {
                **{name: getattr(self.best, name) for name in Best.__slots__},
                "weights": self._standing(self.best.weights),
            },
            "metrics": dict(self.metrics),
            "job": job,
            **({} if self.average is None else {"ema": self._standing(self.average_state())}),
            **({"schedule": schedule} if (schedule := self.schedule.state_dict()) else {}),
            **({} if self.pending is None else {"evaluation": self._pending_section(self.pending)}),
        }

    def _job_section(self) -> dict[str, Any]:
        """The job's own state. JobError where it has a tensor that learns, which a resumed run would get as one that does not."""
        section = dict(self.job.state_dict())
        for path, value in tree_leaves_with_path(section):
            if isinstance(value, Tensor) and value.requires_grad:
                raise problems.STATE_LEARNS(name=f"job{keystr(path)}")
        return section

    def _shared_with_job(self, section: Mapping[str, Any]) -> list[list[list[Any]]]:
        """Which tensors of the job's state are memory of the model, as `sharing` tells it, in lists: a section by itself cannot tell."""
        if not any(isinstance(value, Tensor) for value in tree_leaves(section)):
            return []
        model = {name: value for name, value in self.model_state().items() if isinstance(value, Tensor)}
        shared = sharing({"job": section, "model": model}, "")
        return sorted(
            sorted([path, start] for path, start in piece)
            for piece in shared
            if {path.split("/")[1] for path, _ in piece} == {"job", "model"}
        )

    def _pending_section(self, pending: Pending) -> dict[str, Any]:
        """The pending evaluation. Where it is of the current state, its weights are not held twice."""
        values = {name: getattr(pending, name) for name in Pending.__slots__}
        if pending.step == self.counters.step:
            return {**values, "weights": None, "beside": {}}
        return {**values, "weights": self._standing(pending.weights)}

    def sections_on_all_ranks(self) -> dict[str, Any]:
        """`sections` without what ranks have parts of: of a mirrored optimizer, the parameter groups alone, and an `Elsewhere` for each shard. No rank waits for another."""
        if self.mirrored is None:
            return self.sections()
        groups = {
            phase: {"param_groups": optimizer.groups_as_saved()}
            for phase, optimizer in sharded_of(self.optimizer).items()
        }
        return self._sections(groups.get("", groups))

    def restore_on_all_ranks(self, sections: Mapping[str, Any]) -> None:
        """Load what `sections_on_all_ranks` gave, in place: where that has an `Elsewhere`, this rank's shard stays. Errors as in `restore`."""
        self.restore(sections, optimizer_state=self.mirrored is None)

    def _resized(self) -> dict[str, list[int]]:
        """The shapes of the buffers that a forward has given another one than `job.model()` did, as that of an observer."""
        shapes = {name: tuple(buffer.shape) for name, buffer in self.model.named_buffers()}
        return {
            name: list(shapes[name])
            for name, shape in self._shapes.items()
            if shapes.get(name, shape) != shape
        }

    def _give_shapes(self, resized: Mapping[str, Sequence[int]]) -> None:
        """Have the buffers in the shapes that `job.model()` gave them, but for those of `resized`."""
        buffers = dict(self.model.named_buffers())
        with torch.no_grad():
            for name, shape in {**self._shapes, **resized}.items():
                if name in buffers and tuple(buffers[name].shape) != tuple(shape):
                    give_shape(buffers[name], torch.Size(shape))

    def assembled(self, sections: Mapping[str, Any], ranks: int) -> dict[str, Any]:
        """`sections` with the tensors of a sharded optimizer that this rank writes. All ranks call it."""
        sharded = sharded_of(self.optimizer)
        if not sharded:
            return dict(sections)
        by_rank = writers(sections, ranks)
        mine: dict[int, Tensor] = {}
        for key, (place, shard) in self._placed.items():
            assert self.sharding is not None
            whole = shard.gathered(self.sharding.group, by_rank[id(place)])
            if whole is not None:
                mine[key] = whole
        optimizer = assembled_optimizer(self.optimizer, sections["optimizer"], by_rank)
        return {
            name: _filled(section, mine) for name, section in {**sections, "optimizer": optimizer}.items()
        }

    def _cut(
        self, values: Mapping[str, Any], own: Mapping[str, Any], current: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Whole tensors, with this rank's `Shard` of each that is one in `own`, in memory of its own; the `current` one where they have an `Elsewhere`."""
        cut: dict[str, Any] = {}
        for name, value in values.items():
            if isinstance(value, Elsewhere):
                cut[name] = (current or {})[name]
            else:
                cut[name] = own[name].cut(value) if isinstance(own.get(name), Shard) else in_memory(value)
        return cut

    def _shards(self, values: Mapping[str, Any], current: Mapping[str, Any] | None) -> dict[str, Any]:
        """`_cut` for what a `state_dict` of the model has."""
        return self._cut(values, {} if self.sharding is None else self.model_state(), current)

    def _restore_average(self, average: Average, saved: Mapping[str, Any]) -> None:
        shards = {} if self.sharding is None else self.sharding.shards
        cut = self._cut(saved, shards, self.average_state())
        mirrors = {
            name: value.mirror.local
            for name, value in cut.items()
            if isinstance(value, Shard) and value.mirror is not None
        }
        average.load_state_dict(
            {name: value.local if isinstance(value, Shard) else value for name, value in cut.items()}
        )
        average.mirror = mirrors

    def restore(
        self, sections: Mapping[str, Any], *, fork: bool = False, optimizer_state: bool = True
    ) -> None:
        """Load what `sections` gave, in place. A `fork` keeps the optimizer's own hyperparameters.

        Without `optimizer_state`, a mirrored optimizer keeps the state that it has: only its parameter groups are loaded.

        StorageError where the state does not fit this model or optimizer, SpecError where a fork asks for another optimizer,
        JobError where the optimizer holds its parameters in another order.
        """
        try:
            saved_order = sections["model"]["order"]
            if not fork or saved_order.keys() == self.order.keys():
                check_order(self.order, "here", saved_order, "in the state that is taken over")
            self.settings.load(sections["model"].get("settings", {}))
            self._give_shapes(sections["model"].get("resized", {}))
            if self.sharding is None:
                self.model.load_state_dict(sections["model"]["state"])
            else:
                self.sharding.load(sections["model"]["state"])
            with torch.no_grad():
                for name, tensor in unlisted_tensors(self.model).items():
                    tensor.copy_(in_memory(sections["model"]["unlisted_buffers"][name]))
            if optimizer_state:
                restore_optimizer(self.optimizer, sections["optimizer"], fork=fork)
            else:
                for phase, optimizer in sharded_of(self.optimizer).items():
                    saved_optimizer = sections["optimizer"]
                    optimizer.load_groups(
                        (saved_optimizer[phase] if phase else saved_optimizer)["param_groups"]
                    )
            self.schedule.load_state_dict(sections.get("schedule", {}), fork=fork)
            if self.average is not None:
                average = sections["ema"] if not fork else sections.get("ema", {})
                self._restore_average(self.average, average)
            self.precision.load_state_dict(sections["scaler"])
            self.counters = Counters(**sections["counters"])
            best = sections["best"]
            best_weights = best["weights"] and self._shards(best["weights"], self.best.weights)
            self.best = Best(**{**best, "weights": best_weights})
            self.metrics = dict(sections["metrics"])
            pending = sections.get("evaluation")
            if pending and pending["weights"]:
                current = self.pending.weights if self.pending else None
                pending = {**pending, "weights": self._shards(pending["weights"], current)}
            self.pending = pending and Pending(**pending)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise problems.OTHER_STATE(got=" ".join(str(error).split())) from error
        if sections["job"]:
            shared = sharing(sections["job"], "job")
            self.job.load_state_dict(sections["job"])
            restored = dict(self.job.state_dict())
            check_shared(shared, sharing(restored, "job") if shared else shared)
            with_model = sections["model"].get("shared_with_job", [])
            check_shared(_pieces(with_model), _pieces(self._shared_with_job(restored) if with_model else []))


def _copied(value: Any) -> Any:
    """A tensor or a shard in host memory of its own."""
    return value.copied() if isinstance(value, Shard) else value.detach().cpu().clone()


def _filled(tree: Any, tensors: Mapping[int, Tensor]) -> Any:
    """A tree with tensors in the places of those that stand for them; the tree itself where there are none."""
    if not tensors:
        return tree
    if isinstance(tree, Elsewhere):
        return tensors.get(id(tree), tree)
    if type(tree) is dict:
        return {key: _filled(value, tensors) for key, value in tree.items()}
    return tree


def _pieces(lists: Sequence[Sequence[Sequence[Any]]]) -> Shared:
    """What `_shared_with_job` gave, as `sharing` gives it."""
    return {frozenset((path, start) for path, start in piece) for piece in lists}


def check_shared(saved: Shared, restored: Shared) -> None:
    """JobError where tensors that shared memory when they were saved no longer do when they are restored."""
    for group in saved - restored:
        first, second = sorted(path.removeprefix("/") for path, _ in group)[:2]
        raise problems.SHARED_APART(name=first, other=second)


def power_of_two(weight: float) -> int:
    """The exponent e of the largest power of two 2**e that is at most `weight`, which is > 0."""
    return math.frexp(weight)[1] - 1


def tensors(state: TrainState) -> dict[str, Any]:
    """The tensors of the model's `state_dict`, with a `Shard` of each that is sharded."""
    return {name: value for name, value in state.model_state().items() if isinstance(value, Tensor | Shard)}
