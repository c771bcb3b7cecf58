"""A mean in the place of a sum is told from the totals of a micro-batch and of its halves."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.sampler import MicroBatch
from lockstep.errors import JobError
from lockstep.job.interface import Loss
from lockstep.training.integrity import problems
from lockstep.training.integrity.rehearsal.loss_sums import check_sum, distance_from_mean
from tests.raised import raises

positive = st.lists(st.floats(0.01, 100), min_size=2, max_size=64)


@given(positive)
def test_no_sum_is_taken_for_a_mean(values: list[float]) -> None:
    half = len(values) // 2
    halves = [(math.fsum(part), float(len(part))) for part in (values[:half], values[half:])]
    assert distance_from_mean(math.fsum(values), len(values), halves) > 0.25


@given(positive)
def test_every_mean_is_one(values: list[float]) -> None:
    half = len(values) // 2
    parts = (values[:half], values[half:])
    halves = [(math.fsum(part) / len(part), float(len(part))) for part in parts]
    assert distance_from_mean(math.fsum(values) / len(values), len(values), halves) < 1e-6


def test_a_mean_with_weight_one_is_no_mistake() -> None:
    assert distance_from_mean(2.0, 1.0, [(1.9, 1.0), (2.1, 1.0)]) == math.inf


def checked(loss: Callable[[torch.Tensor], torch.Tensor], samples: int = 8) -> list[str]:
    """The warnings for a loss over `samples` numbers."""
    values, warnings = torch.linspace(0.5, 1.5, 8), list[str]()

    def forward(batch: torch.Tensor, seed: int) -> Loss:
        torch.manual_seed(seed)
        return Loss(loss(batch), len(batch))

    key = MicroBatch(0, 0, list(range(samples)))
    whole = forward(values[key.ids], 0)
    check_sum(lambda part: values[part.ids], forward, key, whole, warnings.append)
    return warnings


def test_means_are_refused_and_sums_are_not() -> None:
    """Noise like that of dropout does not hide a mean; a sum with much of it is no mean in every draw."""
    with raises(problems.MEAN_FOR_SUM, got=re.compile(r"^job\.loss: total is 1 for ")):
        checked(torch.mean)
    with raises(problems.MEAN_FOR_SUM):
        checked(lambda x: (x * (1 + 0.01 * torch.randn(len(x)))).mean())
    assert checked(torch.sum) == []
    for _ in range(20):
        assert checked(lambda x: (torch.randn(len(x)) * 3 + x).sum()) == []


def test_negatives_within_the_batch_are_no_mean() -> None:
    """InfoNCE of n samples that cannot be told apart is n log n."""
    assert checked(lambda x: torch.tensor(len(x) * math.log(len(x)))) == []


def test_a_likely_mean_is_warned_of() -> None:
    """The mean of InfoNCE, log n, is near the mean of the halves' and not the same."""
    (text,) = checked(lambda x: torch.tensor(math.log(100 * len(x))))
    assert "if it is a mean" in text


def test_what_cannot_be_halved_is_not_tried() -> None:
    def whole_only(x: torch.Tensor) -> torch.Tensor:
        if len(x) != 8:
            raise JobError("eight samples are wanted")
        return x.mean()

    assert checked(whole_only) == []
    assert checked(torch.mean, samples=1) == []
