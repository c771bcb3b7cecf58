"""Numbers in words and in digits by the loop of sentence-transformers, in plain torch: python sentences_loop.py"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, MINI, RATE, WARMUP, SCALE, SEED = 8, 64, 16, 2e-2, 0.1, 20.0, 17


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


def data() -> tuple[TensorDataset, TensorDataset]:
    spoken, written = sentences()
    held_out = torch.arange(len(spoken)) % 7 == 3
    return TensorDataset(spoken[~held_out], written[~held_out]), TensorDataset(
        spoken[held_out], written[held_out]
    )


def cached_ranking_loss(model: nn.Module, anchors: Tensor, positives: Tensor) -> None:
    """CachedMultipleNegativesRankingLoss: embeddings without a graph, the gradients of the loss in them, then each mini-batch again with these."""
    with torch.no_grad():
        cache = [[model(part) for part in side.split(MINI)] for side in (anchors, positives)]
    leaves = [torch.cat(parts).requires_grad_() for parts in cache]
    F.cross_entropy(SCALE * leaves[0] @ leaves[1].T, torch.arange(len(anchors))).backward()
    for side, leaf in zip((anchors, positives), leaves, strict=True):
        assert leaf.grad is not None
        for part, gradient in zip(side.split(MINI), leaf.grad.split(MINI), strict=True):
            (model(part) * gradient).sum().backward()


def accuracy(model: nn.Module, held_out: TensorDataset) -> float:
    with torch.no_grad():
        queries, corpus = map(model, held_out.tensors)
    return float(((queries @ corpus.T).argmax(1) == torch.arange(len(queries))).float().mean())


def main() -> None:
    torch.manual_seed(SEED)
    train, held_out = data()
    loader = DataLoader(train, BATCH, shuffle=True, drop_last=True)
    model, updates = Encoder(), EPOCHS * len(loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    step, warm = 0, int(WARMUP * updates)
    for epoch in range(EPOCHS):
        for anchors, positives in loader:
            factor = (step + 1) / warm if step < warm else (updates - step) / (updates - warm)
            for group in optimizer.param_groups:
                group["lr"] = RATE * factor
            optimizer.zero_grad()
            cached_ranking_loss(model, anchors, positives)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
        print(f"epoch {epoch + 1}: eval/accuracy {accuracy(model, held_out):.4f}")


if __name__ == "__main__":
    main()
