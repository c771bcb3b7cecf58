"""`Loss.total` must be a sum: comparing the total of a micro-batch with those of its halves reveals a mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.data.sampler import MicroBatch
from lockstep.errors import LockstepError
from lockstep.job.interface import Loss
from lockstep.training.integrity import problems
from lockstep.training.step.means import number

SURE, LIKELY = 0.05, 0.25
"""How far the total of the whole may be from the mean of the halves' totals, relative to that mean, to be surely a mean, or likely one.

Dropout, batch norm and negatives within the batch move a total by some per cent; a sum is twice such a mean.
"""

_OF_JOB = (LockstepError, AttributeError, RuntimeError, ValueError)
"""What a job raises, or what its loss has in a wrong form, for less than a micro-batch."""

SEEDS = 6
"""How many seeds must show the signature: a loss with noise of its own may show it once by chance."""


def check_sum(
    fetch: Callable[[MicroBatch], Any],
    forward: Callable[[Any, int], Loss],
    key: MicroBatch,
    whole: Loss,
    warn: Callable[[str], None],
    label: str = "job.loss",
) -> None:
    """JobError for a total that is the mean over the samples though the weight counts them; a warning where it may be one.

    The signature: the whole micro-batch's total is the weighted mean of its halves' totals, while its weight is their sum. One
    sample has no halves, and a job that cannot compute half a micro-batch is not tested. `forward` takes a batch and
    the number of a seed; `whole` is the loss of seed 0, and `label` its name in messages.
    """
    size = len(key.ids)
    if size < 2:
        return
    halves = [key._replace(ids=key.ids[: size // 2], due=()), key._replace(ids=key.ids[size // 2 :], due=())]

    def numbers(part: MicroBatch, seed: int) -> tuple[float, float]:
        return _numbers(forward(fetch(part), seed))

    total, weight = _numbers(whole)
    try:
        totals = [numbers(half, 0) for half in halves]
    # A job may need whole micro-batches, as batch norm needs two samples; then nothing is known.
    except _OF_JOB:
        return
    distance = distance_from_mean(total, weight, totals)
    for seed in range(1, SEEDS):
        if distance > LIKELY:
            return
        half_totals = [numbers(half, seed) for half in halves]
        distance = max(distance, distance_from_mean(*numbers(key, seed), half_totals))
    if distance > LIKELY:
        return
    text = (
        f"{label}: total is {total:.6g} for the first micro-batch of {size} samples, and {totals[0][0]:.6g} and {totals[1][0]:.6g} "
        "for its halves"
    )
    if distance > SURE:
        warn(
            f"{text}, though the weight of the whole, {weight:g}, is theirs together; if it is a mean, the gradient is too "
            "small by the weight: give the sum of the losses, as with reduction='sum'"
        )
        return
    raise problems.MEAN_FOR_SUM(got=text, weight=f"{weight:g}")


def told_compared(
    fetch: Callable[[MicroBatch], Any], forward: Callable[[Any, int], Loss], key: MicroBatch, label: str
) -> list[str]:
    """A warning where a loss compares the samples of a micro-batch with each other, so that it depends on `batch.micro`.

    The signature: the whole micro-batch's total is more than those of its halves together, as with negatives within the batch. `forward` takes a
    batch and the number of a seed, in evaluation mode. A loss that draws is not looked at: its halves draw other numbers.
    """
    size = len(key.ids)
    if size < 2:
        return []
    halves = [key._replace(ids=key.ids[: size // 2], due=()), key._replace(ids=key.ids[size // 2 :], due=())]
    try:
        total, weight = _numbers(forward(fetch(key), 0))
        if (total, weight) != _numbers(forward(fetch(key), 1)):
            return []
        (one, of_one), (two, of_two) = (_numbers(forward(fetch(half), 0)) for half in halves)
    except _OF_JOB:  # as above: then nothing is known
        return []
    if not math.isclose(weight, of_one + of_two, rel_tol=1e-3) or min(one, two) < 0:
        return []
    if not total > (1 + SURE) * (one + two):
        return []
    return [
        f"{label}: total is {total:.6g} for the first micro-batch of {size} samples, and {one:.6g} and {two:.6g} for its halves: it compares the "
        "samples of a micro-batch with each other, and batch.micro decides with how many; to compare all samples of batch.global, write "
        "embed(model, batch) and batch_loss(model, rows)"
    ]


def distance_from_mean(total: float, weight: float, halves: Sequence[tuple[float, float]]) -> float:
    """How far a total is from the weighted mean of its halves' totals, relative to that mean; infinite where it cannot be one.

    It cannot be one where the weights do not add up or are too uneven, or where the halves' totals differ in sign.
    """
    together = sum(half_weight for _, half_weight in halves)
    if not together > 0 or not math.isclose(weight, together, rel_tol=1e-3):
        return math.inf
    if not all(half_weight > 0.25 * weight for _, half_weight in halves):
        return math.inf  # with weights so uneven, a sum and a mean are hard to tell apart
    mean = sum(half_total * half_weight for half_total, half_weight in halves) / together
    if not math.isfinite(mean) or min(half * mean for half, _ in halves) <= 0:
        return math.inf
    return abs(total - mean) / abs(mean)


def _numbers(loss: Loss) -> tuple[float, float]:
    return number(loss.total), number(loss.weight)
