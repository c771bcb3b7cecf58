"""Jobs that lack what a section of docs/writing-a-job.md shows; a test writes it into them and trains them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep

__all__ = [
    "Any",
    "Boxes",
    "Callable",
    "F",
    "Iterable",
    "Labelled",
    "Mapping",
    "Queued",
    "Sequence",
    "Tensor",
    "Towers",
    "lockstep",
    "math",
    "nn",
    "torch",
]


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


class Towers(lockstep.Job):
    """Pairs of an image and a text."""

    def model(self) -> nn.Module:
        towers = nn.Module()
        towers.image, towers.text = nn.Linear(6, 4), nn.Linear(5, 4)
        towers.scale = nn.Parameter(torch.tensor(1.0))
        return towers

    def train_data(self) -> Dataset[Any]:
        hidden = numbers(32, 4)
        return TensorDataset(hidden @ numbers(4, 6), hidden @ numbers(4, 5))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.label, self.box = nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.label(x), self.box(x)


class Boxes(lockstep.Job):
    """A label for each sample, and a box for those that are not of the first one."""

    def model(self) -> nn.Module:
        return Heads()

    def train_data(self) -> Dataset[Any]:
        x = numbers(32, 6)
        return TensorDataset(x, x[:, :3].argmax(1), x[:, 1:3])


class Queued(lockstep.Job):
    """Samples that their keys recognise among those of the steps before."""

    def model(self) -> nn.Module:
        model = nn.Module()
        model.query, model.key = nn.Linear(6, 8), nn.Linear(6, 8).requires_grad_(False)
        model.key.load_state_dict(model.query.state_dict())
        model.register_buffer("queue", F.normalize(numbers(16, 8), dim=1))
        model.register_buffer("center", torch.zeros(6))
        return model

    def train_data(self) -> Dataset[Any]:
        x = numbers(32, 6)
        return TensorDataset(x, x[:, 0])


class Labelled(lockstep.Job):
    """A label for each sample."""

    def model(self) -> nn.Module:
        return nn.Linear(6, 3)

    def train_data(self) -> Dataset[Any]:
        x = numbers(32, 6)
        return TensorDataset(x, x[:, :3].argmax(1))

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        return lockstep.Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))
