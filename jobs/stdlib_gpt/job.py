"""A small language model of Python: a byte-level GPT on the standard library's own source.

Shapes: B pieces of source in a micro-batch, T bytes of the longest, C channels, H heads, D channels of a head.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import lockstep

BYTES = 256
START = ord("\n")
"""The byte before a piece: every piece begins a line."""

IGNORED = -100
"""Target of a padded position, which has no loss."""

SHORTEST = 16
"""Bytes in the shortest piece that is kept."""

HELD_OUT = 12
"""Every twelfth module is held out."""


class StdlibGPT(lockstep.Job):
    """Predicts the next byte of Python source."""

    class Params(lockstep.Params):
        depth: PositiveInt = 3
        heads: PositiveInt = 4
        head_width: int = Field(default=32, ge=2, multiple_of=2)
        context: int = Field(default=128, ge=SHORTEST)
        """Bytes in the longest piece."""
        dropout: float = Field(default=0.0, ge=0, lt=1)
        corpus_bytes: int = Field(default=1_200_000, ge=100_000)
        """Most bytes of source that are read, training and held-out together."""

    params: Params

    def model(self) -> nn.Module:
        p = self.params
        return GPT(p.depth, p.heads, p.head_width, p.context, p.dropout)

    def train_data(self) -> Dataset[Tensor]:
        training, _ = self._sources()
        return Pieces(training, self.params.context)

    def eval_data(self) -> Dataset[Tensor]:
        """Pieces of the held-out modules, but for those that a training module has word for word."""
        training, held_out = self._sources()
        return Pieces(held_out, self.params.context, without=Pieces(training, self.params.context).pieces)

    def _sources(self) -> tuple[list[bytes], list[bytes]]:
        sources = modules(self.params.corpus_bytes)
        return [source for i, source in enumerate(sources) if i % HELD_OUT], sources[::HELD_OUT]

    def collate(self, samples: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Inputs and targets (B, T), padded at the end, where causal attention never looks."""
        targets = pad_sequence([piece.long() for piece in samples], batch_first=True, padding_value=IGNORED)
        inputs = F.pad(targets[:, :-1], (1, 0), value=START).clamp(min=0)
        return inputs, targets

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> lockstep.Loss:
        inputs, targets = batch
        logits = model(inputs).flatten(0, 1).float()
        total = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        count = (targets != IGNORED).sum()
        bits = total.detach() / math.log(2)
        return lockstep.Loss(total, count, parts={"bits_per_byte": lockstep.Mean(bits, count)})

    def activation_checkpoints(self, model: nn.Module) -> Iterable[nn.Module]:
        return [module for module in model.modules() if isinstance(module, Block)]

    def example_input(self) -> tuple[Tensor]:
        return (torch.tensor([list(b"\nimport math"), list(b"\nimport this")]),)


class GPT(nn.Module):
    """A decoder-only transformer: bytes (B, T) to logits (B, T, 256) of the byte that follows each."""

    cos: Tensor
    sin: Tensor

    def __init__(self, depth: int, heads: int, head_width: int, context: int, dropout: float) -> None:
        super().__init__()
        width = heads * head_width
        self.embedding = nn.Embedding(BYTES, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.apply(initialise)
        cos, sin = rotary_angles(context, head_width)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        length = inputs.shape[1]
        x = self.dropout(self.embedding(inputs))
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Attention, then a gated MLP; each reads the normalised residual stream (B, T, C) and adds to it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = CausalAttention(width, heads)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = SwiGLU(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin))
        added: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return added


class CausalAttention(nn.Module):
    """Each position attends to itself and to those before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        mixed: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return mixed


class SwiGLU(nn.Module):
    """The gated MLP of Shazeer (2020), arXiv 2002.05202: as many weights as a plain one four times as wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 8 * width // 3
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gated: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return gated


def rotary_angles(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (T, D/2) of the rotary position embedding, Su et al. (2021), arXiv 2104.09864."""
    frequencies = 10_000.0 ** -(torch.arange(0, head_width, 2) / head_width)
    angles = torch.outer(torch.arange(context), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of channels (i, i + D/2) of queries or keys (B, H, T, D) by the angle of its position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)


def initialise(module: nn.Module) -> None:
    """Normal weights with GPT-2's standard deviation."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


class Pieces(Dataset[Tensor]):
    """Sources cut into pieces, each a tensor of its bytes."""

    def __init__(self, sources: Iterable[bytes], context: int, without: Iterable[bytes] = ()) -> None:
        every = (piece for source in sources for piece in cut(source, context))
        left_out = frozenset(without)
        self.pieces = [piece for piece in every if len(piece) >= SHORTEST and piece not in left_out]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> Tensor:
        return torch.frombuffer(bytearray(self.pieces[index]), dtype=torch.uint8)


def cut(source: bytes, context: int) -> Iterator[bytes]:
    """Runs of whole lines between blank ones, at most `context` bytes each; a longer line loses its end."""
    piece = b""
    for line in source.splitlines(keepends=True):
        blank = not line.strip()
        if blank or len(piece) + len(line) > context:
            yield piece
            piece = b""
        if not blank:
            piece += line[:context]
    yield piece


def modules(most_bytes: int) -> list[bytes]:
    """Sources of the standard library's public top-level modules in the order of their names, while they fit."""
    sources: list[bytes] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        source = path.read_bytes()
        if sum(map(len, sources)) + len(source) > most_bytes:
            break
        sources.append(source)
    return sources
