"""More jobs of many kinds, as their fields write them: held to the bit, or refused with the words beside them."""

from __future__ import annotations

import copy
import functools
import math
import os
import random
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, get_worker_info

import lockstep
from lockstep import Loss, Mean
from lockstep.data import problems as data_problems
from lockstep.training import problems
from lockstep.training.integrity import problems as integrity_problems
from lockstep.training.step import problems as step_problems
from tests.distributed.kinds import CLASSES, FEATURES, Kind, Refusal, Words, held_in, numbers, perceptron

# --- sums over the micro-batch ------------------------------------------------------------------------------


class SupervisedContrast(Kind):
    """Khosla et al. 2020: samples of one class are each other's positives."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        z = F.normalize(model(x), dim=1)
        alike = (y[:, None] == y) & ~torch.eye(len(y), dtype=torch.bool)
        logits = (z @ z.T / 0.5).masked_fill(torch.eye(len(y), dtype=torch.bool), -1e9)
        each = -(logits.log_softmax(1) * alike).sum(1) / alike.sum(1).clamp(min=1)
        return Loss(each.sum(), len(y))


class BarlowTwins(Kind):
    """The correlation of two views over the micro-batch, with batch norm that keeps no statistics."""

    def eval_data(self) -> Dataset[Any] | None:
        return self.data(6, 2)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        norm = functools.partial(F.batch_norm, running_mean=None, running_var=None, training=True)
        one, other = (norm(model(x + 0.1 * torch.randn_like(x))) for _ in range(2))
        correlation = one.T @ other / len(x)
        return Loss((correlation - torch.eye(CLASSES)).square().sum() * len(x), len(x))


class Survival(Kind):
    """Cox's partial likelihood: the risk set is the micro-batch, the weight counts the deaths."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        hazard, died = model(x)[:, 0], (y > 0).float()
        order = x[:, 1].argsort(descending=True)
        hazard, died = hazard[order], died[order]
        return Loss(-((hazard - hazard.logcumsumexp(0)) * died).sum(), died.sum())


class Ordinal(Kind):
    """Cumulative logits with ordered thresholds."""

    def model(self) -> nn.Module:
        model = nn.ModuleDict({"score": perceptron(FEATURES, 1)})
        model.steps = nn.Parameter(torch.zeros(CLASSES - 1))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        above = model["score"](x) - F.softplus(model.steps).cumsum(0)
        wanted = (y[:, None] > torch.arange(CLASSES - 1)).float()
        return Loss(F.binary_cross_entropy_with_logits(above, wanted, reduction="sum"), len(y))


class MultiLabel(Kind):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        wanted = (x[:, :CLASSES] > 0).float()
        weights = torch.tensor([1.0, 3.0, 0.5])
        total = F.binary_cross_entropy_with_logits(model(x), wanted, pos_weight=weights, reduction="sum")
        return Loss(total, wanted.numel())


class AngularMargin(Kind):
    """ArcFace."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        cosine = F.linear(F.normalize(model[:-1](x)), F.normalize(model[-1].weight))
        cosine = cosine + 0 * model[-1].bias
        angle = cosine.clamp(-0.99, 0.99).acos() + 0.2 * F.one_hot(y, CLASSES)
        return Loss(F.cross_entropy(8 * angle.cos(), y, reduction="sum"), len(y))


class CentreLoss(Kind):
    def model(self) -> nn.Module:
        model = perceptron()
        model.centres = nn.Parameter(torch.zeros(CLASSES, CLASSES))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        z = model(x)
        return Loss(
            F.cross_entropy(z, y, reduction="sum") + 0.1 * (z - model.centres[y]).square().sum(), len(y)
        )


class SegmentsByDice(Kind):
    """A small U-Net whose loss is a ratio for each sample."""

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        x = numbers(samples, 1, 8, 8, seed=seed)
        return TensorDataset(x, (x > 0.5).float())

    def model(self) -> nn.Module:
        return SmallUNet()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        p = model(x).sigmoid()
        dice = (2 * (p * y).sum((1, 2, 3)) + 1) / ((p + y).sum((1, 2, 3)) + 1)
        return Loss((1 - dice).sum(), len(x), {"dice": Mean(dice.detach().sum(), len(x))})


class SmallUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.up = nn.ConvTranspose2d(4, 2, 2, stride=2)
        self.head = nn.Conv2d(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([x, self.up(self.norm(self.down(x)).relu())], 1))


class Detection(Kind):
    """As torchvision's detectors: a list of dicts of ragged targets, several losses in a dict."""

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(seed)
        return [  # type: ignore[return-value]
            (
                torch.randn(FEATURES, generator=generator),
                {"boxes": torch.rand(1 + i % 3, 4, generator=generator), "labels": torch.arange(1 + i % 3)},
            )
            for i in range(samples)
        ]

    def collate(self, samples: Sequence[Any]) -> Any:
        return tuple(zip(*samples, strict=True))

    def model(self) -> nn.Module:
        return nn.ModuleDict({"boxes": perceptron(FEATURES, 12), "labels": perceptron(FEATURES, 9)})

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        images, targets = batch
        losses = {"boxes": torch.zeros(()), "labels": torch.zeros(())}
        for image, target in zip(images, targets, strict=True):
            n = len(target["labels"])
            boxes = model["boxes"](image).view(3, 4)[:n]
            losses["boxes"] = losses["boxes"] + F.smooth_l1_loss(boxes, target["boxes"], reduction="sum")
            logits = model["labels"](image).view(3, 3)[:n]
            losses["labels"] = losses["labels"] + F.cross_entropy(logits, target["labels"], reduction="sum")
        count = sum(len(target["labels"]) for target in targets)
        return Loss(sum(losses.values()), count, {k: Mean(v.detach(), count) for k, v in losses.items()})


class ListwiseRanking(Kind):
    """Queries with a ragged number of documents, padded and masked."""

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(2 + i % 4, FEATURES, generator=generator) for i in range(samples)]  # type: ignore[return-value]

    def collate(self, samples: Sequence[Tensor]) -> Any:
        lengths = torch.tensor([len(one) for one in samples])
        return {"x": nn.utils.rnn.pad_sequence(list(samples), batch_first=True), "lengths": lengths}

    def model(self) -> nn.Module:
        return perceptron(FEATURES, 1)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, lengths = batch["x"], batch["lengths"]
        padding = torch.arange(x.shape[1]) >= lengths[:, None]
        scores = model(x)[..., 0].masked_fill(padding, -1e9)
        wanted = x[..., 0].masked_fill(padding, -1e9).softmax(1)
        return Loss(-(wanted * scores.log_softmax(1)).sum(), len(x))


