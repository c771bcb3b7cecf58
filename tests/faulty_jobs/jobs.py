"""Jobs with one fault each, of the kind that trains without a message; `Sound` is the job without any."""

from __future__ import annotations

import copy
import os
import random
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

import lockstep

CLASSES, FEATURES = 4, 8


def points(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points (samples, 8), and which of four classes each is in, by a rule that can be learnt."""
    x = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :CLASSES].argmax(1)


class Sound(lockstep.Job):
    """A small classifier with dropout, nothing wrong with it."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, CLASSES)
        )

    def train_data(self) -> Dataset[Any]:
        return TensorDataset(*points(256, 1))

    def eval_data(self) -> Dataset[Any]:
        return TensorDataset(*points(128, 2))

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        return lockstep.Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))


class SoundRegression(Sound):
    """Numbers instead of classes."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, _ = batch
        return lockstep.Loss(F.mse_loss(model(x), x[:, :1], reduction="sum"), len(x))


class SoundZeroStart(Sound):
    """A last layer that begins at zero, so that the first gradient of all others is zero."""

    def model(self) -> nn.Module:
        model = super().model()
        nn.init.zeros_(model[4].weight)  # type: ignore[index]
        return model


class SoundTied(Sound):
    """One matrix used twice, and a frozen copy of another."""

    def model(self) -> nn.Module:
        return Pair(tied=True)


class SoundSparse(Sound):
    """Its inputs are sparse matrices."""

    def model(self) -> nn.Module:
        return nn.Sequential(OfSparse(FEATURES, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, CLASSES))

    def collate(self, samples: Sequence[Any]) -> tuple[Tensor, Tensor]:
        x, y = default_collate(samples)
        return x.to_sparse(), y


class OfSparse(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(x, self.weight.t()) + self.bias


class SoundNested(Sound):
    """Its inputs are rows of several lengths in a nested tensor."""

    def collate(self, samples: Sequence[Any]) -> tuple[Tensor, Tensor]:
        x, y = default_collate(samples)
        return torch.nested.nested_tensor([row[: FEATURES - i % 2] for i, row in enumerate(x)]), y

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        return super().loss(model, (x.to_padded_tensor(0.0, (len(y), FEATURES)), y))


class SoundNll(Sound):
    """Log-probabilities of the model's own, each label weighted by itself."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        return lockstep.Loss(F.nll_loss(model(x).log_softmax(1), y, reduction="none").sum(), len(y))


class SoundBinary(SoundRegression):
    """Yes or no, from one logit."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        logits = model(x).squeeze(1)
        return lockstep.Loss(
            F.binary_cross_entropy_with_logits(logits, (y > 1).float(), reduction="sum"), len(y)
        )


class SoundMeanOfSequence(Sound):
    """A mean over the labels of a sample, and a weight that counts samples."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        twice = F.cross_entropy(torch.cat([model(x), model(x)]), torch.cat([y, y]), reduction="sum")
        return lockstep.Loss(twice / 2, len(y))


# --- the data ---------------------------------------------------------------------------------------------


class NotFinite(Sound):
    def train_data(self) -> Dataset[Any]:
        x, y = points(256, 1)
        x[:, 3] = float("nan")
        return TensorDataset(x, y)


class OneSample(Sound):
    """`__getitem__` forgets its index."""

    def train_data(self) -> Dataset[Any]:
        x, y = points(256, 1)
        return TensorDataset(x[:1].expand(256, -1).contiguous(), y[:1].expand(256).contiguous())


class Truncated(Sound):
    """The last samples cannot be read."""

    def train_data(self) -> Dataset[Any]:
        return Short(*points(256, 1))


