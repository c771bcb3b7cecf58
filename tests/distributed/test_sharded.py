"""G1 for a sharded optimizer: the bits, the identity and the checkpoints of one that is not, on any number of workers."""

from __future__ import annotations

import gc
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lockstep.checkpoint.snapshot as snapshot
import lockstep.training.initial_state as initial_state
import lockstep.training.step.optimizer as optimizer
from lockstep import Loss
from lockstep.checkpoint.reader import checkpoints, load
from lockstep.checkpoint.runs.run_folder import AttemptOrigin, RunFolder
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.record.events.union import Event
from lockstep.record.ledger.rows import StepRow
from lockstep.training.integrity.state_digest import tree_digest
from lockstep.training.start import Start
from lockstep.training.step import problems
from lockstep.training.step.sharding import ShardedOptimizer
from tests.distributed import test_same_bits
from tests.distributed.pool import Pool
from tests.distributed.small_jobs import Plain, Strided
from tests.distributed.training import Document, Kept, Trained, train, train_attempt
from tests.raised import raises

RUN = "run"
PRECISIONS = ("fp32", "bf16", "fp16")


def sharded(document: Document) -> Document:
    return {**document, "sharding": "optimizer"}


def check(pool: Pool, job: str, precision: str, workers: int) -> None:
    """Ragged steps, clipping, a schedule, and a worker that a step leaves without a micro-batch (gpt on four)."""
    wanted = test_same_bits.reference(job, 8, precision)
    found = pool.run(workers, train, sharded(test_same_bits.document(job, 8, precision)))
    assert found == [wanted] * workers


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize(("job", "precision", "workers"), [("digits", "fp32", 2), ("gpt", "bf16", 3)])
def test_the_bits_are_those_of_the_whole_optimizer(
    pool: Pool, job: str, precision: str, workers: int
) -> None:
    check(pool, job, precision, workers)


@pytest.mark.exact
@pytest.mark.parametrize(
    ("job", "precision", "workers"), list(product(("digits", "gpt"), PRECISIONS, range(1, 9)))
)
def test_the_bits_are_those_of_the_whole_optimizer_in_full(
    wide_pool: Pool, job: str, precision: str, workers: int
) -> None:
    check(wide_pool, job, precision, workers)


class Grouped(Strided):
    """Its own optimizer: two groups, one without weight decay, one rate that differs; parameters in any memory order."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        flat = [p for p in model.parameters() if p.dim() < 2]
        deep = [p for p in model.parameters() if p.dim() >= 2]
        return torch.optim.Adam(
            [{"params": deep, "weight_decay": 0.1}, {"params": flat, "lr": 0.02}], amsgrad=True
        )


@pytest.mark.scenario
@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("job", "settings"),
    [
        ("Strided", {"name": "sgd", "momentum": 0.9, "nesterov": True}),
        ("Strided", {"name": "sgd"}),
        ("Grouped", {}),
    ],
)
def test_parameters_of_any_kind_and_groups(pool: Pool, job: str, settings: dict[str, Any]) -> None:
    """Channels last, transposed, with gaps, shared, frozen, of another type."""
    module = "small_jobs" if job == "Strided" else "test_sharded"
    document = {
        "job": {"use": f"tests.distributed.{module}:{job}", "params": {"samples": 50}},
        "batch": {"global": 16, "micro": 2},
        "data": {"drop_last": False},
        "optimizer": settings,
        "clip_norm": 0.5,
    }
    wanted = train(document)
    with mock.patch("lockstep.training.step.span_gathering.GATHER_BYTES", 100):
        assert train(sharded(document)) == wanted
    for workers in (2, 3):
        assert pool.run(workers, train_in_small_pieces, sharded(document)) == [wanted] * workers


class Lazy(Plain):
    """Its parameters get their shapes with the first forward, after the optimizer was made."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.Linear(16, 3))


@pytest.mark.scenario
def test_parameters_without_shapes(pool: Pool) -> None:
    document = {"job": {"use": "tests.distributed.test_sharded:Lazy"}, "batch": {"global": 16, "micro": 2}}
    assert pool.run(2, train_in_small_pieces, sharded(document)) == [train(document)] * 2


def train_in_small_pieces(document: Document) -> Trained:
    """Parameters are gathered in several rounds."""
    with (
        mock.patch("lockstep.training.step.span_gathering.GATHER_BYTES", 128),
        mock.patch("lockstep.training.step.sharding.UNIT", 4),
        mock.patch("lockstep.training.step.span_gathering.UNIT", 4),
    ):
        return train(document)


