"""Jobs whose gradients are not dense real numbers: complex weights, and tables whose gradients have rows."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Loss
from tests.distributed.kinds import CLASSES, Kind, held_in

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


REFUSED: dict[type[Kind], tuple[str, ...]] = {}

HELD = held_in(__name__, REFUSED)
"""Jobs whose bits do not depend on who runs them."""
