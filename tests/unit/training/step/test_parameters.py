"""Parameters that learn in a type of few digits are told of, and modules that come and go are refused."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.training.step import problems
from lockstep.training.step.parameters import ModuleWatch, short_parameters
from tests.raised import raises


def test_parameters_of_few_digits_are_told_and_others_not() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2).half())
    model[2].requires_grad_(False)
    (text,) = short_parameters(model)
    assert text.startswith(
        "job.model: parameter '1.weight' and 1 more is torch.bfloat16, so the gradients of a step are added up"
    )
    assert short_parameters(nn.Linear(2, 2).double()) == []
    assert torch.bfloat16 in {p.dtype for p in model.parameters()}


def test_modules_without_tensors_may_come_and_go_and_modules_may_have_other_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.Linear(2, 2, bias=False))
    model.now = model[0]
    watch = ModuleWatch(model)
    for step in range(2):
        model[1] = nn.Dropout(0.2)
        model.extra = nn.Tanh()
        model.now = model[2]
        watch.check(f"after step {step}")
    del model.extra
    watch.check("after step 2")


def test_a_module_that_is_taken_out_is_refused_and_so_is_a_parameter_in_an_empty_place() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    watch = ModuleWatch(model)
    model[1].bias = nn.Parameter(torch.zeros(2))
    with raises(problems.PARAMETER_MADE, name="1.bias", where="step 4"):
        watch.check("step 4")
    model[1].bias = None
    watch.check("step 5")
    del model[1]
    with raises(problems.MODULE_CHANGED, name="1", got="was taken out", where="step 6"):
        watch.check("step 6")