# --- generative models --------------------------------------------------------------------------------------


class NormalizingFlow(Kind):
    """RealNVP: two affine couplings."""

    def model(self) -> nn.Module:
        return nn.ModuleList(perceptron(FEATURES // 2, FEATURES) for _ in range(2))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        one, other = x.chunk(2, 1)
        volume = torch.zeros(len(x))
        for coupling in model:
            scale, shift = coupling(one).chunk(2, 1)
            other, volume = other * scale.tanh().exp() + shift, volume + scale.tanh().sum(1)
            one, other = other, one
        return Loss((0.5 * (one.square() + other.square()).sum(1) - volume).sum(), len(x))


class VectorQuantised(Kind):
    """VQ-VAE with a straight-through gradient; the code book learns from its own loss."""

    def model(self) -> nn.Module:
        parts = {"encoder": perceptron(FEATURES, 2), "decoder": perceptron(2, FEATURES)}
        return nn.ModuleDict({**parts, "codes": nn.Embedding(5, 2)})

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        z = model["encoder"](x)
        code = model["codes"](torch.cdist(z, model["codes"].weight).argmin(1))
        restored = model["decoder"](z + (code - z).detach())
        total = F.mse_loss(restored, x, reduction="sum") + F.mse_loss(code, z.detach(), reduction="sum")
        return Loss(total + 0.25 * F.mse_loss(z, code.detach(), reduction="sum"), len(x))


class CodesByMovingAverage(VectorQuantised):
    """The code book in buffers, moved in the forward: the step's first micro-batch moves it."""

    def model(self) -> nn.Module:
        model = super().model()
        codes = model.pop("codes").weight.detach().clone()
        model.register_buffer("codes_", codes)
        model.register_buffer("uses", torch.ones(len(codes)))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        z = model["encoder"](x)
        chosen = torch.cdist(z, model.codes_).argmin(1)
        code = model.codes_[chosen]
        if model.training:
            with torch.no_grad():
                share = F.one_hot(chosen, len(model.codes_)).float()
                model.uses.mul_(0.9).add_(share.sum(0), alpha=0.1)
                model.codes_.lerp_((share.T @ z) / model.uses[:, None], 0.1)
        restored = model["decoder"](z + (code - z).detach())
        total = F.mse_loss(restored, x, reduction="sum") + F.mse_loss(z, code, reduction="sum")
        return Loss(total, len(x))


class Denoising(Kind):
    def model(self) -> nn.Module:
        return perceptron(FEATURES, FEATURES, nn.LayerNorm(8))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        return Loss(F.mse_loss(model(F.dropout(x, 0.3)), x, reduction="sum"), x.numel())


class EnergyByLangevin(Kind):
    """Contrastive divergence: negatives are walked down the energy, on its own gradient."""

    def model(self) -> nn.Module:
        return perceptron(FEATURES, 1)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        walk = x.detach().clone()
        with torch.enable_grad():
            for _ in range(3):
                walk.requires_grad_()
                slope = torch.autograd.grad(model(walk).sum(), walk)[0]
                walk = (walk - 0.1 * slope + 0.05 * torch.randn_like(walk)).detach()
        high, low = model(walk), model(x)
        return Loss((low - high + 0.1 * (low.square() + high.square())).sum(), len(x))


class MixtureDensity(Kind):
    def model(self) -> nn.Module:
        return perceptron(FEATURES - 1, 9)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        share, mean, log = model(x[:, :-1]).chunk(3, 1)
        each = torch.distributions.Normal(mean, log.exp()).log_prob(x[:, -1:]) + share.log_softmax(1)
        return Loss(-each.logsumexp(1).sum(), len(x))


class BayesByBackprop(Kind):
    """Weights are drawn anew for each micro-batch, which reads them through `functional_call`."""

    def model(self) -> nn.Module:
        net = perceptron()
        model = nn.ModuleDict({"net": net})
        model.spread = nn.ParameterDict(
            {name.replace(".", "_"): torch.full_like(p, -4.0) for name, p in net.named_parameters()}
        )
        return model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        drawn, divergence = {}, torch.zeros(())
        for name, mean in model["net"].named_parameters():
            log = model.spread[name.replace(".", "_")]
            drawn[name] = mean + log.exp() * torch.randn_like(mean)
            divergence = divergence + (0.5 * (mean.square() + (2 * log).exp()) - log).sum()
        logits = torch.func.functional_call(model["net"], drawn, (x,))
        return Loss(F.cross_entropy(logits, y, reduction="sum") + len(x) / 32 * divergence, len(x))


class GumbelGate(Kind):
    def model(self) -> nn.Module:
        return nn.ModuleDict({"gate": nn.Linear(FEATURES, 2), "a": perceptron(), "b": perceptron()})

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        gate = F.gumbel_softmax(model["gate"](x), tau=0.5, hard=True)
        logits = gate[:, :1] * model["a"](x) + gate[:, 1:] * model["b"](x)
        return Loss(F.cross_entropy(logits, y, reduction="sum"), len(y))


# --- functions of functions ---------------------------------------------------------------------------------


class HyperNetwork(Kind):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, FEATURES * CLASSES))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        weights = model(x[:, :2]).view(len(x), CLASSES, FEATURES)
        return Loss(F.cross_entropy(torch.einsum("bcf,bf->bc", weights, x), y, reduction="sum"), len(y))


class InnerLoop(Kind):
    """MAML: each sample of the micro-batch is a task, adapted by one step of its own."""

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        return TensorDataset(numbers(samples, 8, FEATURES, seed=seed))

    def model(self) -> nn.Module:
        return perceptron(FEATURES - 1, 1)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        weights = dict(model.named_parameters())

        def error(given: Any, task: Tensor) -> Tensor:
            out = torch.func.functional_call(model, given, (task[:, :-1],))
            return F.mse_loss(out, task[:, -1:])

        total = torch.zeros(())
        with torch.enable_grad():
            for task in batch[0]:
                slopes = torch.autograd.grad(
                    error(weights, task[:4]), list(weights.values()), create_graph=True
                )
                adapted = {n: w - 0.1 * s for (n, w), s in zip(weights.items(), slopes, strict=True)}
                total = total + error(adapted, task[4:])
        return Loss(total, len(batch[0]))


class PhysicsInformed(Kind):
    """u'' = -u along one coordinate, by gradients of gradients; weights in double."""

    def model(self) -> nn.Module:
        return perceptron(1, 1).double()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        t = batch[0][:, :1].double().requires_grad_()
        with torch.enable_grad():
            u = model(t)
            speed = torch.autograd.grad(u.sum(), t, create_graph=True)[0]
            force = torch.autograd.grad(speed.sum(), t, create_graph=True)[0]
        return Loss((force + u).square().sum(), len(t))


