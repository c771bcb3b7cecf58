"""A small language model that trains as it is, on sentences that it makes from a seed.

A job is the model, the data and the loss. There is no training loop here, no device, no rank and no call of
`torch.manual_seed`: lockstep has all of these, so that the same spec gives the same bits everywhere.

Shapes: B sentences in a micro-batch, T characters of the longest, C channels.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import lockstep

CHARACTERS = "\n abcdefghijklmnopqrstuvwxyz."
"""All that the model can read; the first one begins and ends a sentence."""

PADDING = -100
"""The target where a sentence is over; it has no loss."""

HELD_OUT = 10
"""Every tenth sentence is held out. A fixed rule, not a random draw."""

NOUNS = ("cat", "tree", "child", "river", "engine", "lamp", "robot", "garden")
VERBS = ("sees", "follows", "builds", "paints", "forgets", "likes")
ADJECTIVES = ("small", "red", "quiet", "old", "bright", "strange")


class GPT(lockstep.Job):
    """Predicts the next character of a sentence."""

    class Params(lockstep.Params):
        # CHANGE: your own settings. The spec sets them below job.params, or on the command line: job.params.depth=4
        depth: PositiveInt = 2
        heads: PositiveInt = 4
        width: PositiveInt = 64
        sentences: int = Field(default=4000, ge=100, le=100_000)

    params: Params

    def model(self) -> nn.Module:
        # CHANGE: your model, freshly initialised, on the CPU. Random draws are seeded before this is called.
        p = self.params
        return Transformer(p.depth, p.heads, p.width)

    def train_data(self) -> Dataset[Tensor]:
        # CHANGE: your data, as any map-style Dataset (__len__ and __getitem__). lockstep.data.Packed makes rows of one
        # length out of documents.
        written = sentences(self.params.sentences)
        del written[::HELD_OUT]
        return Sentences(written)

    def eval_data(self) -> Dataset[Tensor] | None:
        # None for a run without evaluation.
        return Sentences(sentences(self.params.sentences)[::HELD_OUT])

    def collate(self, samples: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Inputs and targets (B, T): a target is the character that follows."""
        inputs = pad_sequence([sample[:-1] for sample in samples], batch_first=True)
        targets = pad_sequence([sample[1:] for sample in samples], batch_first=True, padding_value=PADDING)
        return inputs, targets

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> lockstep.Loss:
        # `total` is the sum over the micro-batch, never its mean, and `weight` what it is divided by: characters,
        # for sentences differ in length. Padding is left out of both.
        inputs, targets = batch
        logits = model(inputs).flatten(0, 1)
        total = F.cross_entropy(logits, targets.flatten(), ignore_index=PADDING, reduction="sum")
        count = (targets != PADDING).sum()
        bits = total.detach() / math.log(2)
        return lockstep.Loss(total, count, parts={"bits_per_character": lockstep.Mean(bits, count)})

    def activation_checkpoints(self, model: nn.Module) -> Iterable[nn.Module]:
        # Recomputed in the backward pass, with activation_checkpointing: true in the spec.
        return [module for module in model.modules() if isinstance(module, Block)]


class Transformer(nn.Module):
    """Characters (B, T) to logits (B, T, characters) of the one that follows each."""

    def __init__(self, depth: int, heads: int, width: int, longest: int = 128) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(CHARACTERS), width)
        self.positions = nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(heads, width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(CHARACTERS))

    def forward(self, inputs: Tensor) -> Tensor:
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.characters(inputs) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Causal attention, then an MLP; each reads the normalised stream (B, T, C) and adds to it."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        mixed: Tensor = x + self.mlp(x)
        return mixed

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(read.transpose(1, 2).reshape(batch, length, width))
        return out


class Sentences(Dataset[Tensor]):
    """Sentences as the numbers of their characters (T), with the mark that begins and ends each."""

    def __init__(self, written: Sequence[str]) -> None:
        self.written = written

    def __len__(self) -> int:
        return len(self.written)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([CHARACTERS.index(character) for character in f"\n{self.written[index]}\n"])


def sentences(count: int, seed: int = 1) -> list[str]:
    """Such as `a quiet robot paints an old lamp.`, each once. One `seed` gives one list, in every process."""
    source = random.Random(seed)

    def noun_phrase() -> str:
        words = [*source.sample(ADJECTIVES, k=source.randint(0, 2)), source.choice(NOUNS)]
        return f"{'an' if words[0][0] in 'aeiou' else 'a'} {' '.join(words)}"

    unique: dict[str, None] = {}  # in the order in which they were made
    while len(unique) < count:
        unique[f"{noun_phrase()} {source.choice(VERBS)} {noun_phrase()}."] = None
    return list(unique)