class Short(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        if index >= 200:
            raise EOFError(f"sample {index}: unexpected end of file")
        return super().__getitem__(index)


class Slow(Sound):
    def train_data(self) -> Dataset[Any]:
        return Sleeping(*points(256, 1))


class Sleeping(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.003)
        return super().__getitem__(index)


class LyingBlocks(Sound):
    """Says that its blocks hold other samples than they do."""

    def train_data(self) -> Dataset[Any]:
        return Blocks(*points(256, 1))


class Blocks(TensorDataset):
    block_sizes = (100, 100, 100)


class Leaking(Sound):
    """Evaluation samples are training samples."""

    def eval_data(self) -> Dataset[Any]:
        x, y = points(256, 1)
        return TensorDataset(x[:128], y[:128])


class UnseededAugmentation(Sound):
    def train_data(self) -> Dataset[Any]:
        return Noisy(*points(256, 1))


class Noisy(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + int.from_bytes(os.urandom(2), "little") / 2**18, y


class LyingLength(Sound):
    """`__len__` says more than there is."""

    def train_data(self) -> Dataset[Any]:
        return Longer(*points(256, 1))


class Longer(TensorDataset):
    def __len__(self) -> int:
        return 300


class ShuffledEvaluation(Sound):
    """Held-out samples come in another order each time, drawn from a generator of the dataset's own."""

    def eval_data(self) -> Dataset[Any]:
        return Reordered(*points(128, 2))


class Reordered(TensorDataset):
    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.generator = random.Random(0)

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(self.generator.randrange(len(self)))


class EmptyEvaluation(Sound):
    """A split that holds nothing out."""

    def eval_data(self) -> Dataset[Any]:
        x, y = points(128, 2)
        return TensorDataset(x[:0], y[:0])


# --- the labels -------------------------------------------------------------------------------------------


class OffByOne(Sound):
    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        return super().loss(model, (x, y + 1))


class SoftmaxTwice(Sound):
    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        return lockstep.Loss(F.cross_entropy(model(x).softmax(1), y, reduction="sum"), len(y))


class ProbabilitiesInNll(Sound):
    """`nll_loss` on probabilities, of which the logarithm was forgotten."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        return lockstep.Loss(F.nll_loss(model(x).softmax(1), y, reduction="sum"), len(y))


class LogitsInNll(Sound):
    """`nll_loss` on logits."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        return lockstep.Loss(F.nll_loss(model(x), y, reduction="sum"), len(y))


class SigmoidTwice(Sound):
    """Probabilities where logits are wanted."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1), nn.Sigmoid())

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        total = F.binary_cross_entropy_with_logits(model(x).squeeze(1), (y > 1).float(), reduction="sum")
        return lockstep.Loss(total, len(y))


class MissingClass(Sound):
    """Held-out samples of class 2 were lost."""

    def eval_data(self) -> Dataset[Any]:
        x, y = points(256, 2)
        return TensorDataset(x[y != 2], y[y != 2])


class Tokens(Sound):
    """A model of sequences of 16 tokens of 32, each drawn after the one before. Half of the held-out texts' words are rare there."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))

    def train_data(self) -> Dataset[Any]:
        return TensorDataset(_texts(256, 1, 32))

    def eval_data(self) -> Dataset[Any]:
        return TensorDataset(_texts(256, 2, 24))

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        (tokens,) = batch
        logits = model(tokens[:, :-1]).flatten(0, 1)
        total = F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
        return lockstep.Loss(total, tokens[:, 1:].numel())


class TokensMissing(Tokens):
    """The held-out texts have another map of tokens: one that every training text has many of is in none of them."""

    def train_data(self) -> Dataset[Any]:
        texts = _texts(256, 1, 32)
        texts[:, ::4] = 31
        return TensorDataset(texts)


def _texts(count: int, seed: int, words: int) -> Tensor:
    """Texts of 17 words, each of one topic: of its four words."""
    draw = torch.Generator().manual_seed(seed)
    topics = torch.randint(words // 4, (count, 1), generator=draw)
    return 4 * topics + torch.randint(4, (count, 17), generator=draw)


class SwappedMap(Sound):
    """Held-out labels are read by another map, which knows no class 0 and calls it 1."""

    def eval_data(self) -> Dataset[Any]:
        x, y = points(256, 2)
        return TensorDataset(x, y.clamp(min=1))


class HeldOutOffByOne(Sound):
    """Held-out labels count from 1."""

    def eval_data(self) -> Dataset[Any]:
        x, y = points(128, 2)
        return TensorDataset(x, y + 1)


class HeldOutUnscaled(SoundRegression):
    """Held-out samples lack the scaling that training samples have had."""

    def eval_data(self) -> Dataset[Any]:
        x, y = points(128, 2)
        return TensorDataset(30 * x, y)


class Outlier(SoundRegression):
    """One sample is a hundred times too large."""

    def train_data(self) -> Dataset[Any]:
        x, y = points(256, 1)
        x[77] *= 100
        return TensorDataset(x, y)


class Memorised(Sound):
    """Labels that no rule gives, and a model that can learn them by heart."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, CLASSES))

    def train_data(self) -> Dataset[Any]:
        x, y = points(64, 1)
        return TensorDataset(x, y.flip(0))


class Sorted(Sound):
    """The data are sorted by class, and not shuffled."""

    def train_data(self) -> Dataset[Any]:
        x, y = points(256, 1)
        order = y.argsort(stable=True)
        return TensorDataset(x[order], y[order])


class PlusMinusOne(Sound):
    """Labels -1 and 1 where 0 and 1 are wanted."""

    def model(self) -> nn.Module:
        return nn.Linear(FEATURES, 1)

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        signs = (y > 1).float() * 2 - 1
        total = F.binary_cross_entropy_with_logits(model(x).squeeze(1), signs, reduction="sum")
        return lockstep.Loss(total, len(y))


class Stretched(SoundRegression):
    """Outputs (B, 1) against targets (B,): torch compares each with every other."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, _ = batch
        return lockstep.Loss(F.mse_loss(model(x), x[:, 0], reduction="sum"), len(x))


class StretchedAbsolute(SoundRegression):
    """The same with absolute errors."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, _ = batch
        return lockstep.Loss(F.smooth_l1_loss(model(x), x[:, 0], reduction="sum"), len(x))


class PaddingCounts(Sound):
    """A third of the labels are padding, and the weight counts them."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        padded = torch.where(torch.arange(len(y)) % 3 == 0, -100, y)
        return lockstep.Loss(F.cross_entropy(model(x), padded, reduction="sum"), len(y))


class Unscaled(Sound):
    """Outputs a thousand times too large."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        return lockstep.Loss(F.cross_entropy(model(x) * 1000, y, reduction="sum"), len(y))


# --- the model --------------------------------------------------------------------------------------------


class Entropy(Sound):
    """Initial weights from the operating system: other ones on each rank."""

    def model(self) -> nn.Module:
        model = super().model()
        with torch.no_grad():
            next(model.parameters()).mul_(1 + int.from_bytes(os.urandom(4), "little") / 2**32)
        return model


class Pair(nn.Module):
    """Encoder and decoder, whose matrices are one or a copy."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, FEATURES)
        self.outer = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)
        weight = self.inner.weight
        self.outer.weight = weight if tied else nn.Parameter(weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.outer(self.inner(x).tanh()).tanh())
        return logits


class Untied(Sound):
    def model(self) -> nn.Module:
        return Pair(tied=False)


class Unused(Sound):
    """A layer that no forward uses."""

    def model(self) -> nn.Module:
        model = super().model()
        model.further = nn.Linear(3, 3)
        model.forward = lambda x: nn.Sequential(*list(model)[:5])(x)  # type: ignore[call-overload,method-assign]
        return model


class Masked(Sound):
    """A mask of zeros: the first layers have a gradient, which is zero."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        features = model[1](model[0](x)) * torch.zeros(16)  # type: ignore[index]
        return lockstep.Loss(F.cross_entropy(model[4](features), y, reduction="sum"), len(y))  # type: ignore[index]


class DeadUnits(Sound):
    """A bias so low that no unit of the layer ever fires."""

    def model(self) -> nn.Module:
        model = super().model()
        nn.init.constant_(model[1].bias, -100.0)  # type: ignore[index]
        return model


class Saturated(Sound):
    """Initial weights so large that every sigmoid is exactly 0 or 1."""

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Sigmoid(), nn.Linear(16, CLASSES))
        nn.init.constant_(model[0].weight, 1e6)  # type: ignore[arg-type]
        return model


class Detached(Sound):
    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        loss = super().loss(model, batch)
        return lockstep.Loss(loss.total.detach(), loss.weight)


class Frozen(Sound):
    """A layer behind a detach: it never learns."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        hidden = model[2](model[1](model[0](x))).detach()  # type: ignore[index]
        return lockstep.Loss(F.cross_entropy(model[4](hidden), y, reduction="sum"), len(y))  # type: ignore[index]


class InPlace(Sound):
    """Writes to what backward still needs."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        probabilities = model(x).softmax(1)
        total = -probabilities.log()[torch.arange(len(y)), y].sum()
        probabilities.mul_(2)
        return lockstep.Loss(total, len(y))


class NormOfOne(Sound):
    """Batch norm, and micro-batches of one sample."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))


class LogOfZero(Sound):
    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        logits = model(x)
        return lockstep.Loss((logits - logits).log().sum() * 0 + logits.sum(), len(y))


class NoDeterministicForm(Sound):
    """An operator that torch has no deterministic kernel of."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        pooled, places = F.max_pool1d(x.unsqueeze(1), 2, return_indices=True)
        return super().loss(model, (F.max_unpool1d(pooled, places, 2).squeeze(1), y))


class InEvaluationMode(Sound):
    """Training without dropout."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        model.eval()
        return super().loss(model, batch)


class InTrainingMode(Sound):
    """A metric that leaves the model in training mode."""

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, lockstep.Mean]:
        x, y = batch
        model.train()
        return {"accuracy": lockstep.Mean((model(x).argmax(1) == y).sum(), len(y))}


class Dropping(nn.Module):
    """Dropout that no mode switches off."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.1)


class AlwaysDropping(Sound):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 16), Dropping(), nn.Linear(16, CLASSES))


class Attention(nn.Module):
    """Attention of a sample with itself, with dropout that no mode switches off."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(len(x), 1, 4, 4)
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1).flatten(1)