class NeuralOde(Kind):
    def model(self) -> nn.Module:
        return nn.ModuleDict({"field": perceptron(FEATURES, FEATURES), "head": nn.Linear(FEATURES, CLASSES)})

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        for _ in range(4):
            x = x + 0.25 * model["field"](x + 0.125 * model["field"](x))
        return Loss(F.cross_entropy(model["head"](x), y, reduction="sum"), len(y))


class Equilibrium(Kind):
    """A fixed point that is looked for until it stands still, and one step of gradient."""

    def model(self) -> nn.Module:
        return nn.ModuleDict({"in": nn.Linear(FEATURES, 8), "loop": nn.Linear(8, 8), "out": nn.Linear(8, 3)})

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        given, z = model["in"](x), torch.zeros(len(x), 8)
        with torch.no_grad():
            for _ in range(20):
                before, z = z, (given + 0.3 * model["loop"](z)).tanh()
                if (z - before).norm() < 1e-4:
                    break
        z = (given + 0.3 * model["loop"](z)).tanh()
        return Loss(F.cross_entropy(model["out"](z), y, reduction="sum"), len(y))


class PerSampleGradients(Kind):
    """Gradients of single samples by vmap, whose norms are a penalty."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        weights = dict(model.named_parameters())

        def one(given: Any, sample: Tensor, label: Tensor) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(model, given, (sample[None],)), label[None])

        with torch.enable_grad():
            slopes = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(weights, x, y)
            norms = sum(slope.flatten(1).square().sum(1) for slope in slopes.values())
            total = F.cross_entropy(model(x), y, reduction="sum") + 0.01 * norms.sum()
        return Loss(total, len(y))


class ComplexNumbers(Kind):
    """A filter on a spectrum, whose complex weights are held as pairs of real numbers."""

    def model(self) -> nn.Module:
        model = nn.ModuleDict({"head": nn.Linear(4, CLASSES)})
        model.filter = nn.Parameter(torch.randn(4, 2))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        spectrum = torch.fft.rfft(x) * torch.view_as_complex(model.filter)
        return Loss(F.cross_entropy(model["head"](spectrum.abs()), y, reduction="sum"), len(y))


# --- modules ------------------------------------------------------------------------------------------------


class LowRank(Kind):
    """LoRA: a frozen base, and what is added to it."""

    def model(self) -> nn.Module:
        model = perceptron().requires_grad_(False)
        model[0], model[2] = Adapted(model[0]), Adapted(model[2])
        return model


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.drop = base, nn.Dropout(0.1)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(self.drop(x)))


class DeepSupervision(Kind):
    def model(self) -> nn.Module:
        return nn.ModuleDict({"one": nn.Linear(FEATURES, 8), "two": nn.Linear(8, 8), "head": nn.Linear(8, 3)})

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        one = model["one"](x).tanh()
        two = model["two"](one).tanh()
        losses = [F.cross_entropy(model["head"](z), y, reduction="sum") for z in (one, two)]
        return Loss(0.3 * losses[0] + losses[1], len(y), {"deep": Mean(losses[1].detach(), len(y))})


class Capsules(Kind):
    """Routing by agreement (Sabour et al. 2017)."""

    def model(self) -> nn.Module:
        model = nn.Module()
        model.weight = nn.Parameter(0.3 * torch.randn(CLASSES, 3, 4, 2))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        votes = torch.einsum("cijk,bik->bcij", model.weight, x.view(-1, 3, 2))
        routing = torch.zeros(votes.shape[:3])
        for _ in range(3):
            out = (routing.softmax(1)[..., None] * votes).sum(2)
            length = out.norm(dim=2, keepdim=True)
            out = out * length / (1 + length.square())
            routing = routing + (votes * out[:, :, None]).sum(3).detach()
        length, wanted = out.norm(dim=2), F.one_hot(y, CLASSES)
        margin = wanted * F.relu(0.9 - length).square() + 0.5 * (1 - wanted) * F.relu(length - 0.1).square()
        return Loss(margin.sum(), len(y))


class Recomputed(Kind):
    """The job calls torch's checkpoint itself, with dropout inside."""

    def model(self) -> nn.Module:
        return perceptron(FEATURES, CLASSES, nn.Dropout(0.3), nn.BatchNorm1d(8))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        logits = checkpoint(model, x, use_reentrant=False)
        return Loss(F.cross_entropy(logits, y, reduction="sum"), len(y))


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).T


class Parametrized(Kind):
    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, CLASSES))
        parametrize.register_parametrization(model[0], "weight", Symmetric())
        nn.utils.parametrizations.orthogonal(model[2])
        return model


class Pruned(Kind):
    """Half of a layer is masked: the mask is a buffer, the weight an attribute that a hook makes."""

    def model(self) -> nn.Module:
        model = perceptron()
        prune.l1_unstructured(model[0], "weight", amount=0.5)
        return model


class SpectralNormByHook(Kind):
    """The older form, which writes its vectors in the forward."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.utils.spectral_norm(nn.Linear(FEATURES, 8)), nn.Tanh(), nn.Linear(8, 3))


class CumulativeBatchNorm(Kind):
    """Statistics that average over all steps, and an instance norm that keeps some."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, FEATURES)),
            nn.Conv1d(1, 4, 3),
            nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
            nn.Flatten(),
            nn.BatchNorm1d(16, momentum=None),
            nn.Linear(16, 3),
        )


class FrozenBatchNorm(Kind):
    """Fine-tuning with the statistics of a base kept as they are."""

    def model(self) -> nn.Module:
        return FineTuned()


class FineTuned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = perceptron(FEATURES, 8, nn.BatchNorm1d(8)).requires_grad_(False)
        self.head = nn.Linear(8, CLASSES)

    def train(self, mode: bool = True) -> FineTuned:
        super().train(mode)
        self.base.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x))


