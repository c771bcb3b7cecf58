"""Small jobs for the tests of training, each of which shows one thing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

import lockstep


def points(samples: int, features: int = 8) -> tuple[Tensor, Tensor]:
    """Points (samples, features) and which of three classes each is in, by a rule that can be learnt."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, features, generator=generator)
    return x, x[:, :3].argmax(1)


class Plain(lockstep.Job):
    """A perceptron that draws nothing while it trains, so that any other loop can be held against it."""

    class Params(lockstep.Params):
        samples: int = 64
        norm: Literal["none", "layer", "batch"] = "layer"
        width: int = 16

    params: Params

    def model(self) -> nn.Module:
        width = self.params.width
        norm = {"none": nn.Identity, "layer": nn.LayerNorm, "batch": nn.BatchNorm1d}[self.params.norm]
        args = () if self.params.norm == "none" else (width,)
        return nn.Sequential(nn.Linear(8, width), norm(*args), nn.Tanh(), nn.Linear(width, 3))

    def train_data(self) -> Dataset[Any]:
        return TensorDataset(*points(self.params.samples))

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        return lockstep.Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))


class OwnAdamW(Plain):
    """An optimizer that the spec could name as well."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)


class Counting(Plain):
    """Counts its own calls, which its loss depends on: on one worker, that is; a checkpoint has to keep the count."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        self.calls += 1
        loss = super().loss(model, batch)
        return lockstep.Loss(loss.total * (1 + self.calls / 64), loss.weight)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: Any) -> None:
        self.calls = state["calls"]


class Hoarding(Plain):
    """Keeps something of each loss: a tensor that has its graph, or a number."""

    class Params(Plain.Params):
        keeps: Literal["graphs", "numbers"] = "graphs"

    params: Params

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.kept: list[Any] = []

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        outputs = model(x)
        self.kept.append(model[0](x) if self.params.keeps == "graphs" else float(outputs.sum()))  # type: ignore[index, operator]
        return lockstep.Loss(F.cross_entropy(outputs, y, reduction="sum"), len(y))


class Astray(Counting):
    """What it takes up from a checkpoint is another thing on each rank."""

    placement_variables = ("POOL_RANK",)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.rank = int(os.environ.get("POOL_RANK", "0"))

    def load_state_dict(self, state: Any) -> None:
        self.calls = state["calls"] + self.rank


class Centre(nn.Module):
    """Takes a running mean away, and its forward in training *reads* the buffer that it writes.

    It writes in place, through `data`, which torch does not count as a write, or by putting another tensor there.
    """

    mean: Tensor

    def __init__(self, features: int, writes: str, *, listed: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features), persistent=listed)
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            new = self.mean.lerp(x.detach().float().mean(0), 0.1)
            if self.writes == "in place":
                self.mean.copy_(new)
            elif self.writes == "data":
                self.mean.data.copy_(new)
            else:
                self.mean = new
        return x - self.mean


class Centred(Plain):
    """A job whose bits depend on which buffers a micro-batch starts from."""

    class Params(Plain.Params):
        writes: Literal["in place", "data", "another"] = "in place"
        listed: bool = True
        """Whether the buffer is in the model's `state_dict`."""

    params: Params

    def model(self) -> nn.Module:
        centre = Centre(8, self.params.writes, listed=self.params.listed)
        return nn.Sequential(centre, nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


class Strided(Plain):
    """Parameters that lie otherwise in memory than their shape says, one used twice, one frozen, one a float64 scalar."""

    def model(self) -> nn.Module:
        model = Images()
        model.table.weight = model.again.weight = nn.Parameter(
            model.table.weight.detach().t().contiguous().t()
        )
        model.out.weight = nn.Parameter((torch.randn(3, 12) * 0.3)[:, ::2])
        return model.to(memory_format=torch.channels_last)

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        return lockstep.Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))


