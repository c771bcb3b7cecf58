"""The estimate of a sharded optimizer is what the workers hold, to the byte; so is what they say of it in the record."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.checks.estimate import estimated
from lockstep.checks.fixture import Fixture
from lockstep.communication.group import Group
from lockstep.job.loading import load_job
from lockstep.record.events.union import Document, Event, tell_nobody
from lockstep.spec.loading import load_spec
from lockstep.training.determinism import determinism
from lockstep.training.driver_requests import NoRequests
from lockstep.training.loop import fit
from lockstep.training.setup import prepare
from lockstep.training.step.sharding import ShardedOptimizer
from tests.distributed.pool import Pool
from tests.distributed.training import Document as SpecDocument
from tests.unit.checks.test_estimate import MODELS


def of_model(name: str) -> SpecDocument:
    """A model of the estimate's own tests, sharded, in steps that four workers can share."""
    micro = MODELS[name]["batch"]["micro"]
    return {**MODELS[name], "batch": {"global": 4 * micro, "micro": micro}, "sharding": "optimizer"}


STRIDED: SpecDocument = {
    "job": {"use": "tests.distributed.small_jobs:Strided"},
    "batch": {"global": 16, "micro": 2},
    "sharding": "optimizer",
    "optimizer": {"name": "sgd", "momentum": 0.9},
}


def held(document: SpecDocument) -> dict[str, int]:
    """What a worker holds after two steps."""
    spec = load_spec({**document, "length": {"steps": 2}, "record": {"uri": "off"}})
    with determinism("strict", 1):
        group = Group.join(torch.device("cpu"))
        run = prepare(spec, load_job(spec.job.use, spec.job.params), group, tell_nobody)
        batches = run.loader()
        for position in run.plan.positions():
            run.step(position, batches)
    state = run.state
    assert isinstance(state.optimizer, ShardedOptimizer)
    kept = state.optimizer.own_state().values()
    storages = [p.untyped_storage() for p in state.model.parameters()]  # with the gaps between elements
    return {
        "parameters_bytes": sum({one.data_ptr(): one.nbytes() for one in storages}.values()),
        "optimizer_bytes": sum(v.nbytes for own in kept for v in own.values() if isinstance(v, Tensor)),
        "gradients_bytes": sum(p.grad.nbytes for p in state.model.parameters() if p.grad is not None),
    }


def estimate_of(document: SpecDocument, workers: int) -> dict[str, Any]:
    spec = load_spec(
        {**document, "length": {"steps": 2}, "record": {"uri": "off"}, "workers": {"max": workers}}
    )
    with determinism("strict", 1):
        return estimated(Fixture(spec)).as_dict()


def check(pool: Pool, document: SpecDocument, workers: int) -> None:
    wanted = estimate_of(document, workers)
    found = pool.run(workers, held, document)
    for name in found[0]:
        assert wanted[name] == max(one[name] for one in found), name
    whole = estimate_of({**document, "sharding": "none"}, workers)
    assert wanted["optimizer_bytes"] < whole["optimizer_bytes"]
    assert wanted["total_bytes"] < whole["total_bytes"]


@pytest.mark.every(2)
@pytest.mark.parametrize("document", [of_model("perceptron"), STRIDED], ids=["perceptron", "strided"])
def test_the_state_of_the_worker_that_holds_most_is_estimated(pool: Pool, document: SpecDocument) -> None:
    """Of parameters that are cut, and of one with gaps in its memory, which is not."""
    check(pool, document, 2)


@pytest.mark.exact
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_the_state_of_the_worker_that_holds_most_is_estimated_in_full(
    pool: Pool, name: str, workers: int
) -> None:
    check(pool, of_model(name), workers)


def used(document: SpecDocument) -> list[str]:
    told: list[Event] = []
    spec = load_spec({**document, "length": {"steps": 2}, "record": {"uri": "off"}})
    job, group = load_job(spec.job.use, spec.job.params), Group.join(torch.device("cpu"))
    fit(spec, job, group, told.append, NoRequests())
    return [event.text for event in told if isinstance(event, Document) and event.name == "memory.json"]


def test_the_record_has_what_a_worker_holds_of_a_sharded_optimizer(pool: Pool) -> None:
    """Its own optimizer's state is that of its spans; that of the optimizer it stands for is empty."""
    document = of_model("perceptron")
    found = [json.loads(text) for (text,) in pool.run(2, used, document)]
    assert max(one["optimizer_bytes"] for one in found) == estimate_of(document, 2)["optimizer_bytes"] > 0
