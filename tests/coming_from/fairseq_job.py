"""Sums of neighbouring digits as fairseq trains them, with Lockstep: lockstep train fairseq.yaml"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep

PAD, LONGEST = 10, 20


class Sums(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of digits of any length; wanted of each place is its sum with the place before it, without the carry."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, LONGEST + 1, (count,), generator=generator).tolist()
        self.sources = [torch.randint(10, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        source = self.sources[i]
        return source, (source + F.pad(source[:-1], (1, 0))) % 10


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 32, padding_idx=PAD), nn.Linear(64, 10)
        self.encoder = nn.GRU(32, 64, batch_first=True)

    def forward(self, source: Tensor) -> Tensor:
        return self.out(self.encoder(self.embed(source))[0])


class Tagging(lockstep.Job):
    class Params(lockstep.Params):
        smoothing: float = 0.1

    params: Params

    def model(self) -> nn.Module:
        return Tagger()

    def train_data(self) -> Sums:
        return Sums(1000, 1)

    def eval_data(self) -> Sums:
        return Sums(200, 2)

    def collate(self, samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        sources, targets = (
            nn.utils.rnn.pad_sequence(list(side), batch_first=True, padding_value=PAD)
            for side in zip(*samples, strict=True)
        )
        return sources, targets

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> lockstep.Loss:
        source, target = batch
        logits, target = model(source).flatten(0, 1), target.flatten()
        total = F.cross_entropy(
            logits, target, ignore_index=PAD, reduction="sum", label_smoothing=self.params.smoothing
        )
        tokens = (target != PAD).sum()
        right = lockstep.Mean((logits.argmax(1) == target).sum(), tokens)
        return lockstep.Loss(total, tokens, {"accuracy": right})
