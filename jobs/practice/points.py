"""What the small jobs here have in common: points in four classes, which no linear model can tell apart."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep

FEATURES, CLASSES = 8, 4


def points(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points (samples, 8) and their classes (samples,): by whether two pairs of coordinates have the same sign."""
    x = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] * x[:, 1] > 0) * 1 + (x[:, 2] * x[:, 3] > 0) * 2


class Points(lockstep.Job):
    """A classifier of the points. What is practised is the model."""

    def train_data(self) -> Dataset[Any]:
        return TensorDataset(*points(2048, seed=1))

    def eval_data(self) -> Dataset[Any]:
        return TensorDataset(*points(512, seed=2))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> lockstep.Loss:
        x, y = batch
        logits = model(x)
        right = (logits.argmax(dim=1) == y).sum()
        return lockstep.Loss(
            total=F.cross_entropy(logits, y, reduction="sum"),
            weight=len(y),
            parts={"accuracy": lockstep.Mean(right, len(y))},
        )
