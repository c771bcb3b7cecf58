"""Which steps of a run are taken again, and from which checkpoint. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from lockstep.errors import SpecError

STEPS = 20
"""How many steps are taken again where nobody says."""


class Stretch(NamedTuple):
    """Steps that are taken again: from the checkpoint of `start` (0: the run's beginning) through `until`."""

    start: int
    until: int

    @property
    def steps(self) -> int:
        return self.until - self.start


def stretch(
    checkpoints: Sequence[int], last: int, first: int | None = None, steps: int | None = None
) -> Stretch:
    """`steps` steps from `first` on, by default the run's last ones, with those since the nearest checkpoint before them.

    SpecError where the run has no such step.
    """
    count = steps or STEPS
    begin = first if first is not None else max(1, last - count + 1)
    if begin > last:
        raise SpecError(f"from: got {begin}, wanted a step of the run, which has {last}")
    return Stretch(max((c for c in checkpoints if c < begin), default=0), min(last, begin + count - 1))


def whole(last: int) -> Stretch:
    """All steps of a run, from its beginning."""
    return Stretch(0, last)


def sample(checkpoints: Sequence[int], last: int, share: float, draw: random.Random) -> list[Stretch]:
    """Stretches between two checkpoints, drawn until they hold at least this share of the run's steps; in order."""
    edges = [0, *(c for c in sorted(checkpoints) if c < last), last]
    every = [Stretch(a, b) for a, b in pairwise(edges)]
    draw.shuffle(every)
    drawn: list[Stretch] = []
    while every and sum(one.steps for one in drawn) < share * last:
        drawn.append(every.pop())
    return sorted(drawn)