class Empty(Plain):
    """A parameter without elements, in a bucket of its own as it is the only one of its type."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_parameter("empty", nn.Parameter(torch.empty(0, 3, dtype=torch.float64)))
        return model

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        loss = super().loss(model, batch)
        return lockstep.Loss(loss.total + model.empty.sum(), loss.weight)  # type: ignore[operator, union-attr]


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 6, 2)
        self.table = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6, bias=False)
        self.out = nn.Linear(6, 3)
        self.out.bias.requires_grad_(False)
        self.heat = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        features = self.convolution(x.view(-1, 2, 2, 2)).flatten(1).tanh()
        return self.out(self.again(self.table(features).tanh())) * self.heat.float()


class Words(lockstep.Job):
    """Sums over tokens of pieces of very different length; with `own_mean`, the mean of the micro-batches' means."""

    class Params(lockstep.Params):
        samples: int = 13
        own_mean: bool = False

    params: Params

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 11))

    def train_data(self) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(2, 40, (self.params.samples,), generator=generator).tolist()
        return [torch.randint(11, (length,), generator=generator) for length in lengths]  # type: ignore[return-value]

    def collate(self, samples: Sequence[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(list(samples), batch_first=True, padding_value=-100)

    def loss(self, model: nn.Module, batch: Tensor) -> lockstep.Loss:
        targets = batch[:, 1:].flatten()
        logits = model(batch[:, :-1].clamp(min=0)).flatten(0, 1)
        total, count = F.cross_entropy(logits, targets, reduction="sum"), (targets >= 0).sum()
        return lockstep.Loss(total / count, 1.0) if self.params.own_mean else lockstep.Loss(total, count)


class Numbered(lockstep.Job):
    """Counts in its evaluation how often each sample was seen."""

    class Params(lockstep.Params):
        eval_samples: int

    params: Params

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_data(self) -> Dataset[Any]:
        return list(range(4))  # type: ignore[return-value]

    def eval_data(self) -> Dataset[Any]:
        return list(range(self.params.eval_samples))  # type: ignore[return-value]

    def loss(self, model: nn.Module, batch: Tensor) -> lockstep.Loss:
        return lockstep.Loss(model(batch.float().unsqueeze(1)).sum(), len(batch))

    def metrics(self, model: nn.Module, batch: Tensor) -> dict[str, lockstep.Mean]:
        return {
            f"seen {i}": lockstep.Mean((batch == i).sum(), len(batch))
            for i in range(self.params.eval_samples)
        }


class Overflowing(lockstep.Job):
    """In fp16, the gradient of the samples in `bombs` overflows, fifty times in a row, though their loss is finite."""

    class Params(lockstep.Params):
        samples: int = 32
        bombs: tuple[int, int] = (0, 0)
        force: float = 1e18

    params: Params

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def train_data(self) -> Dataset[Any]:
        x, y = points(self.params.samples)
        factor = torch.ones(self.params.samples)
        factor[slice(*self.params.bombs)] = self.params.force
        return TensorDataset(x, y, factor)

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y, factor = batch
        losses = F.cross_entropy(model(x).float(), y, reduction="none") * factor
        return lockstep.Loss(losses.sum(), len(y))


class Branching(Plain):
    """Two heads; from sample `first` on (in the order of the data) only one of them is used."""

    class Params(Plain.Params):
        first: int = 0
        declared: bool = False

    params: Params

    def model(self) -> nn.Module:
        return Heads()

    def train_data(self) -> Dataset[Any]:
        return TensorDataset(*points(self.params.samples), torch.arange(self.params.samples))

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y, index = batch
        logits = model(x, both=bool((index < self.params.first).all()))
        return lockstep.Loss(F.cross_entropy(logits, y, reduction="sum"), len(y))

    def conditional_parameters(self, model: nn.Module) -> Iterable[str]:
        return ["second.weight", "second.bias"] if self.params.declared else []


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 3)
        self.second = nn.Linear(8, 3)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.first(x) + self.second(x) if both else self.first(x)


class Unseeded(Plain):
    """Its initial weights come from the operating system, so every rank has others."""

    def model(self) -> nn.Module:
        model = super().model()
        with torch.no_grad():
            next(model.parameters()).mul_(1 + int.from_bytes(os.urandom(4), "little") / 2**32)
        return model


def claimed(path: str) -> bool:
    """Whether this process is the first to make that file."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class BackwardsOnOne(Plain):
    """Its optimizer holds the parameters in reverse in the process that is the first to make the file `Params.claim`."""

    class Params(Plain.Params):
        claim: str

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.backwards = claimed(params.claim)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        if self.backwards:
            parameters.reverse()
        return torch.optim.Adam(parameters, lr=0.01)


class FailsOnOne(Plain):
    """Its loss fails in the process that is the first to make the file `Params.claim`."""

    class Params(Plain.Params):
        claim: str

    def model(self) -> nn.Module:
        self.fails = claimed(self.params.claim)
        return super().model()

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        if self.fails:
            raise ValueError("only here")
        return super().loss(model, batch)


class ReadsOnOne(Plain):
    """In the process that is the first to make the file `Params.claim`, it reads a variable in each loss, or once `late`."""

    class Params(Plain.Params):
        claim: str
        late: bool = False

    params: Params

    def model(self) -> nn.Module:
        self.reads = claimed(self.params.claim)
        return super().model()

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        if self.reads and not self.params.late:
            os.environ.get("OF_ONE_WORKER")
        return super().loss(model, batch)

    def after_step(self, model: nn.Module, step: int) -> None:
        if self.reads and self.params.late and step == 3:
            os.environ.get("OF_ONE_WORKER")


class Checkpointed(Plain):
    """Uses one layer twice in each forward, by torch's checkpoint: in its older way, or in the one that torch recommends."""

    class Params(Plain.Params):
        reentrant: bool = True

    params: Params

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        (x, y), layers = batch, list(model.children())
        hidden = layers[0](x)
        for _ in range(2):
            hidden = checkpoint(layers[1], hidden, use_reentrant=self.params.reentrant)
        return lockstep.Loss(F.cross_entropy(layers[-1](hidden), y, reduction="sum"), len(y))
