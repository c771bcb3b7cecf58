"""Schedules of a job's own: the rates of torch's scheduler, through stops and forks, and what is told of its state. And those by name."""

from __future__ import annotations

import copy
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import lockstep
from lockstep.checkpoint.runs.run_checkpoints import claim
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.training.step import problems
from lockstep.training.step.learning_rate import TorchScheduler
from tests.distributed.kinds import RUN, Dropouts, Kind, document, taken_up
from tests.distributed.pool import Pool
from tests.distributed.step_kinds import (
    FallsEveryEpoch,
    FallsWhenNothingImproves,
    Milestones,
    MovedMomentum,
    Restarts,
    WarmsUpForAnEpoch,
)
from tests.distributed.training import train, train_attempt, train_rank_seeds
from tests.raised import raises


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", [Restarts, MovedMomentum, Milestones], ids=lambda kind: kind.__name__)
def test_rates_are_those_of_the_scheduler(kind: type[Kind]) -> None:
    """As a loop by hand has them: `scheduler.step()` after each `optimizer.step()`."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=1e-3)
    scheduler, rates = kind(None).schedule(optimizer, 6), []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    trained = train(document(kind, length={"epochs": 2}, rehearsal="full"))
    assert [row.lr for row in trained.steps] == rates
    assert len(set(rates)) > 2
    assert trained.warnings == ()


def by_epoch() -> list[float]:
    """The rates of three epochs of three steps, `scheduler.step()` after each epoch."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=1e-3)
    scheduler, rates = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5), []
    for _ in range(3):
        for _ in range(3):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.scenario
def test_a_scheduler_by_epochs_has_the_rates_of_its_own_loop(pool: Pool, tmp_path: Path) -> None:
    """On two workers, and taken up within an epoch and between two. The negative control is stepped after each update."""
    run = document(
        FallsEveryEpoch,
        length={"epochs": 3},
        checkpoint={"storage": str(tmp_path), "every": {"steps": 1}},
    )
    whole = pool.run(2, train, document(FallsEveryEpoch, length={"epochs": 3}))[0]
    assert [row.lr for row in whole.steps] == by_epoch() and whole.warnings == ()
    for stop in (2, 3):
        train_attempt(run, f"{RUN}{stop}", AttemptOrigin(), stop)
        origin = claim(run["checkpoint"]["storage"], f"{RUN}{stop}", None)
        again = train_attempt(run, f"{RUN}{stop}", origin)
        assert (again.rows, again.weights_digest) == (whole.rows, whole.weights_digest)
    with mock.patch.object(TorchScheduler, "follow", lambda self: self.scheduler.step()):
        assert [row.lr for row in train(document(FallsEveryEpoch, length={"epochs": 3})).steps] != by_epoch()


def test_an_epoch_whose_last_step_is_skipped_ends_all_the_same() -> None:
    """fp16: the loss scaler skips steps, and no epoch."""
    scheduler = torch.optim.lr_scheduler.StepLR(
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), step_size=1
    )
    schedule = TorchScheduler(scheduler.optimizer, scheduler, by_epoch=True)
    scheduler.optimizer.step()
    schedule.follow()
    assert scheduler.last_epoch == 0
    schedule.epoch_ended()
    assert scheduler.last_epoch == 1


def test_a_number_of_updates_knows_its_epochs() -> None:
    trained = train(document(WarmsUpForAnEpoch, length={"epochs": 2}))
    rates = [row.lr for row in trained.steps]
    assert max(rates) == rates[2] == pytest.approx(0.1) and trained.warnings == ()
    assert copy.deepcopy(lockstep.Updates(7, 3)).epochs == 3


