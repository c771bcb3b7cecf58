"""Digits and their names by the loop of open_clip, in plain torch: python open_clip_loop.py"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, ACCUMULATED, RATE, WARMUP, SEED = 10, 32, 4, 5e-3, 10, 17
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LONGEST = 5


def tokens(labels: Tensor) -> Tensor:
    spelled = [[ord(letter) - 96 for letter in name.ljust(LONGEST, "`")] for name in NAMES]
    return torch.tensor(spelled)[labels]


def data() -> tuple[TensorDataset, TensorDataset]:
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels)
    held_out = torch.arange(len(y)) % 5 == 0
    return TensorDataset(x[~held_out], tokens(y[~held_out])), TensorDataset(x[held_out], y[held_out])


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
        self.text = nn.Sequential(nn.Embedding(27, 32), nn.Flatten(), nn.Linear(32 * LONGEST, 32))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, x: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.image(x), dim=1), F.normalize(self.text(words), dim=1)


def clip_loss(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    logits, labels = scale.exp() * images @ texts.T, torch.arange(len(images))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def accumulate(model: Clip, batches: list[tuple[Tensor, Tensor]]) -> None:
    """Features of all batches without a graph; then each batch again, among the features of the others."""
    with torch.no_grad():
        features = [model(x, words) for x, words in batches]
    for j, (x, words) in enumerate(batches):
        own = model(x, words)
        images, texts = (
            torch.cat([own[side] if i == j else each[side] for i, each in enumerate(features)])
            for side in (0, 1)
        )
        clip_loss(images, texts, model.logit_scale).backward()


def zero_shot(model: Clip, held_out: TensorDataset) -> float:
    model.eval()
    with torch.no_grad():
        images, names = model(held_out.tensors[0], tokens(torch.arange(10)))
    model.train()
    return float(((images @ names.T).argmax(1) == held_out.tensors[1]).float().mean())


def main() -> None:
    torch.manual_seed(SEED)
    train, held_out = data()
    loader = DataLoader(train, BATCH, shuffle=True, drop_last=True)
    model, updates = Clip(), EPOCHS * (len(loader) // ACCUMULATED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    step = 0
    for epoch in range(EPOCHS):
        batches = iter(loader)
        for _ in range(len(loader) // ACCUMULATED):
            warm = (step + 1) / WARMUP
            cooled = 0.5 * (1 + math.cos(math.pi * max(0, step - WARMUP) / (updates - WARMUP)))
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(warm, cooled)
            optimizer.zero_grad()
            accumulate(model, [next(batches) for _ in range(ACCUMULATED)])
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            with torch.no_grad():
                model.logit_scale.clamp_(0, math.log(100))
            step += 1
        print(f"epoch {epoch + 1}: eval/accuracy {zero_shot(model, held_out):.4f}")


if __name__ == "__main__":
    main()
