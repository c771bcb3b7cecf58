"""Where the time of steps goes."""

from __future__ import annotations

import time

import torch

from lockstep.training.observe.step_times import StepTimes


def test_time_belongs_to_the_part_that_ends() -> None:
    times = StepTimes(torch.device("cpu"))
    began = time.perf_counter()
    for _ in range(2):
        times.begin()
        time.sleep(0.01)
        times.mark("forward")
        time.sleep(0.03)
        times.mark("backward")
        times.mark("forward")
    whole = (time.perf_counter() - began) / 2
    found = times.take()
    assert found["forward"] >= 0.01
    assert found["backward"] >= 0.03
    assert sum(found.values()) <= whole
    assert times.take() == {}
