"""Which of the recorded runs are listed: conditions on their metrics, parameters and facts, such as `eval/accuracy > 0.9 and status = FINISHED`."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from lockstep.errors import closest
from lockstep.record.mirror.run_store import RunInfo
from lockstep.views import problems

_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    "==": operator.eq,
    "=": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(
    rf"\s*(\S+?)\s*({'|'.join(map(re.escape, _OPERATORS))})\s*('[^']*'|\"[^\"]*\"|\S+)\s*"
)
_FACTS = ("run_id", "name", "experiment", "status", "step")


class Condition(NamedTuple):
    """One comparison. A run that has no value of this name does not meet it."""

    name: str
    sign: str
    operand: float | str

    def met(self, value: float | str) -> bool:
        """Whether a value meets it: as numbers where both are, else as texts, of which none is greater."""
        operand, actual = self.operand, _number(value)
        if isinstance(actual, str) != isinstance(operand, str):
            actual, operand = str(value), str(operand)
        if isinstance(operand, str) and self.sign not in ("=", "==", "!="):
            return False
        return _OPERATORS[self.sign](actual, operand)


def conditions(text: str) -> list[Condition]:
    """The comparisons of a text, with `and` between them. SpecError where it is none."""
    comparisons = []
    for part in re.split(r"\s+and\s+", text.strip()):
        match = _CONDITION.fullmatch(part)
        if match is None:
            raise problems.WHERE_FORM(got=part)
        name, sign, operand = match.groups()
        quoted = len(operand) > 1 and operand[0] == operand[-1] and operand[0] in "'\""
        comparisons.append(Condition(name, sign, operand[1:-1] if quoted else _number(operand)))
    return comparisons


def matching(
    runs: Iterable[RunInfo],
    required: Iterable[Condition],
    metrics_of: Callable[[RunInfo], Mapping[str, float]],
) -> list[RunInfo]:
    """The runs that meet all conditions, in their order; `metrics_of` gives the last values of a run's metrics.

    SpecError for a name that no run has a value of.
    """
    required, known = list(required), set[str]()
    chosen = []
    looked_at = 0
    for run in runs:
        looked_at += 1
        values = _values(run, metrics_of(run))
        known |= values.keys()
        if all(condition.name in values and condition.met(values[condition.name]) for condition in required):
            chosen.append(run)
    for condition in required:
        if looked_at and condition.name not in known:
            raise problems.WHERE_NAME(got=condition.name, hint=_suggested(condition.name, known))
    return chosen


def _suggested(name: str, known: set[str]) -> str:
    """The name that was probably meant; of hundreds of metrics and parameters no list is shown."""
    close = closest(name, known)
    return "; `lockstep show RUN --json` has the names" if close is None else f"; did you mean {close!r}?"


def _values(run: RunInfo, metrics: Mapping[str, float]) -> dict[str, float | str]:
    facts: dict[str, float | str] = {name: getattr(run, name) for name in _FACTS}
    return {**run.params, **metrics, **facts}


def _number(value: float | str) -> float | str:
    try:
        number = float(value)
    except ValueError:
        return value
    return value if math.isnan(number) and isinstance(value, str) else number
