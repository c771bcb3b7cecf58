"""G1 for sharded parameters: the bits, the identity and the checkpoints of a model that every worker holds, on any number of workers."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.utils import prune
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

import lockstep.checkpoint.snapshot as snapshot
import lockstep.training.loop as loop
import lockstep.training.model_sharding as model_sharding
import lockstep.training.start as start_of_run
import lockstep.training.step.fsdp_calls as fsdp_calls
import lockstep.training.step.full_sharding as full_sharding
import lockstep.training.step.phase_step as phase_step
import lockstep.training.step.span_gathering as span_gathering
from lockstep import Loss
from lockstep.checkpoint.reader import checkpoints, load
from lockstep.checkpoint.runs.run_checkpoints import claim
from lockstep.checkpoint.runs.run_folder import AttemptOrigin, RunFolder
from lockstep.checkpoint.storage.local import LocalStorage
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.errors import JobError, SpecError
from lockstep.spec.loading import load_spec
from lockstep.training.integrity import problems as integrity_problems
from lockstep.training.integrity.state_digest import tree_digest
from lockstep.training.observe import worker_memory
from lockstep.training.problems import HELD_OUTSIDE, KNOWN_BY_ID
from lockstep.training.read_relay import PIECE
from lockstep.training.state import TrainState
from lockstep.training.step import problems
from lockstep.training.step.fsdp_calls import FSDPCalls
from lockstep.training.step.fsdp_modules import Root
from lockstep.training.step.reduction import TreeSum
from lockstep.training.step.sample_rows import StepRows
from lockstep.training.step.sharded_norm import ShardedNorm
from tests.distributed import (
    batch_kinds,
    elementwise_jobs,
    memory_by_stage,
    phase_kinds,
    public_kinds,
    step_kinds,
    test_same_bits,
)
from tests.distributed import kinds as kinds_of_jobs
from tests.distributed.kinds import FEATURES, Kind, train_every
from tests.distributed.pool import Pool
from tests.distributed.small_jobs import Plain
from tests.distributed.test_sharded_estimate import estimate_of
from tests.distributed.training import Document, Trained, train, train_attempt
from tests.live_bytes import counted
from tests.raised import raises

RUN = "run"
HERE = "tests.distributed.test_full_sharding"


def full(document: Document) -> Document:
    return {**document, "sharding": "full"}


def check(pool: Pool, job: str, precision: str, workers: int) -> None:
    """Ragged steps, clipping, a schedule, and a worker that a step leaves without a micro-batch (gpt on four)."""
    wanted = test_same_bits.reference(job, 8, precision)
    found = pool.run(workers, train, full(test_same_bits.document(job, 8, precision)))
    assert found == [wanted] * workers


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize(("job", "precision", "workers"), [("digits", "fp32", 2), ("gpt", "bf16", 3)])
def test_the_bits_are_those_of_the_whole_model(pool: Pool, job: str, precision: str, workers: int) -> None:
    check(pool, job, precision, workers)


@pytest.mark.exact
@pytest.mark.parametrize(
    ("job", "precision", "workers"), list(product(("digits", "gpt"), ("fp32", "bf16", "fp16"), range(1, 9)))
)
def test_the_bits_are_those_of_the_whole_model_in_full(
    wide_pool: Pool, job: str, precision: str, workers: int
) -> None:
    check(wide_pool, job, precision, workers)


# --- parameters of every kind -----------------------------------------------------------------------------------


class Block(nn.Module):
    """Odd sizes, dropout, a buffer that follows its input, a parameter that all blocks share, and one in another type."""

    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(7, 13), nn.Linear(13, 7, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("level", torch.zeros(7))
        self.scale = scale
        self.shift = nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.out(self.dropout(torch.tanh(self.into(x)))) * self.scale
        if self.training:
            self.level.lerp_(y.detach().mean(0), 0.1)  # type: ignore[operator, union-attr]
        return x + y - self.level + self.shift.float()


class Stack(nn.Module):
    """An embedding that is tied to the head, blocks, and parameters that FSDP cannot cut: a scalar, a transposed one, one with a hook, a rare one."""

    def __init__(self) -> None:
        super().__init__()
        scale = nn.Parameter(torch.ones(7))
        self.table = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(Block(scale) for _ in range(3))
        self.twice = nn.Sequential(nn.Linear(7, 7), nn.Tanh())
        self.head = nn.Linear(7, 11)
        self.head.weight = self.table.weight
        self.heat = nn.Parameter(torch.ones(()))
        self.turned = nn.Parameter(torch.randn(7, 5).t())
        self.hooked = nn.Parameter(torch.zeros(7))
        self.hooked.register_hook(lambda gradient: gradient * 0.5)
        self.rare = nn.Parameter(torch.zeros(7))
        self.frozen = nn.Parameter(torch.ones(9, 7), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table((x * 4).round().long().clamp(-5, 5) + 5).mean(1) + self.hooked + self.frozen.sum(0) / 9
        for block in self.blocks:
            h = block(h)
        h = self.twice(self.twice(h))
        h = h + (h @ self.turned.t()) @ self.turned
        if float(x[0, 0]) > 0.5:
            h = h + self.rare
        return self.head(h)[:, :3] * self.heat


class Kinds(Plain):
    def model(self) -> nn.Module:
        return Stack()

    def conditional_parameters(self, model: nn.Module) -> Iterable[str]:
        return ["rare"]

    def activation_checkpoints(self, model: nn.Module) -> Sequence[nn.Module]:
        return list(model.blocks)  # type: ignore[arg-type]

    def eval_data(self) -> Any:
        return self.train_data()

    def after_step(self, model: nn.Module, step: int) -> None:
        for parameter in model.parameters():
            parameter.clamp_(-1.5, 1.5)


@cache
def kinds(name: str) -> Document:
    """Ragged, clipped, with an average, an evaluation that decides, samples left out, and what `name` says."""
    base: Document = {
        "job": {"use": f"{HERE}:Kinds", "params": {"samples": 37}},
        "batch": {"global": 16, "micro": 2},
        "length": {"epochs": 2},
        "data": {"drop_last": False, "without": "1,5-12"},
        "clip_norm": 0.5,
        "ema": 0.8,
        "evaluate": {"every": {"steps": 2}},
        "early_stop": {"metric": "eval/loss", "mode": "min", "patience": 9},
        "optimizer": {"lr": 0.05},
    }
    return (
        base
        | {
            "adamw": {},
            "sgd": {"optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True}},
            "recomputed": {"activation_checkpointing": True, "precision": "bf16"},
        }[name]
    )


@cache
def reference(name: str) -> Trained:
    return train(kinds(name))


@pytest.mark.scenario
@pytest.mark.thinned(3)
@pytest.mark.parametrize(("name", "workers"), [("adamw", 2), ("sgd", 4), ("recomputed", 3)])
def test_parameters_of_every_kind(pool: Pool, name: str, workers: int) -> None:
    assert pool.run(workers, train, full(kinds(name))) == [reference(name)] * workers


@pytest.mark.exact
@pytest.mark.parametrize(("name", "workers"), list(product(("adamw", "sgd", "recomputed"), (1, 2, 3, 4))))
def test_parameters_of_every_kind_in_full(pool: Pool, name: str, workers: int) -> None:
    assert pool.run(workers, train, full(kinds(name))) == [reference(name)] * workers


def sharded_names(document: Document) -> tuple[list[str], list[str]]:
    """The units of a run, and the parameters that every worker has whole."""
    made: list[full_sharding.FullSharding] = []
    init = full_sharding.FullSharding.__init__

    def noted(self: full_sharding.FullSharding, *given: Any) -> None:
        made.append(self)
        init(self, *given)

    with mock.patch.object(full_sharding.FullSharding, "__init__", noted):
        train(document)
    return made[0].units, sorted(made[0].whole)


@pytest.mark.scenario
def test_what_is_a_unit_and_what_stays_whole(pool: Pool) -> None:
    """A module that is computed twice in a micro-batch is no unit: its gradients would be summed in another order."""
    units, whole = pool.run(2, sharded_names, full({**kinds("adamw"), "length": {"steps": 1}}))[0]
    assert units == ["blocks.0", "blocks.1", "blocks.2"]
    shifts = [f"blocks.{i}.shift" for i in range(3)]
    assert whole == sorted(["blocks.0.scale", *shifts, "heat", "hooked", "rare", "turned"])


# --- checkpoints ------------------------------------------------------------------------------------------------


def saving(storage: Path, sharding: Any, name: str = "adamw") -> Document:
    return {
        **kinds(name),
        "sharding": sharding,
        "checkpoint": {"storage": str(storage), "every": {"steps": 1}, "keep_every": 1},
    }


def attempt_with_many_writers(document: Document, origin: AttemptOrigin, stop: int | None = None) -> Trained:
    """Every rank writes a part, however small the state is."""
    with mock.patch.object(snapshot, "SMALLEST_SHARE", 64):
        return train_attempt(document, RUN, origin, stop)


def folder(storage: Path) -> RunFolder:
    return RunFolder.open(open_storage(str(storage)), RUN)


def content(storage: Path) -> dict[int, str]:
    """What each checkpoint holds, by step; all but the timing columns of the ledger and the like."""
    found = [
        load(one, only={"model", "optimizer", "scaler", "counters", "check", "best", "ema"})
        for one in checkpoints(folder(storage))
    ]
    return {one.manifest.step: tree_digest(one.sections) for one in found}


@pytest.mark.scenario
def test_a_checkpoint_holds_what_one_process_saves_and_anyone_goes_on_from_it(
    pool: Pool, tmp_path: Path
) -> None:
    wanted = reference("adamw")
    plain, shards, total = tmp_path / "plain", tmp_path / "shards", len(wanted.rows)
    assert train_attempt(saving(plain, "none"), RUN, AttemptOrigin()) == wanted
    found = pool.run(3, attempt_with_many_writers, saving(shards, "full"), AttemptOrigin())
    assert found == [wanted] * 3
    assert content(shards) == content(plain)
    assert len(content(plain)) == total
    for storage, sharding, workers, step in (
        (shards, "none", 1, 3),
        (shards, "full", 2, 2),
        (plain, "full", 4, total - 1),
        (shards, "optimizer", 2, 2),
    ):
        origin = AttemptOrigin(RUN, folder(storage).claim().number, step)
        for one in pool.run(workers, attempt_with_many_writers, saving(storage, sharding), origin):
            assert (one.rows, one.identity) == (wanted.rows, wanted.identity)
            assert one.digests == wanted.digests[step:]
            assert one.best == wanted.best != (None, None)
            assert one.summary["ema_digest"] == wanted.summary["ema_digest"] != wanted.weights_digest
        assert (
            content(shards) == content(plain) or sharding == "optimizer"
        )  # it keeps states in another order


class Wide(Plain):
    """Sixteen layers of the same size, and little else."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.ZeroPad1d((0, 248)), *(nn.Linear(256, 256, bias=False) for _ in range(16)))


