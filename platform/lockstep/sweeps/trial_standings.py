"""How the trials of a sweep stand as a whole: of all at once, or kept as each changes, at a cost that does not grow with their number."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

TrialRow = Mapping[str, Any]
"""A row of a sweep's table."""

_SortKey = tuple[bool, float, int]
"""Whether a trial has no value, its value so that less is better, its number."""


class _Counted(NamedTuple):
    """What counts of a row when it was last taken: the row itself may have changed since."""

    status: str
    step: int
    sort_key: _SortKey


class Standing:
    """The trials so far, each as it was when it was last taken. The same as `best_of` and `tally` of them all."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._counted: dict[int, _Counted] = {}
        self._counts: Counter[str] = Counter()
        self._first: int | None = None
        self.rows: dict[int, TrialRow] = {}
        """By their number, in the order in which they were first taken."""
        self.ended: dict[int, TrialRow] = {}
        """The trials that have ended, by the order of their ends."""
        self.steps = 0
        """Those of all trials together."""

    @property
    def best(self) -> TrialRow | None:
        """The trial with the best value, or None."""
        return (
            None if self._first is None or self._counted[self._first].sort_key[0] else self.rows[self._first]
        )

    @property
    def counts(self) -> dict[str, int]:
        """How many trials have each status."""
        return {status: count for status, count in self._counts.items() if count}

    def take(self, row: TrialRow) -> None:
        """A trial is new, or has changed."""
        number, current = row["trial"], _Counted(row["status"], row["step"], sort_key(row, self._mode))
        previous = self._counted.get(number)
        self._counted[number], self.rows[number] = current, row
        if previous is not None:
            self._counts[previous.status] -= 1
            self.steps -= previous.step
        self._counts[current.status] += 1
        self.steps += current.step
        if row["order"] is not None:
            self.ended[row["order"]] = row
        if self._first is None or current.sort_key < self._counted[self._first].sort_key:
            self._first = number
        elif number == self._first and previous is not None and current.sort_key > previous.sort_key:
            self._first = min(self._counted, key=lambda candidate: self._counted[candidate].sort_key)


def best_of(trials: Sequence[TrialRow], mode: str) -> TrialRow | None:
    """The trial with the best value; of equal ones the one of the lowest number. None where no trial has one."""
    best = min(trials, key=lambda trial: sort_key(trial, mode), default=None)
    return None if best is None or sort_key(best, mode)[0] else best


def sort_key(trial: TrialRow, mode: str) -> _SortKey:
    """What trials are sorted by, the best first: those that failed or have no value are last."""
    value, number = trial["metric"], trial["trial"]
    if value is None or trial["status"] == "failed" or math.isnan(value):
        return True, 0.0, number
    return False, value if mode == "min" else -value, number


def tally(trials: Sequence[TrialRow]) -> dict[str, int]:
    """How many trials have each status."""
    return dict(Counter(trial["status"] for trial in trials))