class FakeQuantised(Kind):
    """Quantisation-aware training: the range is observed in the forward, in buffers."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), Quantised(), nn.Tanh(), nn.Linear(8, CLASSES))


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("highest", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.highest = torch.maximum(0.9 * self.highest, x.detach().abs().amax())
        return torch.fake_quantize_per_tensor_affine(x, float(self.highest) / 127, 0, -128, 127)


class StochasticDepth(Kind):
    def model(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)])

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        kept = (torch.rand(len(x), 1) < 0.7).float() / 0.7 if model.training else 1.0
        return Loss(F.cross_entropy(model[1](x + kept * model[0](x)), y, reduction="sum"), len(y))


class ChannelsLast(Kind):
    def model(self) -> nn.Module:
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 3),
        )
        return model.to(memory_format=torch.channels_last)

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        x = numbers(samples, 3, 8, 8, seed=seed)
        return TensorDataset(x, (x.sum((1, 2, 3)) > 0).long())

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return super().loss(model, (x.contiguous(memory_format=torch.channels_last), y))


class HalfWeights(Kind):
    """The whole model in bfloat16, as large models are loaded."""

    def model(self) -> nn.Module:
        return perceptron(FEATURES, CLASSES, nn.LayerNorm(8)).bfloat16()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(F.cross_entropy(model(x.bfloat16()).float(), y, reduction="sum"), len(y))


class TeacherInDouble(Kind):
    """A frozen teacher of another type, in the model and in evaluation mode."""

    def model(self) -> nn.Module:
        return nn.ModuleDict(
            {"student": perceptron(), "teacher": perceptron().double().requires_grad_(False)}
        )

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        wanted = model["teacher"](x.double()).softmax(1).float()
        return Loss(F.kl_div(model["student"](x).log_softmax(1), wanted, reduction="sum"), len(x))


class FeaturesByHook(Kind):
    """A perceptual loss: a hook of a frozen net collects features, and each loss takes them away."""

    def model(self) -> nn.Module:
        return nn.ModuleDict(
            {"net": perceptron(FEATURES, FEATURES), "seen": perceptron().requires_grad_(False)}
        )

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        features: list[Tensor] = []
        handle = model["seen"][0].register_forward_hook(lambda *given: features.append(given[2]))
        model["seen"](model["net"](x))
        model["seen"](x)
        handle.remove()
        return Loss(F.l1_loss(features[0], features[1], reduction="sum"), features[0].numel())


class NoiseOnGradients(Kind):
    """Hooks of parameters change their gradients, with noise and by a limit."""

    def model(self) -> nn.Module:
        model = perceptron()
        model[0].weight.register_hook(lambda slope: slope + 0.01 * torch.randn_like(slope))
        model[2].weight.register_hook(lambda slope: slope.clamp(-0.5, 0.5))
        return model


# --- sequences ----------------------------------------------------------------------------------------------


class CausalLanguageModel(Words):
    """As transformers' models: a model that gives an output object with the mean loss, made a sum again."""

    def model(self) -> nn.Module:
        return Causal()

    def collate(self, samples: Sequence[Tensor]) -> Any:
        ids = nn.utils.rnn.pad_sequence(list(samples), batch_first=True)
        return {
            "input_ids": ids,
            "attention_mask": (ids > 0).long(),
            "labels": ids.masked_fill(ids == 0, -100),
        }

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        out = model(**batch)
        count = (batch["labels"][:, 1:] != -100).sum()
        return Loss(out.loss * count, count, {"perplexing": Mean(out.loss.detach() * count, count)})


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True)
        self.register_buffer("places", numbers(16, 8), persistent=False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Output:
        length = input_ids.shape[1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        z = self.layer(
            self.table(input_ids) + self.places[:length],
            src_mask=later,
            src_key_padding_mask=attention_mask == 0,
            is_causal=True,
        )
        logits = self.head(z)
        return Output(F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits)


class Translation(Words):
    """Sequence to sequence, with a teacher that is sometimes left out."""

    def body(self) -> nn.Module:
        return nn.ModuleDict({"reads": nn.GRU(8, 8, batch_first=True), "writes": nn.GRUCell(8, 8)})

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        words = batch["words"]
        _, state = model["body"]["reads"](model["table"](words))
        state, word, total = state[0], torch.zeros(len(words), dtype=torch.long), torch.zeros(())
        for place in reversed(range(words.shape[1])):
            state = model["body"]["writes"](model["table"](word), state)
            logits, wanted = model["head"](state), words[:, place]
            total = total + F.cross_entropy(logits, wanted, ignore_index=0, reduction="sum")
            word = wanted if torch.rand(()) < 0.5 else logits.argmax(1)
        return Loss(total, (words > 0).sum())


class SkipGrams(Words):
    """Word vectors with negatives drawn from a distribution."""

    def model(self) -> nn.Module:
        return nn.ModuleDict({"centre": nn.Embedding(11, 8), "around": nn.Embedding(11, 8)})

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        words = batch["words"]
        centre, around = words[:, :-1], words[:, 1:]
        pairs = (centre > 0) & (around > 0)
        centre, around = centre[pairs], around[pairs]
        drawn = torch.multinomial(torch.arange(11.0), len(centre) * 3, replacement=True).view(-1, 3)
        z = model["centre"](centre)
        true = F.logsigmoid((z * model["around"](around)).sum(1))
        false = F.logsigmoid(-(z[:, None] * model["around"](drawn)).sum(2)).sum(1)
        return Loss(-(true + false).sum(), len(centre))


class TaggingByCrf(Words):
    """A linear chain over the scores of a recurrent net."""

    def model(self) -> nn.Module:
        model = super().model()
        model["head"] = nn.Linear(8, 3)
        model.moves = nn.Parameter(torch.zeros(3, 3))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        words = batch["words"]
        scores = model["head"](model["body"](model["table"](words))[0])
        tags, there = words % 3, words > 0
        alpha, path = scores[:, 0], scores[:, 0].gather(1, tags[:, :1])[:, 0]
        for i in range(1, words.shape[1]):
            now = (alpha[:, :, None] + model.moves).logsumexp(1) + scores[:, i]
            step = model.moves[tags[:, i - 1], tags[:, i]] + scores[:, i].gather(1, tags[:, i : i + 1])[:, 0]
            alpha = torch.where(there[:, i : i + 1], now, alpha)
            path = torch.where(there[:, i], path + step, path)
        return Loss((alpha.logsumexp(1) - path).sum(), len(words))


class Forecast(Kind):
    """Dilated causal convolutions over windows of one long series, which the dataset cuts."""

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        return Windows(numbers(samples + 16, seed=seed).cumsum(0))

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Conv1d(1, 4, 2, dilation=1), nn.ReLU(), nn.Conv1d(4, 1, 2, dilation=2))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        given, wanted = batch["given"][:, None], batch["wanted"]
        return Loss(F.huber_loss(model(given)[:, 0, -4:], wanted, reduction="sum"), wanted.numel())


class Windows(Dataset[Any]):
    def __init__(self, series: Tensor) -> None:
        self.series = series

    def __len__(self) -> int:
        return len(self.series) - 16

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"given": self.series[i : i + 12], "wanted": self.series[i + 12 : i + 16]}