WIDE = 16 * 256 * 256 * 4


def resumed(
    document: Document, origin: AttemptOrigin, reads_all: bool = False
) -> tuple[Trained, int, list[int]]:
    """An attempt, the bytes that this rank reads from the storage, and the most memory that it takes for tensors to load and to restore it.

    `reads_all` is the control: rank 0 reads and passes all on.
    """
    read, peaks, opened = [0], list[int](), LocalStorage._opened
    loaded, restored, start = start_of_run._load, TrainState.restore, start_of_run._SHARDED

    def counting(self: LocalStorage, path: str) -> Any:
        file = opened(self, path)

        class Counted:
            def readinto(self, buffer: memoryview) -> int:
                got = file.readinto(buffer) or 0
                read[0] += got
                return got

            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *error: Any) -> None:
                file.close()

        return Counted()

    def peaking(call: Any) -> Any:
        def counted_call(*given: Any, **named: Any) -> Any:
            with counted("cpu") as live:
                result = call(*given, **named)
            peaks.append(live.peak)
            return result

        return counted_call

    with (
        mock.patch.object(LocalStorage, "_opened", counting),
        mock.patch.object(start_of_run, "_load", peaking(loaded)),
        mock.patch.object(TrainState, "restore", peaking(restored)),
        mock.patch.object(start_of_run, "_SHARDED", frozenset() if reads_all else start),
    ):
        trained = attempt_with_many_writers(document, origin)
    return trained, read[0], peaks


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize("writers", [1, 4])
def test_a_resume_reads_its_rows(pool: Pool, tmp_path: Path, writers: int) -> None:
    """Of a checkpoint of 3 sets of the parameters a rank of 4 reads its quarter, and hashes about as many bytes of the files; it has no tensor but its own rows."""
    document = {
        "job": {"use": f"{HERE}:Wide"},
        "batch": {"global": 8, "micro": 2},
        "length": {"steps": 2},
        "sharding": "full",
        "checkpoint": {"storage": str(tmp_path), "every": {"steps": 1}, "keep_every": 1},
        "rehearsal": "off",
    }
    wanted = pool.run(writers, attempt_with_many_writers, document, AttemptOrigin())[0]
    origin = AttemptOrigin(RUN, folder(tmp_path).claim().number, 1)
    found = pool.run(4, resumed, document, origin)
    assert [(one.rows, one.weights_digest) for one, _, _ in found] == [
        (wanted.rows, wanted.weights_digest)
    ] * 4
    file = {1: 2, 4: 3 / 4}[
        writers
    ] * WIDE  # the largest share of the files: one process writes a file for each section
    for _, read, (loading, restoring) in found:
        assert read <= 3 * WIDE / 4 + file + 200_000
        assert loading <= PIECE + 200_000  # what rank 0 passes on
        assert (
            restoring <= 2 * WIDE / 4 + WIDE / 16 + 200_000
        )  # the rows of the optimizer, and those of one tensor
    if writers == 4:
        _, read, peaks = pool.run(
            4, resumed, document, replace(origin, attempt=folder(tmp_path).claim().number), True
        )[0]
        assert read >= 3 * WIDE
        assert peaks[0] >= 3 * WIDE


@pytest.mark.thinned(3)
@pytest.mark.scenario
@pytest.mark.parametrize("file", ["model", "optimizer", "best"])
def test_a_damaged_file_is_passed_over_by_every_rank(pool: Pool, tmp_path: Path, file: str) -> None:
    """One rank alone sees the damage."""
    document = saving(tmp_path, "full")
    wanted = pool.run(3, attempt_with_many_writers, document, AttemptOrigin())[0]
    last = tmp_path / checkpoints(folder(tmp_path))[0].folder
    damaged = max(last.glob(f"{file}*.safetensors"))
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    origin = AttemptOrigin(RUN, folder(tmp_path).claim().number)
    found = pool.run(2, attempt_with_many_writers, document, origin)
    assert [one.rows for one in found] == [wanted.rows] * 2
    assert (
        found[0]
        .warnings[0]
        .endswith("its hash is not the one in its manifest; this checkpoint is passed over")
    )
    assert found[0].digests == wanted.digests[-1:]


