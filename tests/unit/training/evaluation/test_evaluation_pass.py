"""Evaluation leaves no trace in the model, and its totals are sums in index order."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.communication.group import Group
from lockstep.data.problems import FETCH_FAILED
from lockstep.reduction_tree import evaluation_ranges
from lockstep.training.evaluation.evaluation_pass import Evaluation
from lockstep.training.integrity import problems
from lockstep.training.integrity.rehearsal.evaluation import rehearse
from lockstep.training.module_modes import evaluating
from lockstep.training.step.buffers import KeptBuffers
from lockstep.training.step.precision import Precision
from tests.raised import raises

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


class Caching(nn.Linear):
    """What prediction needs is computed once in evaluation mode, until train() drops it."""

    cache: Tensor | None = None

    def train(self, mode: bool = True) -> Caching:
        if mode:
            self.cache = None
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return super().forward(x)
        if self.cache is None:
            self.cache = self.weight.detach().clone()
        return x @ self.cache.T


def test_modes_are_restored_by_train_itself() -> None:
    """A module that follows its mode hears of both changes; one that was in evaluation mode before hears of that."""
    model = nn.Sequential(Caching(2, 2), Caching(2, 2))
    model[1].eval()
    with evaluating(model):
        model(torch.ones(1, 2))
        assert all(module.cache is not None for module in model)
    assert [(module.training, module.cache is None) for module in model] == [(True, True), (False, True)]
    with evaluating(model[1]):
        model[1](torch.ones(1, 2))
    assert (model[1].training, model[1].cache is None) == (False, False)


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


def evaluation(job: Any, micro_batch: int = 4, processes: int = 0) -> Evaluation:
    precision = Precision("fp32", CPU)
    return Evaluation(
        job,
        job.data,
        ALONE,
        precision,
        micro_batch=micro_batch,
        global_batch=2 * micro_batch,
        seed=5,
        processes=processes,
    )


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
    assert rehearse(evaluation(job), model).names == ["eval/loss", "eval/ids", "eval/largest"]
    assert job.batches == [[0, 1, 2, 3]]
    assert model.training


def test_sample_that_fails_is_named() -> None:
    class Torn(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            return index // (index - 5)

    with raises(FETCH_FAILED, what="sample 5", kind="ZeroDivisionError"):
        evaluation(Ids(Torn()))(nn.Linear(1, 1))


class Numbers(lockstep.Job):
    """Evaluates one number a micro-batch; `metrics` is a method of each test's own."""

    def __init__(self, samples: int = 4) -> None:
        super().__init__(None)
        self.data = torch.arange(1.0, 1.0 + samples)

    def loss(self, model: nn.Module, batch: Tensor) -> lockstep.Loss:
        return lockstep.Loss(batch.sum(), len(batch))


def test_every_micro_batch_is_in_evaluation_mode_whatever_the_one_before_left() -> None:
    class Leaves(Numbers):
        modes: list[bool] = []  # noqa: RUF012

        def metrics(self, model: nn.Module, batch: Tensor) -> dict[str, lockstep.Mean]:
            self.modes.append(any(module.training for module in model.modules()))
            model.train()
            return {}

    model = nn.Sequential(nn.Dropout(), nn.Linear(1, 1)).eval()
    evaluate = evaluation(Leaves(), micro_batch=1)
    evaluate(model)
    assert Leaves.modes == [False] * 4
    assert not any(module.training for module in model.modules())
    rehearse(evaluate, model, repeat=True)


def test_each_evaluation_computes_anew_what_a_module_keeps_in_evaluation_mode() -> None:
    class Cached(Numbers):
        def loss(self, model: nn.Module, batch: Tensor) -> lockstep.Loss:
            return lockstep.Loss(model(batch[:, None]).sum(), len(batch))

    model = Caching(1, 1, bias=False)
    evaluate, found = evaluation(Cached()), []
    for value in (1.0, 2.0):
        with torch.no_grad():
            model.weight.fill_(value)
        found.append(evaluate(model)["eval/loss"])
    assert found == [2.5, 5.0]


