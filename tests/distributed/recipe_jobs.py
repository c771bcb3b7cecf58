"""Jobs of docs/recipes.md: differentially private training, and quantization-aware training that is calibrated before its first step."""

from __future__ import annotations

import warnings

import torch
import torch.ao.quantization as quantization
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import TensorDataset

import lockstep

Batch = tuple[Tensor, Tensor]


def points(samples: int) -> TensorDataset:
    x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].argmax(1))


# private: begin
class Private(lockstep.Job):
    """DP-SGD (Abadi et al. 2016): each sample's gradient is clipped, and noise is added to their sum once a step."""

    class Params(lockstep.Params):
        batch: int = 12  # batch.global
        most: float = 0.5  # the norm of a sample's gradient, at most
        noise: float = 1.1  # in units of `most`

    params: Params

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def train_data(self) -> TensorDataset:
        return points(48)

    def loss(self, model: nn.Module, batch: Batch) -> lockstep.Loss:
        x, y = batch
        total = F.cross_entropy(model(x), y, reduction="sum")
        if not model.training:
            return lockstep.Loss(total, len(y))
        clipped = clipped_gradients(model, x, y, self.params.most)
        carrier = sum((p * clipped[name]).sum() for name, p in model.named_parameters())
        # Its value is the loss; its gradient is that of the carrier, which are the clipped sums.
        return lockstep.Loss(total.detach() + (carrier - carrier.detach()), len(y))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        std = self.params.noise * self.params.most / self.params.batch

        def add_noise(optimizer: torch.optim.Optimizer, *_: object) -> None:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad.add_(torch.randn_like(p), alpha=std)

        optimizer.register_step_pre_hook(add_noise)
        return optimizer


def clipped_gradients(model: nn.Module, x: Tensor, y: Tensor, most: float) -> dict[str, Tensor]:
    """The sum over the samples of their gradients, each scaled down to the norm `most`, by the names of the parameters."""

    def of_one(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    weights = {name: p.detach() for name, p in model.named_parameters()}
    each = vmap(grad(of_one), in_dims=(None, 0, 0), randomness="different")(weights, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
    factors = (most / (norms + 1e-6)).clamp(max=1.0)
    return {name: torch.einsum("n,n...->...", factors, g) for name, g in each.items()}


# private: end


# quantised: begin
class Quantised(lockstep.Job):
    """Quantization-aware training. The ranges are observed before the first step, on samples that are named here."""

    class Params(lockstep.Params):
        calibration: int = 4  # batches
        observes: bool = False  # whether the ranges go on moving in training

    params: Params

    def model(self) -> nn.Module:
        model = nn.Sequential(
            quantization.QuantStub(),
            nn.Linear(6, 16),
            nn.ReLU(),
            nn.Linear(16, 3),
            quantization.DeQuantStub(),
        )
        with warnings.catch_warnings(action="ignore"):  # torch.ao.quantization is on its way to torchao
            model.qconfig = quantization.get_default_qat_qconfig("x86")  # type: ignore[assignment]
            quantization.prepare_qat(model, inplace=True)
        data = self.train_data()
        with torch.no_grad():
            for i in range(self.params.calibration):
                model(torch.stack([data[j][0] for j in range(8 * i, 8 * i + 8)]))
        if not self.params.observes:
            model.apply(quantization.disable_observer)
        return model

    def train_data(self) -> TensorDataset:
        return points(48)

    def loss(self, model: nn.Module, batch: Batch) -> lockstep.Loss:
        x, y = batch
        return lockstep.Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))


# quantised: end
