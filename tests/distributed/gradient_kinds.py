"""Jobs whose gradients are not dense real numbers: complex weights, and tables whose gradients have rows."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Loss
from tests.distributed.kinds import CLASSES, Kind, Refusal, held_in

# --- complex weights ------------------------------------------------------------------------------------------


class SpectralConv(nn.Module):
    """The layer of a Fourier neural operator (Li et al. 2021): its weights multiply the lowest modes."""

    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(channels, channels, modes, dtype=torch.complex64) / channels)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x.float())
        kept = torch.einsum("bim,iom->bom", spectrum[..., : self.modes], self.weight)
        return torch.fft.irfft(F.pad(kept, (0, spectrum.size(-1) - self.modes)), n=x.size(-1))


class Operator(nn.Module):
    """A Fourier neural operator over the features of a sample, with two layers; a lone complex number scales its output."""

    def __init__(self, channels: int = 12) -> None:
        super().__init__()
        self.lift = nn.Linear(1, channels)
        self.layers = nn.ModuleList(SpectralConv(channels, 3) for _ in range(2))
        self.skips = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in range(2))
        self.gain = nn.Parameter(torch.ones((), dtype=torch.complex64))
        self.turned = nn.Parameter(torch.randn(CLASSES, channels, dtype=torch.complex64).t())
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x[..., None]).transpose(1, 2)
        for layer, skip in zip(self.layers, self.skips, strict=True):
            h = torch.tanh(layer(h) + skip(h))
        pooled = h.mean(2).float()
        return self.head(pooled) + (pooled.to(torch.complex64) @ self.turned * self.gain).abs()


class FourierOperator(Kind):
    """AdamW, clipping by the norm, an average of the weights."""

    more: ClassVar[dict[str, Any]] = {"ema": 0.7}

    def model(self) -> nn.Module:
        return Operator()


class FourierOperatorBySgd(Kind):
    """Momentum and decay of complex numbers."""

    more: ClassVar[dict[str, Any]] = {
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    }

    def model(self) -> nn.Module:
        return Operator()


class RareFilter(Kind):
    """A complex parameter that micro-batches may not use."""

    def model(self) -> nn.Module:
        model = nn.ModuleDict({"head": nn.Linear(4, CLASSES)})
        model.filter = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        return model

    def conditional_parameters(self, model: nn.Module) -> list[str]:
        return ["filter"]

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        spectrum = torch.fft.rfft(x)
        if float(x[0, 0]) > 0:
            spectrum = spectrum * model.filter
        return Loss(F.cross_entropy(model["head"](spectrum.abs()), y, reduction="sum"), len(y))


# --- tables ---------------------------------------------------------------------------------------------------

ROWS, WIDTH = 50, 4

torch.sparse.check_sparse_tensor_invariants.disable()  # torch's SparseAdam makes tensors without a word of it, and torch warns of that


class Bags(nn.Module):
    """What a recommender has: a table of few rows by bags, one by single rows, and layers on top."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.items = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        places = (x * 7).round().long().abs() % ROWS
        return self.head(torch.cat([self.users(places[:, 0]), self.items(places[:, 1:])], 1))


def both(model: nn.Module) -> list[torch.optim.Optimizer]:
    """torch's own pair: SparseAdam for the tables, AdamW for the rest."""
    tables = [
        module.weight for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    ]
    ids = set(map(id, tables))
    rest = [parameter for parameter in model.parameters() if id(parameter) not in ids]
    return [torch.optim.SparseAdam(tables, lr=0.05), torch.optim.AdamW(rest, lr=0.01)]


class Recommender(Kind):
    """Two optimizers, clipping by the norm of both kinds of gradients."""

    def model(self) -> nn.Module:
        return Bags()

    def optimizer(self, model: nn.Module) -> Any:
        return both(model)


class RecommenderBySgd(Kind):
    """One optimizer that takes both kinds."""

    more: ClassVar[dict[str, Any]] = {"optimizer": {"name": "sgd", "lr": 0.5}}

    def model(self) -> nn.Module:
        return Bags()


class OnlyTables(Kind):
    """word2vec with negatives: nothing dense learns."""

    rows = ROWS

    def model(self) -> nn.Module:
        return nn.ModuleDict({name: nn.Embedding(self.rows, WIDTH, sparse=True) for name in ("into", "out")})

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(list(model.parameters()), lr=0.05)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        places = (x * 7).round().long().abs() % self.rows
        others = torch.randint(self.rows, (len(x),))
        word, context, negative = (
            model["into"](places[:, 0]),
            model["out"](places[:, 1]),
            model["out"](others),
        )
        score, noise = (word * context).sum(1), (word * negative).sum(1)
        return Loss(-(F.logsigmoid(score) + F.logsigmoid(-noise)).sum(), len(x))


class FewRows(OnlyTables):
    """Most micro-batches of a step touch each of its rows."""

    rows = 4


class RareTable(Kind):
    """By a function instead of a module, in a type of its own; a second table that most micro-batches do not use, and a frozen one."""

    more: ClassVar[dict[str, Any]] = {"optimizer": {"name": "sgd", "lr": 0.5}}

    def model(self) -> nn.Module:
        model = nn.ModuleDict(
            {"head": nn.Linear(WIDTH, CLASSES), "rare": nn.Embedding(ROWS, WIDTH, sparse=True)}
        )
        model.table = nn.Parameter(torch.randn(ROWS, WIDTH, dtype=torch.float64))
        model["still"] = nn.Embedding(ROWS, WIDTH, sparse=True).requires_grad_(False)
        return model

    def conditional_parameters(self, model: nn.Module) -> list[str]:
        return ["rare.weight"]

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        places = (x * 7).round().long().abs() % ROWS
        h = F.embedding(places[:, 0], model.table, sparse=True).float() + model["still"](places[:, 2])
        chosen = x[:, 0] > 0.7
        if chosen.any():
            h = h.index_add(0, chosen.nonzero()[:, 0], model["rare"](places[chosen, 1]))
        return Loss(F.cross_entropy(model["head"](h), y, reduction="sum"), len(y))


REFUSED: dict[type[Kind], Refusal] = {}

HELD = held_in(__name__, REFUSED)
"""Jobs whose bits do not depend on who runs them."""
