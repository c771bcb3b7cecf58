"""Where the time of steps goes."""

from __future__ import annotations

import time

import torch

from lockstep.training.phases import Phases


def test_time_belongs_to_the_phase_that_ends() -> None:
    phases = Phases(torch.device("cpu"))
    began = time.perf_counter()
    for _ in range(2):
        phases.begin()
        time.sleep(0.01)
        phases.mark("forward")
        time.sleep(0.03)
        phases.mark("backward")
        phases.mark("forward")
    whole = (time.perf_counter() - began) / 2
    found = phases.take()
    assert found["forward"] >= 0.01
    assert found["backward"] >= 0.03
    assert sum(found.values()) <= whole
    assert phases.take() == {}
