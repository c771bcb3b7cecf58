"""Handwritten digits by the loop of timm's train.py, in plain torch: python timm_loop.py"""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, RATE, WARMUP, SEED = 15, 128, 5e-3, 1, 17
MIXUP, SMOOTHING, DECAY, CLIP = 0.2, 0.1, 0.9, 1.0


def data() -> tuple[TensorDataset, TensorDataset]:
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels)
    held_out = torch.arange(len(y)) % 5 == 0
    return TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])


def mixup(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    share = float(np.random.beta(MIXUP, MIXUP))
    soft = F.one_hot(y, 10) * (1 - SMOOTHING) + SMOOTHING / 10
    return share * x + (1 - share) * x.flip(0), share * soft + (1 - share) * soft.flip(0)


def rate(epoch: int) -> float:
    if epoch < WARMUP:
        return RATE * (epoch + 1) / (WARMUP + 1)
    return RATE * 0.5 * (1 + math.cos(math.pi * epoch / EPOCHS))


def validate(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    model.eval()
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in loader)
    return right / len(loader.dataset)  # type: ignore[arg-type]


def main() -> None:
    torch.manual_seed(SEED)
    np.random.seed(SEED)
    train, held_out = data()
    loader = DataLoader(train, BATCH, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.05)
    for epoch in range(EPOCHS):
        for group in optimizer.param_groups:
            group["lr"] = rate(epoch)
        model.train()
        for x, y in loader:
            x, soft = mixup(x, y)
            loss = -(soft * F.log_softmax(model(x), 1)).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            with torch.no_grad():
                for mine, other in zip(average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(other, 1 - DECAY)
        print(f"epoch {epoch + 1}: eval/accuracy {validate(average, DataLoader(held_out, BATCH)):.4f}")


if __name__ == "__main__":
    main()
