"""Numbers in words and in digits as sentence-transformers trains them, with Lockstep: lockstep train sentences.yaml"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep

Pair = tuple[Tensor, Tensor]


def sentences() -> tuple[Tensor, Tensor]:
    """The tokens of 0 … 999 as it is spoken ("three", "hundred", "twenty", "one"; 0 for none), and as it is written."""
    n = torch.arange(1000)
    hundreds, tens, units = n // 100, n // 10 % 10, n % 10
    spoken = [
        hundreds,
        (hundreds > 0) * 10,
        torch.where(tens > 1, 10 + tens, 0),
        torch.where(tens == 1, 20 + units, units),
    ]
    return torch.stack(spoken, 1), torch.stack([30 + hundreds, 40 + tens, 50 + units], 1)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.dense = nn.EmbeddingBag(60, 64, padding_idx=0), nn.Linear(64, 64)

    def forward(self, sentence: Tensor) -> Tensor:
        return F.normalize(self.dense(self.tokens(sentence)), dim=1)


class Ranking(lockstep.Job):
    def model(self) -> nn.Module:
        return Encoder()

    def train_data(self) -> TensorDataset:
        return pairs(held_out=False)

    def eval_data(self) -> TensorDataset:
        return pairs(held_out=True)

    def embed(self, model: nn.Module, batch: Pair) -> dict[str, Tensor]:
        anchors, positives = batch
        return {"anchors": model(anchors), "positives": model(positives)}

    def batch_loss(self, model: nn.Module, rows: dict[str, Tensor]) -> lockstep.Loss:
        scores = 20.0 * rows["anchors"] @ rows["positives"].T
        labels = torch.arange(len(scores))
        return lockstep.Loss(F.cross_entropy(scores, labels, reduction="sum"), len(scores))

    def outputs(self, model: nn.Module, batch: Pair) -> dict[str, Tensor]:
        return self.embed(model, batch)

    def whole_set_metrics(self, outputs: Any) -> dict[str, float]:
        nearest = (outputs["anchors"] @ outputs["positives"].T).argmax(1)
        return {"accuracy": float((nearest == torch.arange(len(nearest))).float().mean())}


def pairs(*, held_out: bool) -> TensorDataset:
    spoken, written = sentences()
    chosen = (torch.arange(len(spoken)) % 7 == 3) == held_out
    return TensorDataset(spoken[chosen], written[chosen])
