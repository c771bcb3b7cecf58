"""Jobs of many kinds, each as its field would write it: what is exact in them must stay so, whoever runs them.

Every class here is a job. Those in `REFUSED` break the promise, and the problem beside them says how.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import Dataset, TensorDataset

import lockstep
from lockstep import Loss, Mean
from lockstep.checkpoint.runs.run_checkpoints import claim
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.errors import Problem
from lockstep.training.integrity import problems as integrity_problems
from lockstep.training.step import problems as step_problems
from tests.distributed.training import train, train_attempt

Refusal = tuple[Problem[Any], dict[str, object]]
"""A problem, and facts of the case; a pattern has to be found in the fact."""

RUN = "run"
FEATURES, CLASSES = 6, 3


def numbers(samples: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randn(samples, *shape, generator=torch.Generator().manual_seed(seed))


def perceptron(inputs: int = FEATURES, outputs: int = CLASSES, *between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), *between, nn.Tanh(), nn.Linear(8, outputs))


class Kind(lockstep.Job):
    """Points in three classes; 32 for training, 7 held out. `more` is what its spec says beside the usual."""

    more: ClassVar[dict[str, Any]] = {}

    def model(self) -> nn.Module:
        return perceptron()

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        x = numbers(samples, FEATURES, seed=seed)
        return TensorDataset(x, x[:, :CLASSES].argmax(1))

    def train_data(self) -> Dataset[Any]:
        return self.data(32, 1)

    def eval_data(self) -> Dataset[Any] | None:
        return self.data(7, 2)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        logits = model(x)
        right = Mean((logits.argmax(1) == y).sum(), len(y))
        return Loss(F.cross_entropy(logits, y, reduction="sum"), len(y), {"accuracy": right})


# --- classification, and what regularises it ----------------------------------------------------------------


class LabelSmoothing(Kind):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(F.cross_entropy(model(x), y, reduction="sum", label_smoothing=0.1), len(y))


class Focal(Kind):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        each = F.cross_entropy(model(x), y, reduction="none")
        return Loss(((1 - torch.exp(-each)) ** 2 * each).sum(), len(y))


class ClassWeights(Kind):
    """The weight of a micro-batch is that of its labels."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        weights = torch.tensor([1.0, 2.0, 0.5])
        return Loss(F.cross_entropy(model(x), y, weights, reduction="sum"), weights[y].sum())


class Dropouts(Kind):
    def model(self) -> nn.Module:
        return perceptron(
            FEATURES, CLASSES, nn.Dropout(0.3), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.1)
        )


class Mixup(Kind):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        share, other = float(lockstep.rng().beta(0.4, 0.4)), torch.randperm(len(y))
        logits = model(share * x + (1 - share) * x[other])
        mixed = [F.cross_entropy(logits, labels, reduction="sum") for labels in (y, y[other])]
        return Loss(share * mixed[0] + (1 - share) * mixed[1], len(y))


class CutmixInPlace(Kind):
    """It writes into its batch, as augmentations do."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        x[:, 2:4] = x[torch.randperm(len(y)), 2:4]
        return super().loss(model, (x, y))


class BatchNorm(Kind):
    def model(self) -> nn.Module:
        return perceptron(FEATURES, CLASSES, nn.BatchNorm1d(8))


class GroupAndInstanceNorm(Kind):
    def model(self) -> nn.Module:
        norms = nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True))
        return nn.Sequential(
            nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 4, 3), norms, nn.Flatten(), nn.Linear(16, 3)
        )


class SpectralNorm(Kind):
    def model(self) -> nn.Module:
        return nn.Sequential(
            parametrizations.spectral_norm(nn.Linear(FEATURES, 8)), nn.Tanh(), nn.Linear(8, 3)
        )


class WeightNorm(Kind):
    def model(self) -> nn.Module:
        return nn.Sequential(parametrizations.weight_norm(nn.Linear(FEATURES, 8)), nn.Tanh(), nn.Linear(8, 3))


class FrozenLayers(Kind):
    def model(self) -> nn.Module:
        model = perceptron()
        model[0].requires_grad_(False)
        return model


class LazyMadeInTime(Kind):
    def model(self) -> nn.Module:
        model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3))
        model(torch.zeros(1, FEATURES))
        return model


class Lazy(Kind):
    """The first micro-batch gives its layers their shapes."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(3))