class AttentionDropping(Sound):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 16), Attention(), nn.Linear(16, CLASSES))


class NormsAlone(Sound):
    """Asks for the gradients of the norms alone, and gives the optimizer the head."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("1."))
        return torch.optim.SGD(model[4].parameters(), lr=0.01)  # type: ignore[index]


# --- the loss and the update ------------------------------------------------------------------------------


class MeanLoss(Sound):
    """The mean where the sum is wanted."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        return lockstep.Loss(F.cross_entropy(model(x), y), len(y))


class WeightOfOne(Sound):
    """A sum that is divided by the number of micro-batches."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        return lockstep.Loss(super().loss(model, batch).total, 1.0)


class SoftmaxOverBatch(Sound):
    """The softmax is taken over the samples and not over the classes."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        return lockstep.Loss(F.nll_loss(model(x).log_softmax(0), y, reduction="sum"), len(y))


class OwnGenerator(Sound):
    """Noise from a generator that nobody seeds."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.generator = torch.Generator()
        self.generator.seed()

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        return super().loss(model, (x + 0.1 * torch.randn(x.shape, generator=self.generator), y))


class Clocked(Sound):
    """A factor that depends on the time of day."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        loss = super().loss(model, batch)
        return lockstep.Loss(loss.total * (1 + time.time() % 1), loss.weight)


