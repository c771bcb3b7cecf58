"""Bugs that users of other trainers have reported, as small jobs: what went wrong there does not happen here.

Other reports have their tests where their subject is tested.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep
from lockstep.checkpoint.reader import checkpoints, load
from lockstep.checkpoint.runs.run_folder import AttemptOrigin, RunFolder
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.driver.local import RankRequests
from lockstep.driver.signals import StopSignal
from tests.distributed import training
from tests.distributed.kinds import RUN, Kind, document, taken_up
from tests.distributed.pool import Pool
from tests.distributed.test_resume import flip_a_bit
from tests.distributed.training import Document, Kept, Trained, train, train_and_die, train_attempt
from tests.forked import Forked

ROWS = 100


class Ids(lockstep.Job):
    """Its loss has, as parts, how often each sample was in the step: the exact ids, whoever executed it."""

    rows: ClassVar[int] = ROWS

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_data(self) -> Dataset[Any]:
        return TensorDataset(torch.arange(self.rows))

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        (ids,) = batch
        seen = {f"seen {i}": lockstep.Mean((ids == i).sum(), 1.0) for i in range(self.rows)}
        squares = (model(ids[:, None] / self.rows) - 1).square().sum()
        return lockstep.Loss(squares, len(ids), seen)


def ids_of(trained: Trained) -> list[list[int]]:
    """The samples of each step, sorted."""
    return [[i for i in range(ROWS) if row.parts[f"seen {i}"]] for row in trained.steps]


def of_ids(folder: Path, epochs: int, **data: Any) -> Document:
    return {
        "job": {"use": f"{__name__}:Ids"},
        "length": {"epochs": epochs},
        "batch": {"global": 20, "micro": 5},
        "data": data,
        "checkpoint": {"storage": str(folder), "every": {"steps": 1}},
    }


@pytest.mark.scenario
def test_epochs_after_a_kill_have_orders_of_their_own(tmp_path: Path) -> None:
    """After a resume, loader processes repeated the order of epoch 0 (PL#21938)."""
    whole = ids_of(train(of_ids(tmp_path / "whole", 4)))
    run = of_ids(tmp_path / "killed", 4, loader_processes=2)
    killed = Forked(train_and_die, run, RUN, 8)  # in the second epoch
    assert killed.wait(120) == -signal.SIGKILL, killed.communicate()
    rest = train_attempt(run, RUN, taken_up(run))
    assert 0 < len(rest.digests) < 20
    assert ids_of(rest) == whole
    epochs = [whole[start : start + 5] for start in range(0, 20, 5)]
    assert [sorted(chain(*epoch)) for epoch in epochs] == [[*range(ROWS)]] * 4
    assert len({str(epoch) for epoch in epochs}) == 4


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize("stops", [(3,), (1, 2, 4)], ids=["once", "three times"])
def test_each_sample_comes_once_however_often_an_epoch_is_stopped(
    pool: Pool, tmp_path: Path, stops: Sequence[int]
) -> None:
    """The position was restored and the order was not (accelerate#4195); each resume repeated batches (accelerate#3938)."""
    run = of_ids(tmp_path, 2)
    whole = train(of_ids(tmp_path / "whole", 2))
    for attempt, stop in enumerate((*stops, None)):
        origin = taken_up(run) if attempt else AttemptOrigin()
        trained = pool.run(2, train_attempt, run, RUN, origin, stop)[0]
        assert ids_of(trained) == ids_of(whole)[:stop]
    assert trained.rows == whole.rows
    for epoch in (ids_of(whole)[:5], ids_of(whole)[5:]):
        assert sorted(chain(*epoch)) == [*range(ROWS)]


# --- figures ------------------------------------------------------------------------------------------------


class Weighted(lockstep.Job):
    """21 rows to evaluate, of weights 1 to 7, whose losses are whole numbers: sums are exact in float64, and not in float32."""

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_data(self) -> Dataset[Any]:
        return self.eval_data()

    def eval_data(self) -> Dataset[Any]:
        return TensorDataset(2**26 + 3 ** torch.arange(21) % 1009, torch.arange(21) % 7 + 1)

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        values, weights = batch
        total = (values.double() * weights).sum() + 0.0 * model(torch.ones(1)).sum()
        return lockstep.Loss(total, weights.sum())


@pytest.mark.scenario
def test_an_evaluation_is_no_larger_on_workers_with_unequal_shares(pool: Pool) -> None:
    """Means of the ranks were averaged as if each had as much data (PL#21859)."""
    run = {
        "job": {"use": f"{__name__}:Weighted"},
        "length": {"steps": 1},
        "batch": {"global": 8, "micro": 2},
    }
    values, weights = Weighted(None).eval_data().tensors  # type: ignore[attr-defined]
    wanted = float((values * weights).sum()) / float(weights.sum())
    for workers in range(1, 5):
        for trained in pool.run(workers, train, run):
            assert trained.summary["metrics"]["eval/loss"] == wanted, workers
    of_ranks = [(values[r::4] * weights[r::4]).sum() / weights[r::4].sum() for r in range(4)]
    assert float(sum(of_ranks)) / 4 != wanted  # the control: what was reported there


class WholeNumbers(lockstep.Job):
    """Least squares over whole numbers in fp64: no sum rounds, so every order of additions has the same bits."""

    def model(self) -> nn.Module:
        model = nn.Linear(3, 1, dtype=torch.float64)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[1.0, -2.0, 3.0]]))
            model.bias.fill_(1.0)
        return model

    def train_data(self) -> Dataset[Any]:
        x = torch.randint(-9, 10, (32, 3), generator=torch.Generator().manual_seed(6)).double()
        return TensorDataset(x, x.square().sum(1))

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        return lockstep.Loss((model(x).squeeze(1) - y).square().sum(), len(y))


