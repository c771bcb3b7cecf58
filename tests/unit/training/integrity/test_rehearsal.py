"""The rehearsal: one micro-batch from end to end that leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.errors import JobError
from lockstep.training.determinism import determinism, filled_memory
from lockstep.training.integrity import problems
from lockstep.training.integrity.rehearsal.micro_batch import Computed, compute
from lockstep.training.integrity.state_digest import weights_digest
from lockstep.training.step.phase_step import LossModule
from lockstep.training.step.precision import Precision
from tests.raised import raises

CPU = torch.device("cpu")


class Normed(nn.Module):
    """Writes to its statistics, and through `data` to a buffer whose version does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout())
        self.register_buffer("constant", torch.ones(2))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.data += len(x)  # type: ignore[operator]
        return self.layer(x) * self.constant


class Rehearsed(lockstep.Job):
    def loss(self, model: nn.Module, batch: Tensor) -> lockstep.Loss:
        out = model(batch)
        return lockstep.Loss(
            out.square().sum(), len(batch), {"mean": lockstep.Mean(out.sum().detach(), out.numel())}
        )


def computed(job: lockstep.Job, model: nn.Module) -> Computed:
    batch = torch.arange(12.0).view(4, 3)
    with determinism("strict", threads=1), filled_memory(True):
        return compute(LossModule(job, model), batch, Precision("fp32", CPU), seed=3, device=CPU)


def test_rehearsal_leaves_no_trace() -> None:
    model = Normed()
    before = weights_digest(model.state_dict())
    computed(Rehearsed(None), model)
    assert weights_digest(model.state_dict()) == before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(module.training for module in model.modules())


def test_rehearsal_finds_parts_and_written_buffers() -> None:
    model = Normed()
    form = computed(Rehearsed(None), model).rehearsal.form
    names = [name for name, _ in model.named_buffers()]
    assert form.parts == ("mean",)
    assert {names[i] for i in form.written} == {
        "seen", "layer.1.running_mean", "layer.1.running_var", "layer.1.num_batches_tracked",
    }  # fmt: skip


def test_rehearsal_repeats_itself() -> None:
    """Its digest is compared between ranks, dropout and all."""
    torch.manual_seed(1)
    model = Normed()
    digests = {computed(Rehearsed(None), model).rehearsal.digest for _ in range(3)}
    assert len(digests) == 1


def test_memory_that_was_never_written_is_found() -> None:
    """Its content is chance: a run that reads it cannot be repeated."""

    class Unwritten(Rehearsed):
        def loss(self, model: nn.Module, batch: Tensor) -> lockstep.Loss:
            return lockstep.Loss((model(batch) * torch.empty(2)).sum(), len(batch))

    with raises(problems.FIRST_NOT_FINITE):
        computed(Unwritten(None), Normed())


def test_a_failed_rehearsal_leaves_no_trace_either() -> None:
    class Failing(Rehearsed):
        def loss(self, model: nn.Module, batch: Tensor) -> lockstep.Loss:
            model(batch).sum().backward()
            raise KeyError("late")

    model = Normed()
    before = weights_digest(model.state_dict())
    filled: Any = torch.utils.deterministic
    with pytest.raises(JobError, match=r"first micro-batch, before training"):
        computed(Failing(None), model)
    assert weights_digest(model.state_dict()) == before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert filled.fill_uninitialized_memory is True  # torch's own default
