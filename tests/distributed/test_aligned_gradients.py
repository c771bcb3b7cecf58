"""G1 for a job's own optimizer that adds up gradients: they begin where new memory does, whatever bucket they lie in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import lockstep.training.step.optimizer_step as step
from lockstep.training.step.norm import ALIGNMENT
from lockstep.training.step.phase_step import PhaseStep
from tests.distributed.pool import Pool
from tests.distributed.small_jobs import Plain
from tests.distributed.training import Document, Trained, train

SEEN: set[int] = set()
"""Where gradients began, modulo what new memory is aligned to."""


class Trusting(torch.optim.Optimizer):
    """LARS: the rate of each parameter by the norms of its weights and its gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                SEEN.add(gradient.data_ptr() % ALIGNMENT["cpu"])
                trust = parameter.norm() / (gradient.norm() + 1e-6)
                parameter.sub_(gradient * (group["lr"] * trust.clamp(max=1.0)))


class Layerwise(Plain):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Trusting(model.parameters())


def document(bucket_mb: float) -> Document:
    return {
        "job": {"use": "tests.distributed.test_aligned_gradients:Layerwise", "params": {"width": 5}},
        "batch": {"global": 16, "micro": 2},
        "workers": {"bucket_mb": bucket_mb},
        "rehearsal": "off",
    }


def train_seeing(bucket_mb: float, aligned: bool) -> tuple[Trained, set[int]]:
    SEEN.clear()
    align = step.align_gradients if aligned else lambda parameters, **_: None
    with mock.patch.object(step, "align_gradients", align):
        return train(document(bucket_mb)), set(SEEN)


@pytest.mark.thinned(3)
@pytest.mark.scenario
@pytest.mark.parametrize("bucket_mb", [0.00003, 0.0001, 25.0])
def test_gradients_are_aligned_in_buckets_of_any_size(pool: Pool, bucket_mb: float) -> None:
    alone, _ = train_seeing(bucket_mb, True)
    for workers in (2, 3):
        assert pool.run(workers, train_seeing, bucket_mb, True) == [(alone, {0})] * workers


@pytest.mark.scenario
def test_in_buckets_they_are_not_by_themselves(pool: Pool) -> None:
    """The control."""
    assert all(len(seen) > 1 for _, seen in pool.run(2, train_seeing, 25.0, False))


class Column(nn.Module):
    """A scale for each feature, in a column that is used turned: its gradient of one worker lies as a row does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 100), nn.Linear(100, 3)
        self.scale = nn.Parameter(torch.zeros(100, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.outer(self.inner(x).tanh() * self.scale.t())
        return outputs


class BySquares(Trusting):
    """The rate of a matrix by the products of the columns of its gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                squares = (gradient.mT @ gradient).diagonal() if gradient.dim() > 1 else gradient.square()
                parameter.sub_(group["lr"] * gradient / (squares + 1e-2))


class Columns(Plain):
    def model(self) -> nn.Module:
        return Column()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return BySquares(model.parameters())


class InMemory(Trusting):
    """The rate of each parameter by what its gradient is in the order in which it lies in memory, and by its strides."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                lies = parameter.grad.as_strided((parameter.numel(),), (1,))
                slope = (lies * torch.linspace(0.5, 1.0, len(lies))).sum().abs()
                parameter.sub_(group["lr"] * parameter.grad / (slope + 1.0 + sum(parameter.grad.stride())))


class ChannelsLast(Plain):
    """Small images, and convolutions whose weights lie with their channels last; those of one pixel could have other strides as well."""

    def model(self) -> nn.Module:
        convolutions = nn.Conv2d(2, 6, 1), nn.Conv2d(6, 4, 2)
        model = nn.Sequential(
            nn.Unflatten(1, (2, 2, 2)), *convolutions, nn.Flatten(), nn.Tanh(), nn.Linear(4, 3)
        )
        return model.to(memory_format=torch.channels_last)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return InMemory(model.parameters())


def train_columns(strided: bool, use: str = "Columns") -> Trained:
    align = step.align_gradients if strided else aligned_alone
    with mock.patch.object(step, "align_gradients", align):
        return train(
            {
                "job": {"use": f"tests.distributed.test_aligned_gradients:{use}"},
                "batch": {"global": 16, "micro": 2},
                "length": {"epochs": 4},
            }
        )


def aligned_alone(parameters: Any, **_: Any) -> None:
    for parameter in parameters:
        if parameter.grad.data_ptr() % ALIGNMENT["cpu"]:
            parameter.grad = parameter.grad.clone()


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize("use", ["Columns", "ChannelsLast"])
def test_gradients_have_the_strides_of_their_parameters(pool: Pool, use: str) -> None:
    """A library goes by the strides, also where a dimension has one element and they make no difference to what is where."""
    alone = train_columns(True, use)
    assert pool.run(2, train_columns, True, use) == [alone] * 2
    if use == "Columns":
        assert pool.run(2, train_columns, False)[0].weights_digest != train_columns(False).weights_digest


class ByChange(torch.optim.Optimizer):
    """Goes by the gradient and its change, and keeps the newest one as it is: in a loop of one's own each step has gradients in new memory."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient, state = parameter.grad, self.state[parameter]
                before = state.get("gradient", gradient)
                parameter.sub_(gradient + 0.5 * (gradient - before), alpha=group["lr"])
                state["gradient"] = gradient


class KeepsGradients(Plain):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return ByChange(model.parameters())


class KeepsAGradient(Plain):
    """In `after_step`, as a part of one."""

    def __init__(self, params: Plain.Params) -> None:
        super().__init__(params)
        self.gradient = torch.zeros(0)

    def after_step(self, model: nn.Module, step: int, *statistics: Any, **_: Any) -> None:
        bias = dict(model.named_parameters())["3.bias"]
        assert bias.grad is not None
        if self.gradient.numel():
            bias.sub_(bias.grad - self.gradient, alpha=0.1)
        self.gradient = bias.grad[:]

    def state_dict(self) -> Mapping[str, Any]:
        return {"gradient": self.gradient}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.gradient = state["gradient"]


def kept(job: str) -> Document:
    return {
        "job": {"use": f"tests.distributed.test_aligned_gradients:{job}"},
        "batch": {"global": 16, "micro": 4},
        "length": {"steps": 6},
        "rehearsal": "quick",
    }


def train_in_buckets(job: str) -> Trained:
    with mock.patch.object(PhaseStep, "in_buckets", False):
        return train(kept(job))


@pytest.mark.parametrize("job", ["KeepsGradients", "KeepsAGradient"])
def test_a_gradient_that_the_job_keeps_stays_as_it_was(pool: Pool, job: str) -> None:
    """The next step fills the buckets again. Left there, the control, it becomes the next gradient, on all ranks alike."""
    whole = train(kept(job))
    assert [rank.weights_digest for rank in pool.run(2, train, kept(job))] == [whole.weights_digest] * 2
    assert pool.run(2, train_in_buckets, job)[0].weights_digest != whole.weights_digest
