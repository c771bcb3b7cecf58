"""G1 for the start of a fully sharded run: by default, and from weights in files, no worker has the whole model, and the bits are those of a whole start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import lockstep.training.initial_model as initial_model
import lockstep.training.stored_weights as stored
from lockstep import Loss
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.communication.group import Group
from lockstep.data import problems
from lockstep.errors import JobError, SpecError
from lockstep.training.integrity.state_digest import weights_digest
from tests.distributed import test_same_bits
from tests.distributed.pool import Pool
from tests.distributed.small_jobs import Plain, points
from tests.distributed.test_full_sharding import (
    RUN,
    WIDE,
    attempt_with_many_writers,
    folder,
    full,
    preparing,
    small,
)
from tests.distributed.training import Document, Trained, train
from tests.raised import raises

HERE = "tests.distributed.test_full_start"
WIDE_JOB = "tests.distributed.test_full_sharding:Wide"
ALONE = Group(0, 1, torch.device("cpu"))


def by_shards(document: Document) -> Trained:
    """A run whose model counts as large: `rehearsal: auto` begins by shards."""
    with mock.patch.object(initial_model, "FULL_BYTES", 0):
        return train(document)


def preparing_by_shards(document: Document) -> tuple[str, int]:
    with mock.patch.object(initial_model, "FULL_BYTES", 0):
        return preparing(document)


# --- the default rehearsal ----------------------------------------------------------------------------------------


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize(("job", "precision", "workers"), [("digits", "fp32", 2), ("gpt", "bf16", 3)])
def test_a_default_start_by_shards_has_the_bits_of_a_whole_one(
    pool: Pool, job: str, precision: str, workers: int
) -> None:
    wanted = test_same_bits.reference(job, 8, precision)
    document = {**full(test_same_bits.document(job, 8, precision)), "rehearsal": "auto"}
    found = pool.run(workers, by_shards, document)
    assert found == [wanted] * workers
    assert not [text for text in found[0].warnings if text.startswith("sharding")]


@pytest.mark.scenario
def test_the_memory_of_a_default_start(pool: Pool) -> None:
    """That of a start by shards without a rehearsal; a small model, the control, begins whole."""
    document = full(small(WIDE_JOB, length={"steps": 1}))
    whole, shards = pool.run(4, preparing, document), pool.run(4, preparing_by_shards, document)
    assert {identity for identity, _ in shards} == {identity for identity, _ in whole}
    assert min(peak for _, peak in whole) >= 2 * WIDE
    assert max(peak for _, peak in shards) <= 2 * WIDE // 4 + 6 * WIDE // 16 + 700_000


class Keeps(Plain):
    """Its loss depends on how many micro-batches its process has computed."""

    kept = 0

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        self.kept += 1
        return Loss(loss.total * self.kept, loss.weight)


@pytest.mark.scenario
def test_a_start_by_shards_finds_what_a_micro_batch_leaves_behind(pool: Pool) -> None:
    """By default, as a rehearsal in other processes does; with `rehearsal: off`, the control, nobody looks."""
    document = full(small(f"{HERE}:Keeps"))
    with pytest.raises(JobError, match=r"is kept from one micro-batch to the next"):
        pool.run(2, by_shards, document)
    pool.run(2, train, document | {"rehearsal": "off"})


class Differentiates(Plain):
    """Its loss penalises the gradient of the outputs at the inputs."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).logsumexp(1).sum(), x)
        loss = super().loss(model, (x.detach(), y))
        return Loss(loss.total * (1 + slope.square().mean()), loss.weight)


class Maps(Plain):
    """Its loss maps the model over the samples."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        outputs = torch.func.vmap(model)(x)
        return Loss(F.cross_entropy(outputs, y, reduction="sum"), len(y))


@pytest.mark.scenario
@pytest.mark.parametrize("job", ["Differentiates", "Maps"])
def test_a_loss_that_needs_more_than_a_forward_begins_by_shards(pool: Pool, job: str) -> None:
    """Its units are found out with all parameters at once, where a member at a time does not do."""
    document = small(f"{HERE}:{job}", rehearsal="off")
    whole = train(document)
    found = pool.run(2, train, full(document))
    assert [(rank.rows, rank.weights_digest) for rank in found] == [(whole.rows, whole.weights_digest)] * 2


class SaysItDrawsNothing(TensorDataset):
    draws_nothing = True

    def __getitem__(self, index: int) -> Any:
        torch.rand(())
        return super().__getitem__(index)


class DrawsForEvaluation(Plain):
    def eval_data(self) -> Dataset[Any]:
        return SaysItDrawsNothing(*points(6))


def test_a_start_by_shards_finds_samples_to_evaluate_that_draw_though_they_say_otherwise(pool: Pool) -> None:
    with raises(problems.DRAWS, dataset="SaysItDrawsNothing"):
        pool.run(2, train, full(small(f"{HERE}:DrawsForEvaluation", rehearsal="off")))


# --- weights in files ---------------------------------------------------------------------------------------------


def sources(tmp_path: Path, document: Document, pool: Pool) -> dict[str, str]:
    """The same weights in a checkpoint, in a file, and in a folder of files with an index."""
    saving = {**document, "checkpoint": {"storage": str(tmp_path / "runs"), "every": {"steps": 1}}, "seed": 3}
    pool.run(2, attempt_with_many_writers, saving, AttemptOrigin())
    run = folder(tmp_path / "runs")
    checkpoint = max((tmp_path / "runs" / RUN).glob("step-*"))
    assert run.run_id == RUN
    weights = {
        name: stored.in_memory(value) for name, value in stored.stored_weights(str(checkpoint), ALONE).items()
    }
    file, several = tmp_path / "w.safetensors", tmp_path / "several"
    save_file(weights, file)
    several.mkdir()
    names = sorted(weights)
    for i in range(3):
        save_file({name: weights[name] for name in names[i::3]}, several / f"part-{i}.safetensors")
    index = {"weight_map": {name: f"part-{i % 3}.safetensors" for i, name in enumerate(names)}}
    (several / stored.INDEX).write_text(json.dumps(index))
    return {"checkpoint": str(checkpoint), "file": str(file), "folder": str(several)}


def read_by(document: Document) -> tuple[Trained, int]:
    """A run, and the bytes of weights that this rank's training process reads from files."""
    read, fill = [0], stored._fill

    def counted(path: Path, at: int, buffer: memoryview) -> None:
        read[0] += len(buffer)
        fill(path, at, buffer)

    with mock.patch.object(stored, "_fill", counted):
        return train(document), read[0]


