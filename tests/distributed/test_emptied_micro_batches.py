"""`data.without` leaves whole micro-batches no sample: the first ones of steps, too, and on any number of workers with any sharding it is one run."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lockstep
from lockstep import Loss
from tests.distributed.batch_kinds import Triplets
from tests.distributed.kinds import FEATURES, BatchNorm, Kind, document, perceptron, train_every
from tests.distributed.pool import Pool
from tests.distributed.step_kinds import OneOfATable
from tests.distributed.training import Document


class Adversaries(Kind):
    """Two phases, of which the first one writes to the statistics of the other's norm."""

    def model(self) -> nn.Module:
        return nn.ModuleDict(
            {"maker": perceptron(2, FEATURES, nn.BatchNorm1d(8)), "judge": perceptron(FEATURES, 1)}
        )

    def loss(self, model: Any, batch: Any) -> Loss:
        return self.judged(model, batch)

    def judged(self, model: Any, batch: Any) -> Loss:
        x = batch[0]
        made = model["maker"](torch.randn(len(x), 2)).detach()
        return Loss((F.softplus(-model["judge"](x)) + F.softplus(model["judge"](made))).sum(), len(x))

    def made(self, model: Any, batch: Any) -> Loss:
        count = len(batch[0])
        return Loss(F.softplus(-model["judge"](model["maker"](torch.randn(count, 2)))).sum(), count)

    def phases(self) -> list[lockstep.Phase]:
        adam = functools.partial(torch.optim.Adam, lr=1e-2)
        return [
            lockstep.Phase("judge", self.judged, ["judge"], adam),
            lockstep.Phase("maker", self.made, ["maker"], adam, draws_as="judge"),
        ]


EMPTIED = {"of the first step": "0,4,8", "of later steps": "12,16,20,24,28", "all but the last": "0-10,12-22"}
"""The samples of micro-batch 0, and of all but the last one, of steps of 12 in four micro-batches."""


def emptied(kind: type[Kind], which: str, **more: Any) -> Document:
    data = {"shuffle": "none", "drop_last": False, "without": EMPTIED[which]}
    return document(kind, **{"data": data, "length": {"steps": 3}, **more})


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("kind", "which"),
    [
        *(
            (kind, which)
            for kind in (BatchNorm, Adversaries)
            for which in ("of the first step", "of later steps")
        ),
        (Kind, "all but the last"),  # one sample, of which no norm can be made
    ],
)
@pytest.mark.parametrize(
    ("sharding", "workers"), [("full", 2), *(pytest.param(*each, marks=pytest.mark.scenario) for each in [("none", 2), ("optimizer", 3), ("full", 3)])]
)  # fmt: skip
def test_emptied_micro_batches_are_the_same_run_on_any_workers(
    pool: Pool, kind: type[Kind], which: str, sharding: str, workers: int
) -> None:
    """Bits and identity, with the rehearsal of the first micro-batch that has samples."""
    given = emptied(kind, which)
    alone = train_every([given])
    assert pool.run(workers, train_every, [{**given, "sharding": sharding}]) == [alone] * workers


def test_a_run_of_which_the_last_micro_batch_alone_has_samples_is_rehearsed() -> None:
    (run,) = train_every([emptied(Kind, "all but the last", length={"steps": 2})])
    assert len(run[1]) == 2


@pytest.mark.scenario
@pytest.mark.parametrize("workers", [2, 3])
def test_what_the_whole_batch_writes_is_kept_with_an_emptied_first_micro_batch(
    pool: Pool, workers: int
) -> None:
    class_ = emptied(Triplets, "of later steps")
    alone = train_every([class_])
    for sharding in ("none", "full"):
        assert pool.run(workers, train_every, [{**class_, "sharding": sharding}]) == [alone] * workers


class Growing(Kind):
    """A history, which each forward makes longer."""

    def model(self) -> nn.Module:
        model = perceptron()
        model.register_buffer("seen", torch.zeros(1, FEATURES))
        return model

    def loss(self, model: Any, batch: Any) -> Loss:
        x, y = batch
        if model.training:
            model.seen = torch.cat([model.seen, x[:1]])
        return super().loss(model, (x + 0.01 * model.seen.sum(), y))


class GrowingInPlace(Growing):
    """The same, in the memory of the buffer itself, which has to stay resizable."""

    def loss(self, model: Any, batch: Any) -> Loss:
        x, y = batch
        if model.training:
            seen, rows = model.seen, len(model.seen)
            seen.resize_(rows + 1, FEATURES)
            seen[rows:] = x[:1]
        return Kind.loss(self, model, (x + 0.01 * model.seen.sum(), y))


@pytest.mark.parametrize("rehearsal", ["off", "full"])
@pytest.mark.parametrize("kind", [Growing, GrowingInPlace])
def test_a_buffer_that_each_forward_makes_longer_is_that_of_micro_batch_0(
    pool: Pool, kind: type[Growing], rehearsal: str
) -> None:
    given = document(kind, length={"steps": 4}, rehearsal=rehearsal)
    alone = train_every([given])
    assert pool.run(2, train_every, [given]) == [alone] * 2


def test_a_buffer_of_one_element_may_have_any_stride(pool: Pool) -> None:
    given = document(OneOfATable, rehearsal="quick")
    assert pool.run(2, train_every, [given]) == [train_every([given])] * 2