# --- checkpoints ----------------------------------------------------------------------------------------------


def saving(storage: Path, precision: str, shard: bool) -> Document:
    document = test_same_bits.document(
        "gpt", 8, precision, checkpoint={"storage": str(storage), "every": {"steps": 1}, "keep_every": 1}
    )
    return sharded(document) if shard else document


def attempt_with_many_writers(document: Document, origin: AttemptOrigin) -> Trained:
    """Every rank writes a part, however small the state is."""
    with mock.patch.object(snapshot, "SMALLEST_SHARE", 64):
        return train_attempt(document, RUN, origin)


def folder(storage: Path) -> RunFolder:
    return RunFolder.open(open_storage(str(storage)), RUN)


def content(storage: Path) -> dict[int, str]:
    """What each checkpoint holds, by step; all but the timing columns of the ledger and the like."""
    found = [
        load(one, only={"model", "optimizer", "scaler", "counters", "check"})
        for one in checkpoints(folder(storage))
    ]
    return {one.manifest.step: tree_digest(one.sections) for one in found}


@pytest.mark.scenario
@pytest.mark.parametrize("precision", ["fp16"])
def test_a_run_is_taken_up_by_any_workers_sharded_or_not(pool: Pool, tmp_path: Path, precision: str) -> None:
    """One worker saved the whole optimizer, three a sharded one: the same checkpoints, from which anyone goes on."""
    wanted = test_same_bits.reference("gpt", 8, precision)
    plain, shards, total = tmp_path / "plain", tmp_path / "shards", len(wanted.rows)
    assert train_attempt(saving(plain, precision, False), RUN, AttemptOrigin()) == wanted
    found = pool.run(3, attempt_with_many_writers, saving(shards, precision, True), AttemptOrigin())
    assert found == [wanted] * 3
    assert content(shards) == content(plain)
    assert len(content(plain)) == total
    files = {path.name for path in (shards / RUN / "step-000000002").iterdir()}
    assert len({name.split(".")[2] for name in files if name.startswith("optimizer.")}) > 1
    for storage, shard, workers, step in (
        (shards, True, 2, 2),
        (shards, False, 1, 3),
        (plain, True, 4, total - 1),
    ):
        origin = AttemptOrigin(RUN, folder(storage).claim().number, step)
        for one in pool.run(workers, attempt_with_many_writers, saving(storage, precision, shard), origin):
            assert one.rows == wanted.rows
            assert one.identity == wanted.identity
            assert one.digests == wanted.digests[step:]
    assert content(shards) == content(plain)


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize(("precision", "before", "after"), [("fp32", 2, 3), ("bf16", 3, 2)])
def test_an_interrupted_run_goes_on_on_other_workers(
    pool: Pool, tmp_path: Path, precision: str, before: int, after: int
) -> None:
    """Ragged steps and clipping; the shares of the state begin elsewhere on as many workers as take it up."""
    document: Document = {
        "job": {"use": "tests.distributed.small_jobs:Plain", "params": {"samples": 40}},
        "batch": {"global": 16, "micro": 2},
        "length": {"epochs": 2},
        "data": {"drop_last": False},
        "precision": precision,
        "clip_norm": 0.5,
    }
    wanted = train(document)
    saving = sharded({**document, "checkpoint": {"storage": str(tmp_path), "every": None}})
    for one in pool.run(before, train_attempt, saving, RUN, AttemptOrigin(), 3):
        assert one.digests == wanted.digests[:3]
    origin = AttemptOrigin(RUN, folder(tmp_path).claim().number, 3)
    for one in pool.run(after, train_attempt, saving, RUN, origin):
        assert (one.rows, one.digests, one.identity) == (wanted.rows, wanted.digests[3:], wanted.identity)


# --- memory, refusals, controls -------------------------------------------------------------------------------


class Wide(Plain):
    class Params(Plain.Params):
        width: int = 700

    params: Params


def held(document: Document) -> tuple[int, int]:
    """Bytes of the optimizer's state on this rank, and of the model's parameters."""
    made: list[ShardedOptimizer] = []
    init = ShardedOptimizer.__init__

    def noted(self: ShardedOptimizer, *args: Any) -> None:
        made.append(self)
        init(self, *args)

    with mock.patch.object(ShardedOptimizer, "__init__", noted):
        train(document)
    every = [value for state in made[0]._own.state.values() for value in state.values()]
    assert not made[0].state
    return sum(value.nbytes for value in every), sum(p.nbytes for p in made[0].parameters)