class StaleCache(Sound):
    """Scales by the mean of the first micro-batch that it saw."""

    mean: Tensor | None = None

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        self.mean = x.mean(0) if self.mean is None else self.mean.lerp(x.mean(0), 0.1)
        return super().loss(model, (x - self.mean, y))


class KeptGraph(Sound):
    """A list that keeps every loss with its graph."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.losses: list[Tensor] = []

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        loss = super().loss(model, batch)
        self.losses.append(loss.total)
        return loss


class Accumulating(Sound):
    """A metric that adds up from one micro-batch to the next."""

    right = 0.0

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, lockstep.Mean]:
        x, y = batch
        self.right += float((model(x).argmax(1) == y).sum())
        return {"accuracy": lockstep.Mean(self.right, len(y))}


class Uphill(torch.optim.SGD):
    """Steps up the gradient."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter += group["lr"] * parameter.grad


class Ascending(Sound):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Uphill(model.parameters(), lr=0.003)


class AscendingBesideAQueue(Ascending):
    """The wrong sign beside a buffer that follows the step, which the loss reads."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("seen", torch.zeros(()))
        return model

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        loss = super().loss(model, batch)
        return lockstep.Loss(loss.total + model.seen * loss.weight, loss.weight)  # type: ignore[operator]

    def after_step(self, model: nn.Module, step: int) -> None:
        model.seen.add_(0.001)  # type: ignore[union-attr,operator]


class ForeignParameters(Sound):
    """The optimizer holds the parameters of another copy of the model."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(copy.deepcopy(model).parameters(), lr=0.01)


class LeftOut(Sound):
    """The optimizer has the last layer alone."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model[4].parameters(), lr=0.01)  # type: ignore[index]


class Idle(torch.optim.SGD):
    """Keeps gradients to itself, as a step that is made on a copy of the parameters does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                copy = parameter.detach().clone()
                copy -= group["lr"] * parameter.grad


class Standing(Sound):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Idle(model.parameters(), lr=0.5)


class ForgottenZeroing(torch.optim.SGD):
    """Adds each gradient to those before it, as a loop without zero_grad does, and keeps the sum to itself."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.sums: dict[int, Tensor] = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for i, parameter in enumerate(group["params"]):
                    self.sums[i] = self.sums.get(i, torch.zeros_like(parameter)) + parameter.grad
                    parameter -= group["lr"] * self.sums[i]


class NeverZeroed(Sound):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return ForgottenZeroing(model.parameters(), lr=0.01)


class HiddenMomentum(torch.optim.SGD):
    """Keeps its momentum beside the optimizer's state."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.velocities: dict[int, Tensor] = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for i, parameter in enumerate(group["params"]):
                    before = self.velocities.get(i, torch.zeros_like(parameter))
                    self.velocities[i] = 0.9 * before + parameter.grad
                    parameter -= group["lr"] * self.velocities[i]


