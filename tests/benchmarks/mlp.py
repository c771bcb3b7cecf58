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
        at_once: bool = False
        """Fetch a micro-batch in one indexing rather than row by row."""

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
        return Table(x, y) if self.params.at_once else TensorDataset(x, y)

    def collate(self, samples: object) -> object:
        return samples if self.params.at_once else super().collate(samples)  # type: ignore[arg-type]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> lockstep.Loss:
        x, y = batch
        return lockstep.Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))


class Table(TensorDataset):
    """Gives the rows of a whole micro-batch as two tensors."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        return tuple(tensor[indices] for tensor in self.tensors)
