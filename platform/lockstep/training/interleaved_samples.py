"""Micro-batch m of M takes every M-th sample of a global batch. A dataset that orders itself, and a loss that compares neighbours, are told.

Sampling P identities of K pictures in a row is meant to put the K side by side; with M = K each micro-batch has one picture of each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.data.dataset import orders_itself
from lockstep.data.dataset_order import says_of_neighbours
from lockstep.data.sampler import MicroBatch

SEEDS = 3
"""How often both arrangements are computed where the first try differs: what a loss draws may do that as well."""

APART = 0.01
"""The relative distance from which on two totals are told to differ."""

LONGEST_S = 2.0
"""A loss that takes longer than this is not looked at further."""


def told_interleaved(
    data: Any, keys: Sequence[MicroBatch], forward: Callable[[MicroBatch, int], float], label: str
) -> list[str]:
    """A warning where the total loss of the first step depends on which of its samples share a micro-batch, for a dataset that orders itself.

    `keys` are all micro-batches of the step; `forward` gives the total of one in evaluation mode, from the number of a seed.
    """
    if len(keys) < 2 or len({len(key.ids) for key in keys}) > 1:
        return []
    neighbours = _of_neighbours(keys)
    until = time.perf_counter() + LONGEST_S
    apart: list[float] = []
    together: list[float] = []
    for seed in range(SEEDS):
        for totals, arrangement in ((apart, keys), (together, neighbours)):
            try:
                totals.append(sum(forward(key, seed) for key in arrangement))
            except Exception:  # noqa: BLE001 - a job may refuse the other arrangement; then nothing is known
                return []
        if not _differ(apart, together) or time.perf_counter() > until:
            return []
    count = len(keys)
    return [
        f"{label}: the first step's total is {apart[0]:.4g}, and {together[0]:.4g} if neighbours in the order of {type(data).__name__}.epoch_order share a "
        f"micro-batch: the loss compares samples, and micro-batch m has the positions m, m + {count}, m + 2·{count} … of each {count * len(keys[0].ids)}; say "
        f"which is meant by an attribute of {type(data).__name__}: neighbours_together = True has neighbours share one, and False leaves it so"
    ]


def is_unsaid(data: Any) -> bool:
    """Whether a dataset of the job's own orders itself, and does not say whether neighbours share a micro-batch."""
    mine = not type(data).__module__.startswith("lockstep.")
    return mine and orders_itself(data) and says_of_neighbours(data) is None


def _of_neighbours(keys: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches of the same global batch, cut into neighbours in its order."""
    ids = [sample_id for across in zip(*(key.ids for key in keys), strict=True) for sample_id in across]
    size = len(keys[0].ids)
    return [key._replace(ids=ids[i * size : (i + 1) * size], due=()) for i, key in enumerate(keys)]


def _differ(apart: Sequence[float], together: Sequence[float]) -> bool:
    """Whether all totals of one arrangement are farther from those of the other than they are from each other."""
    low, high = sorted((apart, together), key=min)
    gap = min(high) - max(low)
    spread = max(max(apart) - min(apart), max(together) - min(together))
    return gap > max(spread, APART * max(map(abs, (*apart, *together))))
