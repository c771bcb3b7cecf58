"""Which modules ran in which type, taken once and without a trace."""

from __future__ import annotations

import json

import torch
from torch import Tensor, nn

from lockstep.plan import Position
from lockstep.training.observe.dtype_coverage import Coverage
from lockstep.training.step.precision import underflow

FIRST = Position(step=0, epoch=0, index=0, start=0, samples=4, micro_batches=1, full=1, ends_epoch=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.distance = nn.Linear(4, 2), nn.MSELoss()

    def forward(self, x: Tensor, *, twice: bool) -> Tensor:
        hidden = self.layer(x) + (self.layer(x) if twice else 0.0)
        loss: Tensor = self.distance(hidden, torch.zeros(3, 2))
        return loss


def test_modules_are_noted_with_the_types_that_autocast_gives_them() -> None:
    model, coverage = Model(), Coverage("bf16")
    with coverage.around(FIRST, 0, model, ""), torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(3, 4), twice=True)
    with coverage.around(FIRST, 1, model, ""):
        model(torch.ones(3, 4), twice=False)
    found = json.loads(coverage.text())
    assert found["precision"] == "bf16"
    by_name = {module["name"]: module for module in found["modules"]}
    assert list(by_name) == ["layer", "distance", "Model"]
    assert by_name["layer"] == {
        "name": "layer",
        "class": "Linear",
        "parameters": ["float32"],
        "inputs": ["float32"],
        "outputs": ["bfloat16"],
        "calls": 2,
    }
    assert by_name["distance"]["outputs"] == ["float32"]
    assert found["outputs"] == {"bfloat16": 1, "float32": 2}
    assert not any(module._forward_hooks for module in model.modules())


def test_the_share_that_fp16_has_no_full_precision_for() -> None:
    """Of the elements other than zero, at the scale that they had in backward."""
    gradients = [torch.tensor([0.0, 2.0**-20, 1.0]), torch.tensor([[2.0**-18]])]
    assert underflow(gradients, 1.0) == 2 / 3
    assert underflow(gradients, 2.0**4) == 1 / 3
    assert underflow(gradients, 2.0**6) == 0.0
    assert underflow([torch.zeros(3)], 1.0) == 0.0
