"""The learning rate: a pure function of the number of updates done, or a torch scheduler whose state is saved.

Updates are optimizer steps that were actually taken: a step that the loss scaler skips does not count.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.checkpoint.tree import pack
from lockstep.errors import JobError
from lockstep.job.interface import Job, PerEpoch, Plateau, Updates
from lockstep.spec.schedules import Schedule
from lockstep.training.failure import job_at
from lockstep.training.step import problems


class RateSchedule(Protocol):
    """Sets the learning rates of an optimizer before each update."""

    base: list[float]
    """The full rate of each parameter group."""

    def set(self, update: int) -> None:
        """Set every group's rate for update number `update`, counted from 0."""

    def follow(self) -> None:
        """Called after an update was taken."""

    def epoch_ended(self) -> None:
        """Called after the last step of each epoch, also where the loss scaler has skipped it."""

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Called after an evaluation, with the metrics of the sets that it took."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics that `evaluated` needs."""

    def standing(self, update: int) -> Any:
        """The schedule's position before update number `update`, by which a restored run is checked."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint saves of it; empty for a function of the number of updates."""

    def load_state_dict(self, state: Mapping[str, Any], *, fork: bool) -> None:
        """Load what `state_dict` returned, after the optimizer's own state is restored."""


class FunctionOfUpdates:
    """A factor on each group's full rate, as a function of the number of updates done. It has no state."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float]) -> None:
        self.optimizer, self.factor = optimizer, factor
        self.base = base_rates(optimizer)

    def set(self, update: int) -> None:
        set_rates(self.optimizer, self.base, self.factor(update))

    def follow(self) -> None:
        pass

    def epoch_ended(self) -> None:
        pass

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        pass

    @property
    def metrics(self) -> tuple[str, ...]:
        return ()

    def standing(self, update: int) -> float:
        return self.factor(update)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any], *, fork: bool) -> None:
        pass


PLATEAU_METRIC = "eval/loss"
"""The metric that a ReduceLROnPlateau follows where the job names none."""


class TorchScheduler:
    """A torch scheduler, stepped after each update, or at the end of each epoch, or, for a ReduceLROnPlateau, after each evaluation."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler,
        metric: str = PLATEAU_METRIC,
        *,
        by_epoch: bool = False,
    ) -> None:
        """`metric` is what a ReduceLROnPlateau follows."""
        self.optimizer, self.scheduler, self.metric = optimizer, scheduler, metric
        self.base = base_rates(optimizer)
        self.by_evaluation = isinstance(scheduler, ReduceLROnPlateau)
        self.by_epoch = by_epoch

    def set(self, update: int) -> None:
        pass  # the scheduler set them when it was stepped

    def follow(self) -> None:
        if not self.by_evaluation and not self.by_epoch:
            self.scheduler.step()

    def epoch_ended(self) -> None:
        if self.by_epoch:
            self.scheduler.step()

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        if isinstance(self.scheduler, ReduceLROnPlateau) and self.metric in metrics:
            self.scheduler.step(metrics[self.metric])

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric,) if self.by_evaluation else ()

    def standing(self, update: int) -> float:
        return rates_of(self.optimizer)[0]

    def state_dict(self) -> dict[str, Any]:
        return {
            "scheduler": _plain(self.scheduler.state_dict()),
            "base": self.base,
            "rates": rates_of(self.optimizer),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, fork: bool) -> None:
        if not state or (fork and state["base"] != self.base):
            lacks = (
                "has no state of a scheduler of torch"
                if not state
                else f"began with the rates {state['base']}"
            )
            raise problems.FORK_SCHEDULE(got=lacks, wanted=self.base)
        # They are saved as plain dicts, which the schedulers cannot go on with.
        counting = [
            (scheduler, name, value)
            for scheduler in _nested(self.scheduler)
            for name, value in vars(scheduler).items()
            if isinstance(value, Counter | defaultdict)
        ]
        self.scheduler.load_state_dict(dict(state["scheduler"]))
        for scheduler, name, value in counting:
            loaded = copy.copy(value)
            loaded.clear()
            loaded.update(vars(scheduler)[name])
            setattr(scheduler, name, loaded)
        if fork:  # a fork's optimizer keeps the rates it was made with, but its scheduler goes on from the saved ones
            for group, rate in zip(self.optimizer.param_groups, state["rates"], strict=True):
                _set_rate(group, rate)


def _plain(state: Any) -> Any:
    """A scheduler's state in types that a checkpoint can hold: MultiStepLR counts its milestones in a Counter."""
    if isinstance(state, dict):
        plain = {key: _plain(value) for key, value in state.items()}
        return plain if isinstance(state, Counter | defaultdict) else type(state)(plain)
    if isinstance(state, Updates):
        return int(state)
    return [_plain(value) for value in state] if isinstance(state, list) else state


