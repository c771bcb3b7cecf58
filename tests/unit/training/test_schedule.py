"""The learning rate: exact factors, as a function of the updates that were really taken."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lockstep.spec.fields import Constant, Cosine, Linear, Schedule, StepDecay
from lockstep.training.schedule import base_rates, rate_factor, set_rates


def factors(schedule: Schedule, total: int) -> list[float]:
    return [rate_factor(schedule, update, total) for update in range(total)]


def test_constant() -> None:
    assert factors(Constant(), 4) == [1.0] * 4


def test_warmup_rises_in_a_straight_line_to_the_full_rate() -> None:
    assert factors(Constant(warmup_steps=4), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_reaches_its_end_just_after_the_last_update() -> None:
    assert factors(Linear(), 4) == [1.0, 0.75, 0.5, 0.25]
    assert rate_factor(Linear(), 4, 4) == 0.0
    assert factors(Linear(warmup_steps=2, final=0.5), 6) == [0.5, 1.0, 1.0, 0.875, 0.75, 0.625]


def test_cosine_is_half_a_cosine() -> None:
    assert factors(Cosine(), 3) == [0.5 * (1 + math.cos(math.pi * i / 3)) for i in range(3)]
    assert factors(Cosine(warmup_steps=2, final=0.2), 4) == [
        0.5,
        1.0,
        1.0,
        0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 2)),
    ]
    assert rate_factor(Cosine(final=0.1), 9, 9) == 0.1


@pytest.mark.parametrize("schedule", [Cosine(final=0.25), Linear(final=0.25)])
def test_the_fall_stays_at_its_end(schedule: Schedule) -> None:
    """More updates than the run was planned for are no reason to rise again."""
    assert [rate_factor(schedule, update, 8) for update in (8, 9, 100)] == [0.25] * 3


def test_step_decay_counts_from_the_end_of_the_warmup() -> None:
    assert factors(StepDecay(every=2, gamma=0.5), 6) == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert factors(StepDecay(every=2, gamma=0.5, warmup_steps=1), 6) == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]


@pytest.mark.parametrize(
    "schedule", [Cosine(warmup_steps=10), Linear(warmup_steps=10), StepDecay(every=3, warmup_steps=10)]
)
def test_warmup_longer_than_the_run(schedule: Schedule) -> None:
    assert factors(schedule, 5) == [0.1, 0.2, 0.3, 0.4, 0.5]


def test_every_factor_is_a_rate() -> None:
    for total in range(1, 30):
        for warmup in range(total + 2):
            for kind in (Constant, Linear, Cosine):
                values = factors(kind(warmup_steps=warmup), total)
                assert all(0.0 < value <= 1.0 for value in values)
                assert values[:warmup] == sorted(values[:warmup])
                assert values[warmup:] == sorted(values[warmup:], reverse=True)


def test_groups_keep_their_own_rates() -> None:
    """A job's optimizer may have several; the first is the one that is recorded."""
    layers = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    groups = [{"params": layers[0].parameters(), "lr": 0.5}, {"params": layers[1].parameters(), "lr": 0.125}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    base = base_rates(optimizer)
    assert set_rates(optimizer, base, 0.5) == 0.25
    assert set_rates(optimizer, base, 0.25) == 0.125
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.03125]