# --- reinforcement, recommendation, self-supervision --------------------------------------------------------


class Trajectory(NamedTuple):
    state: Tensor
    action: Tensor
    advantage: Tensor
    log_probability: Tensor


class ClippedPolicy(Kind):
    """PPO's objective on trajectories that are fixed, given as named tuples."""

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        x = numbers(samples, FEATURES + 1, seed=seed)
        return [Trajectory(row[:-1], row[:3].argmax(), row[-1], torch.tensor(-1.1)) for row in x]  # type: ignore[return-value]

    def model(self) -> nn.Module:
        return nn.ModuleDict({"policy": perceptron(), "value": perceptron(FEATURES, 1)})

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        policy = torch.distributions.Categorical(logits=model["policy"](batch.state))
        ratio = (policy.log_prob(batch.action) - batch.log_probability).exp()
        gain = torch.minimum(ratio * batch.advantage, ratio.clamp(0.8, 1.2) * batch.advantage)
        value = F.mse_loss(model["value"](batch.state)[:, 0], batch.advantage, reduction="sum")
        total = 0.5 * value - gain.sum() - 0.01 * policy.entropy().sum()
        return Loss(total, len(gain), {"entropy": Mean(policy.entropy().detach().sum(), len(gain))})


class Recommendation(Kind):
    """Bayesian personalised ranking: a negative is drawn for each pair in the dataset."""

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        return Pairs(samples, seed)

    def model(self) -> nn.Module:
        return nn.ModuleDict({"user": nn.Embedding(97, 4), "item": nn.Embedding(89, 4)})

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        user = model["user"](batch["user"])
        score = [(user * model["item"](batch[key])).sum(1) for key in ("item", "other")]
        return Loss(-F.logsigmoid(score[0] - score[1]).sum(), len(user))


class Pairs(Dataset[Any]):
    def __init__(self, samples: int, seed: int) -> None:
        self.rows = np.random.default_rng(seed).integers(0, (97, 89), size=(samples, 2))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        user, item = self.rows[i]
        return {"user": user, "item": item, "other": np.random.randint(89)}


class KnowledgeGraph(Kind):
    """TransE with corrupted tails; vectors are normalised in the forward, not written."""

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(seed)
        return TensorDataset(torch.randint(9, (samples, 3), generator=generator))

    def model(self) -> nn.Module:
        return nn.ModuleDict({"entity": nn.Embedding(9, 4, max_norm=None), "relation": nn.Embedding(9, 4)})

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        head, relation, tail = batch[0].T
        wrong = torch.randint(9, tail.shape)
        move = F.normalize(model["entity"](head)) + model["relation"](relation)
        near, far = ((move - F.normalize(model["entity"](t))).norm(dim=1) for t in (tail, wrong))
        return Loss(F.relu(1 + near - far).sum(), len(head))


class BootstrapYourOwnLatent(Kind):
    """BYOL as it is ported: the target is frozen, and a hook of the optimizer moves it once a step."""

    def model(self) -> nn.Module:
        online = perceptron(FEATURES, 4, nn.BatchNorm1d(8))
        target = copy.deepcopy(online).requires_grad_(False)
        return nn.ModuleDict({"online": online, "target": target, "guess": nn.Linear(4, 4)})

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)

        @torch.no_grad()
        def follow(*_: Any) -> None:
            for target, online in zip(
                model["target"].parameters(), model["online"].parameters(), strict=True
            ):
                target.data.mul_(0.9).add_(online.data, alpha=0.1)

        optimizer.register_step_post_hook(follow)
        return optimizer

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        one, other = (x + 0.1 * torch.randn_like(x) for _ in range(2))
        total = torch.zeros(())
        for a, b in ((one, other), (other, one)):
            guess = model["guess"](model["online"](a))
            total = total + (2 - 2 * F.cosine_similarity(guess, model["target"](b).detach())).sum()
        return Loss(total, len(x))


class SelfDistillation(Kind):
    """DINO: the centre of the teacher's outputs is a buffer that the forward moves."""

    def model(self) -> nn.Module:
        model = perceptron()
        model.register_buffer("centre", torch.zeros(1, CLASSES))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        with torch.no_grad():
            seen = model(x)
            wanted = ((seen - model.centre) / 0.1).softmax(1)
            if model.training:
                model.centre = 0.9 * model.centre + 0.1 * seen.mean(0, keepdim=True)
        guess = model(x + 0.1 * torch.randn_like(x)).log_softmax(1)
        return Loss(-(wanted * guess).sum(), len(x))


class QueueInABuffer(Kind):
    """MoCo's queue as a buffer: the keys of the step's first micro-batch go in."""

    def model(self) -> nn.Module:
        model = perceptron()
        model.register_buffer("queue", F.normalize(numbers(6, CLASSES)))
        model.register_buffer("place", torch.zeros((), dtype=torch.long))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        query, key = F.normalize(model(x)), F.normalize(model(x + 0.1 * torch.randn_like(x))).detach()
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ model.queue.clone().T], 1) / 0.2
        if model.training:
            at = int(model.place)
            model.queue[(at + torch.arange(len(key))) % 6] = key
            model.place += len(key)
        return Loss(F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long), reduction="sum"), len(x))


class MaskedPatches(Kind):
    """A masked autoencoder over patches, with a learned token."""

    def model(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        model = nn.ModuleDict({"embed": nn.Linear(1, 4), "body": layer, "head": nn.Linear(4, 1)})
        model.token = nn.Parameter(torch.zeros(4))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x = batch[0][..., None]
        hidden = torch.rand(x.shape[:2]).argsort(1) < 3
        z = torch.where(hidden[..., None], model.token, model["embed"](x))
        restored = model["head"](model["body"](z))
        return Loss((restored - x)[hidden].square().sum(), hidden.sum())


# --- averages and optimizers --------------------------------------------------------------------------------


def swept(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], **{"lr": 0.1, **settings})


class WeightAverage(Kind):
    """torch's own average of the weights, part of the model and moved by a hook; its count is a buffer."""

    multi_avg_fn: Any = None

    def model(self) -> nn.Module:
        net = perceptron(FEATURES, CLASSES, nn.BatchNorm1d(8))
        average = AveragedModel(net, multi_avg_fn=type(self).multi_avg_fn, use_buffers=True)
        return nn.ModuleDict({"net": net, "average": average.requires_grad_(False)})

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = swept(model)
        optimizer.register_step_post_hook(lambda *_: model["average"].update_parameters(model["net"]))
        return optimizer

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return super().loss(model["net"] if model.training else model["average"], batch)