def _nested(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """A scheduler, and those that it is made of, as SequentialLR and ChainedScheduler are."""
    yield scheduler
    for inner in vars(scheduler).get("_schedulers", ()):
        yield from _nested(inner)


def make_schedule(
    job: Job, spec: Schedule, optimizer: torch.optim.Optimizer, total: Updates, *, evaluates: bool
) -> RateSchedule:
    """The job's own schedule over its optimizer, or the one that the spec names. `total` is the most updates that the run takes."""
    with job_at("while its schedule was made"):
        schedule = job.schedule(optimizer, total)
    if schedule is None:
        _check_unused(optimizer)
        spec.check_length(total)
        return FunctionOfUpdates(optimizer, lambda update: spec.factor(update, total))
    if isinstance(schedule, Plateau):
        return _on_plateau(schedule, optimizer)
    if isinstance(schedule, PerEpoch):
        return _by_epoch(schedule, optimizer)
    if isinstance(schedule, LRScheduler):
        return _scheduled(schedule, optimizer, evaluates=evaluates)
    if callable(schedule):
        _check_unused(optimizer)
        return FunctionOfUpdates(optimizer, _checked(schedule, total))
    raise problems.SCHEDULE_KIND(got=type(schedule).__name__)


def _check_unused(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a scheduler that was made and not returned: it leaves `initial_lr` in the groups."""
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise problems.SCHEDULER_KEPT()


def _on_plateau(own: Plateau, optimizer: torch.optim.Optimizer) -> TorchScheduler:
    if not isinstance(own.scheduler, ReduceLROnPlateau):
        raise problems.SCHEDULER_HELD(
            holder="Plateau",
            got=type(own.scheduler).__name__,
            wanted="a ReduceLROnPlateau: only that goes by a metric",
        )
    return _over(own.scheduler, optimizer, own.metric)


def _by_epoch(own: PerEpoch, optimizer: torch.optim.Optimizer) -> TorchScheduler:
    if not isinstance(own.scheduler, LRScheduler) or isinstance(own.scheduler, ReduceLROnPlateau):
        raise problems.SCHEDULER_HELD(
            holder="PerEpoch",
            got=type(own.scheduler).__name__,
            wanted="a torch LRScheduler that goes by no metric",
        )
    return _over(own.scheduler, optimizer, PLATEAU_METRIC, by_epoch=True)


def _scheduled(own: LRScheduler, optimizer: torch.optim.Optimizer, *, evaluates: bool) -> TorchScheduler:
    if isinstance(own, ReduceLROnPlateau):
        if own.mode == "max":
            raise problems.PLATEAU_RISES(got=type(own).__name__, metric=PLATEAU_METRIC)
        if not evaluates:
            raise problems.PLATEAU_UNEVALUATED(got=type(own).__name__, metric=PLATEAU_METRIC)
    return _over(own, optimizer, PLATEAU_METRIC)


def _over(
    own: LRScheduler, optimizer: torch.optim.Optimizer, metric: str, *, by_epoch: bool = False
) -> TorchScheduler:
    if own.optimizer is not optimizer:
        raise problems.OTHER_OPTIMIZER(got=type(own).__name__)
    scheduler = TorchScheduler(optimizer, own, metric, by_epoch=by_epoch)
    pack(scheduler.state_dict(), "job.schedule")  # so a state that no checkpoint can hold fails now
    _check_taken_up(scheduler)
    return scheduler


_TRIED = 3
"""Updates before a state is taken up, and after it."""


def _check_taken_up(original: TorchScheduler) -> None:
    """JobError where a scheduler of the job's own goes on otherwise once another one has taken up its state, as a resumed run would have it."""
    kinds = [type(each) for each in _nested(original.scheduler)]
    own = next((kind for kind in kinds if not kind.__module__.startswith("torch.")), None)
    if own is None:
        return
    wanted: list[list[float]] = []
    got = wanted
    # One that cannot be copied, or that ends here, is not judged: its error belongs to a step of the run.
    with suppress(Exception), warnings.catch_warnings(action="ignore"):
        first, second = _copied(original), _copied(original)
        _moved(first)
        second.load_state_dict(first.state_dict(), fork=False)
        second.optimizer.param_groups[:] = _groups_of(first.optimizer)
        wanted, got = _moved(first), _moved(second)
    if wanted != got:
        raise problems.SCHEDULE_LACKS(name=own.__qualname__, steps=_TRIED, wanted=wanted, got=got)


def _copied(original: TorchScheduler) -> TorchScheduler:
    """A copy with an optimizer that has the groups alone."""
    optimizer: torch.optim.Optimizer = object.__new__(type(original.optimizer))
    vars(optimizer).update(vars(original.optimizer))
    optimizer.param_groups = _groups_of(original.optimizer)
    scheduler = copy.deepcopy(original.scheduler, {id(original.optimizer): optimizer})
    return TorchScheduler(optimizer, scheduler, original.metric, by_epoch=original.by_epoch)


def _groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Copies of its groups, with the same parameters."""
    return [
        copy.deepcopy({**group, "params": []}) | {"params": group["params"]}
        for group in optimizer.param_groups
    ]


def _moved(tried: TorchScheduler) -> list[list[float]]:
    """The rates after each of some updates, of which each ends an epoch and is evaluated."""
    rates = []
    for _ in range(_TRIED):
        tried.follow()
        tried.epoch_ended()
        tried.evaluated({tried.metric: 1.0})
        rates.append(rates_of(tried.optimizer))
    return rates


def _checked(own: Callable[[int], float], total: int) -> Callable[[int], float]:
    """The job's function with the checks of a schedule: finite, not negative, and the same whenever it is called."""

    def factor(update: int) -> float:
        at = min(update, total - 1)  # it is also called for its position after the last update
        with job_at(f"while its schedule was asked for update {at}"):
            value = float(own(at))
        if not math.isfinite(value) or value < 0:
            raise problems.SCHEDULE_FACTOR(got=value, update=at)
        return value

    once = [factor(update) for update in (0, total - 1)]
    again = [factor(update) for update in (0, total - 1)]
    if once != again:
        raise problems.SCHEDULE_DIFFERS(wanted=once, got=again)
    return factor


# --- the rates of an optimizer --------------------------------------------------------------------------------


def base_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """The full learning rate of each parameter group, as the optimizer was made with it, before any scheduler."""
    return [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """The current learning rate of each parameter group."""
    return [float(group["lr"]) for group in optimizer.param_groups]


class Rates:
    """The learning rates of an optimizer: set before each update, and read when the update uses them.

    A hook of the job's optimizer may change them before an update; the changed rate is the one recorded. A hook
    that changes them after it is refused: the next update would overwrite the change, so the job needs a schedule.
    So is an `after_step` that does, unless a torch scheduler goes on from the rates that it finds.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: RateSchedule) -> None:
        self.optimizer = optimizer
        self.schedule = schedule
        self._set: list[float] = []
        self._used: list[float] = []
        self._left: list[float] = []
        """The rates as the newest update left them."""
        self._groups = len(optimizer.param_groups)
        # Registered after the job's own hooks, so it sees what they change.
        optimizer.register_step_pre_hook(self._note)

    def _note(self, *_: object) -> None:
        self._used = rates_of(self.optimizer)

    def set(self, update: int) -> None:
        """Set every group's rate for update number `update`. JobError where that overwrites a change of the job's."""
        self._check_groups()
        if self._left and isinstance(self.schedule, FunctionOfUpdates):
            for i, (current, previous) in enumerate(zip(rates_of(self.optimizer), self._left, strict=True)):
                if current != previous:
                    raise _changed(i, previous, current, "after an update, as by job.after_step")
        self.schedule.set(update)
        self._set = self._used = rates_of(self.optimizer)

    def used(self) -> float:
        """The first group's rate in the update since `set`, or the one that was set where it was skipped."""
        self._check_groups()
        for i, (current, was_set, used) in enumerate(
            zip(rates_of(self.optimizer), self._set, self._used, strict=True)
        ):
            if current not in (was_set, used):
                hint = ", or set the rate in a hook before the update (register_step_pre_hook)"
                raise _changed(i, used, current, "by an update", hint)
        self._left = rates_of(self.optimizer)
        return self._used[0]

    def _check_groups(self) -> None:
        if len(self.optimizer.param_groups) != self._groups:
            raise problems.GROUPS_CHANGED(got=len(self.optimizer.param_groups), wanted=self._groups)


def hooks_of_job(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """The hooks on an optimizer's updates but those of `Rates`."""
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    return [hook for hook in hooks if not isinstance(getattr(hook, "__self__", None), Rates)]


def set_rates(optimizer: torch.optim.Optimizer, base: list[float], factor: float) -> float:
    """Set every group's rate to its base times `factor`. Returns the first group's, the one that is recorded."""
    for group, full in zip(optimizer.param_groups, base, strict=True):
        _set_rate(group, full * factor)
    return base[0] * factor


def _set_rate(group: dict[str, Any], rate: float) -> None:
    """Set a group's rate as torch's schedulers do: with a tensor for a rate, an optimizer updates by other operators."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _changed(group: int, previous: float, current: float, when: str, hint: str = "") -> JobError:
    return problems.RATE_CHANGED(
        group=group, previous=f"{previous:g}", got=f"{current:g}", when=when, remedy=hint
    )