@pytest.mark.thinned(2)
@pytest.mark.scenario
@pytest.mark.parametrize("workers", [4, 3])
def test_weights_in_files_are_read_by_rows(pool: Pool, tmp_path: Path, workers: int) -> None:
    """One digest for each source, whole or sharded; a rank reads its rows alone. The control reads all of it."""
    document = small(WIDE_JOB, rehearsal="off")
    given = sources(tmp_path, document, pool)
    wanted = train({**document, "initial_weights": given["file"]})
    assert wanted.rows != train(document).rows
    for source in given.values():
        started = {**document, "initial_weights": source}
        assert train(started).rows == wanted.rows
        for found, read in pool.run(workers, read_by, full(started)):
            assert (found.rows, found.weights_digest) == (wanted.rows, wanted.weights_digest)
            assert found.identity == wanted.identity
            assert not [text for text in found.warnings if text.startswith("sharding")]
            assert read <= -(-WIDE // workers) + WIDE // 64 + 50_000
    whole = {**document, "initial_weights": given["file"], "rehearsal": "quick"}
    assert pool.run(workers, read_by, full(whole))[0][1] >= WIDE


@pytest.mark.scenario
def test_the_memory_of_a_start_from_weights(pool: Pool, tmp_path: Path) -> None:
    document = small(WIDE_JOB, rehearsal="off", length={"steps": 1})
    for source in sources(tmp_path, document, pool).values():
        started = full({**document, "initial_weights": source})
        shards = pool.run(4, preparing, started)
        assert max(peak for _, peak in shards) <= 2 * WIDE // 4 + 6 * WIDE // 16 + 700_000
        whole = pool.run(4, preparing, started | {"rehearsal": "quick"})
        assert {identity for identity, _ in shards} == {identity for identity, _ in whole}
        assert min(peak for _, peak in whole) >= 2 * WIDE


class Renames(nn.Linear):
    """Takes weights that were saved under another name."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *given: Any) -> None:
        if f"{prefix}kernel" in state_dict:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}kernel")
        super()._load_from_state_dict(state_dict, prefix, *given)


class Older(Plain):
    def model(self) -> nn.Module:
        return nn.Sequential(Renames(8, 16), nn.Tanh(), nn.Linear(16, 3))


def test_a_model_that_loads_weights_in_its_own_way_begins_whole(pool: Pool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    weights = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).state_dict()
    weights["0.kernel"] = weights.pop("0.weight")
    save_file(weights, tmp_path / "w.safetensors")
    document = small(f"{HERE}:Older", rehearsal="off", initial_weights=str(tmp_path / "w.safetensors"))
    found = pool.run(2, train, full(document))
    assert found == [train(document)] * 2
    wanted = "sharding: every worker begins with the whole model: '0' loads weights in a way of its own"
    assert wanted in found[0].warnings


def test_tied_weights_may_be_in_a_file_once(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        return model

    saved, loaded = tied(), tied()
    state = {name: value for name, value in saved.state_dict().items() if name != "1.weight"}
    save_file(state, tmp_path / "model.safetensors")
    stored.load_weights(loaded, str(tmp_path))
    assert weights_digest(loaded.state_dict()) == weights_digest(saved.state_dict())
    assert weights_digest(load_file(tmp_path / "model.safetensors")) == weights_digest(state)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (
            {"weight_map": {"a": "../w.safetensors"}},
            "names the file '../w.safetensors', wanted one of its folder",
        ),
        ({"weight_map": {"a": "none.safetensors"}}, "No such file"),
        ({"weight_map": {"b": "w.safetensors"}}, "w.safetensors has no 'b', which the index says it has"),
        ({}, "weight_map"),
    ],
)
def test_an_index_that_does_not_hold_is_told(tmp_path: Path, index: Document, message: str) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "w.safetensors")
    (tmp_path / stored.INDEX).write_text(json.dumps(index))
    with pytest.raises(SpecError, match=r"^initial_weights: cannot read ") as refusal:
        stored.stored_weights(str(tmp_path), ALONE)
    assert message in str(refusal.value)