class ScaledTwice(WholeNumbers):
    """The control: the loss is divided by the number of micro-batches as well."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        loss = super().loss(model, batch)
        return lockstep.Loss(loss.total * loss.weight / 32, loss.weight)


def one_step(job: type[lockstep.Job], micro: int) -> tuple[str, dict[str, list[float]]]:
    """Loss and gradients of the whole batch."""
    trained = train(
        {
            "job": {"use": f"{__name__}:{job.__name__}"},
            "length": {"steps": 1},
            "batch": {"global": 32, "micro": micro},
            "optimizer": {"name": "sgd", "lr": 0.5},
            "clip_norm": None,
            "rehearsal": "off",
        }
    )
    return trained.steps[0].loss.hex(), {
        name: each.flatten().tolist() for name, each in trained.gradients.items()
    }


@pytest.mark.scenario
def test_an_accumulated_loss_is_scaled_once() -> None:
    """The loss was divided by the number of accumulated micro-batches twice (transformers#40052)."""
    job = WholeNumbers(None)
    model = job.model()
    x, y = job.train_data().tensors  # type: ignore[attr-defined]
    loss = (model(x).squeeze(1) - y).square().sum() / 32
    loss.backward()
    wanted = (
        float(loss.detach()).hex(),
        {name: each.grad.flatten().tolist() for name, each in model.named_parameters()},
    )
    assert [one_step(WholeNumbers, micro) for micro in (4, 8, 32)] == [wanted] * 3
    assert one_step(ScaledTwice, 4) != wanted == one_step(ScaledTwice, 32)


# --- checkpoints --------------------------------------------------------------------------------------------


def saved_and_evaluated(folder: Path, **more: Any) -> Document:
    """The best is the first: the loss falls, and the largest one is wanted."""
    rule = {"metric": "eval/loss", "mode": "max"}
    return document(
        Kind,
        optimizer={"name": "sgd", "lr": 0.1},
        length={"epochs": 3},
        evaluate={"every": {"steps": 2}},
        checkpoint={
            "storage": str(folder),
            "every": {"steps": 1},
            "keep_last": 1,
            "keep_best": rule,
            **more,
        },
    )


def loss_of(weights: Any) -> float:
    """The loss over the held-out data in micro-batches of three, added up in order."""
    job = Kind(None)
    model, data, total = job.model().eval(), job.data(7, 2), 0.0
    model.load_state_dict(weights)
    with torch.no_grad():
        for start in range(0, 7, 3):
            batch = job.collate([data[i] for i in range(start, min(start + 3, 7))])
            total += float(job.loss(model, batch).total)
    return total / 7


def test_the_kept_weights_are_those_that_the_metric_is_of(tmp_path: Path) -> None:
    """A checkpoint of a step was taken before the metric of that step, and kept by an older one (PL#20919)."""
    run = saved_and_evaluated(tmp_path)
    trained = train_attempt(run, RUN, AttemptOrigin())
    metrics = {step: float.fromhex(dict(row)["eval/loss"]) for step, _, row in trained.evaluations}
    kept = {each.step: load(each) for each in checkpoints(RunFolder.open(open_storage(str(tmp_path)), RUN))}
    best = max(metrics, key=lambda step: metrics[step])
    assert sorted(kept) == [best, 9] and best < 9
    assert loss_of(kept[best].sections["model"]["state"]) == kept[best].manifest.facts.metrics["eval/loss"]
    assert kept[best].manifest.facts.metrics["eval/loss"] == metrics[best]
    assert (
        loss_of(kept[9].sections["model"]["state"]) != metrics[best]
    )  # the control: weights of another step


@pytest.mark.scenario
def test_the_newest_good_checkpoint_is_taken_up_and_the_damaged_one_is_named(tmp_path: Path) -> None:
    """An automatic resume took up another checkpoint than the newest good one, without a word (composer#3902)."""
    whole = train_attempt(saved_and_evaluated(tmp_path / "whole"), RUN, AttemptOrigin())
    run = saved_and_evaluated(tmp_path / "damaged")
    train_attempt(run, RUN, AttemptOrigin(), 7)
    damaged = flip_a_bit(tmp_path / "damaged", 7)
    resumed = train_attempt(run, RUN, taken_up(run))
    (warning,) = resumed.warnings
    assert damaged in warning and "passed over" in warning
    assert resumed.digests == whole.digests[2:]  # from the best, which retention has left beside it
    assert (resumed.rows, resumed.weights_digest) == (whole.rows, whole.weights_digest)


class Far(lockstep.Job):
    """Ten million rows, of which it counts those that are fetched."""

    fetched: ClassVar[int] = 0

    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return 10_000_000

        def __getitem__(self, index: int) -> int:
            Far.fetched += 1
            return index

        def __getitems__(self, ids: list[int]) -> list[int]:
            Far.fetched += len(ids)
            return ids

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_data(self) -> Dataset[Any]:
        return Far.Rows()

    def collate(self, samples: Sequence[Any]) -> Tensor:
        return torch.tensor([float(len(samples)), float(sum(samples[:4]))])

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        return lockstep.Loss((model(batch[1:] / 1e7) - 1).square().sum() * batch[0], float(batch[0]))


@pytest.mark.scenario  # nine million rows are fetched before the stop
def test_a_resume_far_into_the_data_fetches_what_is_left_alone(tmp_path: Path) -> None:
    """A resume went through all data before its position (composer#3860)."""
    run = {
        "job": {"use": f"{__name__}:Far"},
        "batch": {"global": 500_000, "micro": 500_000},
        "rehearsal": "off",
        "checkpoint": {"storage": str(tmp_path), "every": None},
    }
    fetched = []
    for origin, stop in ((AttemptOrigin(), 18), (None, None)):
        Far.fetched = 0
        trained = train_attempt(run, RUN, origin or taken_up(run), stop)
        fetched.append(Far.fetched)
    assert [row.step for row in trained.steps] == [*range(1, 21)]
    assert fetched[0] > 9_000_000
    assert fetched[1] <= 1_500_100  # two steps, and one micro-batch again for comparison


# --- signals ------------------------------------------------------------------------------------------------


def train_listening(run: Document) -> Trained:
    """As each rank under torchrun does: it hears of its own signals alone. Rank 1 gets SIGTERM in step 3, while rank 0 is slow."""
    rank = dist.get_rank()
    with StopSignal() as stop:

        class Listening(Kept):
            asked = 0

            def stop(self) -> bool:
                self.asked += 1
                if self.asked == 3 and rank == 0:
                    time.sleep(0.2)
                if self.asked == 3 and rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                return RankRequests(stop).stop()

        with mock.patch.object(training, "Kept", Listening):
            return train_attempt(run, RUN, AttemptOrigin())


@pytest.mark.scenario
def test_sigterm_to_one_rank_ends_all_after_one_save(pool: Pool, tmp_path: Path) -> None:
    """The rank that was signalled left, and the others waited for it in a collective for good (PL#20806)."""
    run = of_ids(tmp_path, 2)
    run["checkpoint"]["every"] = None
    whole = train(run)
    ranks = pool.run(2, train_listening, run)
    step = ranks[0].summary["step"]
    assert {(rank.summary["stopped"], rank.summary["step"]) for rank in ranks} == {(True, step)}
    assert 3 <= step <= 4 < len(whole.rows)
    assert [row.step for rank in ranks for row in rank.checkpoints] == [step]
    assert {rank.digests for rank in ranks} == {whole.digests[:step]}
    for rank in pool.run(3, train_attempt, run, RUN, taken_up(run)):
        assert rank.digests == whole.digests[step:]
