"""Covering sets of a matrix: every pair of values of any two factors together at least once, or every value."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations, product

Row = tuple[Hashable, ...]


def pairs(row: Row) -> frozenset[tuple[int, Hashable, int, Hashable]]:
    """The pairs of values that one row shows."""
    return frozenset((i, a, j, b) for (i, a), (j, b) in combinations(enumerate(row), 2))


def covering(factors: Mapping[str, Sequence[Hashable]]) -> list[Row]:
    """Rows of the product, each chosen for the most pairs not yet shown; always the same ones."""
    every = list(product(*factors.values()))
    missing = set().union(*map(pairs, every))
    chosen = []
    while missing:
        best = max(every, key=lambda row: len(pairs(row) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def showing_each_value(rows: Sequence[Row]) -> list[Row]:
    """As few of `rows` as show every value of every factor, each chosen for the most values not yet shown."""
    missing = {value for row in rows for value in enumerate(row)}
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(missing.intersection(enumerate(row))))
        chosen.append(best)
        missing.difference_update(enumerate(best))
    return chosen
