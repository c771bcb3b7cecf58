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
        alike = (rows["z"] @ rows["z"].T / 0.5).masked_fill(itself, -1e9)
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


HELD = [kind for kind in held_in(__name__, {}) if kind is not Whole]
"""Jobs whose bits do not depend on who runs them."""
