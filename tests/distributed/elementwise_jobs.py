"""Jobs with optimizers of their own that update each element by that element's own numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed.kinds import CLASSES, FEATURES, Kind, held_in, perceptron


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, as lucidrains/lion-pytorch has it; an argument without a default."""

    elementwise = True

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in (p for p in group["params"] if p.grad is not None):
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(average.clone().mul_(beta1).add_(p.grad, alpha=1 - beta1).sign_(), alpha=-lr)
                average.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class LionInTwoGroups(Kind):
    def model(self) -> nn.Module:
        return perceptron(FEATURES, CLASSES, nn.Dropout(0.1))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        deep = [p for p in model.parameters() if p.dim() > 1]
        flat = [p for p in model.parameters() if p.dim() == 1]
        return Lion([{"params": deep, "weight_decay": 0.1}, {"params": flat, "lr": 0.02}], lr=0.01)


class LionThatAsks(Lion):
    """Decays what the job has not excluded, by an attribute of each parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                if not getattr(p, "no_decay", False):
                    p.mul_(1 - group["lr"])
        super().step()


class NotesOnParameters(Kind):
    def model(self) -> nn.Module:
        return perceptron(FEATURES, CLASSES)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        for p in model.parameters():
            p.no_decay = p.dim() < 2  # type: ignore[attr-defined]
        return LionThatAsks(model.parameters(), lr=0.05)


class LionByName(Lion):
    """Decays what is no bias, by the names that torch keeps beside the parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p, name in zip(group["params"], group["param_names"], strict=True):
                if p.grad is not None and not name.endswith("bias"):
                    p.mul_(1 - group["lr"])
        super().step()


class DecaysByName(Kind):
    def model(self) -> nn.Module:
        return perceptron(FEATURES, CLASSES)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return LionByName(model.named_parameters(), lr=0.05)


class LionByPlace(Lion):
    """Has a factor for each parameter in a list of the group, and another one for the third and those behind it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for i, (p, decay) in enumerate(zip(group["params"], group["decays"], strict=True)):
                if p.grad is not None:
                    p.mul_(1 - (decay if i < 2 else 2 * decay))
        super().step()


class DecaysByPlace(Kind):
    """One of the parameters does not learn."""

    def model(self) -> nn.Module:
        model = perceptron(FEATURES, CLASSES)
        next(model.parameters()).requires_grad_(False)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        decays = [0.02 * (i // 2 + 1) for i in range(len(parameters))]
        return LionByPlace([{"params": parameters, "decays": decays}], lr=0.05)


class Gained(nn.Linear):
    """Asks its weight for a factor."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight.gain  # type: ignore[operator]


class NotesInTheModel(Kind):
    """What is noted as the model is made, and asked in a forward and after each step."""

    def model(self) -> nn.Module:
        gained = Gained(FEATURES, FEATURES)
        gained.weight.gain = 0.5  # type: ignore[attr-defined]
        model = nn.Sequential(gained, perceptron(FEATURES, CLASSES))
        for p in model.parameters():
            p.quiet = p.dim() < 2  # type: ignore[attr-defined]
        return model

    def after_step(self, model: nn.Module, step: int) -> None:
        for p in model.parameters():
            if not getattr(p, "quiet", False):
                p.mul_(0.9)


class RateInATensor(Kind):
    """With a tensor for its rate, torch's optimizer takes other operators."""

    def model(self) -> nn.Module:
        return perceptron(FEATURES, CLASSES)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.05))

    def schedule(self, optimizer: torch.optim.Optimizer, total: Any) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)


class Extragradient(torch.optim.Optimizer):
    """Korpelevich 1976: a step to look from, and the step by the gradient there."""

    elementwise = True

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        closure()
        start: list[Tensor] = []
        every = [(p, group["lr"]) for group in self.param_groups for p in group["params"]]
        for p, lr in every:
            start.append(p.clone())
            if p.grad is not None:
                p.add_(p.grad, alpha=-lr)
        closure()
        for (p, lr), value in zip(every, start, strict=True):
            p.copy_(value)
            if p.grad is not None:
                p.add_(p.grad, alpha=-lr)


class ByData(torch.optim.Optimizer):
    """Twice a step along its velocity, and then by the gradient there, written as torch once wrote its own: versions do not count what goes through `.data`."""

    elementwise = True

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        every = [(p, group["lr"]) for group in self.param_groups for p in group["params"]]
        for _ in range(2):
            for p, lr in every:
                p.data.add_(self.state[p].setdefault("velocity", torch.ones_like(p)), alpha=-lr)
            closure()
            for p, lr in every:
                if p.grad is not None:
                    self.state[p]["velocity"].mul_(0.9).add_(p.grad.data)
                    p.data.add_(p.grad.data, alpha=-lr)


class LooksFromAhead(Kind):
    """Its first gradient is not that of where the step begins."""

    closure_calls = 2

    def model(self) -> nn.Module:
        return perceptron(FEATURES, CLASSES, nn.Dropout(0.1))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return ByData(model.parameters(), lr=0.1)


class LooksAhead(Kind):
    """Its statistics are those of the first evaluation."""

    closure_calls = 2

    def model(self) -> nn.Module:
        return perceptron(FEATURES, CLASSES, nn.BatchNorm1d(8), nn.Dropout(0.1))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Extragradient(model.parameters(), lr=0.1)


HELD = held_in(__name__, {})
"""Jobs whose bits do not depend on who runs them."""