class ExponentialAverage(WeightAverage):
    multi_avg_fn = staticmethod(get_ema_multi_avg_fn(0.9))


class TeacherMovedByHook(Kind):
    """Mean teacher in buffers, moved by a hook of the optimizer: every micro-batch reads it."""

    def model(self) -> nn.Module:
        model = perceptron()
        model.register_buffer("teacher", model[0].weight.detach().clone())
        model.register_buffer("moved", torch.zeros((), dtype=torch.long))
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = swept(model, momentum=0.9)

        def follow(*_: Any) -> None:
            model.teacher.data.mul_(0.7).add_(model[0].weight.data, alpha=0.3)
            model.moved += 1

        optimizer.register_step_post_hook(follow)
        return optimizer

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        loss = super().loss(model, batch)
        far = F.mse_loss(model[0](x).tanh(), (x @ model.teacher.T + model.moved).tanh(), reduction="sum")
        return Loss(loss.total + far, loss.weight, loss.parts)


class TeacherReplacedByHook(TeacherMovedByHook):
    """The same, where the hook puts another tensor in the buffer's place."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = swept(model)

        def follow(*_: Any) -> None:
            model.teacher = 0.7 * model.teacher + 0.3 * model[0].weight.detach()
            model.moved = model.moved + 1

        optimizer.register_step_post_hook(follow)
        return optimizer


class NoisyUpdates(Kind):
    """Langevin dynamics: the optimizer draws noise for each update."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Langevin(model.parameters(), lr=0.05)


class Langevin(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(torch.randn_like(parameter), alpha=0.01 * math.sqrt(group["lr"]))


class PrivateGradients(Kind):
    """Noise on the gradient once a step, by a hook before the update."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = swept(model)

        def blur(one: torch.optim.Optimizer, *_: Any) -> None:
            for parameter in one.param_groups[0]["params"]:
                parameter.grad.add_(torch.from_numpy(np.random.normal(0, 0.01, parameter.shape)).float())

        optimizer.register_step_pre_hook(blur)
        return optimizer


class Orthogonalised(Kind):
    """Muon: the update of a matrix is its momentum, orthogonalised; its state is the optimizer's own."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Muon(model.parameters(), lr=0.02)


class Muon(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                update = momentum.mul_(0.9).add_(parameter.grad)
                if parameter.dim() == 2:
                    update = update / (update.norm() + 1e-7)
                    for _ in range(5):
                        update = 1.5 * update - 0.5 * update @ update.T @ update
                parameter.sub_(update, alpha=group["lr"])


class LookAhead(Kind):
    """Slow weights in the state of the optimizer, where a checkpoint finds them."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = swept(model)

        @torch.no_grad()
        def pull(one: torch.optim.Optimizer, *_: Any) -> None:
            for parameter in one.param_groups[0]["params"]:
                state = one.state[parameter]
                slow = state.setdefault("slow", parameter.detach().clone())
                state["steps"] = state.get("steps", 0) + 1
                if state["steps"] % 2 == 0:
                    parameter.copy_(slow.lerp_(parameter, 0.5))

        optimizer.register_step_post_hook(pull)
        return optimizer


class GroupsOfParameters(Kind):
    """Layer-wise rates, no decay for biases, foreach and maximise left alone."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        return torch.optim.NAdam(
            [
                {"params": [p for n, p in named.items() if n.endswith("weight")], "weight_decay": 0.1},
                {"params": [p for n, p in named.items() if n.endswith("bias")], "lr": 0.02},
            ],
            lr=0.01,
        )


class AnnealedByABuffer(Kind):
    """A weight that warms up with a count of the steps, in a buffer."""

    def model(self) -> nn.Module:
        model = perceptron()
        model.register_buffer("steps", torch.zeros((), dtype=torch.long))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        if model.training:
            model.steps += 1
        loss = super().loss(model, batch)
        warm = min(1.0, int(model.steps) / 3)
        return Loss(loss.total + warm * 0.1 * model(x).square().sum(), loss.weight, loss.parts)


class WritesItsWeightsByHook(Kind):
    """Weight clipping where it belongs."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.RMSprop(model.parameters(), lr=0.05)

        @torch.no_grad()
        def clip(*_: Any) -> None:
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)

        optimizer.register_step_post_hook(clip)
        return optimizer


# --- data ---------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    x: Tensor
    y: int
    name: str


class Dataclasses(Kind):
    """Samples and micro-batches that are dataclasses."""

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        x = numbers(samples, FEATURES, seed=seed)
        return [Sample(row, int(row[:3].argmax()), f"sample {i} of {seed}") for i, row in enumerate(x)]  # type: ignore[return-value]

    def collate(self, samples: Sequence[Sample]) -> Any:
        return Gathered(
            torch.stack([s.x for s in samples]), [s.y for s in samples], [s.name for s in samples]
        )

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return super().loss(model, (batch.x, torch.tensor(batch.y)))


@dataclass
class Gathered:
    x: Tensor
    y: list[int]
    names: list[str]


class ArraysAndText(Kind):
    """NumPy rows and strings; the collation splits the strings into words."""

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        rows = np.random.default_rng(seed).normal(size=(samples, FEATURES)).astype(np.float32)
        return [{"row": row, "text": " ".join(f"w{abs(v):.2f}" for v in row)} for row in rows]  # type: ignore[return-value]

    def collate(self, samples: Sequence[Any]) -> Any:
        lengths = [sum(len(word) % 3 for word in sample["text"].split()) % CLASSES for sample in samples]
        return np.stack([sample["row"] for sample in samples]), np.array(lengths)


class Augmented(Kind):
    """Crops and noise from all three generators, in the dataset; a part of it, and two in one."""

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        parts = [Augmenting(numbers(samples, FEATURES, seed=10 * seed + i)) for i in range(2)]
        return Subset(ConcatDataset(parts), range(0, 2 * samples, 2))


class Augmenting(Dataset[Any]):
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        import random

        row = self.rows[i].roll(random.randrange(3)) + 0.1 * torch.randn(FEATURES)
        return (row * float(np.random.uniform(0.9, 1.1))).float(), int(self.rows[i, :3].argmax())


class CachedSamples(Kind):
    """What is costly and draws nothing is kept in memory."""

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        return Caching(numbers(samples, FEATURES, seed=seed))


class Caching(Augmenting):
    def __init__(self, rows: Tensor) -> None:
        super().__init__(rows)
        self.read = functools.lru_cache(maxsize=8)(self._read)

    def _read(self, i: int) -> Tensor:
        return self.rows[i].sin()

    def __getitem__(self, i: int) -> Any:
        row = self.read(i)
        return row + 0.1 * torch.randn(FEATURES), int(row[:3].argmax())


class FetchedAtOnce(Kind):
    """A dataset that fetches a micro-batch at a time, and a loss that writes into what it is given."""

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        return AtOnce(numbers(samples, FEATURES, seed=seed))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        x.mul_(0.5)
        return super().loss(model, (x, y))


class AtOnce(Augmenting):
    def __getitems__(self, ids: Any) -> list[Any]:
        rows = self.rows[torch.as_tensor(ids)]
        return [(row, int(row[:3].argmax())) for row in rows]


class TeacherMadeInInit(Kind):
    """A fixed target that the job draws when it is made."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.target = nn.Linear(FEATURES, CLASSES).requires_grad_(False)
        self.shift = np.random.normal(size=CLASSES).astype(np.float32)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        wanted = self.target(x) + torch.from_numpy(self.shift)
        return Loss(F.mse_loss(model(x), wanted, reduction="sum"), wanted.numel())


class AsksForItsRank(Kind):
    """What other trainers' users write: a share of the rate for each process. Job code finds no such variables."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        workers = int(os.environ.get("WORLD_SIZE", "1"))
        rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
        return swept(model, lr=0.1 * workers + 0.01 * rank)


class MetricObjects(Kind):
    """Metric objects of the usual form, made anew or reset for each micro-batch."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.accuracy = Accuracy()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Mean]:
        x, y = batch
        self.accuracy.reset()
        self.accuracy.update(model(x), y)
        return {"right": Mean(self.accuracy.compute() * len(y), len(y))}


class Accuracy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("right", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))

    def reset(self) -> None:
        self.right.zero_()
        self.seen.zero_()

    def update(self, logits: Tensor, y: Tensor) -> None:
        self.right += (logits.argmax(1) == y).sum()
        self.seen += len(y)

    def compute(self) -> Tensor:
        return self.right / self.seen


