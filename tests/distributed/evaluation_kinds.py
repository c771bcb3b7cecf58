"""Jobs with several held-out sets, with a test, and with weights of their own to evaluate."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import Dataset

from tests.distributed.kinds import CLASSES, FEATURES, Kind, perceptron

SETS: dict[str, Any] = {"far": {"every": {"steps": 2}}, "near": {"limit": 5}}
WORST: dict[str, Any] = {"metric": "eval/far/loss", "mode": "max", "patience": 9}
"""Keeps the weights that a sensible rule would not: the first ones, so that they are not the last."""


class NamedSets(Kind):
    """Two sets with a cadence and a limit of their own, and a test on the data of one of them."""

    more: ClassVar[dict[str, Any]] = {
        "length": {"steps": 5},
        "optimizer": {"name": "sgd", "lr": 0.3},
        "evaluate": {"every": {"steps": 1}, "sets": SETS},
        "early_stop": WORST,
    }

    def model(self) -> nn.Module:
        return perceptron(FEATURES, CLASSES, nn.BatchNorm1d(8), nn.Dropout(0.2))

    def eval_data(self) -> Mapping[str, Dataset[Any]]:  # type: ignore[override]
        return {"near": self.data(7, 2), "far": self.data(11, 3)}

    def test_data(self) -> Dataset[Any]:
        return self.data(11, 3)


class SeveralTests(Kind):
    """One set without a name, two tests with names, and no rule."""

    def test_data(self) -> Mapping[str, Dataset[Any]]:
        return {"same": self.data(7, 2), "other": self.data(5, 4)}


class OnlyTested(Kind):
    def eval_data(self) -> None:
        return None

    def test_data(self) -> Dataset[Any]:
        return self.data(7, 2)


class StochasticAverage(Kind):
    """SWA as torch has it: the mean of the weights, whose batch norms get their statistics from training data."""

    more: ClassVar[dict[str, Any]] = {"length": {"steps": 4}, "evaluate": {"every": {"steps": 2}}}

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.mean: dict[str, Tensor] = {}
        self.count = 0

    def model(self) -> nn.Module:
        return perceptron(FEATURES, CLASSES, nn.BatchNorm1d(8), nn.Dropout(0.3))

    def after_step(self, model: nn.Module, step: int) -> None:
        self.count += 1
        for name, parameter in model.named_parameters():
            mean = self.mean.setdefault(name, torch.zeros_like(parameter))
            mean += (parameter - mean) / self.count

    def state_dict(self) -> dict[str, Any]:
        return {"mean": dict(self.mean), "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mean, self.count = dict(state["mean"]), state["count"]

    @contextmanager
    def eval_weights(self, model: nn.Module, optimizer: Any, batches: Any) -> Iterator[None]:
        for name, parameter in model.named_parameters():
            parameter.copy_(self.mean[name])
        update_bn(batches(5), model)
        yield  # Lockstep puts weights and statistics back


class AverageWithoutStatistics(StochasticAverage):
    """The same in two arguments: batch norms keep the statistics of the trained weights."""

    @contextmanager
    def eval_weights(self, model: nn.Module, optimizer: Any) -> Iterator[None]:  # type: ignore[override]
        for name, parameter in model.named_parameters():
            parameter.copy_(self.mean[name])
        yield


class DiffersByRank(StochasticAverage):
    """A job sees no process group, and may still tell its processes apart."""

    @contextmanager
    def eval_weights(self, model: nn.Module, optimizer: Any) -> Iterator[None]:  # type: ignore[override]
        next(iter(model.parameters())).add_(os.getpid())
        yield


class NoContext(StochasticAverage):
    def eval_weights(self, model: nn.Module, optimizer: Any) -> Iterable[None]:  # type: ignore[override]
        yield


class EmptyMapping(Kind):
    def eval_data(self) -> Mapping[str, Any]:  # type: ignore[override]
        return {}


class SlashInName(Kind):
    def eval_data(self) -> Mapping[str, Any]:  # type: ignore[override]
        return {"a/b": self.data(7, 2)}
