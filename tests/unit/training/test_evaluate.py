"""Evaluation leaves no trace in the model, and its totals are sums in index order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.communication.group import Group
from lockstep.errors import JobError
from lockstep.plan import evaluation_ranges
from lockstep.training.evaluate import Evaluation, evaluating
from lockstep.training.precision import Precision

CPU = torch.device("cpu")
ALONE = Group(0, 1, CPU)


def test_modes_are_restored_as_they_were() -> None:
    """A model in which some modules are frozen in evaluation mode while the rest trains."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()), nn.Dropout())
    model[1].eval()
    model[1][1].train()  # type: ignore[index]
    before = [module.training for module in model.modules()]
    assert len(set(before)) == 2
    with evaluating(model):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
    assert [module.training for module in model.modules()] == before
    assert torch.is_grad_enabled()
    with pytest.raises(ZeroDivisionError), evaluating(model):
        raise ZeroDivisionError
    assert [module.training for module in model.modules()] == before


class Ids(lockstep.Job):
    """Notes the ids of every evaluation micro-batch."""

    def __init__(self, data: Any) -> None:
        super().__init__(None)
        self.data = data
        self.batches: list[list[int]] = []
        self.draws: list[float] = []

    def loss(self, model: nn.Module, batch: Tensor) -> lockstep.Loss:
        self.batches.append(batch.tolist())
        self.draws.append(float(torch.rand(())))
        total = batch.float().sum() * 0.1
        return lockstep.Loss(total, len(batch), {"ids": lockstep.Mean(batch.sum(), len(batch))})

    def metrics(self, model: nn.Module, batch: Tensor) -> dict[str, lockstep.Mean]:
        return {"largest": lockstep.Mean(batch.max(), 1)}


def evaluation(job: Ids, micro_batch: int = 4, processes: int = 0) -> Evaluation:
    precision = Precision("fp32", CPU)
    return Evaluation(job, job.data, ALONE, precision, micro_batch=micro_batch, seed=5, processes=processes)


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("samples", [1, 3, 4, 5, 8, 13])
def test_every_sample_is_evaluated_once_and_in_order(samples: int, processes: int) -> None:
    """G2. The last micro-batch is short; nothing is padded."""
    job = Ids(range(samples))
    metrics = evaluation(job, processes=processes)(nn.Linear(1, 1))
    assert [i for ids in job.batches for i in ids] == list(range(samples))
    assert metrics["eval/ids"] == sum(range(samples)) / samples
    assert set(metrics) == {"eval/loss", "eval/ids", "eval/largest"}


@pytest.mark.parametrize("workers", range(1, 7))
def test_any_number_of_workers_shares_out_every_micro_batch_once(workers: int) -> None:
    """Workers without one, for an evaluation that is smaller than the group, included."""
    for samples in range(1, 41):
        for micro in range(1, 9):
            ranges = evaluation_ranges(samples, micro, workers)
            assert [i for own in ranges for i in own] == list(range(-(-samples // micro)))
            assert len(ranges) == workers


def test_totals_are_added_in_float64_in_index_order() -> None:
    job = Ids(range(13))
    wanted = 0.0
    for first in range(0, 13, 4):
        wanted += float(torch.arange(first, min(first + 4, 13)).float().sum() * 0.1)
    assert evaluation(job)(nn.Linear(1, 1))["eval/loss"] == wanted / 13


def test_every_evaluation_draws_the_same() -> None:
    """And each micro-batch otherwise: metrics of two evaluations differ by the weights alone."""
    job = Ids(range(12))
    evaluate, model = evaluation(job), nn.Linear(1, 1)
    evaluate(model)
    torch.rand(5)
    evaluate(model)
    assert job.draws[:3] == job.draws[3:]
    assert len(set(job.draws)) == 3


def test_metric_without_weight_is_nan() -> None:
    class Weightless(Ids):
        def metrics(self, model: nn.Module, batch: Tensor) -> dict[str, lockstep.Mean]:
            return {"rare": lockstep.Mean(0.0, 0)}

    metrics = evaluation(Weightless(range(4)))(nn.Linear(1, 1))
    assert metrics["eval/rare"] != metrics["eval/rare"]


def test_evaluation_leaves_buffers_and_gradients_alone() -> None:
    class Normed(Ids):
        def loss(self, model: nn.Module, batch: Tensor) -> lockstep.Loss:
            return lockstep.Loss(model(batch.float().unsqueeze(1)).sum(), len(batch))

    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    evaluation(Normed(range(8)))(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_rehearsal_gives_the_names_of_the_metrics() -> None:
    model = nn.Linear(1, 1)
    job = Ids(range(13))
    assert evaluation(job).rehearse(model) == ["eval/loss", "eval/ids", "eval/largest"]
    assert job.batches == [[0, 1, 2, 3]]
    assert model.training


def test_sample_that_fails_is_named() -> None:
    class Torn(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            return index // (index - 5)

    with pytest.raises(JobError, match=r"^data: sample 5 failed .*ZeroDivisionError"):
        evaluation(Ids(Torn()))(nn.Linear(1, 1))