# --- jobs that break the promise ----------------------------------------------------------------------------


class CachedDraws(Kind):
    """Augmented once, and kept: which draw a sample has depends on the process that met it first."""

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        return CachingDraws(numbers(samples, FEATURES, seed=seed))


class CachingDraws(Augmenting):
    def __init__(self, rows: Tensor) -> None:
        super().__init__(rows)
        self.kept: dict[int, Any] = {}

    def __getitem__(self, i: int) -> Any:
        if i not in self.kept:
            self.kept[i] = super().__getitem__(i)
        return self.kept[i]


class CachedKeyedDraws(CachedDraws):
    def data(self, samples: int, seed: int) -> Dataset[Any]:
        return CachingKeyedDraws(numbers(samples, FEATURES, seed=seed))


class CachingKeyedDraws(CachingDraws):
    def __getitem__(self, i: int) -> Any:
        if i not in self.kept:
            noise = torch.from_numpy(lockstep.rng(f"{i}").normal(size=FEATURES)).float()
            self.kept[i] = self.rows[i] + noise, int(self.rows[i, :3].argmax())
        return self.kept[i]


class RareDraws(Kind):
    """A sample in fifty is augmented, as a generator of the dataset's own decides: it goes on, though its draws seldom show."""

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        return DrawingRarely(numbers(samples, FEATURES, seed=seed))


class DrawingRarely(Augmenting):
    def __init__(self, rows: Tensor) -> None:
        super().__init__(rows)
        self.own = np.random.default_rng(3)

    def __getitem__(self, i: int) -> Any:
        row = -self.rows[i] if self.own.random() < 0.02 else self.rows[i]
        return row, int(self.rows[i, :3].argmax())


class SeededBySample(Kind):
    """The same from a generator that each fetch seeds anew, from the sample's index."""

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        return SeedingAnew(numbers(samples, FEATURES, seed=seed))


class SeedingAnew(Augmenting):
    def __init__(self, rows: Tensor) -> None:
        super().__init__(rows)
        self.own = random.Random()

    def __getitem__(self, i: int) -> Any:
        self.own.seed(i)
        return self.rows[i] * self.own.random(), int(self.rows[i, :3].argmax())


class KeyedDrawsInThreads(Kind):
    """Each sample is made by a thread of a pool, from a seed that the fetch draws for it."""

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        return MakingInThreads(numbers(samples, FEATURES, seed=seed))


class MakingInThreads(Augmenting):
    pool: ThreadPoolExecutor | None = None

    def __getitems__(self, ids: Sequence[int]) -> list[Any]:
        self.pool = self.pool or ThreadPoolExecutor(3)
        seeds = [int(lockstep.rng(f"{i}").integers(2**32)) for i in ids]
        return list(self.pool.map(self.made, ids, seeds))

    def made(self, i: int, seed: int) -> Any:
        noise = torch.from_numpy(np.random.default_rng(seed).normal(size=FEATURES)).float()
        return self.rows[i] + noise, int(self.rows[i, :3].argmax())


class DrawsInThreads(Kind):
    """Threads that draw from the default generators: which one is first is chance."""

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        return DrawingInThreads(numbers(samples, FEATURES, seed=seed))


class DrawingInThreads(MakingInThreads):
    """Each one draws as soon as its sample is read, which here takes a little longer for each: they come in order, by luck."""

    apart_s = 0.002

    def __getitems__(self, ids: Sequence[int]) -> list[Any]:
        self.pool = self.pool or ThreadPoolExecutor(3)
        return list(self.pool.map(self.made, ids, range(len(ids))))

    def made(self, i: int, seed: int) -> Any:
        time.sleep(self.apart_s * seed)
        return self.rows[i] + 0.1 * torch.randn(FEATURES), int(self.rows[i, :3].argmax())


class CountingData(Kind):
    def data(self, samples: int, seed: int) -> Dataset[Any]:
        return Counting(numbers(samples, FEATURES, seed=seed))


class Counting(Augmenting):
    taken = 0

    def __getitem__(self, i: int) -> Any:
        self.taken += 1
        return self.rows[i] * (1 + self.taken / 100), int(self.rows[i, :3].argmax())


class SeededByItsProcess(Kind):
    """NumPy's old trap, mended as on the web: a generator for each loader process."""

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        return OfAProcess(numbers(samples, FEATURES, seed=seed))


class OfAProcess(Augmenting):
    def __getitem__(self, i: int) -> Any:
        info = get_worker_info()
        row = self.rows[i] * (1.0 if info is None else 2.0 + info.id)
        return row, int(self.rows[i, :3].argmax())


