"""Jobs whose params describe them: what the soak draws is a model, its data and how its loss is stated."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep
from lockstep import Job, Loss, Mean, Phase, Term

FEATURES, CLASSES = 6, 3
LAYERS = ("dropout", "batch norm", "layer norm", "residual", "shared", "gated", "spectral", "complex")


class Samples(Dataset[Any]):
    """Points with a label and a weight; `augment` draws noise for each from Lockstep's generator."""

    def __init__(self, count: int, seed: int, augment: bool) -> None:
        self.x = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed))
        self.augment = augment

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int, float]:
        x = self.x[index]
        label = int(x[:CLASSES].argmax())
        if self.augment:
            x = x + 0.1 * torch.from_numpy(lockstep.rng().standard_normal(FEATURES)).float()
        return x, label, 0.5 + index % 5


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Gated(nn.Module):
    """Some micro-batches leave its second branch unused."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.always = nn.Linear(width, width)
        self.sometimes = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.always(x)
        return y + self.sometimes(x) if bool(x.detach().sum() > 0) else y


class Spectrum(nn.Module):
    """A filter of complex numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(width // 2 + 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        filtered: Tensor = torch.fft.irfft(torch.fft.rfft(x.float()) * self.filter, n=x.size(1))
        return filtered


def layer(name: str, width: int) -> nn.Module:
    match name:
        case "dropout":
            return nn.Dropout(0.2)
        case "batch norm":
            return nn.BatchNorm1d(width)
        case "layer norm":
            return nn.LayerNorm(width)
        case "residual":
            return Residual(width)
        case "gated":
            return Gated(width)
        case "complex":
            return Spectrum(width)
        case "spectral":
            return nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))
        case _:
            return nn.Linear(width, width)


class Drawn(Job):
    """A sum over samples."""

    class Params(lockstep.Params):
        samples: int = 40
        held_out: int = 7
        width: int = 8
        layers: tuple[Literal[LAYERS], ...] = ()  # type: ignore[valid-type]
        augment: bool = False
        weighted: bool = False
        """Whether a micro-batch weighs what its samples do, instead of their number."""
        frozen: bool = False
        noise: bool = False
        optimizer: Literal["", "groups", "rmsprop"] = ""
        metric: bool = False

    params: Params

    def model(self) -> nn.Module:
        width = self.params.width
        shared = nn.Linear(width, width)
        inner = [shared if name == "shared" else layer(name, width) for name in self.params.layers]
        model = nn.Sequential(
            nn.Linear(FEATURES, width), nn.Tanh(), nn.Sequential(*inner), nn.Linear(width, self.outputs_of())
        )
        model[0].bias.requires_grad_(not self.params.frozen)
        return model

    def outputs_of(self) -> int:
        return CLASSES

    def conditional_parameters(self, model: nn.Module) -> Iterable[str]:
        return [name for name, _ in model.named_parameters() if ".sometimes." in name]

    def train_data(self) -> Dataset[Any]:
        return Samples(self.params.samples, 1, self.params.augment)

    def eval_data(self) -> Dataset[Any] | None:
        return Samples(self.params.held_out, 2, False) if self.params.held_out else None

    def lengths(self, data: Any) -> list[int]:
        """Some lengths, of which several samples have the same; the samples themselves are all alike in size."""
        return [1 + index * 7 % 13 for index in range(len(data))]

    def logits(self, model: nn.Module, batch: Any) -> Tensor:
        x = batch[0]
        if self.params.noise and model.training:
            x = x + 0.05 * torch.randn_like(x)
        result: Tensor = model(x)
        return result

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        _, y, weight = batch
        logits = self.logits(model, batch)
        each = F.cross_entropy(logits.float(), y, reduction="none")
        right = Mean((logits.argmax(1) == y).sum(), len(y))
        if self.params.weighted:
            return Loss((each * weight).sum(), weight.sum(), {"right": right})
        return Loss(each.sum(), len(y), {"right": right})

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Mean]:
        if not self.params.metric:
            return {}
        logits = self.logits(model, batch)
        return {"margin": Mean((logits.amax(1) - logits.mean(1)).sum(), len(logits))}

    def optimizer(self, model: nn.Module) -> Any:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        match self.params.optimizer:
            case "groups":
                groups = [{"params": trained[:1], "lr": 0.01}, {"params": trained[1:], "weight_decay": 0.1}]
                return torch.optim.AdamW(groups, lr=0.003)
            case "rmsprop":
                return torch.optim.RMSprop(trained, lr=0.003, momentum=0.5)
        return None


