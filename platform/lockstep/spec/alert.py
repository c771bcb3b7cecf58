"""The rules by which a person is told of a run while it goes on."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, FiniteFloat, PositiveFloat, PositiveInt, field_validator, model_validator

from lockstep.errors import nearest
from lockstep.spec.messages import FieldError
from lockstep.spec.section import Section


class AlertRule(Section):
    """An alert after `for` steps or evaluations in a row whose metric is above, or below, a value: exactly one of the two."""

    above: FiniteFloat | None = None
    below: FiniteFloat | None = None
    for_: PositiveInt = Field(default=1, alias="for")

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        if (self.above is None) == (self.below is None):
            raise ValueError("wanted exactly one of above and below")
        return self

    def met_by(self, value: float) -> bool:
        """Whether a value of the metric is beyond the bound; NaN never is."""
        if self.above is not None:
            return value > self.above
        return self.below is not None and value < self.below

    def __str__(self) -> str:
        return f"above {self.above:g}" if self.above is not None else f"below {self.below:g}"


class Alert(Section):
    """What a person is told of while the run goes on, once each."""

    metrics: dict[str, AlertRule] = Field(default={})
    no_progress_s: PositiveFloat | None = None
    waiting_s: PositiveFloat | None = None
    drift: bool = False
    disk_below_gb: PositiveFloat | None = None

    @model_validator(mode="before")
    @classmethod
    def _metrics_by_name(cls, data: Any) -> Any:
        """`alert: {loss: {above: 8}}` as the rule of `alert.metrics` that it is."""
        if not isinstance(data, dict):
            return data
        named = {key: value for key, value in data.items() if key not in cls.model_fields}
        for key, value in named.items():
            if not isinstance(value, dict):  # no rule: most likely a field that is misspelt
                raise FieldError(f"alert.{key}", f"unknown key{nearest(str(key), cls.model_fields)}")
        fields = {key: value for key, value in data.items() if key in cls.model_fields}
        return {**fields, "metrics": {**(fields.get("metrics") or {}), **named}} if named else data

    @field_validator("metrics")
    @classmethod
    def _are_of_rows(cls, rules: dict[str, AlertRule]) -> dict[str, AlertRule]:
        for name in rules:
            context, _, metric = name.rpartition("/")
            if not metric or context.partition("/")[0] not in ("", "train", "eval") or name.startswith("/"):
                raise ValueError(
                    f"got {name!r}, wanted a metric of a step or of an evaluation, such as loss, train/grad_norm or eval/loss"
                )
        return rules

    @property
    def any(self) -> bool:
        """Whether anything is asked for."""
        return self != Alert()