class Unsaved(Sound):
    """A state that no checkpoint keeps."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return HiddenMomentum(model.parameters(), lr=0.01)


class OwnCritic(Sound):
    """A network of the job's own, which it trains in `after_step` and no checkpoint keeps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.critic = nn.Linear(CLASSES, 1)
        nn.init.constant_(self.critic.weight, 0.1)
        nn.init.zeros_(self.critic.bias)
        self.descent = torch.optim.SGD(self.critic.parameters(), lr=0.01)

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        logits = model(x)
        judged = 0.1 * self.critic(logits).square().sum()
        return lockstep.Loss(F.cross_entropy(logits, y, reduction="sum") + judged, len(y))

    def after_step(self, model: nn.Module, step: int) -> None:
        self.descent.zero_grad()
        with torch.enable_grad():
            (self.critic(torch.ones(1, CLASSES)) - 1).square().sum().backward()
        self.descent.step()


class MasterWeights(torch.optim.SGD):
    """Updates copies in double precision, and adds to their gradients, which it does not zero."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.01)
        masters = [p.detach().double().requires_grad_() for p in self.param_groups[0]["params"]]
        self.inner = torch.optim.SGD(masters, lr=0.01)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        masters, own = self.inner.param_groups[0]["params"], self.param_groups[0]["params"]
        with torch.no_grad():
            for master, parameter in zip(masters, own, strict=True):
                master.copy_(parameter)
                if master.grad is None:
                    master.grad = torch.zeros_like(master)
                master.grad += parameter.grad
            self.inner.step()
            for master, parameter in zip(masters, own, strict=True):
                parameter.copy_(master)


class MastersNeverZeroed(Sound):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return MasterWeights(model.parameters())


class OwnStepNeverZeroed(Sound):
    """Pulls the head to a small norm in `after_step`, by a backward that adds to what the step has left."""

    zeroes = False

    def after_step(self, model: nn.Module, step: int) -> None:
        head = model[4].weight  # type: ignore[index]
        if self.zeroes:
            head.grad = None
        with torch.enable_grad():
            (0.5 * head.square().sum()).backward()
        with torch.no_grad():
            head -= 1e-3 * head.grad


class SoundOwnStep(OwnStepNeverZeroed):
    """The same, from a gradient of its own."""

    zeroes = True


class Underflowing(Sound):
    """In fp16 the gradient of the first layers is below the smallest number there is."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        hidden = model[1](model[0](x)) * 1e-12  # type: ignore[index]
        return lockstep.Loss(F.cross_entropy(model[4](hidden).float(), y, reduction="sum"), len(y))  # type: ignore[index]


class Overflowing(Sound):
    """In fp16 every gradient is beyond the largest number there is, at any scale."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        return lockstep.Loss(F.cross_entropy(model(x).float(), y, reduction="sum") * 1e25, len(y))


class SparseTable(Sound):
    """An embedding whose gradient is sparse, with an optimizer that takes no such gradient."""

    def model(self) -> nn.Module:
        return nn.Embedding(CLASSES, CLASSES, sparse=True)

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        _, y = batch
        return lockstep.Loss(F.cross_entropy(model(y), y, reduction="sum"), len(y))


class SoundTable(SparseTable):
    """The same with one that does, a hook of its own, and a dense layer beside it."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(CLASSES, CLASSES, sparse=True), nn.Linear(CLASSES, CLASSES))

    def optimizer(self, model: nn.Module) -> Any:
        optimizer = torch.optim.SparseAdam([model[0].weight], lr=0.01)  # type: ignore[index]
        optimizer.register_step_post_hook(lambda *_: None)
        return [optimizer, torch.optim.AdamW(model[1].parameters(), lr=0.01)]  # type: ignore[index]


class Offset(SoundRegression):
    """Targets near 1002, of which bf16 knows 1000 and 1004: most of the loss is rounding."""

    def model(self) -> nn.Module:
        model = super().model()
        nn.init.constant_(model[2].bias, 1002.0)  # type: ignore[index]
        return model

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, _ = batch
        return lockstep.Loss(F.mse_loss(model(x), 1002 + x[:, :1], reduction="sum"), len(x))


class ShortByHand(Sound):
    """Casts its input by itself, which works under autocast alone."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        return lockstep.Loss(F.cross_entropy(model(x.bfloat16()), y, reduction="sum"), len(y))