def test_the_rate_falls_when_nothing_improves() -> None:
    """word_language_model: `if not best_val_loss or val_loss < best_val_loss: … else: lr /= 4.0`."""
    trained = train(document(FallsWhenNothingImproves, length={"epochs": 3}))
    lr, best, wanted = 20.0, float("inf"), []
    for row in trained.evaluations:
        wanted.append(lr)
        loss = float.fromhex(dict(row[2])["eval/loss"])
        if loss < best:
            best = loss
        else:
            lr /= 4.0
    assert [row.lr for row in trained.steps] == wanted
    assert len(set(wanted)) > 1


@pytest.mark.scenario
def test_a_scheduler_whose_state_is_lost_has_other_rates(tmp_path: Path) -> None:
    """The negative control of what a resumed run takes up."""
    whole = train(document(Restarts))
    for forgets in (False, True):
        run = document(Restarts, checkpoint={"storage": str(tmp_path / str(forgets)), "every": None})
        train_attempt(run, RUN, AttemptOrigin(), 1)
        loads = TorchScheduler.load_state_dict
        with mock.patch.object(
            TorchScheduler, "load_state_dict", (lambda *given, **more: None) if forgets else loads
        ):
            resumed = train_attempt(run, RUN, taken_up(run))
        assert (resumed.weights_digest == whole.weights_digest) is not forgets


@pytest.mark.scenario
def test_a_fork_goes_on_with_the_scheduler_or_is_refused(tmp_path: Path) -> None:
    run = document(Restarts, checkpoint={"storage": str(tmp_path), "every": None})
    whole = train_attempt(run, RUN, AttemptOrigin())
    fork = {"run": RUN, "step": 3}
    longer = {**run, "length": {"epochs": 2}}
    forked = train_attempt({**longer, "fork": fork}, "forked", AttemptOrigin())
    alone = train({**longer, "checkpoint": {"every": None}})
    assert forked.digests == alone.digests[3:]
    assert whole.digests == alone.digests[:3]
    with raises(problems.FORK_SCHEDULE, got="began with the rates [0.001]"):
        train_attempt({**longer, "fork": fork, "optimizer": {"lr": 0.5}}, "other", AttemptOrigin())


NAMED = {
    "wsd": {"warmup_steps": 1, "decay_steps": 3, "decay": "sqrt"},
    "one_cycle": {"pct_start": 0.4},
    "polynomial": {"warmup_steps": 2, "power": 2.0, "final": 0.1},
    "inverse_sqrt": {"warmup_steps": 2},
    "cosine_restarts": {"warmup_steps": 1, "period": 3},
}


@pytest.mark.scenario
@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    "workers", [2, *(pytest.param(workers, marks=pytest.mark.exact) for workers in (1, 3))]
)
@pytest.mark.parametrize("name", NAMED)
def test_a_schedule_by_name_has_one_value_on_any_number_of_workers_and_across_a_stop(
    pool: Pool, tmp_path: Path, name: str, workers: int
) -> None:
    """G1: stopped where the rate falls, and gone on with by others and with loader processes. The control has a seed for each rank."""
    more = {"schedule": {"name": name, **NAMED[name]}, "length": {"epochs": 2}, "rehearsal": "off"}
    whole = train(document(Dropouts, **more))
    assert len({row.lr for row in whole.steps}) > 2
    assert whole.digests != train(document(Dropouts, **{**more, "schedule": {"name": "constant"}})).digests
    run = document(Dropouts, **more, checkpoint={"storage": str(tmp_path), "every": None})
    train_attempt(run, RUN, AttemptOrigin(), 4)
    loading = {**run, "data": {**run.get("data", {}), "loader_processes": 1}}
    for trained in pool.run(workers, train_attempt, loading, RUN, taken_up(run)):
        assert trained.digests == whole.digests[4:]
        assert trained.summary["metrics"] == whole.summary["metrics"]
    for trained in pool.run(workers, train, document(Dropouts, **more)):
        assert trained == whole
    if workers > 1:
        assert pool.run(workers, train_rank_seeds, document(Dropouts, **more))[0].digests != whole.digests
