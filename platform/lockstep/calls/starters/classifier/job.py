"""A classifier that trains as it is, on points that it draws from a seed.

A job is the model, the data and the loss. There is no training loop here, no device, no rank and no call of
`torch.manual_seed`: lockstep has all of these, so that the same spec gives the same bits everywhere.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep

HELD_OUT = 5
"""Every fifth point is held out. A fixed rule, not a random draw: no point is in both parts."""


class Classifier(lockstep.Job):
    """Tells to which class a point belongs; each class has several centres."""

    class Params(lockstep.Params):
        # CHANGE: your own settings. The spec sets them below job.params, or on the command line: job.params.width=128
        width: PositiveInt = 64
        dropout: float = Field(default=0.1, ge=0, lt=1)
        points: PositiveInt = 5000
        features: PositiveInt = 16
        classes: PositiveInt = 4

    params: Params

    def model(self) -> nn.Module:
        # CHANGE: your model, freshly initialised, on the CPU. Random draws are seeded before this is called.
        p = self.params
        return nn.Sequential(
            nn.Linear(p.features, p.width),
            nn.ReLU(),
            nn.Dropout(p.dropout),
            nn.Linear(p.width, p.width),
            nn.ReLU(),
            nn.Linear(p.width, p.classes),
        )

    def train_data(self) -> Dataset[tuple[Tensor, ...]]:
        # CHANGE: your data, as any map-style Dataset (__len__ and __getitem__); lockstep.data.Table reads Parquet.
        return part(self.params, held_out=False)

    def eval_data(self) -> Dataset[tuple[Tensor, ...]] | None:
        # None for a run without evaluation.
        return part(self.params, held_out=True)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> lockstep.Loss:
        # CHANGE: your loss. `total` is the sum over the micro-batch, never its mean; `weight` is what it is divided by.
        points, labels = batch
        logits = model(points)
        correct = (logits.argmax(dim=1) == labels).sum()
        return lockstep.Loss(
            total=F.cross_entropy(logits, labels, reduction="sum"),
            weight=len(labels),
            parts={"accuracy": lockstep.Mean(correct, len(labels))},  # train/accuracy and eval/accuracy
        )


def part(params: Classifier.Params, *, held_out: bool) -> TensorDataset:
    """Points (N, features) and their labels (N): those that are held out, or the others."""
    points, labels = drawn(params.points, params.features, params.classes)
    chosen = (torch.arange(len(labels)) % HELD_OUT == 0) == held_out
    return TensorDataset(points[chosen], labels[chosen])


def drawn(count: int, features: int, classes: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Points around centres of which each class has three. One `seed` gives one set, in every process."""
    source = torch.Generator().manual_seed(seed)
    centres = torch.randn(3 * classes, features, generator=source)
    nearest = torch.randint(len(centres), (count,), generator=source)
    points = centres[nearest] + torch.randn(count, features, generator=source)
    return points, nearest % classes
