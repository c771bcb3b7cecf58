"""Which ranks keep the others waiting: slower by much, and step after step."""

from __future__ import annotations

import random
import time

import torch

from lockstep.communication.group import Group
from lockstep.training.observe.rank_speed import WINDOW, Pace, Stopwatch, stragglers


def steps(*seconds: float, noise: float = 0.2, seed: int = 1) -> list[list[float]]:
    draw = random.Random(seed)
    return [[mean * draw.uniform(1 - noise, 1 + noise) for mean in seconds] for _ in range(WINDOW)]


def test_a_rank_that_is_slow_step_after_step_is_named() -> None:
    ((rank, ratio),) = stragglers(steps(0.01, 0.01, 0.03, 0.01))
    assert rank == 2
    assert 2.5 < ratio < 3.5


def test_one_of_two_is_named() -> None:
    assert [rank for rank, _ in stragglers(steps(0.03, 0.01))] == [0]


def test_noise_and_a_slow_step_now_and_then_name_nobody() -> None:
    assert stragglers(steps(0.01, 0.01, 0.01, noise=0.4)) == []
    rare = steps(0.01, 0.01)
    for step in rare[::10]:
        step[1] *= 20
    assert stragglers(rare) == []


def test_a_rank_that_is_a_little_slower_is_not_named() -> None:
    assert stragglers(steps(0.01, 0.013, 0.01)) == []


def test_windows_are_told_once_and_ragged_steps_left_out() -> None:
    pace = Pace(Group(0, 1, torch.device("cpu")))
    pace._hosts = ["one", "two"]  # as a group of two would have gathered them
    told = []
    for step in range(1, 2 * WINDOW + 2):
        told += pace.add(step, [0.01, 0.0] if step == 7 else [0.01, 0.02])
    assert [line[line.index(", in") :] for line in told] == [
        f", in steps {2} to {WINDOW + 1}",
        f", in steps {WINDOW + 2} to {2 * WINDOW + 1}",
    ]
    assert "rank 1 of 2 on two takes 2.0 times as long" in told[0]


def test_a_stopwatch_gives_the_mean_of_its_micro_batches() -> None:
    watch = Stopwatch(torch.device("cpu"))
    began = time.perf_counter()
    for pause_s in (0.01, 0.03):
        with watch:
            time.sleep(pause_s)
    assert 0.02 <= watch.take() <= (time.perf_counter() - began) / 2
    assert watch.take() == 0.0
