"""An optimizer whose state is not only tensors, as that of Shampoo and SOAP."""

from __future__ import annotations

from typing import Any

import torch


class Nested(torch.optim.Optimizer):
    """State in lists and mappings, in double and as integers, and a word. The update depends on its type and on the word."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["sums"] = [torch.zeros_like(parameter, dtype=torch.float64), {"deep": (torch.ones(2),)}]
                state["count"] = {"step": torch.tensor(0, dtype=torch.int64), "sizes": [1, 2.5, None, "x"]}
                state["mode"] = "down"
            total = state["sums"][0].mul_(0.9).add_(parameter.grad.double() / 3)
            state["count"]["step"] += 1
            parameter.sub_(total.float(), alpha=0.1 if state["mode"] == "down" else 0.05)
