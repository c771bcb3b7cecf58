"""The jobs of the checks on GPUs. They need torch alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep


class Mixed(lockstep.Job):
    """BatchNorm, dropout, an embedding, and a head that only some micro-batches use."""

    class Params(lockstep.Params):
        samples: int = 102
        width: int = 96

    params: Params

    def model(self) -> nn.Module:
        return MixedModel(self.params.width)

    def train_data(self) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(5)
        words = torch.randint(31, (self.params.samples, 6), generator=generator)
        return TensorDataset(words, words.sum(1) % 3, torch.arange(self.params.samples))

    def eval_data(self) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(6)
        words = torch.randint(31, (23, 6), generator=generator)
        return TensorDataset(words, words.sum(1) % 3, torch.arange(23))

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        words, labels, index = batch
        logits = model(words, both=bool((index % 7).sum() % 2))
        return lockstep.Loss(F.cross_entropy(logits.float(), labels, reduction="sum"), len(labels))

    def conditional_parameters(self, model: nn.Module) -> Iterable[str]:
        return ["second.weight", "second.bias"]


class Fused(Mixed):
    """Its own optimizer is one kernel, which reads the step count where the parameters are."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


class MixedModel(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, width)
        self.hidden = nn.Linear(6 * width, 5 * width)
        self.norm = nn.BatchNorm1d(5 * width)
        self.dropout = nn.Dropout(0.1)
        self.first = nn.Linear(5 * width, 3)
        self.second = nn.Linear(5 * width, 3)

    def forward(self, words: Tensor, both: bool) -> Tensor:
        x = self.dropout(self.norm(self.hidden(self.embedding(words).flatten(1))).tanh())
        logits: Tensor = self.first(x) + self.second(x) if both else self.first(x)
        return logits


class Tokens(lockstep.Job):
    """A GPT on random tokens; with its default params that of 124 M parameters."""

    class Params(lockstep.Params):
        depth: int = 12
        heads: int = 12
        width: int = 768
        context: int = 1024
        vocabulary: int = 50304
        samples: int = 4096

    params: Params

    def model(self) -> nn.Module:
        p = self.params
        return GPT(p.depth, p.heads, p.width, p.context, p.vocabulary)

    def train_data(self) -> Dataset[Any]:
        p = self.params
        shape, generator = (p.samples, p.context + 1), torch.Generator().manual_seed(7)
        return TensorDataset(torch.randint(p.vocabulary, shape, generator=generator))

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        (tokens,) = batch
        logits = model(tokens[:, :-1]).flatten(0, 1)
        total = F.cross_entropy(logits.float(), tokens[:, 1:].flatten(), reduction="sum")
        return lockstep.Loss(total, tokens[:, 1:].numel())


class GPT(nn.Module):
    """GPT-2's shapes: tokens (B, T) to logits (B, T, vocabulary), with the head tied to the embedding."""

    def __init__(self, depth: int, heads: int, width: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(Block(heads, width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


class Block(nn.Module):
    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        added: Tensor = x + self.down(F.gelu(self.up(self.second(x))))
        return added