class ReusesItsTensor(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.right = torch.zeros(())

    def metrics(self, model: nn.Module, batch: Tensor) -> dict[str, lockstep.Mean]:
        self.right.copy_(batch.sum())
        return {"sum": lockstep.Mean(self.right, self.right)}


class GivesABuffer(Numbers):
    def metrics(self, model: nn.Module, batch: Tensor) -> dict[str, lockstep.Mean]:
        model.seen.copy_(batch.sum())  # type: ignore[union-attr, operator]
        return {"sum": lockstep.Mean(model.seen, model.seen)}  # type: ignore[arg-type]


@pytest.mark.parametrize("job", [ReusesItsTensor, GivesABuffer])
def test_means_are_those_of_their_micro_batch(job: type[Numbers]) -> None:
    """Whatever is written to their tensors afterwards: by the job for the next one, or where buffers are put back."""

    class Seeing(job):  # type: ignore[misc, valid-type]
        def metrics(self, model: nn.Module, batch: Tensor) -> dict[str, lockstep.Mean]:
            given = super().metrics(model, batch)["sum"]
            return {"sum": lockstep.Mean(given.total, 1), "weight": lockstep.Mean(1, given.weight)}

    model = nn.Linear(1, 1)
    model.register_buffer("seen", torch.tensor(9.0))
    evaluate = evaluation(Seeing(), micro_batch=1)
    evaluate.restore_buffers = KeptBuffers(model).restore
    metrics = evaluate(model)
    assert (metrics["eval/sum"], metrics["eval/weight"]) == (10 / 4, 4 / 10)


def test_no_graph_outlives_its_micro_batch() -> None:
    """A loss that needs gradients within itself; on a device the means of all micro-batches wait for the end."""

    class Penalised(Numbers):
        totals: list[weakref.ref[Tensor]] = []  # noqa: RUF012

        def loss(self, model: nn.Module, batch: Tensor) -> lockstep.Loss:
            assert [total() for total in self.totals if total() is not None] == []
            with torch.enable_grad():
                total = model(batch[:, None]).sum()
            self.totals.append(weakref.ref(total))
            return lockstep.Loss(total, len(batch))

    evaluation(Penalised(), micro_batch=1)(nn.Linear(1, 1))
    assert len(Penalised.totals) == 4


def test_a_first_micro_batch_unlike_its_repetition_is_refused() -> None:
    """From the second on it gives the same."""

    class First(Numbers):
        seen = False

        def metrics(self, model: nn.Module, batch: Tensor) -> dict[str, lockstep.Mean]:
            seen, self.seen = self.seen, True
            return {"seen": lockstep.Mean(float(seen), 1)}

    with raises(problems.EVALUATION_KEEPS, name="job.seen", got="eval/seen"):
        rehearse(evaluation(First()), nn.Linear(1, 1), repeat=True)


class Merging(nn.Linear):
    """A low-rank change that eval() adds to the weight and train() takes away again, as loralib does."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.weight.requires_grad = False
        self.down, self.up = nn.Parameter(torch.rand(2, 3)), nn.Parameter(torch.zeros(3, 2))

    def train(self, mode: bool = True) -> Merging:
        if mode != self.training:
            self.weight.data += (self.up @ self.down) * (-1 if mode else 1)
        return super().train(mode)


def test_weights_that_do_not_come_back_from_evaluation_mode_are_refused() -> None:
    """Though at the start, where the change is zero, they do; and what was tried leaves no trace."""
    model = nn.Sequential(Merging(), nn.Linear(3, 1))
    before = [parameter.clone() for parameter in model.parameters()]
    with raises(problems.WEIGHTS_MERGED, name="0.weight"):
        rehearse(evaluation(Numbers()), model, repeat=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