class GradientPenalty(Kind):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        x = x.requires_grad_()
        with torch.enable_grad():  # in evaluation as well
            each = F.cross_entropy(model(x), y, reduction="none")
            slope = torch.autograd.grad(each.sum(), x, create_graph=True)[0]
        return Loss((each + 0.1 * slope.square().sum(1)).sum(), len(y))


class LearnedTemperature(Kind):
    def model(self) -> nn.Module:
        model = perceptron()
        model.heat = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(F.cross_entropy(model(x) * model.heat.exp().float(), y, reduction="sum"), len(y))


class GradientReversal(Kind):
    """A domain-adversarial head: an autograd function of the job's own."""

    def model(self) -> nn.Module:
        return nn.ModuleDict(
            {"body": nn.Linear(FEATURES, 8), "label": nn.Linear(8, 3), "domain": nn.Linear(8, 2)}
        )

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        features = model["body"](x).tanh()
        total = F.cross_entropy(model["label"](features), y, reduction="sum")
        domain = F.cross_entropy(model["domain"](Reversed.apply(features)), y % 2, reduction="sum")
        return Loss(total + domain, len(y), {"domain": Mean(domain.detach(), len(y))})


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class CachedMask(Kind):
    """A constant that the first call makes and later ones use."""

    mask: Tensor | None = None

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        if self.mask is None:
            self.mask = torch.linspace(0.5, 1.5, FEATURES)
        return super().loss(model, (x * self.mask, y))


# --- pairs, sets and regressions ----------------------------------------------------------------------------


