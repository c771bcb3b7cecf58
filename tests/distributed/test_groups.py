"""`data.group`: samples side by side in the order share a micro-batch, ragged steps included, and batch norm over pictures in a step's last sample."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from lockstep import Loss
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.errors import JobError, SpecError
from lockstep.randomness import model_key, seed_all
from lockstep.training.determinism import determinism
from lockstep.training.integrity import problems
from lockstep.training.integrity.state_digest import weights_digest
from tests.distributed.changing_jobs import planned_batches
from tests.distributed.kinds import FEATURES, RUN, Kind, numbers, perceptron, taken_up
from tests.distributed.pool import Pool
from tests.distributed.training import Document, train, train_attempt
from tests.raised import raises

K = 2


class People(Dataset[tuple[Tensor, int]]):
    """Pictures of persons, K of each in a row, persons shuffled by the epoch. 22 pictures: a ragged step ends with them."""

    def __init__(self) -> None:
        self.x = numbers(22, FEATURES)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.x[i], i // K

    def epoch_order(self, seed: int, epoch: int, shuffle: str) -> Sequence[int]:
        persons = torch.randperm(len(self.x) // K).tolist()
        return [person * K + i for person in persons for i in range(K)]


class Persons(Kind):
    """A loss that needs both pictures of a person in its micro-batch, and fails without."""

    def model(self) -> nn.Module:
        return perceptron(FEATURES, 4)

    def train_data(self) -> Dataset[Any]:
        return People()

    def eval_data(self) -> None:
        return None

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, person = batch
        one, two = person.view(-1, K).unbind(1)
        assert torch.equal(one, two)
        pairs = model(x).view(-1, K, 4)
        return Loss((pairs[:, 0] - pairs[:, 1] - 1).square().sum(), len(pairs))


def run(**more: Any) -> Document:
    return {
        "job": {"use": f"{__name__}:Persons"},
        "seed": 5,
        "length": {"epochs": 2},
        "batch": {"global": 16, "micro": 4},
        "data": {"drop_last": False, "group": {"size": K}},
        **more,
    }


@pytest.mark.scenario
@pytest.mark.thinned(3)
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_groups_stay_together_on_any_number_of_workers(pool: Pool, workers: int) -> None:
    """Six samples of the ragged step make micro-batches of 2, 2 and 2; nothing is told of the order."""
    one = train(run(rehearsal="full"))
    assert one.warnings == ()
    assert [row.weight for row in one.steps] == [8, 3, 8, 3]
    assert pool.run(workers, train, run()) == [one] * workers


def test_a_batch_of_groups_is_the_loop_of_its_author() -> None:
    """P×K in one micro-batch: the pairs of the epoch's order, their mean, and an update. The control forms the pairs of one epoch in both."""
    spec = run(batch={"global": 16, "micro": 16}, data={"group": {"size": K}}, rehearsal="off")

    def by_hand(batches: Iterable[list[int]]) -> list[str]:
        seed_all(model_key(5))
        job, digests = Persons(None), []
        model, data = job.model(), People()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
        for ids in batches:
            optimizer.zero_grad()
            pairs = model(data.x[ids]).view(-1, K, 4)
            ((pairs[:, 0] - pairs[:, 1] - 1).square().sum() / len(pairs)).backward()
            optimizer.step()
            digests.append(weights_digest(model.state_dict()))
        return digests

    steps = [ids for (ids,) in planned_batches(spec)]
    assert len(steps) == 2 and all(i // K == j // K for ids in steps for i, j in batched(ids, K))
    with determinism("strict", threads=1):
        assert by_hand(steps) == list(train(spec).digests)
        assert by_hand(steps[:1] * 2) != list(train(spec).digests)


def batched(ids: list[int], size: int) -> Iterator[list[int]]:
    return (ids[i : i + size] for i in range(0, len(ids), size))


@pytest.mark.scenario
def test_a_run_goes_on_amid_its_groups_with_loader_processes(pool: Pool, tmp_path: Path) -> None:
    one = train(run())
    saved = run(checkpoint={"storage": str(tmp_path), "every": None})
    pool.run(2, train_attempt, saved, RUN, AttemptOrigin(), 3)
    saved["data"] = {**saved["data"], "loader_processes": 1}
    again = train_attempt(saved, RUN, taken_up(saved))
    assert (again.weights_digest, again.rows) == (one.weights_digest, one.rows)


def test_without_groups_the_loss_fails_and_a_size_that_does_not_fit_is_refused() -> None:
    with pytest.raises(JobError):
        train(run(data={"drop_last": False}))
    with pytest.raises(SpecError, match=r"data\.group\.size: got 3, wanted a divisor of batch\.micro = 4"):
        train(run(data={"group": {"size": 3}}))


class Pictures(Kind):
    """BatchNorm2d: a picture by itself has a variance."""

    def data(self, samples: int, seed: int) -> Dataset[Any]:
        return TensorDataset(numbers(samples, 1, 4, 4, seed=seed), torch.arange(samples) % 3)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))


class Vectors(Kind):
    def model(self) -> nn.Module:
        return perceptron(FEATURES, 3, nn.BatchNorm1d(8))


@pytest.mark.scenario
def test_a_micro_batch_of_one_picture_has_a_variance_and_one_of_one_vector_has_none(pool: Pool) -> None:
    """32 samples in steps of 28: the last step has four micro-batches of one sample."""
    ragged = {"batch": {"global": 28, "micro": 4}, "data": {"drop_last": False}}
    pictures = {"job": {"use": f"{__name__}:Pictures"}, **ragged}
    one = train(pictures)
    assert [row.weight for row in one.steps] == [28, 4]
    assert pool.run(2, train, pictures) == [one] * 2
    with raises(problems.BATCH_NORM, name="1", reason=re.compile("^the last step of an epoch of 32 samples")):
        train({"job": {"use": f"{__name__}:Vectors"}, **ragged})