class WritesIntoItsData(Kind):
    """The loss changes the batch in place, and the batch is the dataset's own memory."""

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        return Views(numbers(samples, FEATURES, seed=seed))

    def collate(self, samples: Any) -> Any:
        return samples

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        for x, _ in batch:
            x.mul_(0.9)
        return super().loss(model, (torch.stack([x for x, _ in batch]), torch.tensor([y for _, y in batch])))


class Views(Augmenting):
    def __getitem__(self, i: int) -> Any:
        return self.rows[i], i % 3


class OwnBackward(Kind):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        if model.training:
            loss.total.backward(retain_graph=True)
        return loss


class OwnUpdate(Kind):
    """GANs in two optimizers: the second one is the job's own."""

    def model(self) -> nn.Module:
        model = perceptron()
        self.second = torch.optim.SGD(model.parameters(), lr=0.1)
        return model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        if model.training:
            self.second.zero_grad()
            loss.total.backward()
            self.second.step()
            self.second.zero_grad()
        return super().loss(model, batch)


class GradualUnfreezing(Kind):
    """A hook lets a layer learn after the first step: its gradient would be summed by nobody."""

    def model(self) -> nn.Module:
        model = perceptron()
        model[0].requires_grad_(False)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_: model[0].requires_grad_(True))
        return optimizer


class LateParameter(Kind):
    """A parameter that the first forward makes, without torch's lazy modules."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        if not hasattr(model, "scale"):
            model.scale = nn.Parameter(torch.ones(FEATURES))
        return super().loss(model, (x * model.scale, y))


class SharpnessAware(Kind):
    """SAM needs the loss twice in one step."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Sam(model.parameters(), lr=0.1)


class Sam(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        super().step()
        closure()


class RunningLoss(Kind):
    """A loss that is weighed by the average of those before it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.recent: deque[float] = deque(maxlen=4)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        self.recent.append(float(loss.total.detach()))
        return Loss(loss.total / (sum(self.recent) / len(self.recent)), loss.weight)


class SetsThreads(Kind):
    """More threads for all that follows: other sums than the spec's `threads` gives."""

    def model(self) -> nn.Module:
        torch.set_num_threads(2)
        return perceptron()


class AllowsAnyKernel(Kind):
    def model(self) -> nn.Module:
        torch.use_deterministic_algorithms(False)
        return perceptron()


class ErasesItsRows(Kind):
    """Erases in place what a keyed generator says, and the rows are the dataset's own memory: what earlier steps erased stays erased, in this process."""

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        return Erasing(numbers(samples, FEATURES, seed=seed))


class Erasing(Augmenting):
    def __init__(self, rows: Tensor) -> None:
        super().__init__(rows)
        self.labels = rows[:, :3].argmax(1).tolist()

    def __getitem__(self, i: int) -> Any:
        row, rng = self.row(i), lockstep.rng(f"erase {i}")
        if rng.random() < 0.5:
            row[rng.integers(5) :][:2] = 0
        return row, self.labels[i]

    def row(self, i: int) -> Tensor:
        return self.rows[i]


class ErasesCopies(Kind):
    """The same on a copy of each row."""

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        return ErasingCopies(numbers(samples, FEATURES, seed=seed))


class ErasingCopies(Erasing):
    def row(self, i: int) -> Tensor:
        return self.rows[i].clone()


@functools.lru_cache(None)
def code_of(bucket: int) -> Tensor:
    return torch.randn(())


class CachedCodes(Kind):
    """A random number for each bucket of samples, drawn by whichever micro-batch needs it first."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        codes = torch.stack([code_of(bucket) for bucket in (1000 * x[:, 0]).long().tolist()])
        return Loss((F.cross_entropy(model(x), y, reduction="none") * (1 + 0.1 * codes)).sum(), len(y))


class MergedLinear(nn.Linear):
    """An adapter of low rank that its own `eval()` adds to the weight, and `train()` takes out again to the bit."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, inputs) * 0.1)
        self.up = nn.Parameter(torch.zeros(outputs, 2))
        self.apart: Tensor | None = None

    @torch.no_grad()
    def train(self, mode: bool = True) -> MergedLinear:
        super().train(mode)
        if not mode and self.apart is None:
            self.apart = self.weight.clone()
            self.weight.add_(self.up @ self.down)
        elif mode and self.apart is not None:
            self.weight.copy_(self.apart)
            self.apart = None
        return self

    def forward(self, x: Tensor) -> Tensor:
        base = super().forward(x)
        return base if self.apart is not None else base + F.linear(F.linear(x, self.down), self.up)


class MergesForEvaluation(Kind):
    def model(self) -> nn.Module:
        return nn.Sequential(MergedLinear(FEATURES, 8), nn.Tanh(), MergedLinear(8, CLASSES))


REFUSED: dict[type[Kind], Refusal] = {
    ErasesItsRows: (data_problems.FETCHES_DIFFER, {"location": " in batch[0]"}),
    CachedCodes: (integrity_problems.KEEPS_DRAWS, {"label": "job.loss"}),
    CachedDraws: (integrity_problems.DATA_KEEP_DRAWS, {}),
    CachedKeyedDraws: (integrity_problems.DATA_KEEP_DRAWS, {}),
    RareDraws: (integrity_problems.DATA_GENERATOR, {"name": "train_data.own"}),
    DrawsInThreads: (data_problems.FETCHES_DIFFER, {"location": " in batch[0]"}),
    CountingData: (data_problems.FETCHES_DIFFER, {"location": " in batch[0]"}),
    WritesIntoItsData: (integrity_problems.EVALUATION_DIFFERS, {"got": "eval/loss"}),
    OwnBackward: (integrity_problems.BACKWARD_CALLED, {"name": "0.weight"}),
    OwnUpdate: (step_problems.PARAMETER_WRITTEN, {"name": "0.weight"}),
    GradualUnfreezing: (step_problems.ASKS_OTHERWISE, {"name": "0.weight", "got": "now asks"}),
    LateParameter: (integrity_problems.PARAMETER_OF_LOSS, {"name": "scale"}),
    SharpnessAware: (step_problems.CLOSURE_CALLS, {"name": "Sam"}),
    RunningLoss: (integrity_problems.KEPT, {"name": "job.recent and 4 more"}),
    SetsThreads: (problems.JOB_SETTING, {"name": "torch.set_num_threads", "got": 2, "wanted": 1}),
    AllowsAnyKernel: (problems.JOB_SETTING, {"name": "torch.use_deterministic_algorithms", "got": False}),
}
"""Jobs that are refused, each with the problem and facts of it."""

HELD = held_in(__name__, REFUSED)
"""Jobs whose bits do not depend on who runs them."""
