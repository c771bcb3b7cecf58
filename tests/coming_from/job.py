"""Handwritten digits with Lockstep: lockstep train train.yaml"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep


class Digits(lockstep.Job):
    class Params(lockstep.Params):
        width: int = 64

    params: Params

    def model(self) -> nn.Module:
        width = self.params.width
        return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 10))

    def train_data(self) -> TensorDataset:
        return rows(held_out=False)

    def eval_data(self) -> TensorDataset:
        return rows(held_out=True)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> lockstep.Loss:
        x, y = batch
        logits = model(x)
        right = lockstep.Mean((logits.argmax(1) == y).sum(), len(y))
        return lockstep.Loss(F.cross_entropy(logits, y, reduction="sum"), len(y), {"accuracy": right})


def rows(*, held_out: bool) -> TensorDataset:
    pixels, labels = load_digits(return_X_y=True)
    chosen = (torch.arange(len(labels)) % 5 == 0) == held_out
    return TensorDataset(torch.from_numpy(pixels).float()[chosen] / 16, torch.from_numpy(labels)[chosen])
