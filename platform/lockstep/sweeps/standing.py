"""How the trials of a sweep stand as a whole: of all at once, or kept as each changes, at a cost that does not grow with their number."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Trial = Mapping[str, Any]
"""A row of a sweep's table."""

_Place = tuple[bool, float, int]
"""Whether a trial has no value, its value so that less is better, its number."""


class _Told(NamedTuple):
    """What counts of a row, as it was told last: the row itself may have changed since."""

    status: str
    step: int
    place: _Place


class Standing:
    """The trials that were told so far, each as it was told last. The same as `best_of` and `tally` of them all."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._told: dict[int, _Told] = {}
        self._counts: Counter[str] = Counter()
        self._first: int | None = None
        self.rows: dict[int, Trial] = {}
        """By their number, in the order in which they were told first."""
        self.ended: dict[int, Trial] = {}
        """The trials that have ended, by the order of their ends."""
        self.steps = 0
        """Those of all trials together."""

    @property
    def best(self) -> Trial | None:
        """The trial with the best value, or None."""
        return None if self._first is None or self._told[self._first].place[0] else self.rows[self._first]

    @property
    def counts(self) -> dict[str, int]:
        """How many trials have each status."""
        return {status: count for status, count in self._counts.items() if count}

    def take(self, row: Trial) -> None:
        """A trial is new, or has changed."""
        number, now = row["trial"], _Told(row["status"], row["step"], place(row, self._mode))
        before = self._told.get(number)
        self._told[number], self.rows[number] = now, row
        if before is not None:
            self._counts[before.status] -= 1
            self.steps -= before.step
        self._counts[now.status] += 1
        self.steps += now.step
        if row["order"] is not None:
            self.ended[row["order"]] = row
        if self._first is None or now.place < self._told[self._first].place:
            self._first = number
        elif number == self._first and before is not None and now.place > before.place:
            self._first = min(self._told, key=lambda other: self._told[other].place)


def best_of(trials: Sequence[Trial], mode: str) -> Trial | None:
    """The trial with the best value; of equal ones the one of the lowest number. None where no trial has one."""
    best = min(trials, key=lambda trial: place(trial, mode), default=None)
    return None if best is None or place(best, mode)[0] else best


def place(trial: Trial, mode: str) -> _Place:
    """What trials are ranked by, the best first: those that failed or have no value are last."""
    value, number = trial["metric"], trial["trial"]
    if value is None or trial["status"] == "failed" or math.isnan(value):
        return True, 0.0, number
    return False, value if mode == "min" else -value, number


def tally(trials: Sequence[Trial]) -> dict[str, int]:
    """How many trials have each status."""
    return dict(Counter(trial["status"] for trial in trials))