# --- the start --------------------------------------------------------------------------------------------------


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize(("job", "precision", "workers"), [("digits", "fp32", 2), ("gpt", "bf16", 4)])
def test_a_start_by_shards_has_the_bits_of_a_whole_one(
    pool: Pool, job: str, precision: str, workers: int
) -> None:
    """The identity has the digests of the initial weights and of the first micro-batch."""
    wanted = test_same_bits.reference(job, 8, precision)
    document = full(test_same_bits.document(job, 8, precision)) | {"rehearsal": "off"}
    found = pool.run(workers, train, document)
    assert found == [wanted] * workers
    assert not [text for text in found[0].warnings if text.startswith("sharding")]


@pytest.mark.scenario
def test_a_model_that_cannot_be_deferred_begins_whole(pool: Pool) -> None:
    found = pool.run(2, train, full(kinds("adamw")) | {"rehearsal": "off"})
    assert found == [reference("adamw")] * 2
    wanted = "sharding: every worker begins with the whole model: parameter 'hooked' has a hook"
    assert [text for text in found[0].warnings if text.startswith("sharding")] == [wanted]


def preparing(document: Document) -> tuple[str, int]:
    """The identity of a run, and the most memory that this rank takes for tensors before the first step."""
    peaks, prepare = list[int](), loop.prepare

    def counted_prepare(*given: Any, **named: Any) -> Any:
        with counted("cpu") as live:
            run = prepare(*given, **named)
        peaks.append(live.peak)
        return run

    with mock.patch.object(loop, "prepare", counted_prepare):
        return train(document).identity, peaks[0]


@pytest.mark.scenario
def test_the_memory_of_a_start_by_shards(pool: Pool) -> None:
    """A share of the parameters and of one gradient, and some units; a whole start has both whole, on every worker."""
    document = full(small(f"{HERE}:Wide", length={"steps": 1}, rehearsal="off"))
    whole = pool.run(4, preparing, document | {"rehearsal": "quick"})
    shards = pool.run(4, preparing, document)
    unit = WIDE // 16
    assert {identity for identity, _ in shards} == {identity for identity, _ in whole}
    assert min(peak for _, peak in whole) >= 2 * WIDE
    assert max(peak for _, peak in shards) <= 2 * WIDE // 4 + 6 * unit + 700_000


# --- controls, refusals, memory ---------------------------------------------------------------------------------


def train_in_a_ring_s_order(document: Document) -> Trained:
    """What arrives is added from left to right, as a chain of workers would."""

    def folded(self: TreeSum, node: range, gradients: list[Tensor]) -> None:
        if self.sums:
            _, total = self.sums.pop()
            torch._foreach_add_(total, gradients)
            gradients = total
        self.sums.append((node, gradients))

    with mock.patch.object(TreeSum, "add", folded):
        return train(document)


def train_with_a_norm_by_worker(document: Document) -> Trained:
    """Each worker adds up its own rows, and the workers' sums are added: the rows, and so the order, depend on their number."""

    def of_rows(self: ShardedNorm, gradients: Sequence[Tensor]) -> list[float]:
        own = [float(gradient.pow(2).sum(dtype=torch.float64)) for gradient in gradients]
        return [sum(of_ranks) for of_ranks in zip(*self._group.gather(own), strict=True)]

    with mock.patch.object(ShardedNorm, "squares", of_rows):
        return train(document)


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize("broken", [train_in_a_ring_s_order, train_with_a_norm_by_worker])
def test_another_order_gives_other_bits(pool: Pool, broken: Any) -> None:
    """The controls."""
    found = pool.run(2, broken, full(test_same_bits.document("digits", 8, "fp32")))[0]
    assert found.rows != test_same_bits.reference("digits", 8, "fp32").rows


class Deep(Plain):
    class Params(Plain.Params):
        width: int = 128
        depth: int = 8

    params: Params

    def model(self) -> nn.Module:
        width = self.params.width
        blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(self.params.depth)]
        return nn.Sequential(nn.Linear(8, width), *blocks, nn.Linear(width, 3))


class Wanderer(Plain):
    """Holds a parameter outside of its module."""

    def model(self) -> nn.Module:
        model = super().model()
        self.held = [model[0].weight]  # type: ignore[index]
        return model


class Halving(nn.Linear):
    """Halves its weight from its sixth call on."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 5:
            with torch.no_grad():
                self.weight.mul_(0.5)
        return super().forward(x)


class Writer(Plain):
    def model(self) -> nn.Module:
        return nn.Sequential(Halving(8, 16), nn.Tanh(), nn.Linear(16, 3))


def small(job: str, **more: Any) -> Document:
    return {"job": {"use": job}, "batch": {"global": 8, "micro": 2}, "length": {"steps": 2}, **more}


class Images(Plain):
    """Pictures of 2 by 2 pixels in 10 channels, convolved in channels_last, with kernels of one pixel and of one channel."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(10, 16, 1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1, groups=16),
            nn.ReLU(),
            nn.Conv2d(16, 9, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(9, 8, 3, padding=1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 3),
        ).to(memory_format=torch.channels_last)

    def train_data(self) -> Dataset[Any]:
        x = torch.randn(24, 10, 2, 2, generator=torch.Generator().manual_seed(1))
        return TensorDataset(x, x[:, :3, 0, 0].argmax(1))


class Columns(Plain):
    """Weights that are turned rows: a dimension of one element has another stride than new memory has."""

    def model(self) -> nn.Module:
        return TurnedRows()


class TurnedRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 30)
        self.column, self.row = nn.Parameter(torch.randn(1, 30).T), nn.Parameter(torch.randn(3, 1).T)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).tanh() @ self.column @ self.row


@pytest.mark.parametrize(("job", "micro"), [("Images", 3), ("Images", 1), ("Columns", 3)])
def test_a_dimension_of_one_element_keeps_its_stride(pool: Pool, job: str, micro: int) -> None:
    """Kernels of one pixel, of one channel, and a micro-batch of one sample: a convolution chooses its kernel by the strides."""
    batch = {"global": 6 * micro, "micro": micro}
    document = small(f"{HERE}:{job}", batch=batch, length={"steps": 3}, rehearsal="quick")
    whole = train(document)
    for rank in pool.run(2, train, full(document)):
        assert (rank.weights_digest, rank.rows) == (whole.weights_digest, whole.rows)


def test_a_parameter_that_the_job_holds_itself_is_refused(pool: Pool) -> None:
    """It would keep the weights of the start, and its gradient would be lost without a word."""
    with raises(HELD_OUTSIDE, name="0.weight"):
        pool.run(2, train, full(small(f"{HERE}:Wanderer")))


QUIET: set[int] = set()


