"""Sums of neighbouring digits by the loop of fairseq-train, in plain torch: python fairseq_loop.py"""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPOCHS, MAX_TOKENS, UPDATE_FREQ, RATE, WARMUP, SMOOTHING, SEED = 8, 320, 2, 1e-2, 20, 0.1, 17
PAD, LONGEST = 10, 20


def data(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Sequences of digits of any length; wanted of each place is its sum with the place before it, without the carry."""
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for _ in range(count):
        length = int(torch.randint(3, LONGEST + 1, (), generator=generator))
        source = torch.randint(10, (length,), generator=generator)
        pairs.append((source, (source + F.pad(source[:-1], (1, 0))) % 10))
    return pairs


def batches(pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Sequences of like length together, at most MAX_TOKENS in a batch with its padding."""
    result, batch = [], list[tuple[Tensor, Tensor]]()
    for pair in sorted(pairs, key=lambda pair: len(pair[0])):
        if (len(batch) + 1) * len(pair[0]) > MAX_TOKENS:
            result.append(batch)
            batch = []
        batch.append(pair)
    return [collate(batch) for batch in [*result, batch]]


def collate(batch: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    sources, targets = (
        nn.utils.rnn.pad_sequence(list(side), batch_first=True, padding_value=PAD)
        for side in zip(*batch, strict=True)
    )
    return sources, targets


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 32, padding_idx=PAD), nn.Linear(64, 10)
        self.encoder = nn.GRU(32, 64, batch_first=True)

    def forward(self, source: Tensor) -> Tensor:
        return self.out(self.encoder(self.embed(source))[0])


def criterion(model: nn.Module, source: Tensor, target: Tensor) -> tuple[Tensor, int, int]:
    """label_smoothed_cross_entropy: the sum over the tokens, and how many there are."""
    logits = model(source).flatten(0, 1)
    loss = F.cross_entropy(
        logits, target.flatten(), ignore_index=PAD, reduction="sum", label_smoothing=SMOOTHING
    )
    right = (logits.argmax(1) == target.flatten()).sum()
    return loss, int((target != PAD).sum()), int(right)


def main() -> None:
    torch.manual_seed(SEED)
    random.seed(SEED)
    model, valid = Tagger(), batches(data(200, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, betas=(0.9, 0.98))
    update = 0
    for epoch in range(EPOCHS):
        every = batches(data(1000, 1))
        random.shuffle(every)
        for i in range(0, len(every), UPDATE_FREQ):
            update += 1
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(update / WARMUP, (WARMUP / update) ** 0.5)
            optimizer.zero_grad()
            sample_size = 0
            for source, target in every[i : i + UPDATE_FREQ]:
                loss, tokens, _ = criterion(model, source, target)
                loss.backward()
                sample_size += tokens
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= sample_size
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        with torch.no_grad():
            counted = [criterion(model, *batch)[1:] for batch in valid]
        tokens, right = (sum(column) for column in zip(*counted, strict=True))
        print(f"epoch {epoch + 1}: eval/accuracy {right / tokens:.4f}")


if __name__ == "__main__":
    main()