class Terms(Drawn):
    """Two sums, each over samples of its own."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y, _ = batch
        logits, chosen = self.logits(model, batch).float(), self.chosen(batch)
        far = F.smooth_l1_loss(logits, x[:, :CLASSES], reduction="none").sum(1)
        return Loss.of_terms(
            {
                "kind": Term(F.cross_entropy(logits, y, reduction="sum"), len(y)),
                "far": Term((far * chosen).sum(), chosen.sum(), coefficient=0.5),
            }
        )

    def term_weights(self, batch: Any) -> dict[str, Any]:
        return {"kind": len(batch[1]), "far": self.chosen(batch).sum()}

    def chosen(self, batch: Any) -> Tensor:
        chosen: Tensor = batch[1] == 0
        return chosen


class Whole(Drawn):
    """A comparison of all samples of the global batch."""

    loss = Job.loss

    def embed(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        return {"z": F.normalize(self.logits(model, batch).float(), dim=1), "y": batch[1]}

    def batch_loss(self, model: nn.Module, rows: Any) -> Loss:
        alike = (rows["z"] @ rows["z"].T / 0.5).float()
        itself = torch.eye(len(alike), dtype=torch.bool)
        same = (rows["y"][:, None] == rows["y"]) & ~itself
        return Loss(-(alike.masked_fill(itself, -1e9).log_softmax(1) * same).sum(), len(alike))


class Phased(Drawn):
    """Two updates a step, of two networks."""

    optimizer = Job.optimizer

    def model(self) -> nn.Module:
        return nn.ModuleDict({"net": super().model(), "judge": nn.Linear(CLASSES, 1)})

    def logits(self, model: nn.Module, batch: Any) -> Tensor:
        logits: Tensor = model["net"](batch[0])
        return logits

    def phases(self) -> Sequence[Phase]:
        return [
            Phase("judge", self.judged, ["judge"], partial(torch.optim.Adam, lr=0.002)),
            Phase("net", self.fooled, ["net"]),
        ]

    def judged(self, model: nn.Module, batch: Any) -> Loss:
        made = self.logits(model, batch).detach()
        real = F.one_hot(batch[1], CLASSES).float()
        total = F.softplus(-model["judge"](real)).sum() + F.softplus(model["judge"](made.float())).sum()
        return Loss(total, len(made))

    def fooled(self, model: nn.Module, batch: Any) -> Loss:
        made = self.logits(model, batch)
        total = F.softplus(-model["judge"](made.float())).sum()
        return Loss(total + F.cross_entropy(made.float(), batch[1], reduction="sum"), len(made))


class Followed(Drawn):
    """A statistic of each step, and a frozen teacher that moves after it."""

    def model(self) -> nn.Module:
        net = super().model()
        model = nn.ModuleDict({"net": net, "teacher": copy.deepcopy(net).requires_grad_(False)})
        model.register_buffer("centre", torch.zeros(CLASSES))
        return model

    def logits(self, model: nn.Module, batch: Any) -> Tensor:
        logits: Tensor = model["net"](batch[0])
        return logits

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        logits = self.logits(model, batch)
        with torch.no_grad():
            wanted = (model["teacher"](batch[0]).float() - model.centre).softmax(1)
        return Loss(F.cross_entropy(logits.float(), wanted, reduction="sum"), len(logits))

    def step_statistics(self, model: nn.Module, batch: Any) -> Mapping[str, Mean | Tensor]:
        outputs = model["teacher"](batch[0]).float()
        return {"centre": Mean(outputs.mean(1).sum(), len(outputs)), "rows": outputs}

    def after_step(self, model: nn.Module, step: int, statistics: Any) -> None:
        centre = statistics["centre"]
        model.centre.lerp_(statistics["rows"].mean(0), 0.1).add_(centre.total / centre.weight, alpha=0.01)
        for teacher, student in zip(model["teacher"].parameters(), model["net"].parameters(), strict=True):
            teacher.lerp_(student, 0.1)


class Tables(Drawn):
    """Rows of two tables beside the network, under an optimizer of their own; one of them only where a sample asks for it."""

    def model(self) -> nn.Module:
        tables = {name: nn.Embedding(23, CLASSES, sparse=True) for name in ("often", "sometimes")}
        return nn.ModuleDict({"net": super().model(), **tables})

    def conditional_parameters(self, model: nn.Module) -> Iterable[str]:
        return [*super().conditional_parameters(model), "sometimes.weight"]

    def logits(self, model: nn.Module, batch: Any) -> Tensor:
        places = (batch[0][:, :2] * 9).round().long().abs() % 23
        logits: Tensor = model["net"](batch[0]).float() + model["often"](places[:, 0])
        asking = batch[0][:, 2] > 1
        if asking.any():
            rows = model["sometimes"](places[asking, 1])
            logits = logits.index_add(0, asking.nonzero()[:, 0], rows)
        return logits

    def optimizer(self, model: nn.Module) -> Any:
        tables = [model["often"].weight, model["sometimes"].weight]
        rest = [parameter for parameter in model["net"].parameters() if parameter.requires_grad]
        return [torch.optim.SparseAdam(tables, lr=0.02), torch.optim.AdamW(rest, lr=0.003)]


PROGRAMS = (Drawn, Terms, Whole, Phased, Followed, Tables)
