"""Which steps of a run are taken again, and from which checkpoint. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

STEPS = 20
"""How many steps are taken again where nobody says."""


class Span(NamedTuple):
    """Steps that are taken again: from the checkpoint of `start` (0: the run's beginning, of a fork where it was forked) through `until`."""

    start: int
    until: int


def span(
    checkpoints: Sequence[int],
    last: int,
    first: int | None = None,
    steps: int | None = None,
    *,
    forked_at: int = 0,
) -> Span:
    """`steps` steps from `first` on, by default the run's last ones, with those since the nearest checkpoint before them.

    The steps of a fork are those after `forked_at`.
    """
    count = steps or STEPS
    begin = first if first is not None else max(forked_at + 1, last - count + 1)
    return Span(max((c for c in checkpoints if c < begin), default=0), min(last, begin + count - 1))


def whole(last: int) -> Span:
    """All steps of a run, from its beginning."""
    return Span(0, last)


def sample(
    checkpoints: Sequence[int], last: int, share: float, draw: random.Random, *, forked_at: int = 0
) -> list[Span]:
    """Spans between two checkpoints, drawn until they hold at least this share of the run's steps; in order."""
    edges = [0, *(c for c in sorted(checkpoints) if c < last), last]
    every = [Span(a, b) for a, b in pairwise(edges)]
    draw.shuffle(every)
    drawn: list[Span] = []
    while every and sum(each.until - max(each.start, forked_at) for each in drawn) < share * (
        last - forked_at
    ):
        drawn.append(every.pop())
    return sorted(drawn)
