"""Parameters that learn in a type of few digits are told of."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.training.parameters import short_parameters


def test_parameters_of_few_digits_are_told_and_others_not() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2).half())
    model[2].requires_grad_(False)
    (text,) = short_parameters(model)
    assert text.startswith(
        "job.model: parameter '1.weight' and 1 more is torch.bfloat16, so the gradients of a step are added up"
    )
    assert short_parameters(nn.Linear(2, 2).double()) == []
    assert torch.bfloat16 in {p.dtype for p in model.parameters()}
