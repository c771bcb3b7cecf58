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
from lockstep.randomness import Draws, rng, seed_all
from lockstep.training.activations import checkpoint_activations


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
        seed_all(3, "step", 0, 0)
        draws = Draws()
        model(torch.ones(2, 4)).sum().backward()
        return [*(one.grad.tolist() for one in model.parameters() if one.grad is not None), draws.state()[1:]]

    assert gradients(recomputed=True) == gradients(recomputed=False)
