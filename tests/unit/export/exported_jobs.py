"""Jobs to export: one model with one input, one with two; and what a model can do otherwise when it is traced."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep

PLANTED: set[str] = set()
"""What the model of `One` does besides: `branch` on the data, `three rows` that it takes for granted, `sizes` that a trace takes for
granted, `one bit` that is another one in an exported graph, `traced` otherwise by TorchScript, `nested` outputs, `pairs` of rows, rows that are
`picked` by their values; or `no example` of the job."""

EVALUATED = 10

GATE = "EXPORT_GATE"
"""The variable that names a pipe which the example of `Gated` waits for to be closed."""


def points(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :3].argmax(1)


class Net(nn.Module):
    """Rows (B, 8) to logits (B, 3)."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(16, 3)
        # Drawn, and in no file of weights: it follows from the seed.
        self.register_buffer("offset", torch.randn(3), persistent=False)

    def forward(self, x: Tensor) -> Any:
        if "branch" in PLANTED and x.sum() > 0:
            x = x * 2
        if "three rows" in PLANTED and not self.training:
            x = x.reshape(3, 8)
        if "sizes" in PLANTED and len(x) == 3:
            x = x.reshape(len(x), 8)
        logits = self.out(self.drop(self.norm(self.hidden(x)).tanh())) + self.offset
        if "one bit" in PLANTED and torch.compiler.is_exporting():
            logits = torch.nextafter(logits, torch.full_like(logits, torch.inf))
        if "traced" in PLANTED and torch.jit.is_tracing():
            logits = logits + 1
        if "pairs" in PLANTED:
            return logits @ logits.T
        if "picked" in PLANTED:
            return logits[logits[:, 0] > 0]
        return {"a": [logits]} if "nested" in PLANTED else logits


class One(lockstep.Job):
    def model(self) -> nn.Module:
        return Net()

    def train_data(self) -> Dataset[Any]:
        return TensorDataset(*points(24, 1))

    def eval_data(self) -> Dataset[Any]:
        return TensorDataset(*points(EVALUATED, 2))

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        return lockstep.Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))

    def example_input(self) -> Tensor | None:
        if "no example" in PLANTED:
            return None
        x = points(3, 3)[0]
        return torch.stack([x[0].abs(), -x[1].abs(), x[2]])


class Gated(One):
    def example_input(self) -> Tensor | None:
        if GATE in os.environ:
            Path(os.environ[GATE]).read_bytes()
        return super().example_input()


class Pair(nn.Module):
    """Rows (B, 4) and words (B, T), with positions (T) for all rows, to logits (B, 3) and a mean (B)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor, words: Tensor, positions: Tensor) -> dict[str, Tensor]:
        read = (self.words(words) * positions[:, None]).sum(1)
        logits = self.out(torch.cat([x, read], dim=1))
        return {"logits": logits, "mean": logits.mean(1)}


class Two(lockstep.Job):
    def model(self) -> nn.Module:
        return Pair()

    def train_data(self) -> Dataset[Any]:
        x, y = points(24, 1)
        return TensorDataset(x[:, :4], (x[:, 4:6].abs() * 2).long().clamp(max=6), y)

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, words, y = batch
        logits = model(x, words, torch.arange(1.0, 3.0))["logits"]
        return lockstep.Loss(F.cross_entropy(logits, y, reduction="sum"), len(y))

    def example_input(self) -> tuple[Tensor, Tensor, Tensor]:
        x, words, _ = self.train_data()[:4]
        return x, words, torch.arange(1.0, 3.0)


class Library(nn.Linear):
    """A model of a library with a form of its own."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "inner").mkdir()
        torch.save(self.state_dict(), folder / "inner" / "weights.pt")

    @classmethod
    def from_pretrained(cls, folder: Path) -> Library:
        found = cls(8, 3)
        found.load_state_dict(torch.load(folder / "inner" / "weights.pt"))
        if "one bit" in PLANTED:
            found.bias.data[0] = torch.nextafter(found.bias.data[0], torch.tensor(torch.inf))
        return found


class OfLibrary(lockstep.Job):
    def model(self) -> nn.Module:
        return Library(8, 3)

    def train_data(self) -> Dataset[Any]:
        return TensorDataset(*points(24, 1))

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        return lockstep.Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))

    def identity(self) -> dict[str, Any]:
        return {"library": 3}

    def save_pretrained(self, model: nn.Module, folder: Path) -> None:
        super().save_pretrained(model, folder)
        (folder / "words.txt").write_text("a word\n")


class Moving(nn.Linear):
    """Rows (B, 8) to logits (B, 3), less a mean that is in no file of weights, times a scale of its own state, over a temperature."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__(8, 3)
        self.scale, self.temperature = 1.0, 1.0
        self.register_buffer("mean", torch.randn(3), persistent=False)

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) - self.mean) * self.scale / self.temperature


class Anneals(One):
    """Moves in `after_step` all that docs/guarantees.md names as a place for state."""

    _model: Moving

    def model(self) -> nn.Module:
        self._model = Moving()
        return self._model

    def after_step(self, model: nn.Module, step: int) -> None:
        assert isinstance(model, Moving)
        model.mean += 0.25
        model.scale *= 1.5
        model.temperature *= 0.75

    def state_dict(self) -> dict[str, Any]:
        return {"temperature": self._model.temperature}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._model.temperature = state["temperature"]