class KnowsByID(Plain):
    """Knows some of its parameters by what `id` says of them, in an attribute of its own, of its module, or of its model."""

    where = "attribute"

    def model(self) -> nn.Module:
        model = super().model()
        weight = id(model[0].weight)  # type: ignore[index]
        if self.where == "attribute":
            self.quiet = {"decayed": [weight]}
        if self.where == "module":
            QUIET.clear()
            QUIET.add(weight)
        if self.where == "model":
            model.quiet = {weight: 0.5}  # type: ignore[assignment]
        if self.where == "function":
            self.is_quiet = lambda parameter: id(parameter) == weight
        return model

    def after_step(self, model: nn.Module, step: int) -> None:
        quiet = {*getattr(self, "quiet", {}).get("decayed", []), *QUIET, *getattr(model, "quiet", {})}
        for parameter in model.parameters():
            if id(parameter) in quiet or getattr(self, "is_quiet", lambda _: False)(parameter):
                parameter.mul_(0.9)


class InModule(KnowsByID):
    where = "module"


class InModel(KnowsByID):
    where = "model"


class InFunction(KnowsByID):
    where = "function"


@pytest.mark.parametrize(
    ("job", "where"),
    [("KnowsByID", "quiet"), ("InModule", "QUIET"), ("InModel", "model"), ("InFunction", "is_quiet")],
)
def test_a_parameter_that_the_job_knows_by_its_id_is_refused(pool: Pool, job: str, where: str) -> None:
    """There is another in its place: nothing would match, and nothing say so."""
    with raises(KNOWN_BY_ID, name="0.weight", got=where):
        pool.run(2, train, full(small(f"{HERE}:{job}", rehearsal="quick")))


class Entangled(Plain):
    """Leaves a ring of objects behind that nobody holds, and that holds a parameter of its model."""

    def model(self) -> nn.Module:
        model = super().model()
        ring: list[Any] = [model[0].weight]  # type: ignore[index]
        ring.append(ring)
        return model


@pytest.mark.scenario
def test_a_parameter_that_only_garbage_holds_is_let_go(pool: Pool) -> None:
    """Python frees a ring of objects when it next looks for such: until then it would seem held, and its memory would be."""
    document = small(f"{HERE}:Entangled")
    digests = {one.weights_digest for one in pool.run(2, train, full(document))}
    assert digests == {train(document).weights_digest}


class Penalising(Deep):
    """Adds the squares of all weights, outside of their modules."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        penalty: Any = sum(parameter.pow(2).sum() for parameter in model.parameters())
        return Loss(loss.total + penalty * loss.weight, loss.weight)


class Measuring(Deep):
    """Divides by the norm of a weight, a number that torch would add up in another order."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.total / float(model[0].weight.detach().norm()), loss.weight)  # type: ignore[index, operator, union-attr]


@pytest.mark.every(2)
@pytest.mark.parametrize("job", ["Penalising", "Measuring"])
def test_parameters_that_are_used_outside_of_their_modules_are_refused(pool: Pool, job: str) -> None:
    with pytest.raises(JobError, match=r"or set sharding=optimizer$"):
        pool.run(2, train, full(small(f"{HERE}:{job}", rehearsal="quick")))


