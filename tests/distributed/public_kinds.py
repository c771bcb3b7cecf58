"""Small jobs of the kinds of well-known public programs, written as their loops are: each must train, and none is told of anything.

What other modules here have of a field is not repeated: GANs (`phase_kinds`), quantization and distillation (`mode_kinds`), seq2seq, detection and
flows (`further_kinds`), siamese nets and mixtures of experts (`kinds`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import Dataset, TensorDataset

import lockstep
from lockstep import Loss, Mean, Phase
from tests.distributed.kinds import CLASSES, FEATURES, Kind, Refusal, held_in, numbers, perceptron


class SimClr(Kind):
    """sthalles/SimCLR: two views of each sample, drawn in the loss; the other samples of the micro-batch are its negatives."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        views = torch.cat([x + 0.1 * torch.randn_like(x) for _ in range(2)])
        f = F.normalize(model(views), dim=1)
        alike = (f @ f.T / 0.5).masked_fill(torch.eye(len(f), dtype=torch.bool), -1e9)
        partner = torch.arange(len(f)).roll(len(x))
        return Loss(F.cross_entropy(alike, partner, reduction="sum") / 2, len(x))


class Clip(Kind):
    """openai/CLIP: two towers over the whole batch and a learned temperature, whose logarithm is clamped after each step."""

    loss = lockstep.Job.loss

    def model(self) -> nn.Module:
        towers = nn.ModuleDict({"image": perceptron(FEATURES, 4), "text": nn.Embedding(CLASSES, 4)})
        towers.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        return towers

    def embed(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        return {"image": F.normalize(model["image"](x), dim=1), "text": F.normalize(model["text"](y), dim=1)}

    def batch_loss(self, model: nn.Module, rows: Mapping[str, Tensor]) -> Loss:
        logits = model.scale.exp() * rows["image"] @ rows["text"].T
        pairs = torch.arange(len(logits))
        total = F.cross_entropy(logits, pairs, reduction="sum") + F.cross_entropy(
            logits.T, pairs, reduction="sum"
        )
        return Loss(total / 2, len(pairs))

    def after_step(self, model: nn.Module, step: int) -> None:
        model.scale.clamp_(0, math.log(100))


class MeanTeacher(Kind):
    """CuriousAI/mean-teacher: the teacher is the average of the student, at rest, and moves after each step."""

    def model(self) -> nn.Module:
        student = perceptron(FEATURES, CLASSES, nn.BatchNorm1d(8), nn.Dropout(0.3))
        teacher = copy.deepcopy(student).requires_grad_(False).eval()
        return nn.ModuleDict({"student": student, "teacher": teacher})

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        logits = model["student"](x)
        with torch.no_grad():
            wanted = model["teacher"](x).softmax(1)
        distance = F.mse_loss(logits.softmax(1), wanted, reduction="sum")
        return Loss(F.cross_entropy(logits, y, reduction="sum") + distance, len(y))

    def after_step(self, model: nn.Module, step: int) -> None:
        share = 1 - min(1 - 1 / (step + 1), 0.99)
        for mine, learned in zip(model["teacher"].parameters(), model["student"].parameters(), strict=True):
            mine.lerp_(learned, share)


class Transitions(Kind):
    """Recorded states, actions, rewards, what followed, and whether it was the end."""

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        state, action = numbers(samples, FEATURES, seed=seed), torch.arange(samples) % CLASSES
        return TensorDataset(state, action, state[:, 0], state.roll(1, 0), torch.arange(samples) % 5 == 4)


class DeepQ(Transitions):
    """pytorch/tutorials' DQN: a target network that is copied every second step."""

    def model(self) -> nn.Module:
        policy = perceptron()
        return nn.ModuleDict({"policy": policy, "target": copy.deepcopy(policy).requires_grad_(False)})

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        state, action, reward, following, done = batch
        value = model["policy"](state).gather(1, action[:, None])[:, 0]
        with torch.no_grad():
            ahead = model["target"](following).amax(1) * ~done
        return Loss(F.smooth_l1_loss(value, reward + 0.9 * ahead, reduction="sum"), len(state))

    def after_step(self, model: nn.Module, step: int) -> None:
        if step % 2 == 0:
            model["target"].load_state_dict(model["policy"].state_dict())


class ActorCritic(Transitions):
    """Two phases over recorded transitions: the critic first, then the actor by its advantage."""

    def model(self) -> nn.Module:
        return nn.ModuleDict({"actor": perceptron(), "critic": perceptron(FEATURES, 1)})

    def phases(self) -> list[Phase]:
        adam = partial(torch.optim.Adam, lr=1e-2)
        return [
            Phase("critic", self.critic_loss, ["critic"], adam),
            Phase("actor", self.actor_loss, ["actor"], adam),
        ]

    def critic_loss(self, model: nn.Module, batch: Any) -> Loss:
        state, _, reward, *_ = batch
        return Loss(F.mse_loss(model["critic"](state)[:, 0], reward, reduction="sum"), len(state))

    def actor_loss(self, model: nn.Module, batch: Any) -> Loss:
        state, action, reward, *_ = batch
        with torch.no_grad():
            advantage = reward - model["critic"](state)[:, 0]
        chosen = model["actor"](state).log_softmax(1).gather(1, action[:, None])[:, 0]
        return Loss(-(chosen * advantage).sum(), len(state))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return self.critic_loss(model, batch)


class LowRankAdapters(Kind):
    """microsoft/LoRA: the base is frozen and in training mode, as its loop has it; only A and B learn."""

    def model(self) -> nn.Module:
        base = perceptron(FEATURES, CLASSES, nn.Dropout(0.1)).requires_grad_(False)
        base[0] = Adapter(base[0])
        return base


class Adapter(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.drop = base, nn.Dropout(0.1)
        self.a = nn.Parameter(torch.randn(2, FEATURES) / 10)
        self.b = nn.Parameter(torch.zeros(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.drop(x) @ self.a.T @ self.b.T


class SpectralCritic(Kind):
    """A net with spectral and weight norm by parametrization, whose vectors are buffers."""

    def model(self) -> nn.Module:
        first = parametrizations.spectral_norm(nn.Linear(FEATURES, 8))
        return nn.Sequential(first, nn.LeakyReLU(0.2), parametrizations.weight_norm(nn.Linear(8, CLASSES)))


class LazyNet(Kind):
    """torch's lazy modules with BatchNorm, sized by the first forward, and a part that rests."""

    def model(self) -> nn.Module:
        at_rest = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Dropout(0.5)).requires_grad_(False).eval()
        return nn.Sequential(
            at_rest, nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(CLASSES)
        )


class Sentences(Kind):
    """Words for a language model; the last sample of a micro-batch is the shortest."""

    words = 11

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        words = torch.randint(1, self.words, (samples, 7), generator=torch.Generator().manual_seed(seed))
        words[torch.arange(7)[None] >= 3 + torch.arange(samples)[:, None] % 5] = 0
        return TensorDataset(words)


class TiedGpt(Sentences):
    """karpathy/nanoGPT: a causal transformer with tied embeddings; the weight of the loss is its tokens."""

    def model(self) -> nn.Module:
        return Gpt(self.words)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        (words,) = batch
        logits, wanted = model(words[:, :-1]), words[:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=0, reduction="sum")
        return Loss(total, (wanted != 0).sum())


class Gpt(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, 8), nn.Embedding(8, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(8, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        length = words.shape[1]
        mask = torch.full((length, length), -torch.inf).triu(1)
        return self.head(self.block(self.words(words) + self.places.weight[:length], src_mask=mask))


class SequenceToSequence(Sentences):
    """pytorch/tutorials' translation with a GRU: teacher forcing by a coin for the micro-batch."""

    def model(self) -> nn.Module:
        return nn.ModuleDict(
            {
                "words": nn.Embedding(self.words, 8),
                "encoder": nn.GRU(8, 8, batch_first=True),
                "decoder": nn.GRUCell(8, 8),
                "out": nn.Linear(8, self.words),
            }
        )

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        (words,) = batch
        _, hidden = model["encoder"](model["words"](words))
        state, given, total = hidden[0], torch.ones(len(words), dtype=torch.long), words.new_zeros(()).float()
        forced = not model.training or float(torch.rand(())) < 0.5
        for wanted in words.unbind(1):
            state = model["decoder"](model["words"](given), state)
            logits = model["out"](state)
            total = total + F.cross_entropy(logits, wanted, ignore_index=0, reduction="sum")
            given = wanted if forced else logits.argmax(1)
        return Loss(total, (words != 0).sum())


class Boxes(Kind):
    """A one-stage detector: boxes only where there is an object, and a batch of ragged lists of them."""

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        return Scenes(numbers(samples, 4, FEATURES, seed=seed))

    def collate(self, samples: Any) -> Any:
        return torch.stack([x for x, _ in samples]), [cells for _, cells in samples]

    def model(self) -> nn.Module:
        return perceptron(FEATURES, 5)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, cells = batch
        out, there = model(x), torch.zeros(x.shape[:2])
        for i, own in enumerate(cells):
            there[i, own] = 1.0
        objects = F.binary_cross_entropy_with_logits(out[..., 0], there, reduction="sum")
        boxes = F.l1_loss(out[..., 1:][there > 0], x[..., :4][there > 0], reduction="sum")
        return Loss(objects + boxes, len(x), {"boxes": Mean(boxes, there.sum())})


class Scenes(Dataset[Any]):
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, list[int]]:
        return self.x[i], list(range(i % 4))


class VariationalAutoencoder(Kind):
    """pytorch/examples' VAE: the noise is drawn in training and in evaluation."""

    def model(self) -> nn.Module:
        return nn.ModuleDict({"encoder": perceptron(FEATURES, 4), "decoder": perceptron(2, FEATURES)})

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        mean, log_variance = model["encoder"](x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
        return Loss(F.mse_loss(model["decoder"](z), x, reduction="sum") + divergence, len(x))


class MixupAndSmoothing(Kind):
    """timm's recipe: mixup by a draw for the micro-batch, smoothed labels, a cycle of the rate."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        share, other = float(torch.distributions.Beta(0.8, 0.8).sample()), torch.arange(len(y)).flip(0)
        if not model.training:
            share = 1.0
        logits = model(share * x + (1 - share) * x[other])
        smooth = partial(F.cross_entropy, logits, reduction="sum", label_smoothing=0.1)
        return Loss(share * smooth(y) + (1 - share) * smooth(y[other]), len(y))

    def schedule(self, optimizer: torch.optim.Optimizer, updates: int) -> Any:
        return OneCycleLR(optimizer, 1e-2, total_steps=updates)


class StochasticWeightAverage(Kind):
    """timgaripov/swa: the mean of the weights since the second step, in modules that rest, and evaluated."""

    def model(self) -> nn.Module:
        net = perceptron()
        mean = copy.deepcopy(net).requires_grad_(False).eval()
        return nn.ModuleDict({"net": net, "mean": mean})

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(F.cross_entropy(model["net"](x), y, reduction="sum"), len(y))

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Mean]:
        x, y = batch
        return {"mean_loss": Mean(F.cross_entropy(model["mean"](x), y, reduction="sum"), len(y))}

    def after_step(self, model: nn.Module, step: int) -> None:
        for mine, learned in zip(model["mean"].parameters(), model["net"].parameters(), strict=True):
            mine.lerp_(learned, 1 / max(1, step - 1))


class SparseExperts(Kind):
    """Switch Transformer: top-1 experts, of which some get nothing, and a loss that balances them."""

    def model(self) -> nn.Module:
        experts = nn.ModuleList(perceptron() for _ in range(4))
        return nn.ModuleDict({"gate": nn.Linear(FEATURES, 4), "experts": experts})

    def conditional_parameters(self, model: nn.Module) -> Iterable[str]:
        return [name for name, _ in model.named_parameters() if name.startswith("experts")]

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        shares = model["gate"](x).softmax(1)
        share, chosen = shares.max(1)
        total = 0.01 * len(x) * (shares.mean(0) * F.one_hot(chosen, 4).float().mean(0)).sum() * len(x)
        for i, expert in enumerate(model["experts"]):
            own = chosen == i
            if own.any():
                total = total + F.cross_entropy(share[own, None] * expert(x[own]), y[own], reduction="sum")
        return Loss(total, len(x))


class SiameseWithMomentum(Kind):
    """facebookresearch/simsiam: the predictor has a gradient stopped on its other side; BatchNorm in both."""

    def model(self) -> nn.Module:
        encoder = perceptron(FEATURES, 4, nn.BatchNorm1d(8))
        return nn.ModuleDict({"encoder": encoder, "predictor": perceptron(4, 4, nn.BatchNorm1d(8))})

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = [{"params": list(one.parameters())} for one in model.children()]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=1e-4)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        views = [model["encoder"](x + 0.1 * torch.randn_like(x)) for _ in range(2)]
        guesses = [model["predictor"](view) for view in views]
        pairs = zip(guesses, reversed(views), strict=True)
        alike = [F.cosine_similarity(guess, view.detach()).sum() for guess, view in pairs]
        return Loss(1 * len(x) - sum(alike) / 2, len(x))


class FrozenBackbone(Kind):
    """A detector's fine-tuning: the backbone's BatchNorm rests, its first layers are frozen, and each part has a rate of its own."""

    def model(self) -> nn.Module:
        backbone = nn.Sequential(perceptron(FEATURES, 8, nn.BatchNorm1d(8)), nn.BatchNorm1d(8), nn.ReLU())
        for module in backbone.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval().requires_grad_(False)
        backbone[0][0].requires_grad_(False)
        return nn.Sequential(backbone, nn.Linear(8, CLASSES))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        slow = [p for p in model[0].parameters() if p.requires_grad]
        return torch.optim.AdamW(
            [{"params": slow, "lr": 1e-4}, {"params": list(model[1].parameters())}], lr=1e-2
        )


class GhostBatchNorm(Kind):
    """What a recipe with SyncBatchNorm becomes: the statistics of a micro-batch, with a slow momentum, and no clipping."""

    more: ClassVar[dict[str, Any]] = {"clip_norm": None}

    def model(self) -> nn.Module:
        return perceptron(FEATURES, CLASSES, nn.BatchNorm1d(8, momentum=0.01))


class FreeAdversarial(Kind):
    """Madry's adversarial training: the attack is made within the loss, in evaluation mode, and the modes are put back."""

    def model(self) -> nn.Module:
        return perceptron(FEATURES, CLASSES, nn.BatchNorm1d(8), nn.Dropout(0.1))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        if model.training:
            model.eval()
            attacked = (x + 0.01 * torch.randn_like(x)).requires_grad_()
            slope = torch.autograd.grad(F.cross_entropy(model(attacked), y), attacked)[0]
            x = x + 0.05 * slope.sign()
            model.train()
        return Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))


class Diffusion(Kind):
    """lucidrains/denoising-diffusion-pytorch: a step of noise for each sample, a net that is told of it, and `ema`."""

    more: ClassVar[dict[str, Any]] = {
        "ema": 0.5,
        "checkpoint": {"every": None, "keep_best": {"metric": "eval/loss"}},
    }

    def model(self) -> nn.Module:
        return perceptron(FEATURES + 1, FEATURES)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        share, noise = torch.rand(len(x), 1), torch.randn_like(x)
        mixed = share.sqrt() * x + (1 - share).sqrt() * noise
        return Loss(F.mse_loss(model(torch.cat([mixed, share], 1)), noise, reduction="sum"), len(x))


class Gradients(Kind):
    """A model that the loop moves with `lockstep.rng()`: Gumbel noise by NumPy, and a temperature in an attribute of the model."""

    def model(self) -> nn.Module:
        net = perceptron()
        net.temperature = 1.0
        return net

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        noise = torch.from_numpy(lockstep.rng().gumbel(size=(len(x), CLASSES))).float()
        return Loss(F.cross_entropy((model(x) + 0.1 * noise) / model.temperature, y, reduction="sum"), len(y))

    def after_step(self, model: nn.Module, step: int) -> None:
        model.temperature = max(0.5, 0.9 * model.temperature)


REFUSED: Mapping[type[Kind], Refusal] = {}
"""None: each of these trains."""

HELD = [kind for kind in held_in(__name__, REFUSED) if kind not in {Sentences, Transitions}]
"""Jobs whose bits do not depend on who runs them."""