@pytest.mark.every(2)
@pytest.mark.parametrize("workers", [2, 4])
def test_the_state_is_shared_out_evenly(pool: Pool, workers: int) -> None:
    document = sharded(
        {
            "job": {"use": "tests.distributed.test_sharded:Wide"},
            "batch": {"global": 8, "micro": 1},
            "length": {"steps": 2},
        }
    )
    for state, parameters in pool.run(workers, held, document):
        # A size, not a value of training: slices end at whole runs of 16 numbers.
        assert state == pytest.approx(2 * parameters / workers, rel=0.05)


def live(document: Document, origin: AttemptOrigin, keeps: bool = False) -> int:
    """Bytes of the tensors that Python knows after the first step that this attempt takes."""
    found: list[int] = []
    tell = Kept.tell

    def counting(self: Kept, event: Event) -> None:
        tell(self, event)
        if isinstance(event, StepRow) and not found:
            gc.collect()
            storages = [
                one.untyped_storage() for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)
            ]
            found.append(sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))

    forget = (lambda start: start) if keeps else Start.without_state
    with mock.patch.object(Kept, "tell", counting), mock.patch.object(Start, "without_state", forget):
        train_attempt(document, RUN, origin)
    return found[0]


@pytest.mark.scenario
def test_a_resumed_worker_holds_no_more_than_one_from_the_beginning(pool: Pool, tmp_path: Path) -> None:
    """The control: the whole state that was read, kept for the run, would show."""
    document = sharded(
        {
            "job": {"use": "tests.distributed.test_sharded:Wide", "params": {"width": 20_000}},
            "batch": {"global": 8, "micro": 4},
            "length": {"steps": 3},
            "checkpoint": {"storage": str(tmp_path), "every": {"steps": 1}, "keep_every": 1},
        }
    )
    begun = max(pool.run(2, live, document, AttemptOrigin()))
    resumed = [
        max(pool.run(2, live, document, AttemptOrigin(RUN, folder(tmp_path).claim().number, 1), keeps))
        for keeps in (False, True)
    ]
    assert resumed[0] <= 1.05 * begun < resumed[1]


class Short(Plain):
    """Parameters in bfloat16, one of them so large that threads share it."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 9001), nn.Tanh(), nn.Linear(9001, 3)).bfloat16()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(F.cross_entropy(model(x.bfloat16()).float(), y, reduction="sum"), len(y))


def short(threads: int) -> Document:
    return {
        "job": {"use": "tests.distributed.test_sharded:Short"},
        "batch": {"global": 4, "micro": 2},
        "length": {"steps": 3},
        "threads": threads,
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    }


def train_with_any_threads(document: Document) -> Trained:
    with mock.patch.object(initial_state, "check_threads", lambda *_: None):
        return train(document)


@pytest.mark.scenario
def test_short_parameters_are_updated_by_one_thread_alone(pool: Pool) -> None:
    """On any number of workers, for sharding is placement. The control: without the refusal, three threads give other bits."""
    assert pool.run(2, train, sharded(short(1))) == [train(short(1))] * 2
    for workers in (1, 2):
        with raises(problems.SHORT_THREADS, got="optimizer", threads=3, name="0.weight"):
            pool.run(workers, train, sharded(short(3)))
    found, *_ = pool.run(2, train_with_any_threads, sharded(short(3)))
    assert found.weights_digest != train(short(3)).weights_digest


class Adding(torch.optim.SGD):
    """Divides each gradient by its norm."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad / (parameter.grad.norm() + 1)
        super().step()


class Own(Plain):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Adding(model.parameters(), lr=0.1)


def own() -> Document:
    return {"job": {"use": "tests.distributed.test_sharded:Own"}, "batch": {"global": 16, "micro": 4}}


def train_unchecked(document: Document) -> Trained:
    with mock.patch.object(optimizer, "check_shardable", lambda whole, **_: None):
        return train_in_small_pieces(document)


def test_an_optimizer_that_adds_up_gradients_is_refused_on_any_number_of_workers(pool: Pool) -> None:
    for workers in (1, 2):
        with raises(problems.NOT_ELEMENT_WISE, got="Adding"):
            pool.run(workers, train, sharded(own()))


@pytest.mark.scenario
def test_without_the_refusal_it_would_give_other_bits(pool: Pool) -> None:
    """The control: what is refused is refused for a reason."""
    assert pool.run(2, train_unchecked, sharded(own()))[0].weights_digest != train(own()).weights_digest