@pytest.mark.scenario
def test_a_write_to_a_parameter_is_refused_as_without_sharding(pool: Pool) -> None:
    document = small(f"{HERE}:Writer", length={"steps": 6}, rehearsal="off")
    for setting in (document, full(document)):
        with raises(problems.PARAMETER_WRITTEN, name="0.weight"):
            pool.run(2, train, setting)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"reduction": "native"}, "sharding: got 'full' with reduction native"),
        ({"compile": True}, "sharding: got 'full' with compile true"),
    ],
)
def test_settings_that_need_a_whole_model_are_refused(more: Document, message: str) -> None:
    with pytest.raises(SpecError) as refusal:
        load_spec(full(small(f"{HERE}:Kinds", **more)))
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (FSDPModule, "set_custom_reduce_scatter"),
        (FSDPState, "_register_pre_backward_hook"),
        (torch.autograd.graph.Node, "_sequence_nr"),
    ],
)
def test_a_torch_without_the_calls_is_refused(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    full_sharding.check_torch()
    monkeypatch.delattr(owner, name)
    with raises(problems.NO_FSDP, missing=name):
        full_sharding.check_torch()


def held(document: Document) -> dict[str, Any]:
    """What this rank says that it holds."""
    texts: list[str] = []
    used = worker_memory.used

    def noted(*given: Any) -> str:
        texts.append(used(*given))
        return texts[0]

    with mock.patch.object(worker_memory, "used", noted):
        train(document)
    result: dict[str, Any] = json.loads(texts[0])
    return result


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize("workers", [2, 4])
def test_a_worker_holds_its_share(pool: Pool, workers: int) -> None:
    check_share(pool, workers)


@pytest.mark.exact
def test_one_of_eight_workers_holds_its_share(wide_pool: Pool) -> None:
    check_share(wide_pool, 8, batch={"global": 8, "micro": 1})


def check_share(pool: Pool, workers: int, **more: Any) -> None:
    document = small(f"{HERE}:Deep") | more
    micro_batches = document["batch"]["global"] // document["batch"]["micro"]
    whole, estimated = held(document), estimate_of(full(document), workers)
    for share in pool.run(workers, held, full(document)):
        for name in ("parameters_bytes", "gradients_bytes", "optimizer_bytes"):
            # A size, not a value of training: rows are not divided.
            assert share[name] == pytest.approx(whole[name] / workers, rel=0.05)
            assert share[name] == pytest.approx(estimated[name], rel=0.05)
        for name in ("communication_bytes", "buffers_bytes"):
            assert share[name] == estimated[name]
    assert estimated["units"] == 10  # of the sequence: two layers, and eight blocks
    passes, sets = micro_batches // workers, 3 * whole["parameters_bytes"]  # gathered twice, and reduced
    assert estimated["sent_bytes"] == passes * sets * (workers - 1) // workers


# --- steps that go over their micro-batches twice, or gather more than gradients ---------------------------------


class HeadOfTheBatch(batch_kinds.Triplets):
    """Computes the last module of a sequence for the whole batch alone: no micro-batch gathers it."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))

    def embed(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        return torch.cat([model[:2](x), y[:, None].float()], dim=1)

    def batch_loss(self, model: Any, rows: Tensor) -> Loss:
        return super().batch_loss(model, torch.cat([model[2](rows[:, :-1]), rows[:, -1:]], dim=1))


WHOLE_BATCH = [
    *(kind for kind in batch_kinds.HELD if kind is not batch_kinds.CriticOverTheBatch),
    HeadOfTheBatch,
]
"""Losses over the whole batch, terms with weights of their own, and statistics of a step."""

LEAVING_OUT = (batch_kinds.Detection, batch_kinds.Dino, batch_kinds.Codebook, HeadOfTheBatch)
"""Those whose micro-batches may have one sample, or none."""


def of_whole_batch(kind: type[kinds_of_jobs.Kind]) -> Document:
    without = {"without": "1,5-12"} if kind in LEAVING_OUT else {}
    return kinds_of_jobs.document(kind, data={"drop_last": False, **without}, rehearsal="off")


@cache
def whole_batch_reference(kind: type[kinds_of_jobs.Kind]) -> Any:
    return train_every([of_whole_batch(kind)])[0]


BEGINS_WHOLE = "sharding: every worker begins with the whole model: "


def check_whole_batch(pool: Pool, kinds: Sequence[type[kinds_of_jobs.Kind]], workers: int) -> None:
    """An epoch of three steps, the last one ragged, of which `without` leaves some micro-batches no sample."""
    for kind in kinds:
        found = pool.run(workers, train_every, [full(of_whole_batch(kind))])
        for ((*bits, warnings),) in found:
            *wanted, told = whole_batch_reference(kind)
            assert bits == wanted
            assert [text for text in warnings if not text.startswith(BEGINS_WHOLE)] == [*told]


@pytest.mark.scenario
def test_a_step_that_takes_something_from_the_whole_batch(pool: Pool) -> None:
    kinds = [
        batch_kinds.Detection,
        batch_kinds.Moco,
        batch_kinds.Dino,
        batch_kinds.QueueOfTheBatch,
        HeadOfTheBatch,
    ]
    check_whole_batch(pool, kinds, 2)


@pytest.mark.exact
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_step_that_takes_something_from_the_whole_batch_in_full(pool: Pool, workers: int) -> None:
    check_whole_batch(pool, WHOLE_BATCH, workers)


def train_with_rows_by_rank(document: Document) -> Trained:
    """The rows of a step come rank by rank, as a plain gathering of them would have them."""
    gather = StepRows.gather

    def by_rank(self: StepRows) -> dict[str, Tensor]:
        ranges = self._ranges
        self._ranges = lambda count: tuple(
            range(r.start * len(r), (r.start + 1) * len(r)) for r in ranges(count)
        )
        try:
            return gather(self)
        finally:
            self._ranges = ranges

    with mock.patch.object(StepRows, "gather", by_rank):
        return train(document)


@pytest.mark.scenario
def test_rows_in_the_order_of_the_ranks_give_other_bits(pool: Pool) -> None:
    """The control: two workers, four micro-batches each of three samples, and none left out."""
    document = kinds_of_jobs.document(batch_kinds.Clip, length={"steps": 2}, rehearsal="off")
    assert pool.run(2, train, full(document))[0].rows == train(document).rows
    assert pool.run(2, train_with_rows_by_rank, full(document))[0].rows != train(document).rows


# --- what torch and FSDP do beside the step -----------------------------------------------------------------------


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", [public_kinds.TiedGpt, public_kinds.DeepQ])
def test_evaluations_and_updates_of_the_job_s_own_are_those_of_the_whole_model(
    pool: Pool, kind: type[kinds_of_jobs.Kind]
) -> None:
    """A transformer that torch evaluates by a kernel of its own, and a target that is loaded from the `state_dict` of what learns."""
    document = kinds_of_jobs.document(kind, rehearsal="off")
    assert pool.run(2, train_every, [full(document)]) == [train_every([document])] * 2


def train_without_whole_gradients(document: Document) -> list[tuple[Any, ...]]:
    """A parameter that is gathered has the rows of its gradient that this worker updates."""

    def rows(self: full_sharding.FullSharding, name: str) -> Tensor | None:
        return self.local[name].grad

    with mock.patch.object(full_sharding.FullSharding, "whole_gradient", rows):
        return train_every([document])


@pytest.mark.scenario
@pytest.mark.thinned(4)
@pytest.mark.parametrize(("sharding", "workers"), [("full", 3), ("optimizer", 2), ("full", 2), ("full", 1)])
def test_a_job_that_reads_its_gradients_reads_whole_ones(pool: Pool, sharding: str, workers: int) -> None:
    """In `after_step`; the control reads the rows of its worker."""
    document = kinds_of_jobs.document(step_kinds.ReadsItsGradients, rehearsal="off")
    wanted = train_every([document])
    placed = {**document, "sharding": sharding}
    assert pool.run(workers, train_every, [placed]) == [wanted] * workers
    if sharding == "full" and workers > 1:
        with raises(integrity_problems.OTHER_BITS, got=re.compile("first in 'steepness'")):
            pool.run(workers, train_without_whole_gradients, placed)


# --- several phases, and parameters that rest -------------------------------------------------------------------


@cache
def phased_reference(kind: type[kinds_of_jobs.Kind], rehearsal: str) -> Any:
    return train_every([kinds_of_jobs.document(kind, rehearsal=rehearsal)])[0]


def check_phased(
    pool: Pool, kinds: Sequence[type[kinds_of_jobs.Kind]], sharding: Any, workers: int, rehearsal: str = "off"
) -> None:
    """Identity, digests, rows and evaluations are those of a run that shares nothing out."""
    for kind in kinds:
        document = {**kinds_of_jobs.document(kind, rehearsal=rehearsal), "sharding": sharding}
        *wanted, told = phased_reference(kind, rehearsal)
        for ((*bits, warnings),) in pool.run(workers, train_every, [document]):
            assert bits == wanted, kind.__name__
            assert [text for text in warnings if not text.startswith(BEGINS_WHOLE)] == [*told]


@pytest.mark.scenario
@pytest.mark.thinned(3)
@pytest.mark.parametrize(("sharding", "workers"), [("optimizer", 2), ("full", 2), ("full", 3)])
def test_phases_and_resting_parameters(pool: Pool, sharding: str, workers: int) -> None:
    kinds = [phase_kinds.WassersteinWithPenalty, phase_kinds.RestsByChance]
    if workers == 2:
        kinds += [phase_kinds.Gan, phase_kinds.UnfrozenLayerByLayer]
    check_phased(pool, kinds, sharding, workers)


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize(("sharding", "workers"), [("optimizer", 3), ("full", 2)])
def test_own_optimizers_that_update_each_element_alone(pool: Pool, sharding: str, workers: int) -> None:
    """One evaluates the loss again within its update: the ranks evaluate it together, at the weights that all have by then."""
    check_phased(pool, elementwise_jobs.HELD, sharding, workers)


class ResetsMoments(kinds_of_jobs.Kind):
    """As ReLoRA does, in the state of the optimizer that it has made."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, kinds_of_jobs.CLASSES))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.made = torch.optim.AdamW(model.parameters(), lr=0.01)
        return self.made

    def after_step(self, model: nn.Module, step: int) -> None:
        for state in self.made.state.values():
            state["exp_avg"].zero_()


class LooksAhead(ResetsMoments):
    """Evaluates weights that follow the momentum."""

    after_step = kinds_of_jobs.Kind.after_step

    @contextmanager
    def eval_weights(self, model: nn.Module, optimizer: Any) -> Iterator[None]:
        for p in model.parameters():
            if "exp_avg" in optimizer.state.get(p, {}):
                p.add_(optimizer.state[p]["exp_avg"])
        yield


@pytest.mark.parametrize("kind", [ResetsMoments, LooksAhead])
def test_a_state_that_is_shared_out_is_not_looked_into(pool: Pool, kind: type[Kind]) -> None:
    """Each worker would find another part of it, or nothing."""
    document = kinds_of_jobs.document(kind, rehearsal="off")
    train_every([document])
    with raises(problems.STATE_SHARED_OUT):
        pool.run(2, train_every, [{**document, "sharding": "optimizer"}])


def test_a_mirror_of_what_rests(pool: Pool) -> None:
    """A part of the state that no update has made yet, or that rests, is mirrored as it is."""
    kind = phase_kinds.UnfrozenLayerByLayer
    document = kinds_of_jobs.document(kind, rehearsal="off", sharding="optimizer", faults={"mirror": True})
    *wanted, _ = phased_reference(kind, "off")
    for ((*bits, _),) in pool.run(2, train_every, [document]):
        assert bits == wanted


def train_with_spans_left_behind(document: Document) -> list[tuple[Any, ...]]:
    """The second evaluation of an update sees the spans that its own rank has moved, and none of the others'."""
    gathering, calls = span_gathering.SpanGathering.__call__, [0]

    def but_for_the_second(self: span_gathering.SpanGathering) -> None:
        """Of the three of an update: two evaluations and its end."""
        calls[0] += 1
        if calls[0] % 3 != 2:
            gathering(self)

    with mock.patch.object(span_gathering.SpanGathering, "__call__", but_for_the_second):
        return train_every([document])


def test_an_evaluation_before_the_spans_are_gathered_is_found(pool: Pool) -> None:
    """The control: it would have other bits."""
    kind = elementwise_jobs.LooksAhead
    document = {**kinds_of_jobs.document(kind, rehearsal="off"), "sharding": "optimizer"}
    with raises(integrity_problems.OTHER_BITS):
        pool.run(2, train_with_spans_left_behind, document)


def train_with_all_that_asks(document: Document) -> list[tuple[Any, ...]]:
    """A backward leaves gradients in every parameter that asks for one, also in those that rest."""
    with mock.patch.object(
        phase_step.LossModule, "apart", property(lambda self: False, lambda self, value: None), create=True
    ):
        return train_every([document])


def test_a_gradient_of_what_rests_is_an_error(pool: Pool) -> None:
    """The control: what a unit sends is what learns, and nothing else."""
    document = full(kinds_of_jobs.document(phase_kinds.UnfrozenLayerByLayer, rehearsal="off"))
    with pytest.raises(JobError, match=r"got no gradient|was computed"):
        pool.run(2, train_with_all_that_asks, document)


@pytest.mark.exact
@pytest.mark.parametrize(("sharding", "workers"), list(product(("optimizer", "full"), (1, 2, 3, 4))))
def test_own_optimizers_that_update_each_element_alone_in_full(
    pool: Pool, sharding: str, workers: int
) -> None:
    check_phased(pool, elementwise_jobs.HELD, sharding, workers, "quick")


@pytest.mark.exact
@pytest.mark.parametrize(
    ("sharding", "workers", "rehearsal"),
    list(product(("optimizer", "full"), (1, 2, 3, 4), ("off", "quick"))),
)
def test_phases_and_resting_parameters_in_full(
    pool: Pool, sharding: str, workers: int, rehearsal: str
) -> None:
    check_phased(pool, phase_kinds.HELD, sharding, workers, rehearsal)


@pytest.mark.scenario
def test_a_run_of_several_phases_is_taken_up_under_another_sharding(pool: Pool, tmp_path: Path) -> None:
    """A generator that rests in two steps of three has no state of its optimizer yet when the first checkpoint is saved."""
    kind = phase_kinds.WassersteinWithPenalty
    wanted = train(kinds_of_jobs.document(kind, rehearsal="off"))
    for before, after in (
        (("full", 3), ("none", 1)),
        (("none", 1), ("optimizer", 2)),
        (("optimizer", 2), ("full", 4)),
    ):
        storage = tmp_path / f"{before[0]}-{after[0]}"
        document = kinds_of_jobs.document(
            kind,
            rehearsal="off",
            checkpoint={"storage": str(storage), "every": {"steps": 1}, "keep_every": 1},
        )
        (sharding, workers), (other, others) = before, after
        pool.run(workers, attempt_with_many_writers, {**document, "sharding": sharding}, AttemptOrigin())
        for step in (1, 2):
            origin = AttemptOrigin(RUN, folder(storage).claim().number, step)
            for one in pool.run(others, attempt_with_many_writers, {**document, "sharding": other}, origin):
                assert (one.rows, one.identity, one.digests) == (
                    wanted.rows,
                    wanted.identity,
                    wanted.digests[step:],
                )


@pytest.mark.exact
def test_the_memory_of_the_process_is_that_of_its_tensors(tmp_path: Path) -> None:
    """What is freed goes back to the system: each stage takes what the arithmetic says, a tenth and 8 MiB. The control keeps it, as glibc does by itself."""
    bound = {
        name: 1.1 * sets + (8 << 20) / memory_by_stage.MODEL
        for name, sets in memory_by_stage.by_arithmetic(4).items()
    }
    by_kept = dict[bool, list[dict[str, float]]]()
    for keeps in (False, True):
        document = memory_by_stage.document(str(tmp_path / str(keeps)))
        pool = Pool(4)
        try:
            by_kept[keeps] = pool.run(4, memory_by_stage.peaks, document, AttemptOrigin(), keeps)
        finally:
            pool.close()
    pool = Pool(4)
    try:
        origin = claim(str(tmp_path / "False" / "checkpoints"), RUN, 1)
        by_kept[False] += pool.run(
            4, memory_by_stage.peaks, memory_by_stage.document(str(tmp_path / "False")), origin
        )
    finally:
        pool.close()
    for of_rank in by_kept[False]:
        assert all(sets <= bound[stage] for stage, sets in of_rank.items()), of_rank
    assert all(of_rank["save"] > 1.5 * bound["save"] for of_rank in by_kept[True]), by_kept[True]


class AsksForShapes(Kind):
    """Weighs its loss by what parameters say of themselves."""

    def loss(self, model: Any, batch: Any) -> Loss:
        weight = model[0].weight
        asked = weight.size(1) + weight.dim() + len(weight) + weight.nelement() + weight.shape[0]
        loss = super().loss(model, batch)
        return Loss(loss.total * (1 + asked / sum(p.numel() for p in model.parameters())), loss.weight)


class MaskedTeacher(Kind):
    """A frozen teacher of torch's own layers, for which torch has another kernel where nothing watches them."""

    def model(self) -> nn.Module:
        teacher = nn.TransformerEncoderLayer(FEATURES, 2, 16, batch_first=True).requires_grad_(False).eval()
        return nn.ModuleDict({"student": nn.Linear(FEATURES, FEATURES), "teacher": teacher})

    def loss(self, model: Any, batch: Any) -> Loss:
        x, _ = batch
        mask = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            aim = model["teacher"](x[None], src_mask=mask)[0]
        return Loss((model["student"](x) - aim).square().sum(), len(x))


class AsksForClasses(Kind):
    """Weighs its loss, and changes its rate, by the classes of its modules and their names."""

    def loss(self, model: Any, batch: Any) -> Loss:
        asked = sum({nn.Linear: 0.25, nn.Tanh: 0.5}.get(type(module), 0.0) for module in model.modules())
        loss = super().loss(model, batch)
        return Loss(loss.total * (1 + asked + len(repr(model)) / 512), loss.weight)

    def after_step(self, model: Any, step: int) -> None:
        for module in model:
            if type(module) in {nn.Linear} and not hasattr(module, "unshard"):
                module.bias.mul_(0.75)


@pytest.mark.parametrize("kind", [AsksForShapes, AsksForClasses, MaskedTeacher])
def test_what_a_module_can_see_of_its_shards_decides_nothing(pool: Pool, kind: type[Kind]) -> None:
    document = kinds_of_jobs.document(kind, rehearsal="quick")
    assert pool.run(2, train_every, [full(document)]) == [train_every([document])] * 2


def train_with_classes_of_torch(document: Document) -> list[tuple[Any, ...]]:
    """The units keep the classes that torch gives them."""
    with mock.patch.object(fsdp_calls, "restore_class", lambda module: None):
        return train_every([document])


def test_other_classes_give_other_bits(pool: Pool) -> None:
    document = kinds_of_jobs.document(AsksForClasses, rehearsal="quick")
    (run,) = pool.run(2, train_with_classes_of_torch, full(document))[0]
    assert run[1] != train_every([document])[0][1]


class CopiesItsUnits(Kind):
    def after_step(self, model: Any, step: int) -> None:
        copy.deepcopy(model)


def test_a_copy_of_what_is_sharded_is_refused(pool: Pool) -> None:
    with raises(problems.UNIT_COPIED, got="Linear"):
        pool.run(2, train_every, [full(kinds_of_jobs.document(CopiesItsUnits, rehearsal="quick"))])


class AssignsData(Kind):
    """Gives its parameters other memory after a step, and by way of another type."""

    def after_step(self, model: Any, step: int) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.75
        if step == 2:
            model.double().float()


def train_in_the_memory_of_the_job(document: Document) -> list[tuple[Any, ...]]:
    """What the job has assigned is where the module computes, and FSDP gathers elsewhere."""
    with mock.patch.object(full_sharding, "restore_memory", lambda parameter, memory: None):
        return train_every([document])


def test_parameters_whose_data_the_job_assigns(pool: Pool) -> None:
    document = kinds_of_jobs.document(AssignsData, rehearsal="quick")
    (wanted,) = train_every([document])
    assert pool.run(2, train_every, [full(document)]) == [[wanted]] * 2
    (control,) = pool.run(2, train_in_the_memory_of_the_job, full(document))[0]
    assert control[1] != wanted[1]


class AssignsAParameter(Kind):
    def after_step(self, model: Any, step: int) -> None:
        model[0].weight = nn.Parameter(model[0].weight * 0.5)


class AssignsAType(Kind):
    def after_step(self, model: Any, step: int) -> None:
        model[0].bfloat16()


class AssignsALayout(Kind):
    def after_step(self, model: Any, step: int) -> None:
        model[0].weight.data = model[0].weight.data.t().contiguous().t()


@pytest.mark.parametrize("kind", [AssignsAParameter, AssignsAType, AssignsALayout])
def test_another_parameter_in_the_place_of_one_is_refused(pool: Pool, kind: type[Kind]) -> None:
    """It would compute for a step, and no update would reach it."""
    with raises(problems.PARAMETER_REPLACED, name="0.weight", where="after step 1"):
        pool.run(2, train_every, [full(kinds_of_jobs.document(kind, rehearsal="quick"))])


class Experts(nn.Module):
    """Two experts. The balance of their load, and what their weights cost, stay in attributes; the latter is computed last, from a weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, 2)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))
        self.costs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.shares = torch.softmax(self.gate(x), -1)
        y = x + sum(self.shares[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        self.costs = [self.shares.mean(0).square().sum(), self.gate.weight.square().sum()]
        return y


class LeavesCosts(Kind):
    def model(self) -> nn.Module:
        return nn.Sequential(Experts(), Experts(), nn.Linear(FEATURES, kinds_of_jobs.CLASSES))

    def loss(self, model: Any, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        costs = torch.stack([cost for experts in model[:2] for cost in experts.costs])
        return replace(loss, total=loss.total + costs.sum() * 0.1 * loss.weight)


class LeavesItsLoss(Kind):
    """Keeps its newest loss, with the graph."""

    def loss(self, model: Any, batch: Any) -> Loss:
        self.newest = super().loss(model, batch)
        return self.newest


class ComputesItsWeights(Kind):
    """Weights that hooks compute from parameters, and keep beside them: pruned, normed and spectral ones."""

    def model(self) -> nn.Module:
        width = kinds_of_jobs.FEATURES
        pruned = prune.random_unstructured(nn.Linear(width, width), "weight", 0.3)
        normed = nn.utils.weight_norm(nn.Linear(width, width))  # type: ignore[no-untyped-call]
        spectral = nn.utils.spectral_norm(nn.Linear(width, kinds_of_jobs.CLASSES))
        return nn.Sequential(pruned, nn.Tanh(), normed, nn.Tanh(), spectral)


class Turned(nn.Module):
    """Returns a view, to which its model adds in place."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(torch.tanh(self.into(x)))
        return y.unsqueeze(0).transpose(0, 1)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Turned() for _ in range(2))
        self.head = nn.Linear(FEATURES, kinds_of_jobs.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(x)
            h += x.unsqueeze(1)
            x = h.squeeze(1)
        return self.head(x)  # type: ignore[no-any-return]


class AddsToAView(Kind):
    def model(self) -> nn.Module:
        return Residual()


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
@pytest.mark.parametrize("rehearsal", ["quick", "off"])
@pytest.mark.parametrize("kind", [LeavesCosts, LeavesItsLoss, ComputesItsWeights, AddsToAView])
def test_graphs_that_a_forward_leaves_behind(pool: Pool, kind: type[Kind], rehearsal: str) -> None:
    """They hold parameters of the start until the next forward, and a backward may begin at them."""
    document = kinds_of_jobs.document(kind, rehearsal=rehearsal)
    (wanted,) = train_every([document])
    for (found,) in pool.run(2, train_every, [full(document)]):
        assert found[:-1] == wanted[:-1]


WIDTH = 16
"""Of what blocks attend to: gradients of few elements may be the same in any brackets."""


class Attending(nn.Module):
    """A block that uses its context twice."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return x + torch.sigmoid(self.key(context)) * torch.tanh(self.value(context))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Decoder(nn.Module):
    """All blocks attend to one context."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.context = nn.Linear(FEATURES, WIDTH), nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Attending() for _ in range(3))
        self.head = nn.Linear(WIDTH, kinds_of_jobs.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        context, x = torch.tanh(self.context(x)), self.into(x)
        for block in self.blocks:
            x = block(x, context=context)
        return self.head(x)  # type: ignore[no-any-return]


class Supervised(nn.Module):
    """What each block returns is also an output."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(FEATURES, FEATURES)
        self.blocks = nn.ModuleList(Normed() for _ in range(3))
        self.head = nn.Linear(FEATURES, kinds_of_jobs.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        states = [self.into(x)]
        for block in self.blocks:
            states.append(block(states[-1]))
        return torch.stack([self.head(state) for state in states]).sum(0)


class AttendsToOneContext(Kind):
    def model(self) -> nn.Module:
        return Decoder()


class ShowsAllStates(Kind):
    def model(self) -> nn.Module:
        return Supervised()


class PenalisesThroughNorms(kinds_of_jobs.GradientPenalty):
    """Its gradient is differentiated again, when its weights are not gathered any more."""

    def model(self) -> nn.Module:
        return Supervised()


class PenalisesASequence(kinds_of_jobs.GradientPenalty):
    """Its first unit is given the samples themselves."""

    def model(self) -> nn.Module:
        return nn.Sequential(Normed(), Normed(), nn.Linear(FEATURES, kinds_of_jobs.CLASSES))


@pytest.mark.parametrize("rehearsal", ["quick", "off"])
@pytest.mark.parametrize(
    "kind", [AttendsToOneContext, ShowsAllStates, PenalisesThroughNorms, PenalisesASequence]
)
def test_an_input_of_a_unit_that_is_used_elsewhere_too(pool: Pool, kind: type[Kind], rehearsal: str) -> None:
    """Its gradient is the sum of all uses, one after the other."""
    document = kinds_of_jobs.document(kind, rehearsal=rehearsal)
    (wanted,) = train_every([document])
    for (got,) in pool.run(2, train_every, [full(document)]):
        assert got[:-1] == wanted[:-1]


def train_through_functions_of_fsdp(document: Document) -> list[tuple[Any, ...]]:
    """FSDP sums what a unit gives for an input before it adds what others give."""
    with mock.patch.object(FSDPCalls, "follow", lambda calls, begun: None):
        return train_every([document])


@pytest.mark.parametrize("kind", [AttendsToOneContext, ShowsAllStates])
def test_an_input_that_goes_through_a_function_gives_other_bits(pool: Pool, kind: type[Kind]) -> None:
    document = kinds_of_jobs.document(kind, rehearsal="off")
    (control,) = pool.run(2, train_through_functions_of_fsdp, full(document))[0]
    assert control[1] != train_every([document])[0][1]


class Heads(nn.Module):
    """Units beside each other, which share one input."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(FEATURES, FEATURES)
        self.heads = nn.ModuleList(nn.Linear(FEATURES, kinds_of_jobs.CLASSES) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.into(x))
        return torch.stack([head(x) for head in self.heads]).sum(0)


class HasHeads(Kind):
    def model(self) -> nn.Module:
        return Heads()


class Passing(nn.Module):
    """A block that returns its context as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(x) * context), context


class Chain(nn.Module):
    """Blocks one after the other; with `recomputed` each backward computes their forward again."""

    def __init__(self, recomputed: bool | None) -> None:
        super().__init__()
        self.recomputed = recomputed
        self.into, self.context = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.blocks = nn.ModuleList(Passing() for _ in range(5))
        self.head = nn.Linear(FEATURES, kinds_of_jobs.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        context, x = torch.tanh(self.context(x)), self.into(x)
        for block in self.blocks:
            if self.recomputed is None or not self.training:
                x, context = block(x, context)
            else:
                x, context = checkpoint(block, x, context, use_reentrant=self.recomputed)
        return self.head(x)  # type: ignore[no-any-return]


class PassesAContext(Kind):
    def model(self) -> nn.Module:
        return Chain(None)


class RecomputesByHooks(Kind):
    def model(self) -> nn.Module:
        return Chain(False)


class RecomputesWithin(Kind):
    def model(self) -> nn.Module:
        return Chain(True)


class PenalisesRecomputed(kinds_of_jobs.GradientPenalty):
    """Its blocks, the first of which is given the samples themselves, are computed again in each of its backwards."""

    def model(self) -> nn.Module:
        return Recomputed(Normed(), Normed(), nn.Linear(FEATURES, kinds_of_jobs.CLASSES))


class Recomputed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = checkpoint(module, x, use_reentrant=False)
        return x


@dataclass(slots=True)
class Fields:
    x: Tensor


class Wraps(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return Fields(torch.tanh(super().forward(x)))


class Unwraps(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        *blocks, head = self
        for block in blocks:
            x = block(x).x
        return head(x)  # type: ignore[no-any-return]


class ReturnsFields(Kind):
    """Its units return instances of a dataclass that have no `__dict__`."""

    def model(self) -> nn.Module:
        blocks = [Wraps(FEATURES, FEATURES) for _ in range(3)]
        return Unwraps(*blocks, nn.Linear(FEATURES, kinds_of_jobs.CLASSES))


@pytest.mark.parametrize(
    "kind", [PassesAContext, RecomputesByHooks, RecomputesWithin, PenalisesRecomputed, ReturnsFields]
)
def test_units_that_pass_an_input_on_or_are_recomputed(pool: Pool, kind: type[Kind]) -> None:
    document = kinds_of_jobs.document(kind, rehearsal="off")
    (wanted,) = train_every([document])
    for (got,) in pool.run(2, train_every, [full(document)]):
        assert got[:-1] == wanted[:-1]


def most_in_backward(document: Document) -> int:
    """The most units whose backward had begun and not ended, that of the micro-batch before among them: its oldest ends without a word."""
    begin, end, under_way, most = FSDPCalls._begin, FSDPCalls._end, set[int](), [0]

    def noted_begin(calls: FSDPCalls, gradients: Any) -> None:
        begin(calls, gradients)
        under_way.add(id(calls))
        most.append(len(under_way))

    def noted_end(calls: FSDPCalls) -> None:
        end(calls)
        under_way.discard(id(calls))

    with mock.patch.multiple(FSDPCalls, _begin=noted_begin, _end=noted_end):
        train_every([document])
    assert len(most) > 1
    return max(most)


@pytest.mark.parametrize("kind", [HasHeads, PassesAContext, RecomputesByHooks, RecomputesWithin])
def test_units_are_let_go_of_one_by_one(pool: Pool, kind: type[Kind]) -> None:
    """Also those that share an input, or return it as it is, and those whose forward a backward computes again."""
    for most in pool.run(2, most_in_backward, full(kinds_of_jobs.document(kind, rehearsal="off"))):
        assert most <= 2


def outputs_in_dataclasses_alone(document: Document) -> int:
    """How often the outermost FSDP module returned tensors for a backward where torch 2.11 does not look for them: its inner backwards would end FSDP's."""
    forward, hidden, seen = Root.forward, [0], [0]

    def noted(root: Root, call: Callable[[], Any]) -> Any:
        output = forward(root, call)
        learning = any(tensor.requires_grad for tensor in fsdp_calls._tensors(output))
        hooked = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(output))
        seen[0] += learning
        hidden[0] += learning and not hooked
        return output

    with mock.patch.object(Root, "forward", noted):
        train_every([document])
    assert seen[0]
    return hidden[0]


def test_a_backward_begins_with_tensors_that_every_torch_finds(pool: Pool) -> None:
    document = full(kinds_of_jobs.document(RecomputesWithin, rehearsal="off"))
    assert pool.run(2, outputs_in_dataclasses_alone, document) == [0, 0]


class Shifted(nn.Linear):
    """Computes with a tensor that was made of its weight before training; a backward through that never ends."""

    def __init__(self) -> None:
        super().__init__(FEATURES, kinds_of_jobs.CLASSES)
        self.shifted = self.weight + 1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(x, self.shifted)


class Viewing(nn.Linear):
    """Keeps a view of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        self.turned = self.weight.t()
        return super().forward(x)


class HoldsAGraph(Kind):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, FEATURES), Shifted())


class HoldsAView(Kind):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, FEATURES), Viewing(FEATURES, kinds_of_jobs.CLASSES))


@pytest.mark.parametrize("kind", [HoldsAGraph, HoldsAView])
def test_what_would_go_on_with_the_weights_of_the_start_is_refused(pool: Pool, kind: type[Kind]) -> None:
    with raises(HELD_OUTSIDE, name="1.weight"):
        pool.run(2, train_every, [full(kinds_of_jobs.document(kind, rehearsal="quick"))])


def train_with_what_is_held(document: Document) -> list[tuple[Any, ...]]:
    """A gradient that reaches a parameter of the start is lost."""
    with mock.patch.object(model_sharding, "check_gone", lambda originals: None):
        return train_every([document])


def test_a_gradient_that_is_lost_gives_other_bits(pool: Pool) -> None:
    document = kinds_of_jobs.document(HoldsAGraph, rehearsal="quick")
    (control,) = pool.run(2, train_with_what_is_held, full(document))[0]
    assert control[1] != train_every([document])[0][1]
