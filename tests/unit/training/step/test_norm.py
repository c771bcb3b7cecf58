"""The norm has one value wherever the gradients lie (G1), and none that is finite is lost."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lockstep.training.step import norm
from lockstep.training.step.norm import ALIGNMENT, BLOCK, GradientNorm, align_gradients, clip_gradients

SHAPES = [(3, 5), (1,), (64,), (65,), (7, 3, 3, 3), (4097,), (), (0, 4), (BLOCK,), (BLOCK + 1,), (3, BLOCK)]
"""Blocks that fill a row and blocks that do not, whole parameters and several blocks, a scalar and an empty one."""


def gradients(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator) * 10.0 ** ((7 * i) % 9 - 4) for i, shape in enumerate(SHAPES)
    ]


def in_buckets(every: list[Tensor], count: int, offset: int) -> list[Tensor]:
    """The gradients as views into `count` flat buckets, in reversed order as DDP has them, each bucket begun at `offset`."""
    found: list[Tensor] = []
    for b in range(count):
        mine = [(i, g) for i, g in reversed(list(enumerate(every))) if i % count == b]
        length, at = offset + sum(g.numel() for _, g in mine), offset
        bucket = torch.full((length,), math.nan, device=every[0].device)
        for _, gradient in mine:
            view = bucket[at : at + gradient.numel()].view(gradient.shape)
            found.append(view.copy_(gradient))
            at += gradient.numel()
    order = [i for b in range(count) for i in reversed(range(len(every))) if i % count == b]
    return [found[order.index(i)] for i in range(len(every))]


def by_definition(gradient: Tensor) -> float:
    """Blocks in index order. What is within a block is left to torch's sum of a fresh float64 row, filled up with zeros."""
    total = 0.0
    for block in gradient.contiguous().view(-1).split(BLOCK):
        width = next(w for w in (64, 512, 4096, 8192, 16384, 32768, BLOCK) if w >= len(block))
        row = torch.zeros(1, width, dtype=torch.float64)
        row[0, : len(block)] = block.double() ** 2
        total += float(row.sum(1))
    return total


def test_the_norm_is_the_sum_over_blocks_and_parameters_in_index_order() -> None:
    every = gradients()
    squares = [by_definition(gradient) for gradient in every]
    norm = GradientNorm(every)
    assert norm.squares(every) == squares
    total = 0.0
    for square in squares:
        total += square
    assert norm(every) == math.sqrt(total)


@pytest.mark.parametrize("buckets", [1, 2, 3, 5, 8])
def test_the_norm_is_the_same_bits_at_every_offset_in_buckets_of_any_size(buckets: int) -> None:
    every = gradients()
    wanted = GradientNorm(every).squares(every)
    for offset in range(16):
        views = in_buckets(every, buckets, offset)
        assert all(torch.equal(view, gradient) for view, gradient in zip(views, every, strict=True))
        assert GradientNorm(every).squares(views) == wanted, offset


def test_sums_of_all_rows_of_the_workspace_are_those_of_the_rows_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on CUDA: each row is added up among as many others as the workspace holds, whatever these are."""
    every = gradients()
    wanted = GradientNorm(every).squares(every)
    monkeypatch.setattr(norm, "_ROW_BY_ROW", frozenset[str]())
    found = GradientNorm(every)
    found.squares([torch.full_like(gradient, math.nan) for gradient in every])
    assert found.squares(every) == wanted


def test_views_at_sixteen_offsets_are_aligned_otherwise() -> None:
    """The control of the test above: the memory that the gradients lie in does differ."""
    every = gradients()
    found = [
        {view.data_ptr() % ALIGNMENT["cpu"] for view in in_buckets(every, 1, offset)} for offset in range(16)
    ]
    assert len(set().union(*found)) == 16


def test_another_order_of_the_elements_gives_other_bits() -> None:
    """The control: the sum rounds, so equal bits are not for free."""
    gradient = torch.randn(3 * BLOCK, generator=torch.Generator().manual_seed(1))
    norm = GradientNorm([gradient])
    assert len({norm.squares([gradient.roll(places)])[0] for places in range(8)}) > 1


def strided() -> Iterator[Tensor]:
    plain = torch.randn(8, 6, 5, 5, generator=torch.Generator().manual_seed(3))
    yield plain
    yield plain.contiguous(memory_format=torch.channels_last)
    yield plain.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    yield torch.stack([plain, plain], -1)[..., 0]


def test_the_order_is_the_logical_one_whatever_the_strides() -> None:
    every = list(strided())
    assert len({gradient.stride() for gradient in every}) == 4
    assert len({GradientNorm([gradient])([gradient]) for gradient in every}) == 1
    large = torch.randn(4, 300, 200)
    assert GradientNorm([large])([large]) == GradientNorm([large])(
        [large.transpose(1, 2).contiguous().transpose(1, 2)]
    )


@pytest.mark.parametrize("threads", [1, 2])
def test_the_norm_is_the_same_again(threads: int) -> None:
    """What a workspace holds from the step before is not in the next."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        norm = GradientNorm(gradients())
        first = norm(gradients())
        norm([torch.full_like(gradient, math.inf) for gradient in gradients()])
        assert norm(gradients()) == first
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nothing_finite_overflows_or_vanishes(dtype: torch.dtype) -> None:
    """The control: torch's norm is infinite or zero for the same gradients in fp32."""
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    for value in (largest, smallest):
        gradient = torch.full((4, 1024), value, dtype=dtype)
        assert GradientNorm([gradient])([gradient]) == 64.0 * value
    if dtype == torch.float32:
        assert float(torch.nn.utils.get_total_norm([torch.full((4096,), largest)])) == math.inf
        assert float(torch.nn.utils.get_total_norm([torch.full((4096,), smallest)])) == 0.0


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("at", [0, 5, BLOCK])
def test_what_is_not_finite_shows(value: float, at: int) -> None:
    gradient = torch.ones(BLOCK + 1)
    gradient[at] = value
    found = GradientNorm([gradient])([gradient])
    assert math.isnan(found) if math.isnan(value) else found == math.inf


def test_gradients_above_the_norm_are_scaled_and_others_left() -> None:
    every = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])]
    clip_gradients(every, GradientNorm(every)(every), 10.0)
    assert [g.tolist() for g in every] == [[3.0, 0.0], [4.0]]
    clip_gradients(every, GradientNorm(every)(every), 1.0)
    factor = 1.0 / (5.0 + 1e-6)
    assert torch.equal(every[0], torch.tensor([3.0, 0.0]) * factor)
    assert torch.equal(every[1], torch.tensor([4.0]) * factor)


def test_gradients_are_moved_to_memory_of_their_own_where_they_are_not_aligned() -> None:
    parameters = [torch.nn.Parameter(torch.empty(shape)) for shape in SHAPES]
    every = gradients()
    for parameter, view in zip(parameters, in_buckets(every, 1, 0), strict=True):
        parameter.grad = view
    assert any(p.grad is not None and p.grad.data_ptr() % ALIGNMENT["cpu"] for p in parameters)
    kept = [p.grad for p in parameters if p.grad is not None and p.grad.data_ptr() % ALIGNMENT["cpu"] == 0]
    align_gradients(parameters)
    assert not any(p.grad is not None and p.grad.data_ptr() % ALIGNMENT["cpu"] for p in parameters)
    assert all(any(p.grad is gradient for p in parameters) for gradient in kept)
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, every, strict=True) if p.grad is not None)