class InBatchNegatives(Kind):
    """InfoNCE: every other sample of the micro-batch is a negative, so batch.micro is part of what it means."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        one, other = (F.normalize(model(x + noise * torch.randn_like(x)), dim=1) for noise in (0.0, 0.1))
        return Loss(F.cross_entropy(one @ other.T / 0.2, torch.arange(len(y)), reduction="sum"), len(y))


class Siamese(Kind):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        distance = (model(x) - model(x.flip(1))).square().sum(1)
        same = (y == 0).float()
        return Loss((same * distance + (1 - same) * F.relu(1 - distance)).sum(), len(y))


class Triplets(Kind):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(
            F.triplet_margin_loss(model(x), model(x + 0.1), model(-x), reduction="sum", margin=2.0), len(y)
        )


class Quantiles(Kind):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        error = x.sum(1, keepdim=True) - model(x)
        levels = torch.tensor([0.1, 0.5, 0.9])
        return Loss(torch.maximum(levels * error, (levels - 1) * error).sum(), error.numel())


class MultiTask(Kind):
    """Two heads, weighed by what they learn (Kendall et al. 2018)."""

    def model(self) -> nn.Module:
        model = nn.ModuleDict(
            {"body": nn.Linear(FEATURES, 8), "label": nn.Linear(8, 3), "sum": nn.Linear(8, 1)}
        )
        model.logs = nn.Parameter(torch.zeros(2))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        features = model["body"](x).tanh()
        label = F.cross_entropy(model["label"](features), y, reduction="sum")
        total = F.mse_loss(model["sum"](features)[:, 0], x.sum(1), reduction="sum")
        logs, n = model.logs, len(y)
        parts = {"label": Mean(label.detach(), n), "sum": Mean(total.detach(), n)}
        return Loss(label * (-logs[0]).exp() + total * (-logs[1]).exp() + n * logs.sum(), n, parts)


class MixtureOfExperts(Kind):
    """Only experts that are chosen get a gradient."""

    def model(self) -> nn.Module:
        return Experts()

    def conditional_parameters(self, model: nn.Module) -> Iterable[str]:
        return [name for name, _ in model.named_parameters() if name.startswith("experts")]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, 4)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = self.gate(x).softmax(1).max(1)
        out = torch.zeros(len(x), CLASSES)
        for i, expert in enumerate(self.experts):
            own = (chosen == i).nonzero()[:, 0]
            if len(own):
                out = out.index_add(0, own, share[own, None] * expert(x[own]))
        return out


# --- generative ---------------------------------------------------------------------------------------------


class Autoencoder(Kind):
    def model(self) -> nn.Module:
        return perceptron(FEATURES, FEATURES)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        return Loss(F.mse_loss(model(x), x, reduction="sum"), x.numel())


class Variational(Kind):
    def model(self) -> nn.Module:
        return nn.ModuleDict({"encoder": perceptron(FEATURES, 4), "decoder": perceptron(2, FEATURES)})

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        mean, log = model["encoder"](x).chunk(2, 1)
        restored = model["decoder"](mean + torch.randn_like(mean) * (log / 2).exp())
        divergence = -0.5 * (1 + log - mean.square() - log.exp()).sum()
        return Loss(F.mse_loss(restored, x, reduction="sum") + divergence, len(x))


class Diffusion(Kind):
    def model(self) -> nn.Module:
        return perceptron(FEATURES + 1, FEATURES)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        t, noise = torch.rand(len(x), 1), torch.randn_like(x)
        kept = torch.cos(t * torch.pi / 2)
        guess = model(torch.cat([kept * x + (1 - kept**2).sqrt() * noise, t], 1))
        return Loss(F.mse_loss(guess, noise, reduction="sum"), x.numel())


class Adversarial(Kind):
    """A generator and a critic with two signs of one loss, turned by hooks on the gradients."""

    def model(self) -> nn.Module:
        return nn.ModuleDict({"maker": perceptron(2, FEATURES), "critic": perceptron(FEATURES, 1)})

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        made = model["maker"](torch.randn(len(x), 2))
        if made.requires_grad:
            made.register_hook(lambda gradient: -gradient)
        return Loss((F.softplus(-model["critic"](x)) + F.softplus(model["critic"](made))).sum(), len(x))


class TransposedConvolution(Kind):
    def model(self) -> nn.Module:
        up = nn.ConvTranspose1d(4, 2, 3, stride=2, output_padding=1)
        down = nn.Conv1d(1, 4, 2, stride=2)
        return nn.Sequential(nn.Unflatten(1, (1, FEATURES)), down, up, nn.Flatten(), nn.Linear(16, 3))


class Images(Kind):
    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 3),
        )

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        x = numbers(samples, 1, 8, 8, seed=seed)
        return TensorDataset(x, (x.sum((1, 2, 3)) > 0).long())


# --- sequences ----------------------------------------------------------------------------------------------


class Words(Kind):
    """Sentences of 5 … 9 of eleven words: too long for two to be the same by chance."""

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(5, 10, (samples,), generator=generator).tolist()
        return [torch.randint(1, 11, (length,), generator=generator) for length in lengths]  # type: ignore[return-value]

    def collate(self, samples: Sequence[Tensor]) -> Any:
        return {
            "words": nn.utils.rnn.pad_sequence(list(samples), batch_first=True),
            "lengths": torch.tensor([len(one) for one in samples]),
        }

    def model(self) -> nn.Module:
        return nn.ModuleDict({"table": nn.Embedding(11, 8), "body": self.body(), "head": nn.Linear(8, 11)})

    def body(self) -> nn.Module:
        return nn.GRU(8, 8, batch_first=True)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """The label of a word is its rest by three."""
        words = batch["words"]
        out, _ = model["body"](model["table"](words))
        labels = torch.where(words > 0, words % 3, -100)
        total = F.cross_entropy(model["head"](out).flatten(0, 1), labels.flatten(), reduction="sum")
        return Loss(total, (words > 0).sum())


class LongShortTermMemory(Words):
    def body(self) -> nn.Module:
        return nn.LSTM(8, 4, num_layers=2, bidirectional=True, dropout=0.2, batch_first=True)


class PackedRecurrence(Words):
    def body(self) -> nn.Module:
        return nn.RNN(8, 8, batch_first=True)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        words, lengths = batch["words"], batch["lengths"]
        packed = nn.utils.rnn.pack_padded_sequence(
            model["table"](words), lengths, batch_first=True, enforce_sorted=False
        )
        _, last = model["body"](packed)
        return Loss(F.cross_entropy(model["head"](last[0]), words[:, 0], reduction="sum"), len(words))


class MaskedWords(Words):
    """A transformer that guesses the words that were masked."""

    def body(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        words = batch["words"]
        hidden = (torch.rand(words.shape) < 0.3) & (words > 0)
        hidden[:, 0] = True
        out = model["body"](model["table"](words.masked_fill(hidden, 0)), src_key_padding_mask=words == 0)
        return Loss(F.cross_entropy(model["head"](out)[hidden], words[hidden], reduction="sum"), hidden.sum())


class TiedWeights(Words):
    def model(self) -> nn.Module:
        model = super().model()
        model["head"].weight = model["table"].weight
        return model


class BagsOfWords(Words):
    def model(self) -> nn.Module:
        return nn.ModuleDict({"bag": nn.EmbeddingBag(11, 8, mode="sum"), "head": nn.Linear(8, 11)})

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        words, lengths = batch["words"], batch["lengths"]
        offsets = lengths.cumsum(0) - lengths
        bags = model["bag"](words[words > 0], offsets)
        return Loss(F.cross_entropy(model["head"](bags), words[:, 0], reduction="sum"), len(words))


class Alignment(Words):
    """Connectionist temporal classification, whose CPU kernel is deterministic."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        words, lengths = batch["words"], batch["lengths"]
        frames = words.repeat_interleave(3, 1)
        out, _ = model["body"](model["table"](frames))
        logs = model["head"](out).log_softmax(2).transpose(0, 1)
        return Loss(F.ctc_loss(logs, words, 3 * lengths, lengths, reduction="sum"), len(words))


