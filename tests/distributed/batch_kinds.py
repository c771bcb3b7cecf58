"""Jobs whose loss takes something from the whole global batch: rows of all samples, weights of its terms, statistics of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Job, Loss, Mean, Phase, Term
from tests.distributed.kinds import CLASSES, FEATURES, Kind, held_in, perceptron


class Whole(Kind):
    """A kind without the loss of all kinds: `batch_loss` is that of evaluations as well."""

    loss = Job.loss


class Clip(Whole):
    """openai/CLIP: all pairs of the global batch are compared; the temperature is learned, and the loss alone uses it."""

    def model(self) -> nn.Module:
        image = perceptron(FEATURES, 4, nn.BatchNorm1d(8), nn.Dropout(0.2))
        towers = nn.ModuleDict({"image": image, "text": nn.Embedding(CLASSES, 4)})
        towers.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        return towers

    def embed(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        return {"image": F.normalize(model["image"](x), dim=1), "text": F.normalize(model["text"](y), dim=1)}

    def batch_loss(self, model: nn.Module, rows: Mapping[str, Tensor]) -> Loss:
        logits = model.scale.exp() * rows["image"] @ rows["text"].T
        pairs = torch.arange(len(logits))
        sums = [F.cross_entropy(each, pairs, reduction="sum") for each in (logits, logits.T)]
        right = Mean((logits.argmax(1) == pairs).sum(), len(pairs))
        return Loss((sums[0] + sums[1]) / 2, len(pairs), {"right": right})

    def after_step(self, model: nn.Module, step: int) -> None:
        model.scale.clamp_(0, math.log(100))


class BarlowTwins(Whole):
    """facebookresearch/barlowtwins: two views drawn in the embedding, and a batch norm over the whole batch within the loss."""

    def model(self) -> nn.Module:
        return nn.ModuleDict(
            {"net": perceptron(FEATURES, 4, nn.Dropout(0.1)), "bn": nn.BatchNorm1d(4, affine=False)}
        )

    def embed(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        x, _ = batch
        return {name: model["net"](x + 0.1 * torch.randn_like(x)) for name in ("one", "two")}

    def batch_loss(self, model: nn.Module, rows: Mapping[str, Tensor]) -> Loss:
        one, two = rows["one"], rows["two"]
        c = model["bn"](one).T @ model["bn"](two) / len(one)
        on = (c.diagonal() - 1).square().sum()
        return Loss(on + 0.0051 * (c.square().sum() - c.diagonal().square().sum()), 1)


class Triplets(Whole):
    """Batch-hard triplets: a tensor without a name, whose last column is the label."""

    def embed(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return torch.cat([F.normalize(model(x), dim=1), y[:, None].float()], dim=1)

    def batch_loss(self, model: nn.Module, rows: Tensor) -> Loss:
        z, labels = rows[:, :-1], rows[:, -1].detach()
        far, same = torch.cdist(z, z), labels[:, None] == labels
        hardest = far.masked_fill(~same, 0).amax(1) - far.masked_fill(same, math.inf).amin(1)
        return Loss(F.softplus(hardest.clamp(max=10)).sum(), len(rows))


class DiceOverABatch(Whole):
    """One ratio over all samples; it draws in the loss."""

    more: ClassVar[dict[str, Any]] = {"precision": "bf16"}

    def embed(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        return {"share": model(x).softmax(1), "label": y}

    def batch_loss(self, model: nn.Module, rows: Mapping[str, Tensor]) -> Loss:
        wanted = F.one_hot(rows["label"], CLASSES) * (torch.rand(len(rows["label"]), 1) < 0.9)
        overlap = 2 * (rows["share"] * wanted).sum() + 1
        return Loss(1 - overlap / (rows["share"].sum() + wanted.sum() + 1), 1)


class CriticOverTheBatch(Whole):
    """A phase whose loss compares the whole batch, before one whose loss does not."""

    def model(self) -> nn.Module:
        return nn.ModuleDict({"tower": perceptron(FEATURES, 4), "head": nn.Linear(4, CLASSES)})

    def phases(self) -> list[Phase]:
        return [
            Phase("compare", self.compared, ["tower"], embed=self.rows),
            Phase("classify", self.classified, ["head"]),
        ]

    def rows(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        return {"z": F.normalize(model["tower"](x), dim=1), "y": y}

    def compared(self, model: nn.Module, rows: Mapping[str, Tensor]) -> Loss:
        itself = torch.eye(len(rows["z"]), dtype=torch.bool)
        alike = (rows["z"] @ rows["z"].T / 0.5).float().masked_fill(itself, -1e9)
        same = (rows["y"][:, None] == rows["y"]) & ~itself
        return Loss(-(alike.log_softmax(1) * same).sum() / len(same), 1)

    def classified(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(F.cross_entropy(model["head"](model["tower"](x)), y, reduction="sum"), len(y))

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Mean]:
        x, y = batch
        return {"right": Mean((model["head"](model["tower"](x)).argmax(1) == y).sum(), len(y))}


class Detection(Kind):
    """A class for each sample, and a box for those of one class: sums over different numbers, which the data give."""

    def model(self) -> nn.Module:
        return nn.ModuleDict(
            {
                "net": perceptron(FEATURES, 8, nn.Dropout(0.1)),
                "kind": nn.Linear(8, CLASSES),
                "box": nn.Linear(8, 2),
            }
        )

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        z, there = model["net"](x), y == 0
        far = F.smooth_l1_loss(model["box"](z), x[:, :2], reduction="none").sum(1)
        return Loss.of_terms(
            {
                "kind": Term(F.cross_entropy(model["kind"](z), y, reduction="sum"), len(y)),
                "box": Term((far * there).sum(), there.sum(), coefficient=5.0),
            },
            {"there": Mean(there.sum(), len(y))},
        )

    def term_weights(self, batch: Any) -> dict[str, Any]:
        _, y = batch
        return {"kind": len(y), "box": (y == 0).sum()}


class MatchedByPrediction(Detection):
    """What a box is matched with follows from the forward, and with it the weight."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        z = model["net"](x)
        logits = model["kind"](z)
        matched = logits.detach().argmax(1) == y
        far = F.smooth_l1_loss(model["box"](z), x[:, :2], reduction="none").sum(1)
        return Loss.of_terms(
            {
                "kind": Term(F.cross_entropy(logits, y, reduction="sum"), len(y)),
                "box": Term((far * matched).sum(), matched.sum(), coefficient=5.0),
            }
        )

    term_weights = Kind.term_weights


