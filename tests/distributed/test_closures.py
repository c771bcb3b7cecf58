"""Optimizers that evaluate the loss again: the loops that people write, one value however a run is executed, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.errors import LockstepError, Problem
from lockstep.randomness import model_key, seed_all, step_key
from lockstep.training.determinism import determinism
from lockstep.training.integrity.problems import NOT_RESUMED
from lockstep.training.integrity.state_digest import weights_digest
from lockstep.training.step import optimizer_step, problems
from tests.distributed.closure_kinds import (
    HELD,
    DrawsBetweenCalls,
    Lbfgs,
    LbfgsOverTheBatch,
    LbfgsWithoutASearch,
    PublishedSam,
    Sam,
    SharpnessAware,
)
from tests.distributed.elementwise_jobs import LooksFromAhead
from tests.distributed.kinds import RUN, Kind, document, taken_up
from tests.distributed.pool import Pool
from tests.distributed.test_batch_loss import batches, check_one_value, whole
from tests.distributed.test_hold_kinds import attempts
from tests.distributed.training import Document, train, train_job
from tests.raised import raises


def by_hand(job: Any, *, keyed: bool = True, calls: list[int] | None = None) -> list[str]:
    """The loop of the optimizer's author: the digest of the model after every step. `keyed`: each evaluation draws the same dropout."""
    digests = []
    with determinism("strict", threads=1):
        seed_all(model_key(11))
        model = job.model()
        optimizer = job.optimizer(model)
        for step, (x, y) in batches(job.train_data()):
            count = [0]

            def closure(x: Any = x, y: Any = y, step: int = step, count: list[int] = count) -> Any:
                if keyed or not count[0]:
                    seed_all(step_key(11, step, 0))
                count[0] += 1
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            if isinstance(optimizer, Sam):
                closure()
            optimizer.step(closure)
            digests.append(weights_digest(model.state_dict()))
            if calls is not None:
                calls.append(count[0] - isinstance(optimizer, Sam))
    return digests


@pytest.mark.every(3)
@pytest.mark.parametrize("job", [Lbfgs, LbfgsWithoutASearch, PublishedSam, LooksFromAhead])
def test_each_is_its_own_loop_after_every_step(job: type[Kind]) -> None:
    """With one micro-batch. The negative control draws other dropout in each evaluation."""
    calls: list[int] = []
    trained = train(whole(job))
    assert list(trained.digests) == by_hand(job(None), calls=calls)
    assert [row.parts["closure_calls"] for row in trained.steps] == calls
    assert list(trained.digests) != by_hand(job(None), keyed=False)


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("workers", "kinds"),
    [
        (2, [Lbfgs, SharpnessAware]),
        (4, [DrawsBetweenCalls, LbfgsOverTheBatch]),
        *(pytest.param(each, HELD, marks=pytest.mark.scenario) for each in (2, 3, 4)),
    ],
)
def test_every_kind_has_one_value_and_is_told_of_nothing(
    pool: Pool, workers: int, kinds: list[type[Kind]]
) -> None:
    check_one_value(pool, workers, kinds)


@pytest.mark.scenario
@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param([Lbfgs, SharpnessAware], id="two"),
        pytest.param(HELD, marks=pytest.mark.exact, id="all"),
    ],
)
@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 3, marks=pytest.mark.exact)])
def test_a_run_that_is_taken_up_comes_to_the_same(
    pool: Pool, kinds: list[type[Kind]], before: int, after: int, tmp_path: Path
) -> None:
    """The search goes on from the directions and steps that it had."""
    runs: list[Document] = [
        document(kind, rehearsal="off", checkpoint={"storage": str(tmp_path / kind.__name__), "every": None})
        for kind in kinds
    ]
    alone = [train(run) for run in runs]
    attempts(pool, before, [(run, AttemptOrigin()) for run in runs], 1)
    for rank in attempts(pool, after, [(run, taken_up(run)) for run in runs], None):
        for one, (_, digests, rows, evaluations) in zip(alone, rank, strict=True):
            assert (digests, rows, evaluations) == (one.digests[1:], one.rows, one.evaluations)


@pytest.mark.scenario
def test_a_death_in_the_third_evaluation_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    alone = train(document(Lbfgs, rehearsal="off"))
    run = document(Lbfgs, rehearsal="off", checkpoint={"storage": str(tmp_path), "every": {"steps": 1}})
    evaluate, calls = optimizer_step.Stepper._evaluate_again, [0]

    def dying(*args: Any) -> float:
        calls[0] += 1
        if calls[0] == 7:  # the first of five calls has its gradient already
            raise RuntimeError("gone")
        return evaluate(*args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(LockstepError, match="gone"):
        patch.setattr(optimizer_step.Stepper, "_evaluate_again", dying)
        train_job(run, Lbfgs(None), None, RUN, AttemptOrigin())
    again = train_job(run, Lbfgs(None), None, RUN, taken_up(run))
    assert len(again.digests) == 2
    assert (again.weights_digest, again.rows) == (alone.weights_digest, alone.rows)


def test_buffers_are_those_of_the_first_evaluation() -> None:
    """Batch norm counts a step once, however often the loss is evaluated; the first step's statistics are those of plain SGD."""

    class Plain(SharpnessAware):
        def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.1)

    def statistics(job: Kind) -> list[Any]:
        kept: list[Any] = []
        make = job.model

        def model() -> nn.Module:
            kept.append(make())
            return kept[0]

        vars(job)["model"] = model
        train_job({**document(SharpnessAware, rehearsal="off"), "length": {"steps": 1}}, job)
        return [buffer.tolist() for buffer in kept[0].buffers()]

    assert statistics(SharpnessAware(None)) == statistics(Plain(None))


class Endless(torch.optim.SGD):
    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        while True:
            closure()


class EvaluatesForEver(Kind):
    closure_calls = 5

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Endless(model.parameters(), lr=0.1)


class DoesNotSay(EvaluatesForEver):
    closure_calls = 0


class MomentumOutOfSight(Kind):
    """The published class keeps the momentum of the optimizer that it wraps out of its state."""

    closure_calls = 1

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Sam(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("job", "more", "problem", "facts"),
    [
        (EvaluatesForEver, {}, problems.CLOSURE_OFTEN, {"name": "Endless", "wanted": 5}),
        (DoesNotSay, {}, problems.CLOSURE_CALLS, {"name": "Endless"}),
        (Lbfgs, {"precision": "fp16"}, problems.CLOSURE_FP16, {"name": "LBFGS"}),
        (MomentumOutOfSight, {"rehearsal": "full"}, NOT_RESUMED, {"name": "'0.weight' and 3 more"}),
        (Lbfgs, {"optimizer": {"sharded": True}}, problems.NOT_ELEMENT_WISE, {"got": "LBFGS"}),
    ],
)
def test_what_cannot_be_is_refused(
    job: type[Kind], more: Document, problem: Problem[Any], facts: dict[str, object]
) -> None:
    with raises(problem, **facts):
        train(document(job, **{"rehearsal": "off", **more}))
