"""Digits and their names as open_clip trains them, with Lockstep: lockstep train open_clip.yaml"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LONGEST = 5


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
        self.text = nn.Sequential(nn.Embedding(27, 32), nn.Flatten(), nn.Linear(32 * LONGEST, 32))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, x: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.image(x), dim=1), F.normalize(self.text(words), dim=1)


class Pairs(lockstep.Job):
    def model(self) -> nn.Module:
        return Clip()

    def train_data(self) -> TensorDataset:
        return rows(held_out=False)

    def eval_data(self) -> TensorDataset:
        return rows(held_out=True)

    def embed(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, labels = batch
        images, texts = model(x, tokens(labels))
        return {"images": images, "texts": texts}

    def batch_loss(self, model: nn.Module, rows: dict[str, Tensor]) -> lockstep.Loss:
        scale: Tensor = model.logit_scale  # type: ignore[assignment]
        logits = scale.exp() * rows["images"] @ rows["texts"].T
        labels = torch.arange(len(logits))
        total = F.cross_entropy(logits, labels, reduction="sum")
        total = total + F.cross_entropy(logits.T, labels, reduction="sum")
        return lockstep.Loss(total / 2, len(logits))

    def after_step(self, model: nn.Module, step: int) -> None:
        model.logit_scale.clamp_(0, math.log(100))  # type: ignore[operator, union-attr]

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, lockstep.Mean]:
        x, labels = batch
        images, names = model(x, tokens(torch.arange(10)))
        return {"accuracy": lockstep.Mean(((images @ names.T).argmax(1) == labels).sum(), len(x))}


def tokens(labels: Tensor) -> Tensor:
    spelled = [[ord(letter) - 96 for letter in name.ljust(LONGEST, "`")] for name in NAMES]
    return torch.tensor(spelled)[labels]


def rows(*, held_out: bool) -> TensorDataset:
    pixels, labels = load_digits(return_X_y=True)
    chosen = (torch.arange(len(labels)) % 5 == 0) == held_out
    return TensorDataset(torch.from_numpy(pixels).float()[chosen] / 16, torch.from_numpy(labels)[chosen])
