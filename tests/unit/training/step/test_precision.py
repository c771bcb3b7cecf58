"""The loss scale of fp16."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.training.step import problems
from lockstep.training.step.precision import Precision
from tests.raised import raises


def overflowing_step(scale: float) -> Precision:
    """After a step at this scale whose gradient is infinite."""
    precision, parameter = Precision("fp16", torch.device("cpu")), nn.Parameter(torch.ones(1))
    state = precision.state_dict()
    precision.load_state_dict({**state, "scaler": {**state["scaler"], "scale": scale}})
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    precision.scaled(parameter.sum() * float("inf")).backward()
    precision.unscale(optimizer)
    assert not precision.update(optimizer)
    precision.settle()
    return precision


def test_a_loss_scale_that_falls_to_zero_ends_the_run() -> None:
    """Nothing learns with it, however few steps in a row overflowed."""
    with raises(problems.SCALE_FELL, got="steps overflowed again and again", scale=0):
        overflowing_step(2.0**-149)


def test_the_smallest_loss_scales_are_still_ones() -> None:
    assert overflowing_step(2.0**-148).scale == 2.0**-149
