"""Handwritten digits as timm trains them, with Lockstep: lockstep train timm.yaml"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep


class Digits(lockstep.Job):
    class Params(lockstep.Params):
        mixup: float = 0.2
        smoothing: float = 0.1

    params: Params

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))

    def train_data(self) -> TensorDataset:
        return rows(held_out=False)

    def eval_data(self) -> TensorDataset:
        return rows(held_out=True)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> lockstep.Loss:
        x, y = batch
        soft = F.one_hot(y, 10).float()
        if model.training:
            soft = soft * (1 - self.params.smoothing) + self.params.smoothing / 10
            share = float(lockstep.rng().beta(self.params.mixup, self.params.mixup))
            x, soft = share * x + (1 - share) * x.flip(0), share * soft + (1 - share) * soft.flip(0)
        logits = model(x)
        right = lockstep.Mean((logits.argmax(1) == y).sum(), len(y))
        return lockstep.Loss(-(soft * F.log_softmax(logits, 1)).sum(), len(y), {"accuracy": right})


def rows(*, held_out: bool) -> TensorDataset:
    pixels, labels = load_digits(return_X_y=True)
    chosen = (torch.arange(len(labels)) % 5 == 0) == held_out
    return TensorDataset(torch.from_numpy(pixels).float()[chosen] / 16, torch.from_numpy(labels)[chosen])