class Moco(Kind):
    """facebookresearch/moco: a queue of the keys of all samples of the steps before, and an encoder of keys that follows."""

    def model(self) -> nn.Module:
        model = nn.ModuleDict({"query": perceptron(FEATURES, 4)})
        model["key"] = perceptron(FEATURES, 4).requires_grad_(False)
        model["key"].load_state_dict(model["query"].state_dict())
        model.register_buffer("queue", F.normalize(torch.randn(24, 4), dim=1))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        q = F.normalize(model["query"](x + 0.1 * torch.randn_like(x)), dim=1)
        with torch.no_grad():
            k = F.normalize(model["key"](x + 0.1 * torch.randn_like(x)), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ model.queue.T], dim=1) / 0.2
        total = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long), reduction="sum")
        return Loss(total, len(x), statistics={"keys": k})

    def after_step(self, model: nn.Module, step: int, statistics: Mapping[str, Any]) -> None:
        keys = statistics["keys"]
        model.queue.copy_(torch.cat([model.queue[len(keys) :], keys]))
        for mine, learned in zip(model["key"].parameters(), model["query"].parameters(), strict=True):
            mine.lerp_(learned, 0.1)


class Dino(Kind):
    """facebookresearch/dino: the center is a running mean of the teacher's outputs over the whole batch."""

    def model(self) -> nn.Module:
        model = nn.ModuleDict({"student": perceptron(FEATURES, 5, nn.Dropout(0.1))})
        model["teacher"] = perceptron(FEATURES, 5, nn.Dropout(0.1)).requires_grad_(False)
        model["teacher"].load_state_dict(model["student"].state_dict())
        model.register_buffer("center", torch.zeros(5))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        with torch.no_grad():
            wanted = ((model["teacher"](x) - model.center) / 0.07).softmax(1)
        return Loss(-(wanted * (model["student"](x) / 0.1).log_softmax(1)).sum(), len(x))

    def step_statistics(self, model: nn.Module, batch: Any) -> dict[str, Mean]:
        x, _ = batch
        return {"center": Mean(model["teacher"](x).sum(0), len(x))}

    def after_step(self, model: nn.Module, step: int, statistics: Mapping[str, Any]) -> None:
        center = statistics["center"]
        model.center.mul_(0.9).add_((center.total / center.weight).float() * 0.1)
        for mine, learned in zip(model["teacher"].parameters(), model["student"].parameters(), strict=True):
            mine.lerp_(learned, 0.1)