class BackPropagationThroughTime(Words):
    """The hidden state goes from step to step in a buffer: exact with one micro-batch a step."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("hidden", torch.zeros(8))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        words = batch["words"]
        start = model.hidden.expand(1, len(words), 8).contiguous()
        out, last = model["body"](model["table"](words), start)
        if model.training:
            model.hidden.copy_(last.detach().mean((0, 1)))
        return Loss(
            F.cross_entropy(model["head"](out).flatten(0, 1), words.flatten(), reduction="sum"), words.numel()
        )


# --- graphs, reinforcement, teachers ------------------------------------------------------------------------


class Graph:
    """Graphs in one, as graph libraries batch them: nodes, edges, and the graph of each node."""

    def __init__(self, graphs: Sequence[tuple[Tensor, Tensor, int]]) -> None:
        sizes = torch.tensor([len(nodes) for nodes, _, _ in graphs])
        starts = (sizes.cumsum(0) - sizes).tolist()
        self.nodes = torch.cat([nodes for nodes, _, _ in graphs])
        self.edges = torch.cat(
            [edges + start for (_, edges, _), start in zip(graphs, starts, strict=True)], 1
        )
        self.graph = torch.arange(len(graphs)).repeat_interleave(sizes)
        self.labels = torch.tensor([label for _, _, label in graphs])

    def to(self, device: torch.device) -> Graph:
        moved = copy.copy(self)
        vars(moved).update({name: tensor.to(device) for name, tensor in vars(self).items()})
        return moved


class Graphs(Kind):
    def data(self, samples: int, seed: int) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(seed)
        return [  # type: ignore[return-value]
            (
                torch.randn(3 + i % 4, FEATURES, generator=generator),
                torch.randint(3 + i % 4, (2, 6), generator=generator),
                i % 3,
            )
            for i in range(samples)
        ]

    def collate(self, samples: Sequence[Any]) -> Any:
        return Graph(samples)

    def loss(self, model: nn.Module, batch: Graph) -> Loss:
        source, target = batch.edges
        nodes = batch.nodes.index_add(0, target, batch.nodes[source])
        count = len(batch.labels)
        pooled = torch.zeros(count, FEATURES).index_add(0, batch.graph, nodes)
        return Loss(F.cross_entropy(model(pooled), batch.labels, reduction="sum"), count)


class FixedReplay(Kind):
    """Q-learning from a fixed buffer, whose target net is moved by a hook of the optimizer."""

    def model(self) -> nn.Module:
        online = perceptron()
        return nn.ModuleDict({"online": online, "target": copy.deepcopy(online).requires_grad_(False)})

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
        pairs = list(zip(model["target"].parameters(), model["online"].parameters(), strict=True))

        def follow(*_: Any) -> None:
            with torch.no_grad():
                for target, online in pairs:
                    target.lerp_(online, 0.1)

        optimizer.register_step_post_hook(follow)
        return optimizer

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, action = batch
        value = model["online"](x).gather(1, action[:, None])[:, 0]
        with torch.no_grad():
            wanted = x[:, 0] + 0.9 * model["target"](x.roll(1, 1)).amax(1)
        return Loss(F.smooth_l1_loss(value, wanted, reduction="sum"), len(x))


class Distillation(Kind):
    """The teacher is frozen, and no part of the model."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.teacher = nn.Linear(FEATURES, CLASSES).requires_grad_(False)
        with torch.no_grad():
            self.teacher.weight.copy_(numbers(CLASSES, FEATURES, seed=9))
            self.teacher.bias.zero_()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        wanted = (self.teacher(x) / 2).softmax(1)
        return Loss(F.kl_div((model(x) / 2).log_softmax(1), wanted, reduction="sum"), len(x))


