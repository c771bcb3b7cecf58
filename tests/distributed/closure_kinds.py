"""Jobs whose optimizer evaluates the loss again within an update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed.batch_kinds import Clip, Moco
from tests.distributed.kinds import CLASSES, FEATURES, Kind, held_in, perceptron


class Lbfgs(Kind):
    """torch's own, with a line search that decides by the loss."""

    def model(self) -> nn.Module:
        return perceptron(FEATURES, CLASSES, nn.Dropout(0.1))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(
            model.parameters(), lr=0.5, max_iter=4, history_size=3, line_search_fn="strong_wolfe"
        )


class LbfgsWithoutASearch(Lbfgs):
    """As torch's tutorial on style transfer has it."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)


class Sam(torch.optim.Optimizer):
    """davda54/sam as published: it climbs from the gradient at hand, evaluates there, and steps from where it was."""

    def __init__(
        self, params: Any, base_optimizer: type[torch.optim.Optimizer], rho: float = 0.05, **more: Any
    ) -> None:
        super().__init__(params, {"rho": rho, **more})
        self.base_optimizer = base_optimizer(self.param_groups, **more)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        grad_norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (grad_norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()

    def _grad_norm(self) -> Tensor:
        norms = [
            p.grad.norm(p=2) for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        return torch.norm(torch.stack(norms), p=2)


class PublishedSam(Kind):
    """Without momentum, which the published class would lose on a resume."""

    closure_calls = 1

    def model(self) -> nn.Module:
        return perceptron(FEATURES, CLASSES, nn.Dropout(0.1))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Sam(model.parameters(), torch.optim.SGD, lr=0.1)


class SamWithItsState(Sam):
    """Its state has that of the optimizer that it wraps."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.base_optimizer.state = self.state


class SharpnessAware(Kind):
    """Batch norm's statistics are those of the first evaluation."""

    closure_calls = 1

    def model(self) -> nn.Module:
        return perceptron(FEATURES, CLASSES, nn.BatchNorm1d(8), nn.Dropout(0.1))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return SamWithItsState(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


class Drawing(torch.optim.SGD):
    """It evaluates as often as it draws, and draws again after that."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is not None
        for _ in range(int(torch.randint(1, 4, ()))):
            closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad + 0.01 * torch.randn_like(p), alpha=-group["lr"])


class DrawsBetweenCalls(Kind):
    closure_calls = 3

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Drawing(model.parameters(), lr=0.1)


class LbfgsOverTheBatch(Clip):
    """A loss over the whole batch, evaluated again; a norm of a buffer that the forward reads."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=3)


class SharpnessAwareQueue(Moco):
    """Statistics are those of the first evaluation."""

    closure_calls = 1

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Sam(model["query"].parameters(), torch.optim.SGD, lr=0.1)


HELD = held_in(__name__, {})
"""Jobs whose bits do not depend on who runs them."""
