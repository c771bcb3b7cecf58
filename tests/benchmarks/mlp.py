"""A job whose step is so short that whatever a trainer adds to it shows: a small MLP on random rows."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep

CLASSES = 10


class MLP(lockstep.Job):
    class Params(lockstep.Params):
        features: int = 64
        width: int = 128
        depth: int = 2
        rows: int = 32768

    params: Params

    def model(self) -> nn.Module:
        p = self.params
        widths = [p.features, *[p.width] * p.depth]
        layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(widths[-1], CLASSES))

    def train_data(self) -> Dataset[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(self.params.rows, self.params.features, generator=generator)
        y = torch.randint(CLASSES, (self.params.rows,), generator=generator)
        return TensorDataset(x, y)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> lockstep.Loss:
        x, y = batch
        return lockstep.Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))