class TeacherInBuffers(Kind):
    """An average of the weights that each forward moves, in buffers: the step's first micro-batch's is kept."""

    def model(self) -> nn.Module:
        model = perceptron()
        model.register_buffer("teacher", model[0].weight.detach().clone())
        return model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        if model.training:
            model.teacher.lerp_(model[0].weight.detach(), 0.1)
        wanted = (x @ model.teacher.T).tanh()
        return Loss(F.mse_loss(model[0](x), wanted, reduction="sum") + model(x).square().sum(), len(x))


class Thermostat(Kind):
    """A temperature that a hook of the optimizer lowers once a step, and the job's state keeps."""

    heat = 2.0

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(self.cool)
        return optimizer

    def cool(self, *_: Any) -> None:
        self.heat = 1 + (self.heat - 1) / 2

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(F.cross_entropy(model(x) / self.heat, y, reduction="sum"), len(y))

    def state_dict(self) -> dict[str, Any]:
        return {"heat": self.heat}

    def load_state_dict(self, state: Any) -> None:
        self.heat = state["heat"]


class RateByHook(Kind):
    """A hook before the update halves the rate of biases and, beyond the schedule, everything."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer.register_step_pre_hook(
            lambda one, *_: one.param_groups[0].update(lr=one.param_groups[0]["lr"] / 2)
        )
        return optimizer


class Gathered:
    """A stand-in for a metric of torchmetrics: it gathers over the default process group where there is one."""

    def __call__(self, value: Tensor) -> Tensor:
        if not torch.distributed.is_initialized():
            return value
        every = [torch.zeros_like(value) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(every, value)
        return torch.stack(every).mean(0)


class GatheringMetric(Kind):
    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Mean]:
        x, y = batch
        return {"gathered": Mean(Gathered()((model(x).argmax(1) == y).float().sum()), len(y))}


class BuffersInEvaluation(Kind):
    """A module that counts what it is shown, in evaluation as well."""

    def model(self) -> nn.Module:
        return nn.Sequential(Shown(), perceptron())


class Shown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shown", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.shown += x.detach().abs().sum()
        return x


# --- jobs that break the promise ----------------------------------------------------------------------------


class TeacherInParameters(Kind):
    """A teacher as frozen parameters that the loss moves."""

    def model(self) -> nn.Module:
        student = perceptron()
        return nn.ModuleDict({"student": student, "teacher": copy.deepcopy(student).requires_grad_(False)})

    def move(self, model: nn.Module) -> None:
        with torch.no_grad():
            for teacher, student in zip(
                model["teacher"].parameters(), model["student"].parameters(), strict=True
            ):
                teacher.lerp_(student, 0.1).add_(1e-3)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        if model.training:
            self.move(model)
        return Loss(F.mse_loss(model["student"](x), model["teacher"](x), reduction="sum"), len(x))


class MomentumEncoder(TeacherInParameters):
    """The same past torch's count of writes, as it is usually written."""

    def move(self, model: nn.Module) -> None:
        for teacher, student in zip(
            model["teacher"].parameters(), model["student"].parameters(), strict=True
        ):
            teacher.data.mul_(0.9).add_(student.data, alpha=0.11)


