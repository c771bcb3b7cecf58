"""The first of a line of commits that differs, found by halving. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class FirstChanged(NamedTuple):
    """The first commit that is known to differ; `untold` are those right before it of which nothing is known."""

    commit: str
    untold: Sequence[str]


def first_changed(commits: Sequence[str], same: Callable[[str], bool | None]) -> FirstChanged:
    """The first of `commits`, oldest first, from which on they differ: the last one does, and what came before the first did not.

    `same` says whether a commit is as before; None where that cannot be decided, and another one is tried.
    """
    low, high = -1, len(commits) - 1
    untold: set[int] = set()
    while between := [i for i in range(low + 1, high) if i not in untold]:
        middle = min(between, key=lambda i: abs(2 * i - low - high))
        verdict = same(commits[middle])
        if verdict is None:
            untold.add(middle)
        elif verdict:
            low = middle
        else:
            high = middle
    return FirstChanged(commits[high], commits[low + 1 : high])