class Codebook(Kind):
    """van den Oord et al. 2017 with moving averages: counts and sums of all vectors of a step, kept in the job, and losses of terms."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.counts, self.sums = torch.ones(6), torch.zeros(6, 4)

    def model(self) -> nn.Module:
        model = nn.ModuleDict({"encoder": perceptron(FEATURES, 4), "decoder": perceptron(4, FEATURES)})
        model.register_buffer("codes", torch.randn(6, 4))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        z = model["encoder"](x)
        chosen = F.one_hot(torch.cdist(z.detach(), model.codes).argmin(1), 6).float()
        q = chosen @ model.codes
        restored = model["decoder"](z + (q - z).detach())
        terms = {
            "restored": Term(F.mse_loss(restored, x, reduction="sum"), x.numel()),
            "commitment": Term(F.mse_loss(z, q, reduction="sum"), z.numel(), 0.25),
        }
        return Loss.of_terms(terms, statistics={"codes": Mean(chosen.T @ z.detach(), chosen.sum(0))})

    def after_step(self, model: nn.Module, step: int, statistics: Mapping[str, Any]) -> None:
        codes = statistics["codes"]
        self.counts = 0.9 * self.counts + 0.1 * codes.weight
        self.sums = 0.9 * self.sums + 0.1 * codes.total
        model.codes.copy_(self.sums / self.counts[:, None])

    def state_dict(self) -> dict[str, Tensor]:
        return {"counts": self.counts, "sums": self.sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts, self.sums = state["counts"], state["sums"]


class QueueOfTheBatch(Clip):
    """Rows of the whole batch go on to `after_step` as they are, beside a mean of the micro-batches."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("last", torch.zeros(4))
        return model

    def batch_loss(self, model: nn.Module, rows: Mapping[str, Tensor]) -> Loss:
        loss = super().batch_loss(model, rows)
        return Loss(
            loss.total + (rows["image"] @ model.last).sum(),
            loss.weight,
            loss.parts,
            statistics={"image": rows["image"]},
        )

    def step_statistics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        x, y = batch
        return {"x": Mean(x.sum(0), 1.5), "y": y}

    def after_step(self, model: nn.Module, step: int, statistics: Mapping[str, Any]) -> None:
        super().after_step(model, step)
        ranks = torch.arange(len(statistics["image"])) * statistics["y"]
        model.last.copy_(
            (statistics["image"] * ranks[:, None]).sum(0) / 100 + statistics["x"].total[:4] / 1000
        )


HELD = [kind for kind in held_in(__name__, {}) if kind is not Whole]
"""Jobs whose bits do not depend on who runs them."""
