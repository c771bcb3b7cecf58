"""A value that is not finite ends the run, and what brought it is told by itself: step, micro-batch, operator, module, and why."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep
from lockstep import train
from lockstep.errors import LockstepError
from lockstep.training.observe import not_finite
from tests.faulty_jobs.jobs import OfSparse, SoundSparse

BAD = 21
"""The sample that is spoilt: of step 3, micro-batch 1, in the data's own order."""


class Plain(lockstep.Job):
    """y of x, by least squares, in the data's own order."""

    more: ClassVar[dict[str, Any]] = {}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def tensors(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(48, 4, generator=torch.Generator().manual_seed(2))
        return x, x.sum(1)

    def train_data(self) -> Dataset[Any]:
        return TensorDataset(*self.tensors())

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        return lockstep.Loss((model(x).squeeze(1).float() - y).square().sum(), len(y))


class BadInput(Plain):
    def tensors(self) -> tuple[Tensor, Tensor]:
        x, y = super().tensors()
        x[BAD, 1] = torch.nan
        return x, y


class BadSparseInput(BadInput):
    """The numbers of a sparse tensor lie behind its indices."""

    def model(self) -> nn.Module:
        return OfSparse(4, 1)

    collate = SoundSparse.collate


class BadLabel(Plain):
    def tensors(self) -> tuple[Tensor, Tensor]:
        x, y = super().tensors()
        y[BAD] = torch.inf
        return x, y


class BadWeight(Plain):
    def after_step(self, model: nn.Module, step: int) -> None:
        if step == 2:
            model.get_parameter("2.bias").fill_(torch.nan)


class RunsAway(Plain):
    more: ClassVar[dict[str, Any]] = {"optimizer": {"name": "sgd", "lr": 1e6}, "length": {"epochs": 10}}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))


class Overflows(Plain):
    """A value that fp32 holds and bf16 does not."""

    more: ClassVar[dict[str, Any]] = {"precision": "bf16"}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 1))

    def tensors(self) -> tuple[Tensor, Tensor]:
        x, y = super().tensors()
        x[BAD, 0] = 3.4e38
        return x, y

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, _ = batch
        return lockstep.Loss((model(x).float() * 1e-30).sum(), len(x))


class RootOfZero(Plain):
    """Its loss is finite, its gradient is not."""

    def tensors(self) -> tuple[Tensor, Tensor]:
        x, y = super().tensors()
        x[BAD] = 0.0
        return x, y

    def model(self) -> nn.Module:
        return nn.Linear(4, 1, bias=False)

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        return lockstep.Loss(model(batch[0]).square().sqrt().sum(), len(batch[0]))


def told(folder: Path, job: type[Plain], error: str) -> dict[str, Any]:
    """What is found of a run that its own error ended."""
    spec = {
        "job": {"use": f"{job.__module__}:{job.__qualname__}"},
        "batch": {"global": 8, "micro": 2},
        "data": {"shuffle": "none"},
        "optimizer": {"name": "sgd", "lr": 1e-3},
        "checkpoint": {"storage": str(folder), "every": None},
        "record": {"uri": "off"},
        "rehearsal": "off",
        **job.more,
    }
    with pytest.raises(LockstepError, match=error):
        train(spec, local=True)
    (run,) = (path for path in folder.iterdir() if path.is_dir())
    found: dict[str, Any] = json.loads((run / not_finite.NAME).read_text())
    return found


@pytest.mark.parametrize(
    ("job", "brought_by", "module", "phase"),
    [
        (BadInput, "input", "0", "forward"),
        (BadLabel, "label", None, "forward"),
        (BadWeight, "weight", "2", "forward"),
        (Overflows, "precision", "0", "forward"),
        (RootOfZero, None, None, "backward"),
    ],
)
def test_what_brought_it_is_told_with_its_micro_batch_and_module(
    tmp_path: Path, job: type[Plain], brought_by: str | None, module: str | None, phase: str
) -> None:
    error = "the gradient of step 3 has the norm" if job is RootOfZero else "the loss of step 3, micro-batch "
    found = told(tmp_path, job, error)
    assert (found["step"], found["brought_by"], found["module"], found["phase"]) == (
        3,
        brought_by,
        module,
        phase,
    )
    assert found["operator"].startswith("aten.")
    m = 0 if job is BadWeight else 1
    assert found["micro_batch"] == m
    assert found["samples"] == [16 + m, 20 + m]
    x, y = job(None).tensors()
    batch = safetensors.torch.load(base64.b64decode(found["batch"]))
    for name, whole in (("batch[0]", x), ("batch[1]", y)):
        assert torch.equal(batch[name].nan_to_num(7.0), whole[found["samples"]].nan_to_num(7.0))


def test_a_sparse_input_is_told_and_kept_like_another(tmp_path: Path) -> None:
    found = told(tmp_path, BadSparseInput, "the loss of step 3, micro-batch ")
    assert (found["step"], found["brought_by"]) == (3, "input")
    x, y = BadSparseInput(None).tensors()
    batch = safetensors.torch.load(base64.b64decode(found["batch"]))
    kept = torch.sparse_coo_tensor(batch["batch[0]"], batch["batch[1]"], (2, 4), check_invariants=True)
    assert torch.equal(kept.to_dense().nan_to_num(7.0), x[found["samples"]].nan_to_num(7.0))
    assert torch.equal(batch["batch[2]"], y[found["samples"]])


def test_a_rate_that_is_too_high_is_told_as_such(tmp_path: Path) -> None:
    found = told(tmp_path, RunsAway, "is (inf|nan)")
    assert found["brought_by"] == "rate"
    assert "at a rate of 1e+06" in found["evidence"]


def test_looking_takes_no_longer_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is not found is said to be not found."""
    monkeypatch.setattr(not_finite, "LONGEST_S", 0.0)
    began = time.monotonic()
    found = told(tmp_path, RootOfZero, "the gradient of step 3")
    assert found["micro_batch"] is None
    assert found["evidence"] == "after 0 s no micro-batch with such a value was found"
    assert time.monotonic() - began < 60


def test_what_goes_wrong_in_looking_does_not_hide_the_runs_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no memory is left")

    monkeypatch.setattr(not_finite, "find", broken)
    with pytest.raises(FileNotFoundError):  # the run has ended with its own error, and has no such document
        told(tmp_path, BadInput, "the loss of step 3, micro-batch 1 is nan")
