"""The validated configuration of a sweep: a base spec, a space over its fields, and how it is searched.

What a random or grid sweep tries is a pure function of its seed and the number of the trial: each field of the space
draws from a generator of its own, so that a field more or less leaves the others as they are.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from lockstep.errors import SpecError, nearest
from lockstep.spec import problems
from lockstep.spec.document import check_text, override, put, read_document
from lockstep.spec.fields import PLACEMENT, PLACEMENT_FIELDS, Spec
from lockstep.spec.loading import load_spec, validate
from lockstep.spec.messages import FieldError, refusal, shown
from lockstep.spec.schedulers import NoScheduler, Pbt, Scheduler
from lockstep.spec.section import Section

_Bounds = Annotated[tuple[float, float], Field(strict=False)]
_WholeBounds = Annotated[tuple[int, int], Field(strict=False)]

MOST_TRIALS = 100_000
"""Of a sweep, whose trials are kept in memory."""

_FIXED = PLACEMENT | {"fork"}
"""Sections that a space may not search: they decide where a trial runs, not what it computes."""

_DELAYS = ("beside", "delay")
"""Fields of `evaluate` by which an evaluation decides after further steps."""

_COMPLETE = {"determinism", "compile", "evaluate"}
"""Sections with all their defaults also where they are searched: two have forms of their own, and `delay` stays where a resume changes `beside`."""


class Domain(Section):
    """The values that one field may take: exactly one kind, and on which other fields' values it depends.

    `grid` is gone through value by value, the others are drawn from; `randint` leaves its upper bound out.
    """

    choice: list[Any] | None = Field(default=None, min_length=1)
    grid: list[Any] | None = Field(default=None, min_length=1)
    uniform: _Bounds | None = None
    loguniform: _Bounds | None = None
    randint: _WholeBounds | None = None
    when: dict[str, Any] = Field(default_factory=dict)

    @field_validator("uniform", "loguniform", "randint")
    @classmethod
    def _ascending(
        cls, bounds: tuple[float, float] | None, info: ValidationInfo
    ) -> tuple[float, float] | None:
        if bounds is not None and not bounds[0] < bounds[1]:
            raise ValueError("wanted [lower, upper] with lower below upper")
        if bounds is not None and info.field_name == "loguniform" and bounds[0] <= 0:
            raise ValueError("wanted bounds above 0")
        return bounds

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if sum(getattr(self, kind) is not None for kind in KINDS) != 1:
            raise ValueError(f"wanted exactly one of {', '.join(KINDS)}")
        return self

    @property
    def values(self) -> list[Any] | None:
        """The values, where they can be counted."""
        return self.grid if self.grid is not None else self.choice

    def draw(self, source: random.Random) -> Any:
        """One value. Floats have six digits, which is what a table shows."""
        if self.values is not None:
            return self.values[source.randrange(len(self.values))]
        if self.randint is not None:
            return source.randrange(*self.randint)
        if self.uniform is not None:
            return self.rounded(source.uniform(*self.uniform))
        assert self.loguniform is not None
        return self.rounded(math.exp(source.uniform(*map(math.log, self.loguniform))))

    def gives(self, value: Any, field: str = "") -> bool:
        """Whether a drawn value can be this one, or have it at a dotted field."""
        if self.values is not None:
            return any(_at(each, field) == value for each in self.values)
        if self.randint is not None:
            return not field and value in range(*self.randint)
        low, high = self.uniform or self.loguniform or (math.inf, -math.inf)
        return not field and isinstance(value, int | float) and low <= value <= high

    def nearest(self, value: Any) -> Any:
        """The value that may be drawn which is nearest to this one: to a drawn one, or a changed number."""
        if self.values is not None:
            return value
        if self.randint is not None:
            return min(max(round(value), self.randint[0]), self.randint[1] - 1)
        return self.rounded(value)

    def rounded(self, value: float) -> float:
        """`value` with six digits, within the bounds."""
        low, high = self.uniform or self.loguniform or (-math.inf, math.inf)
        return min(max(float(f"{value:.6g}"), low), high)


KINDS = ("choice", "grid", "uniform", "loguniform", "randint")


class Budget(Section):
    """When the sweep ends at the latest: seconds since it began or was resumed, or steps of all its trials together."""

    seconds: PositiveFloat | None = None
    steps: PositiveInt | None = None


class SweepSpec(Section):
    """A sweep as it is configured."""

    spec: dict[str, Any] = Field(examples=["train.yaml"])
    """With its defaults, but for sections of which the space has fields."""
    space: dict[str, Domain] = Field(min_length=1, examples=["{optimizer.lr: {loguniform: [1e-4, 1e-1]}}"])
    name: str = ""
    metric: str = "eval/loss"
    mode: Literal["min", "max"] = "min"
    trials: PositiveInt | None = None
    concurrency: PositiveInt | None = None
    seed: int = Field(default=0, ge=0, lt=2**32)
    search: Literal["random", "grid", "optuna"] = "random"
    scheduler: Scheduler = NoScheduler()
    budget: Budget = Budget()

    @model_validator(mode="after")
    def _population_decides_at_once(self) -> Self:
        """A member takes over the state that an evaluation was made of: with a delay it would have gone on from there by then."""
        evaluate = self.spec.get("evaluate")
        settings = evaluate if isinstance(evaluate, dict) else {}
        delayed = {f"spec.evaluate.{name}": shown(settings[name]) for name in _DELAYS if settings.get(name)}
        delayed |= {
            f"space.evaluate.{name}": "values to choose from"
            for name in _DELAYS
            if f"evaluate.{name}" in self.space
        }
        for field, value in delayed.items() if self.scheduler.has_population else ():
            raise ValueError(
                f"{field}: got {value} with scheduler=pbt, whose members take over states at the step of an evaluation; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for field, domain in self.space.items():
            section, _, name = field.partition(".")
            if section in _FIXED or (name and PLACEMENT_FIELDS.get(section) == name):
                raise ValueError(
                    f"space.{field}: it decides where a trial runs, not its result; set spec.{field}"
                )
            if self.search == "grid" and domain.values is None:
                raise ValueError(
                    f"space.{field}: search=grid needs choice or grid; list the values, or set search=random"
                )
            if self.search == "optuna" and domain.grid is not None:
                raise ValueError(f"space.{field}: search=optuna needs choice instead of grid")
            if self.search == "optuna" and self.scheduler.has_population:
                raise ValueError("search: optuna and scheduler=pbt cannot be combined; leave one out")
            if domain.when and self.scheduler.has_population:
                raise ValueError(f"space.{field}: `when` and scheduler=pbt cannot be combined; leave one out")
            self._check_place(field)
            for other_field, value in domain.when.items():
                self._check_when(field, other_field, value)
        if not self._enumerated and self.trials is None:
            raise ValueError(
                "trials: missing; wanted the number of trials, because nothing in the space is a grid"
            )
        if self.total > MOST_TRIALS:
            field = "trials" if self.trials else "space"
            raise FieldError(field, f"got {self.total} trials, wanted at most {MOST_TRIALS}")
        return self

    def _check_place(self, field: str) -> None:
        """ValueError where a section of the space would replace a field of it, or have another value for it."""
        order = list(self.space)
        for section in order:
            if not field.startswith(f"{section}."):
                continue
            if order.index(section) > order.index(field):
                raise ValueError(
                    f"space.{field}: {section} replaces the section that it is in; put {section} before it"
                )
            subfield = field.removeprefix(f"{section}.")
            for value in self.space[section].values or ():
                if _at(value, subfield) is not None:
                    raise ValueError(
                        f"space.{field}: a value of space.{section}, {shown(value)}, has it too; leave out one of the two"
                    )

    def _check_when(self, field: str, parent: str, value: Any) -> None:
        """ValueError where the field that `field` depends on does not exist, comes later, or never has this value."""
        order = list(self.space)
        owner = _owner(parent, order)
        if owner is None:
            self._check_constant(field, parent, value)
            return
        if order.index(owner) >= order.index(field):
            raise ValueError(f"space.{field}: it depends on {parent}, which must come before it")
        domain, subfield = self.space[owner], parent.removeprefix(owner).removeprefix(".")
        if not domain.gives(value, subfield):
            among = domain.values and [shown(_at(each, subfield)) for each in domain.values]
            expected = f"one of {', '.join(among)}" if among else f"a value of space.{owner}"
            raise ValueError(f"space.{field}.when.{parent}: got {shown(value)}, wanted {expected}")

    def _check_constant(self, field: str, parent: str, value: Any) -> None:
        """ValueError where the base has no field `parent`, or the field cannot have this value."""
        section, _, leaf = parent.rpartition(".")
        if section == "job.params" and leaf not in (params := self.spec["job"]["params"]):
            hint = nearest(parent, [*self.space, *(f"job.params.{name}" for name in params)])
            raise ValueError(f"space.{field}.when.{parent}: in neither the space nor spec{hint}")
        # of another kind the section's other fields may be unknown
        pair = (section, {leaf: value}) if section and leaf == "name" else (parent, value)
        document = copy.deepcopy(self.spec)
        try:
            put(document, [pair])
            validate(document)
        except SpecError as error:
            if error.field and f"{parent}.".startswith(f"{error.field}."):
                raise ValueError(f"space.{field}.when.{error}") from error

    @property
    def _enumerated(self) -> dict[str, list[Any]]:
        """The fields that are gone through value by value."""
        every = self.search == "grid"
        return {
            field: domain.values
            for field, domain in self.space.items()
            if domain.values is not None and (every or domain.grid is not None)
        }

    @cached_property
    def base(self) -> Spec:
        """The spec that all trials share."""
        return load_spec(self.spec)

    @property
    def total(self) -> int:
        """How many trials there are."""
        return self.trials or math.prod(len(values) for values in self._enumerated.values())

    def sample(self, index: int) -> dict[str, Any]:
        """What trial `index` of a random or grid sweep sets, by dotted field."""
        fixed, rest = dict[str, Any](), index
        for field, values in reversed(self._enumerated.items()):  # the last one changes from trial to trial
            rest, at = divmod(rest, len(values))
            fixed[field] = values[at]
        chosen: dict[str, Any] = {}
        for field, domain in self.space.items():
            if self.holds(domain.when, chosen):
                source = random.Random(f"{self.seed}:{index}:{field}")
                chosen[field] = fixed[field] if field in fixed else domain.draw(source)
        return chosen

    def holds(self, when: Mapping[str, Any], chosen: Mapping[str, Any]) -> bool:
        """Whether the fields that a domain depends on have the values it wants, in `chosen` or else in the base."""
        return all(self._value(field, chosen) == value for field, value in when.items())

    def _value(self, field: str, chosen: Mapping[str, Any]) -> Any:
        owner = _owner(field, chosen)
        if owner is None:
            return _at(self.base.document(), field)
        return _at(chosen[owner], field.removeprefix(owner).removeprefix("."))

    def trial(self, chosen: Mapping[str, Any], **more: Any) -> Spec:
        """The spec of a trial that sets `chosen`, and sections `more`. SpecError where it is none."""
        document = copy.deepcopy(self.spec) | more
        values = ", ".join(f"{field}={shown(value)}" for field, value in chosen.items())
        try:
            put(document, chosen.items())
            spec = load_spec(document)
        except SpecError as error:
            raise problems.SPACE(got=values, reason=error) from error
        if self.scheduler.has_population:
            self._check_meetings(spec, values)
        return spec

    def _check_meetings(self, spec: Spec, values: str) -> None:
        """SpecError for a member with these values that is not compared at the steps of the others."""
        expected = self._meetings(self.base)
        for field, got in self._meetings(spec).items():
            if got != (wanted := expected.get(field)):
                raise problems.POPULATION(members=values, field=field, got=shown(got), wanted=shown(wanted))

    def _meetings(self, spec: Spec) -> dict[str, Any]:
        """By field, what decides at which steps a member of a population is compared with the others."""
        document = spec.model_dump(mode="json", exclude_none=True)
        fields = ["length", "evaluate.every", "evaluate.beside", "evaluate.delay"]
        fields += [f"evaluate.sets.{name}.every" for name in _sets_of(self.metric, spec.evaluate.sets)]
        return {field: _at(document, field) for field in fields}

    def document(self) -> dict[str, Any]:
        """The sweep as plain data, as a sweep file would write it."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True) | {"spec": self.spec}