class Queue(Kind):
    """Momentum contrast with a queue of keys that the job keeps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.queue = numbers(4, CLASSES)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        keys = model(x)
        logits = torch.cat([keys, keys @ self.queue.T], 1)
        self.queue = torch.cat([keys.detach(), self.queue])[:4]
        return Loss(F.cross_entropy(logits, y, reduction="sum"), len(y))


class HiddenInAnAttribute(BackPropagationThroughTime):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        words = batch["words"]
        start = getattr(model, "last", torch.zeros(8)).expand(1, len(words), 8).contiguous()
        out, last = model["body"](model["table"](words), start)
        model.last = last.detach().mean((0, 1))
        return Loss(
            F.cross_entropy(model["head"](out).flatten(0, 1), words.flatten(), reduction="sum"), words.numel()
        )


class CountedCalls(Kind):
    """A counter of the class that the loss depends on."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        CountedCalls.calls += 1
        loss = super().loss(model, batch)
        return Loss(loss.total * (1 + CountedCalls.calls / 64), loss.weight)


class OwnGenerator(Kind):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.generator = torch.Generator().manual_seed(0)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return super().loss(model, (x + torch.randn(x.shape, generator=self.generator), y))


class OutOfSight(Kind):
    """It draws from where nothing can be seen."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return super().loss(model, (x + next(DRAWS), y))


DRAWS = iter(torch.linspace(0, 1, 1000))


class TotalIsAMean(Kind):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(F.cross_entropy(model(x), y), len(y))


class Scheduled(Kind):
    """A scheduler of torch that a hook moves."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=100)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer


class RateAfterwards(Kind):
    """A hook after the update changes the rate for the next one."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda one, *_: one.param_groups[0].update(lr=0.01))
        return optimizer


class UpdateFromTheLoss(Kind):
    """A hook of the optimizer that reads what the loss left behind: the worker's last micro-batch."""

    last: Tensor

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        self.last = batch[0].mean(0)
        return super().loss(model, batch)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def use(*_: Any) -> None:
            with torch.no_grad():
                model[0].weight.add_(self.last, alpha=0.01)

        optimizer.register_step_post_hook(use)
        return optimizer


