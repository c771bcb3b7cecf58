"""The learning-rate range test (Smith 2015): one run whose rate rises until its loss explodes. Kept: the curve."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep.checks import problems
from lockstep.communication.group import Group, local_device
from lockstep.errors import NumericsError
from lockstep.job.job_folder import search_job_folder
from lockstep.job.loading import load_job
from lockstep.record.events.union import Event
from lockstep.record.ledger.rows import StepRow
from lockstep.spec.fields import Every, Length, Spec
from lockstep.spec.loading import load_spec
from lockstep.spec.schedules import StepDecay
from lockstep.training.driver_requests import NoRequests
from lockstep.training.loop import fit
from lockstep.training.step.phases import refuse_phases

DIVERGED = 4.0
"""A smoothed loss of so many times its least value has diverged."""

_MEMORY = 0.9
"""How much of the smoothed loss is the one before."""


@dataclass(frozen=True, slots=True)
class RateRange:
    """The curve, a row a step, and what follows from it: a tenth of the rate from which on the smoothed loss rises, and where it had `diverged`."""

    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    diverged: float | None
    suggestion: float

    @property
    def rises_from(self) -> float:
        """The rate at which the smoothed loss is least."""
        return self.rates[self._least]

    @property
    def _least(self) -> int:
        return min(range(len(self.smoothed)), key=self.smoothed.__getitem__)

    @property
    def reasoning(self) -> str:
        """Why this rate is suggested, in words."""
        least, last = self._least, len(self.rates) - 1
        text = f"the smoothed loss goes from {self.smoothed[0]:.4g} to {self.smoothed[least]:.4g}, its least, at a rate of {self.rises_from:.2g}"
        if least == 0:
            text = f"the smoothed loss rises from the first rate on, {self.rises_from:.2g}: lower --lowest to see where it falls"
        elif least == last:
            text += ", the last one: raise --highest to see where it rises"
        else:
            text += " and rises from there on"
        if self.diverged is not None:
            text += f"; at {self.diverged:.2g} it has diverged (a loss that is not finite, or {DIVERGED:g} times the least)"
        return f"{text}; a tenth of {self.rises_from:.2g} leaves room for noise and for a longer run: optimizer.lr={self.suggestion:g}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "rises_from": self.rises_from, "reasoning": self.reasoning}


class _Curve(NoRequests):
    """The events and requests of a range test: it asks to stop once the loss has diverged."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.smoothed: list[float] = []
        self._mean = 0.0

    def tell(self, event: Event) -> None:
        if not isinstance(event, StepRow) or self.diverged:
            return  # the step under way when the run was asked to stop is not part of the curve
        self.rates.append(event.lr)
        self.losses.append(event.loss)
        self._mean = _MEMORY * self._mean + (1 - _MEMORY) * event.loss
        self.smoothed.append(self._mean / (1 - _MEMORY ** len(self.losses)))

    @property
    def diverged(self) -> bool:
        """Whether the smoothed loss has exploded."""
        return len(self.losses) > 10 and self.smoothed[-1] > DIVERGED * min(self.smoothed)

    def stop(self) -> bool:
        return self.diverged


def lr_find(
    source: Spec | str | Path | Mapping[str, Any],
    overrides: Iterable[str] = (),
    *,
    lowest: float = 1e-7,
    highest: float = 10.0,
    steps: int = 100,
) -> RateRange:
    """Train `steps` steps with a rate that rises from `lowest` to `highest`, in this process. Raises LockstepError."""
    if not 0 < lowest < highest or not math.isfinite(highest / lowest) or steps < 10:
        raise problems.RATES(lowest=f"{lowest:g}", highest=f"{highest:g}", steps=steps)
    search_job_folder()
    spec = source if isinstance(source, Spec) else load_spec(source, overrides, uri="off")
    rising = spec.model_copy(
        update={
            "optimizer": spec.optimizer.model_copy(update={"lr": lowest}),
            "schedule": StepDecay(every=1, gamma=(highest / lowest) ** (1 / (steps - 1))),
            "length": Length(steps=steps),
            "evaluate": spec.evaluate.model_copy(update={"every": Every(steps=steps)}),
            "early_stop": None,
            "checkpoint": spec.checkpoint.model_copy(update={"keep_best": None}),
        }
    )
    curve, not_finite = _Curve(), False
    group = Group.join(local_device(spec))
    try:
        job = load_job(spec.job.use, spec.job.params)
        refuse_phases(job, "lockstep lr-find")
        vars(job)["schedule"] = partial(_rising, lowest, (highest / lowest) ** (1 / (steps - 1)))
        fit(rising, job, group, curve.tell, curve)
    except NumericsError:
        not_finite = True
    if not curve.rates:
        raise problems.FIRST_LOSS(rate=f"{lowest:g}")
    end = curve.rates[-1] if curve.diverged or not_finite else None
    rate_range = RateRange(curve.rates, curve.losses, curve.smoothed, end, 0.0)
    return replace(rate_range, suggestion=float(f"{rate_range.rises_from / 10:.2g}"))


def _rising(
    lowest: float, factor: float, optimizer: torch.optim.Optimizer, updates: int
) -> Callable[[int], float] | None:
    """What has the rate of an optimizer of the job's own begin at `lowest`; None for the spec's, which has that rate and the rising schedule."""
    first = float(optimizer.param_groups[0]["lr"])
    if first == lowest:
        return None
    if not first > 0:
        raise problems.NO_RATE(got=f"{first:g}")
    return lambda update: lowest / first * factor**update


def as_text(test: RateRange, *, width: int = 60) -> str:
    """The curve for a terminal, a line for each third of a decade, and the suggestion."""
    shown: dict[int, int] = {}
    for i, rate in enumerate(test.rates):
        shown[math.floor(3 * math.log10(rate))] = i  # the last step of each
    top = max((loss for loss in test.smoothed if math.isfinite(loss)), default=1.0) or 1.0
    lines = [
        f"{test.rates[i]:9.2e}  {test.smoothed[i]:10.4f}  {'▪' * max(1, round(width * min(1.0, test.smoothed[i] / top)))}"
        for i in shown.values()
    ]
    return "\n".join([*lines, test.reasoning])