def load_sweep(
    source: str | Path | Mapping[str, Any], overrides: Iterable[str] = (), *, uri: str | None = None
) -> SweepSpec:
    """Read a sweep from a YAML file or from plain data; `spec` in it is a spec, or the file of one beside it.

    `overrides` are `key=value` strings over the sweep: `trials=4`, `spec.length.epochs=2`. Every trial that can be known
    now is checked. Raises SpecError: one line that names the field, what was got and what is wanted.
    """
    if isinstance(source, Mapping):
        document, folder, name = copy.deepcopy(dict(source)), Path(), ""
    else:
        document, folder, name = read_document(Path(source)), Path(source).parent, Path(source).stem
    if isinstance(document.get("spec"), str):
        path = folder / document["spec"]
        document["spec"] = read_document(path)
        if path.stem not in {"train", "spec"}:
            document["spec"].setdefault("name", path.stem)
    override(document, overrides)
    check_text(document)
    base = None
    if isinstance(document.get("spec"), dict):
        base = load_spec(document["spec"], uri=uri)
        document["spec"] = base.document()
    try:
        sweep = SweepSpec.model_validate(document)
    except pydantic.ValidationError as error:
        raise refusal(error, SweepSpec, document) from error
    assert base is not None, "the sweep has a mapping for its spec"
    spec = _as_written(base, sweep.space)
    if isinstance(sweep.scheduler, Pbt):
        spec = _in_step(spec, sweep.scheduler.every_steps, sweep.metric)
    name = sweep.name or (name if name not in {"", "sweep"} else f"{spec['name']}-sweep")
    sweep = sweep.model_copy(update={"name": name, "spec": spec})
    for index in range(min(sweep.total, 1000)):  # what Optuna will suggest lies within the same bounds
        sweep.trial(sweep.sample(index))
    return sweep


