"""Buffers as DDP treats them at world size M: every micro-batch begins with the step's, micro-batch 0's update stays."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lockstep.communication.group import Group
from lockstep.training.step import problems
from lockstep.training.step.buffers import StepBuffers, copy_all, statistics
from tests.raised import raises

ALONE = Group(0, 1, torch.device("cpu"))


class Counting(nn.Module):
    """Writes to one buffer, reads another and never touches a third."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        for name in ("written", "constant"):
            self.register_buffer(name, torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.written += x.detach().mean(0)  # type: ignore[operator]
        return self.norm(x) + self.constant


def step(model: Counting, buffers: StepBuffers, batches: list[Tensor]) -> list[int]:
    """The forwards of one step; which buffers micro-batch 0 wrote to."""
    flagged: list[int] = []
    for m, batch in enumerate(batches):
        model(batch)
        if m == 0:
            flagged = buffers.keep()
        buffers.restore()
    buffers.end_step(flagged)
    return flagged


def test_the_update_of_micro_batch_0_is_the_one_that_stays() -> None:
    model, alone = Counting(), Counting()
    buffers = StepBuffers(model, ALONE, frozenset())
    for _ in range(3):
        batches = [torch.randn(4, 2) for _ in range(4)]
        step(model, buffers, batches)
        alone(batches[0])
        for (name, value), (_, wanted) in zip(model.named_buffers(), alone.named_buffers(), strict=True):
            assert torch.equal(value, wanted), name
    assert model.norm.num_batches_tracked == 3


def test_what_backward_writes_is_kept_where_forward_wrote_nothing() -> None:
    """A forward that is recomputed there writes a second time, which does not count."""
    model = Counting()
    buffers = StepBuffers(model, ALONE, frozenset({0, 1}))
    assert [name for name, _ in model.named_buffers()][:2] == ["written", "constant"]
    flagged: list[int] = []
    for m in range(2):
        model(torch.ones(4, 2))
        if m == 0:
            flagged = buffers.keep()
        model(torch.ones(4, 2))
        model.constant += 5 + m  # type: ignore[operator]
        if m == 0:
            buffers.keep_late()
        buffers.restore()
    buffers.end_step(flagged)
    assert model.written.tolist() == [1.0, 1.0]  # type: ignore[operator, union-attr]
    assert model.constant.tolist() == [5.0, 5.0]  # type: ignore[operator, union-attr]
    assert model.norm.num_batches_tracked == 1


def test_what_only_a_later_backward_writes_is_refused() -> None:
    model = Counting()
    buffers = StepBuffers(model, ALONE, frozenset())
    model(torch.ones(4, 2))
    buffers.keep()
    model.constant += 1  # type: ignore[operator]
    with raises(problems.BUFFER_IN_BACKWARD, name="constant"):
        buffers.keep_late()


@pytest.mark.parametrize("write", ["counted", "past torch", "replaced"])
def test_what_an_update_writes_is_seen_by_every_micro_batch_of_the_next_step(write: str) -> None:
    """By the second one too, and by whoever restores the buffers in an evaluation between."""
    model = Counting()
    buffers = StepBuffers(model, ALONE, frozenset())
    step(model, buffers, [torch.randn(4, 2) for _ in range(2)])
    match write:
        case "counted":
            model.constant += 1  # type: ignore[operator]
        case "past torch":
            model.constant.data.add_(1)  # type: ignore[operator, union-attr]
        case "replaced":
            model.constant = model.constant + 1  # type: ignore[operator]
    buffers.take_over()
    seen = []
    for _ in range(2):
        model(torch.randn(4, 2))
        seen.append(model.constant.tolist())  # type: ignore[operator, union-attr]
        buffers.restore()
    assert seen == [[1.0, 1.0]] * 2
    assert model.constant.tolist() == [1.0, 1.0]  # type: ignore[operator, union-attr]


def test_every_micro_batch_begins_with_the_steps_buffers() -> None:
    model = Counting()
    buffers = StepBuffers(model, ALONE, frozenset())
    before = [buffer.clone() for buffer in model.buffers()]
    model(torch.randn(4, 2))
    buffers.keep()
    buffers.restore()
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before, strict=True))


def test_only_what_is_written_is_sent() -> None:
    model = Counting()
    names = [name for name, _ in model.named_buffers()]
    flagged = step(model, StepBuffers(model, ALONE, frozenset()), [torch.randn(4, 2)])
    assert {names[i] for i in flagged} == {
        "written", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
    }  # fmt: skip


def test_statistics_of_normalisation_count_as_written() -> None:
    """torch's batch norm writes its running mean without raising the version by which a write is seen."""
    model = Counting()
    names = [name for name, _ in model.named_buffers()]
    assert {names[i] for i in statistics(model)} == {
        "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
    }  # fmt: skip
    assert statistics(nn.LayerNorm(2)) == frozenset()


def test_a_step_that_writes_nothing_sends_nothing() -> None:
    model = nn.Linear(2, 2)
    buffers = StepBuffers(model, ALONE, frozenset())
    model(torch.randn(4, 2))
    assert buffers.keep() == []
    buffers.restore()
    buffers.end_step([])


def test_a_buffer_that_is_replaced_is_put_back() -> None:
    model = Counting()
    tensor = model.written
    buffers = StepBuffers(model, ALONE, frozenset())
    model.written = torch.ones(2)
    flagged = buffers.keep()
    buffers.restore()
    assert model.written is tensor
    assert model.written.tolist() == [0.0, 0.0]
    buffers.end_step(flagged)
    assert model.written is tensor
    assert model.written.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("other", [torch.ones(2, dtype=torch.float64), None])
def test_a_buffer_that_changes_its_kind_is_refused(other: Tensor | None) -> None:
    model = Counting()
    buffers = StepBuffers(model, ALONE, frozenset())
    model.written = other
    with raises(problems.BUFFER_TYPE, name="written", wanted=torch.float32):
        buffers.keep()


def test_copies_of_several_types_and_layouts_are_exact() -> None:
    sources = [
        torch.randn(3, 4).t(),
        torch.arange(5),
        torch.randn(2).bfloat16(),
        torch.randn(()),
        torch.arange(2) > 0,
    ]
    targets = [torch.zeros_like(source) for source in sources]
    before = [target._version for target in targets]
    copy_all(targets, sources)
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))
    assert all(
        target._version > was for target, was in zip(targets, before, strict=True)
    )  # what a write is seen by


def test_a_write_past_torch_to_a_buffer_that_seemed_constant_is_refused() -> None:
    """Not one to a buffer that counts as written, nor what an update has changed. NaN is itself."""
    model = Counting()
    model.constant.data.fill_(float("nan"))  # type: ignore[operator, union-attr]
    buffers = StepBuffers(model, ALONE, frozenset())
    step(model, buffers, [torch.randn(4, 2)])
    buffers.check_unseen("step 1, rank 0")
    model.norm.running_mean.data.add_(1)  # type: ignore[union-attr]
    buffers.check_unseen("step 1, rank 0")
    model.constant.data.add_(torch.tensor([1.0, 0.0])).nan_to_num_()  # type: ignore[operator, union-attr]
    with raises(problems.BUFFER_UNCOUNTED, name="constant", where="step 2, rank 0"):
        buffers.check_unseen("step 2, rank 0")
    buffers.take_over()
    buffers.check_unseen("step 2, rank 0")