class KeptMetric(Kind):
    """A metric that goes on adding from one micro-batch to the next."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.right, self.seen = torch.zeros(()), 0

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Mean]:
        x, y = batch
        self.right += (model(x).argmax(1) == y).float().sum()
        self.seen += len(y)
        return {"running": Mean(self.right / self.seen, 1)}


class ClampedInTheLoss(Kind):
    """Weight clipping where it does not belong."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.1, 0.1)
        return super().loss(model, batch)


def document(kind: type[Kind], **more: Any) -> dict[str, Any]:
    """An epoch of three steps, the last one ragged: 8 samples instead of 12."""
    whole = kind is BackPropagationThroughTime
    return {
        "job": {"use": f"{kind.__module__}:{kind.__qualname__}"},
        "batch": {"global": 12, "micro": 12 if whole else 3},
        "data": {"drop_last": False},
        "clip_norm": 1.0,
        **kind.more,
        **more,
    }


def train_every(documents: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """One run after another in the process group at hand: all that must be the same bits of each, and its warnings."""
    runs = [train(one) for one in documents]
    return [(run.identity, run.digests, run.rows, run.evaluations, run.warnings) for run in runs]


def train_attempts(attempts: list[tuple[dict[str, Any], AttemptOrigin]], stop_after: int | None) -> list[Any]:
    """One attempt of each run after another, stopped after a step or to its end: the same of each, without warnings."""
    runs = [train_attempt(one, RUN, origin, stop_after) for one, origin in attempts]
    return [(run.identity, run.digests, run.rows, run.evaluations) for run in runs]


def taken_up(one: dict[str, Any]) -> AttemptOrigin:
    """The next attempt of the run that `one` describes, from its newest checkpoint."""
    return claim(one["checkpoint"]["storage"], RUN, None)


REFUSED: dict[type[Kind], Refusal] = {
    TeacherInParameters: (step_problems.PARAMETER_WRITTEN, {"name": "teacher.0.weight"}),
    MomentumEncoder: (step_problems.PARAMETER_WRITTEN, {"name": "teacher.0.weight"}),
    ClampedInTheLoss: (step_problems.PARAMETER_WRITTEN, {"name": "0.weight"}),
    Queue: (integrity_problems.KEPT, {"name": "job.queue", "got": "the loss"}),
    HiddenInAnAttribute: (integrity_problems.KEPT, {"name": "model.last", "got": "the loss"}),
    CountedCalls: (integrity_problems.KEPT, {"name": "class CountedCalls.calls", "got": "the loss"}),
    OwnGenerator: (integrity_problems.KEPT, {"name": "job.generator", "got": "the loss"}),
    OutOfSight: (integrity_problems.REPEATED_OTHERWISE, {"got": "the loss"}),
    TotalIsAMean: (
        integrity_problems.MEAN_FOR_SUM,
        {"got": re.compile("^job.loss: total is .* for its halves$"), "weight": 3},
    ),
    Scheduled: (step_problems.SCHEDULER_CARRIED, {"label": "job.optimizer"}),
    RateAfterwards: (
        step_problems.RATE_CHANGED,
        {"group": 0, "previous": 0.1, "got": 0.01, "when": "by an update"},
    ),
    UpdateFromTheLoss: (integrity_problems.LAST_MICRO_BATCH, {"name": "'0.weight'"}),
    KeptMetric: (
        integrity_problems.EVALUATION_KEEPS,
        {"name": "job.right and 1 more", "got": "eval/running"},
    ),
}
"""Jobs that are refused, each with the problem and facts of it."""


def held_in(module: str, refused: Mapping[type[Kind], Refusal]) -> list[type[Kind]]:
    """The kinds that a module defines, but for the refused ones."""
    every = vars(sys.modules[module]).values()
    kinds = [kind for kind in every if isinstance(kind, type) and issubclass(kind, Kind)]
    return [kind for kind in kinds if kind.__module__ == module and kind not in {Kind, *refused}]


HELD = held_in(__name__, REFUSED)
"""Jobs whose bits do not depend on who runs them."""