def _as_written(base: Spec, space: Iterable[str]) -> dict[str, Any]:
    """The base, without the defaults in the sections of the space: there one may follow from what a trial sets."""
    document, written = base.document(), base.model_dump(mode="json", by_alias=True, exclude_unset=True)
    for section in {field.partition(".")[0] for field in space} - _COMPLETE:
        document.pop(section, None)
        if section in written:
            document[section] = written[section]
    return document


def _in_step(spec: dict[str, Any], steps: int, metric: str) -> dict[str, Any]:
    """A spec that evaluates, saves and keeps its state each so many steps: there another trial may take it over."""
    every = {"steps": steps}
    checkpoint = {**spec["checkpoint"], "every": every, "keep_every": steps}
    sets = spec["evaluate"]["sets"]
    in_step = {name: {**sets[name], "every": None} for name in _sets_of(metric, sets)}
    evaluate = {**spec["evaluate"], "every": every, "sets": {**sets, **in_step}}
    return {**spec, "evaluate": evaluate, "checkpoint": checkpoint}


def _sets_of(metric: str, sets: Iterable[str]) -> list[str]:
    """Those sets of evaluation of which a metric may be."""
    return [name for name in sets if metric.startswith(f"eval/{name}/")]


def _owner(field: str, fields: Iterable[str]) -> str | None:
    """That one of `fields` which decides the value of a field: itself, or else a section that it is in."""
    return max(
        (candidate for candidate in fields if field == candidate or field.startswith(f"{candidate}.")),
        key=len,
        default=None,
    )


def _at(document: Any, field: str) -> Any:
    """The value at a dotted field; None where there is none, and all of it where the field is empty."""
    for part in filter(None, field.split(".")):
        document = document.get(part) if isinstance(document, Mapping) else None
    return document
