"""An optimizer that keeps all of its momenta in one memory."""

from __future__ import annotations

from typing import Any

import torch


class FlatMomentum(torch.optim.Optimizer):
    """SGD with momentum. The momenta are views of one flat tensor in float32, which is updated as one; a step's number is counted once for all."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        first = self.state[parameters[0]]
        if not first:
            sizes = [parameter.numel() for parameter in parameters]
            first["flat"] = torch.zeros(sum(sizes), device=parameters[0].device)
            count, seen = torch.tensor(0.0), [0]
            for parameter, part in zip(parameters, first["flat"].split(sizes), strict=True):
                self.state[parameter].update(momentum=part.view_as(parameter), step=count, seen=seen)
        first["step"] += 1
        first["seen"][0] += 1
        first["flat"].mul_(0.9).add_(torch.cat([one.grad.flatten().float() for one in parameters]))
        for parameter in parameters:
            state = self.state[parameter]
            parameter.sub_(
                state["momentum"].to(parameter.dtype) / (state["step"] + state["seen"][0]), alpha=0.1
            )
