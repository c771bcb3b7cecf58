"""A job for the tests of proofs, in which something can be planted that no field of an identity shows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep
from lockstep import randomness

PLANTED: dict[str, Any] = {}
"""`sample`: the id of a sample that is another one; `label`: of one with another label; `swap`: two samples that change places; `shift`: all
samples are others; `order`: a sum is taken the other way round; `gradient`: (step, micro-batch), counted from 0, in which one bit of a
gradient is flipped."""


class Points(Dataset[Any]):
    def __init__(self, samples: int) -> None:
        self.x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(5))
        self.y = self.x[:, :3].argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        other = PLANTED.get("swap", {}).get(i, i)
        i = other if other < len(self.x) else i  # the samples of the evaluation are fewer
        x = self.x[i] + PLANTED.get("shift", 0.0)
        if PLANTED.get("sample") == i:
            x = x + torch.tensor([2**-20] + [0.0] * 7)
        return x, (self.y[i] + 1) % 3 if PLANTED.get("label") == i else self.y[i], i


class Flip(torch.autograd.Function):
    """Hands a value through; its gradient has one bit flipped in the planted micro-batch."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        key = randomness._current.get()
        ctx.here = key is not None and key[1] == "step" and key[2:] == PLANTED.get("gradient")
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        if ctx.here:
            gradient = gradient.clone()
            gradient.view(torch.int32)[0, 0] ^= 1 << 12
        return gradient


class Model(nn.Module):
    """`flipped` takes a sum the other way round."""

    def __init__(self, flipped: bool = False) -> None:
        super().__init__()
        self.flipped = flipped
        self.hidden = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.norm(self.hidden(x)).tanh())
        total = (h.flip(1) if self.flipped or PLANTED.get("order") else h).sum(1, keepdim=True)
        return Flip.apply(self.out(h * total.cos()))


class Small(lockstep.Job):
    class Params(lockstep.Params):
        samples: int = 56
        api_key: str = ""

    params: Params

    def model(self) -> nn.Module:
        return Model()

    def train_data(self) -> Dataset[Any]:
        return Points(self.params.samples)

    def eval_data(self) -> Dataset[Any]:
        return Points(10)

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y, _ = batch
        total = F.cross_entropy(model(x).float(), y, reduction="sum")
        return lockstep.Loss(total, len(y), {"one": lockstep.Mean(total.detach(), len(y))})


class Reordered(Small):
    def model(self) -> nn.Module:
        return Model(flipped=True)


class Nested(Small):
    """Its inputs are a nested tensor."""

    def collate(self, samples: Any) -> Any:
        x, y, numbers = zip(*samples, strict=True)
        return torch.nested.nested_tensor(list(x)), torch.stack(y), torch.tensor(numbers)

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        return super().loss(model, (batch[0].to_padded_tensor(0.0), *batch[1:]))


class Transposed(Small):
    """Its inputs lie in memory column by column."""

    def collate(self, samples: Any) -> Any:
        x, y, numbers = zip(*samples, strict=True)
        return torch.stack(x, 1).t(), torch.stack(y), torch.tensor(numbers)
