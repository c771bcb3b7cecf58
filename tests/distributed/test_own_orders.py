"""G1: an order of the dataset's own follows from the seed and the epoch, or changes between epochs with what a checkpoint keeps; else it is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.data.problems import ORDER_FOLLOWS_ASKING, ORDER_FOLLOWS_TRAINING
from lockstep.data.sampler import MicroBatchSampler
from lockstep.training.integrity.problems import OTHER_GRADIENTS
from tests.distributed.pool import Pool
from tests.distributed.small_jobs import Plain, points
from tests.distributed.test_resume import RUN, taken_up
from tests.distributed.training import Document, train, train_attempt
from tests.raised import raises

SAMPLES, STEPS_PER_EPOCH = 24, 2


class ByScore(Dataset[Any]):
    """Samples in the order of their scores, which the job changes."""

    def __init__(self, job: Curriculum) -> None:
        self._job, self._points = job, points(SAMPLES)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return tuple(each[index] for each in self._points)

    def epoch_order(self, seed: int, epoch: int, shuffle: str) -> Tensor:
        return torch.argsort(self._job.scores)


class Curriculum(Plain):
    """New scores after each step, or after the last one of an epoch."""

    class Params(Plain.Params):
        every: int = 1

    params: Params

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.scores = torch.arange(SAMPLES)

    def train_data(self) -> Dataset[Any]:
        return ByScore(self)

    def after_step(self, model: nn.Module, step: int, *statistics: Any, **_: Any) -> None:
        if step % self.params.every == 0:
            self.scores = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step))

    def state_dict(self) -> Mapping[str, Any]:
        return {"scores": self.scores}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scores = state["scores"]


class Remembered(ByScore):
    """Orders that a generator of its own draws one after the other, and that are kept."""

    def __init__(self, job: Curriculum) -> None:
        super().__init__(job)
        self._orders, self._generator = dict[int, Tensor](), torch.Generator().manual_seed(3)

    def epoch_order(self, seed: int, epoch: int, shuffle: str) -> Tensor:
        if epoch not in self._orders:
            self._orders[epoch] = torch.randperm(SAMPLES, generator=self._generator)
        return self._orders[epoch]


class Remembering(Curriculum):
    def train_data(self) -> Dataset[Any]:
        return Remembered(self)


def run(every: int, job: str = "Curriculum", processes: int = 0, **more: Any) -> Document:
    return {
        "job": {"use": f"tests.distributed.test_own_orders:{job}", "params": {"every": every}},
        "batch": {"global": SAMPLES // STEPS_PER_EPOCH, "micro": 3},
        "length": {"epochs": 4},
        "data": {"loader_processes": processes},
        **more,
    }


@pytest.mark.parametrize("processes", [0, 1])
def test_an_order_that_each_step_changes_is_refused(processes: int) -> None:
    with raises(ORDER_FOLLOWS_TRAINING, dataset="ByScore", epoch=0, step=2):
        train(run(every=1, processes=processes))


def test_an_order_that_changes_later_in_an_epoch_is_refused_at_its_end() -> None:
    """After step 5, which is no power of two after the start."""
    with raises(ORDER_FOLLOWS_TRAINING, dataset="ByScore", epoch=2, step=6):
        train(run(every=5))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_order_is_looked_at_before_a_micro_batch_is_computed_again(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its samples are asked for anew: if training has changed their order, no device is to be blamed."""
    due = set[bool]()
    monkeypatch.setattr(MicroBatchSampler, "check_unchanged", lambda *_, **told: due.add(told["due"]))
    train(run(100, determinism={"mode": "strict", "recheck": share}))
    assert due == {bool(share)}


def test_without_the_look_a_device_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(MicroBatchSampler, "check_unchanged", lambda *_, **__: None)
    with raises(OTHER_GRADIENTS):
        train(run(every=1))


@pytest.mark.scenario
def test_an_order_that_each_step_changes_is_refused_on_two_workers(pool: Pool) -> None:
    with raises(ORDER_FOLLOWS_TRAINING, dataset="ByScore"):
        pool.run(2, train, run(every=1))


def test_an_order_that_changes_between_epochs_is_that_of_a_resume(tmp_path: Path) -> None:
    """At the end of an epoch, and within one."""
    whole = train(run(STEPS_PER_EPOCH))
    for stop in (STEPS_PER_EPOCH, STEPS_PER_EPOCH + 1):
        saved = run(STEPS_PER_EPOCH, checkpoint={"storage": str(tmp_path / f"{stop}"), "every": None})
        train_attempt(saved, RUN, AttemptOrigin(), stop_after=stop)
        resumed = train_attempt(saved, RUN, taken_up(saved["checkpoint"]["storage"], None))
        assert (resumed.rows, resumed.weights_digest) == (whole.rows, whole.weights_digest)


def test_an_order_that_a_loader_process_was_given_too_early_is_refused() -> None:
    """That of the next epoch is asked for while the steps before it are computed."""
    with raises(ORDER_FOLLOWS_TRAINING, dataset="ByScore", epoch=1, step=re.compile("^[34]$")):
        train(run(STEPS_PER_EPOCH, processes=1))


def test_without_the_look_a_resume_visits_other_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    monkeypatch.setattr(MicroBatchSampler, "check_unchanged", lambda *_, **__: None)
    strict = {"mode": "strict", "recheck": 0}
    saved = run(1, checkpoint={"storage": str(tmp_path), "every": None}, determinism=strict)
    train_attempt(saved, RUN, AttemptOrigin(), stop_after=3)
    resumed = train_attempt(saved, RUN, taken_up(str(tmp_path), None))
    assert resumed.weights_digest != train(run(1, determinism=strict)).weights_digest


def test_an_order_that_follows_which_epochs_were_asked_for_is_refused() -> None:
    with raises(ORDER_FOLLOWS_ASKING, dataset="Remembered"):
        train(run(100, job="Remembering"))
