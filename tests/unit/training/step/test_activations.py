"""Activation checkpointing changes no bit: what is recomputed draws the numbers that it drew before."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.randomness import Draws, rng, seed_all, step_key
from lockstep.training.step.activations import checkpoint_activations


class Noisy(nn.Module):
    """Draws from one generator, and again in the next of its kind."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.inner, self.source = nn.Linear(4, 4), source

    def forward(self, x: Tensor) -> Tensor:
        sources: dict[str, Callable[[], float]] = {
            "python": random.random,
            "numpy": lambda: float(np.random.rand()),
            "torch": lambda: float(torch.rand(())),
            "rng": lambda: float(rng().random()),
        }
        return torch.tanh(self.inner(x) * (1.0 + sources[self.source]()))


class Recomputes(lockstep.Job):
    def activation_checkpoints(self, model: nn.Module) -> Iterable[nn.Module]:
        return list(model.children())


@pytest.mark.parametrize("source", ["python", "numpy", "torch", "rng"])
def test_what_is_recomputed_draws_the_same_numbers(source: str) -> None:
    """As a layer does that python's generator drops: its gradient had been that of another draw."""

    def gradients(*, recomputed: bool) -> list[Any]:
        torch.manual_seed(1)
        model = nn.Sequential(Noisy(source), Noisy(source), nn.Linear(4, 1))
        if recomputed:
            checkpoint_activations(Recomputes(Recomputes.Params()), model)
        seed_all(step_key(3, 0, 0))
        draws = Draws()
        model(torch.ones(2, 4)).sum().backward()
        return [*(one.grad.tolist() for one in model.parameters() if one.grad is not None), draws.state()[1:]]

    assert gradients(recomputed=True) == gradients(recomputed=False)


def test_a_device_is_found_also_where_a_module_is_called_with_keywords_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch keeps the generators of the devices whose tensors are in positional arguments: another one's dropout would drop others in backward."""
    seen: list[Any] = []
    own = torch.utils.checkpoint._infer_device_type

    def looked_at(*given: Any) -> str:
        seen.extend(torch.utils._pytree.tree_leaves(given))
        return own(*given)

    monkeypatch.setattr(torch.utils.checkpoint, "_infer_device_type", looked_at)
    model = nn.Sequential(Noisy("torch"))
    checkpoint_activations(Recomputes(Recomputes.Params()), model)
    x = torch.ones(2, 4)
    model[0](x=x).sum().backward()
    assert any(one is x for one in seen)
    assert isinstance(model[0].inner, nn.Linear)
    assert model[0].inner.weight.grad is not None
