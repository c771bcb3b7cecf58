"""The norm of a step's gradients, which does not depend on where in memory they lie.

A kernel that sums a tensor may choose another order for another alignment (CUDA's do). On two workers `.grad` is a
view into DDP's buckets, which are laid out anew after the first step; on one worker it has memory of its own. So no
such kernel sees a gradient here. The definition:

* the elements of a parameter, in logical order (row-major by its shape, whatever its strides), form blocks of `BLOCK`; a complex one counts
  as two, its real and its imaginary part; of a table whose gradient is sparse only the rows of the gradient count, in their order;
* a block is copied to a row of a float64 workspace, squared and added up there, by a kernel that adds up every row alike;
* the sums of a parameter's blocks are added in index order, then those of the parameters, in float64.

A square of an fp32 number is exact in float64 and at most 2**256, so the norm of finite gradients is finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, groupby, takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.spec.optimizers import TorchOptimizer
from lockstep.training.step.complex_as_real import real_views

BLOCK = 1 << 16
"""Elements of a block. As float64 they are 512 KiB, which stay in a core's cache from the copy to the sum; with a quarter
of that the calls cost as much as the additions."""

_WIDTHS = (64, 512, 4096, 8192, 16384, 32768, BLOCK)
"""Blocks that are shorter than `BLOCK` are filled up with zeros to one of these, to be added up many at a time."""

_BLOCKS_AT_ONCE = {"cpu": 1, "cuda": 64}
"""How many full blocks the workspace holds: what a core's cache has room for, or enough to fill a GPU (32 MiB)."""

_ROW_BY_ROW = frozenset({"cpu"})
"""Devices whose sum of a row does not depend on how many rows there are. CUDA's kernel splits rows between threads by their number."""

ALIGNMENT = {"cpu": 64, "cuda": 512}
"""Bytes to which torch aligns new memory. A library may choose a kernel by as much: cuBLASLt looks at up to 256."""


ELEMENT_BY_ELEMENT = tuple(getattr(torch.optim, kind.torch_class) for kind in TorchOptimizer.__subclasses__())
"""Optimizers that never sum over a gradient's elements, so that its place in memory does not matter to them."""


def workspace_bytes(device: torch.device) -> int:
    """Bytes of the workspace that a `GradientNorm` keeps on a device."""
    return 8 * BLOCK * _BLOCKS_AT_ONCE.get(device.type, 1)


class _Piece(NamedTuple):
    """A block: its parameter, its place among the parameter's blocks, and its elements."""

    parameter: int
    block: int
    length: int

    @property
    def width(self) -> int:
        """The width of its row: with rows of few widths many blocks are added up at once."""
        return next(width for width in _WIDTHS if width >= self.length)


class _Sums(NamedTuple):
    """Rows of one width, which are added up at once."""

    summed: Tensor
    """What is added up: the rows and, where the device wants one number of rows always, what lies behind them in the workspace."""
    all: Tensor
    """The sums of all that."""
    sums: Tensor
    """Those of the rows."""


class _Load(NamedTuple):
    """Blocks that are in the workspace together, one a row; `targets` is where in the rows the elements go."""

    pieces: list[_Piece]
    cells: Tensor
    """All of the rows."""
    targets: list[Tensor]
    padded: Tensor
    """The rows from the first width on of which one is filled up with zeros."""
    widths: list[_Sums]


class GradientNorm:
    """The norm over the gradients of `parameters`. Keeps its workspace, so that a step allocates next to nothing."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        workspace: Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`workspace` is that of another norm on the device of the gradients, which is used in turn. Without parameters there has to be a `device`."""
        device = device or (parameters[0].device if workspace is None else workspace.device)
        parameters = real_views(parameters)
        at_once = BLOCK * _BLOCKS_AT_ONCE.get(device.type, 1)
        self._shapes = [parameter.shape for parameter in parameters]
        self._workspace = (
            torch.empty(at_once, dtype=torch.float64, device=device) if workspace is None else workspace
        )
        pieces = _widest_first(parameters)
        self._sums = torch.empty(len(pieces), dtype=torch.float64, device=device)
        self._loads: list[_Load] = []
        done = 0
        while done < len(pieces):
            count = self._room(pieces[done:])
            self._loads.append(self._load(pieces[done : done + count], done))
            done += count
        self._in_order = sorted((piece.parameter, piece.block, i) for i, piece in enumerate(pieces))
        self.observe: Callable[[Sequence[Tensor], Sequence[float]], None] | None = None
        """Called just before the update with the gradients of the step, before they are clipped, and the sum of squares of each."""
        self._split = [p for p, shape in enumerate(self._shapes) if shape.numel() > BLOCK]

    def _room(self, pieces: Sequence[_Piece]) -> int:
        """How many of the pieces have room in the workspace together."""
        if (
            self._workspace.device.type not in _ROW_BY_ROW
        ):  # of one width, as all of the workspace is added up
            width = pieces[0].width
            return min(self._workspace.numel() // width, sum(piece.width == width for piece in pieces))
        ends = accumulate(piece.width for piece in pieces)
        return sum(1 for _ in takewhile(lambda end: end <= self._workspace.numel(), ends))

    def _load(self, pieces: list[_Piece], done: int) -> _Load:
        """The load of `pieces`, before which `done` others have their sums."""
        targets, widths, end, padded_from = list[Tensor](), list[_Sums](), 0, None
        for width, alike in groupby(pieces, key=lambda piece: piece.width):
            group = list(alike)
            begin, end = end, end + len(group) * width
            rows = self._workspace[begin:end].view(-1, width)
            if padded_from is None and any(piece.length < width for piece in group):
                padded_from = begin
            for row, piece in zip(rows, group, strict=True):
                target, shape = row[: piece.length], self._shapes[piece.parameter]
                # One that is copied as a whole keeps its shape, whatever its strides.
                targets.append(target.view(shape) if piece.length == shape.numel() else target)
            sums = self._sums[done : done + len(group)]
            done += len(group)
            if rows.device.type in _ROW_BY_ROW:
                widths.append(_Sums(rows, sums, sums))
            else:
                summed = self._workspace.view(-1, width)
                widths.append(_Sums(summed, sums.new_empty(len(summed)), sums))
        padded = self._workspace[end if padded_from is None else padded_from : end]
        return _Load(pieces, self._workspace[:end], targets, padded, widths)

    def squares(self, gradients: Sequence[Tensor]) -> list[float]:
        """The sum of the squares of each parameter's gradient. On a CUDA device it waits for them, once."""
        gradients = real_views(gradients)
        blocks: list[Sequence[Tensor]] = [(gradient,) for gradient in gradients]
        for p in self._split:
            blocks[p] = torch.split(gradients[p].reshape(-1), BLOCK)
        for pieces, cells, targets, padded, widths in self._loads:
            if len(padded):
                padded.zero_()
            torch._foreach_copy_(targets, [blocks[piece.parameter][piece.block] for piece in pieces])
            cells.mul_(cells)
            for summed, sums_of_all, sums in widths:
                torch.sum(summed, 1, out=sums_of_all)
                if sums_of_all is not sums:
                    sums.copy_(sums_of_all[: len(sums)])
        sums_of_blocks, totals = self._sums.tolist(), [0.0] * len(self._shapes)
        for parameter, _, i in self._in_order:
            totals[parameter] += sums_of_blocks[i]
        return totals

    def __call__(self, gradients: Sequence[Tensor], rows: Sequence[Tensor] = ()) -> float:
        """The norm of all gradients together: infinite or NaN where one of them is.

        `rows` are the rows that gradients of tables have, another number in each step; each table counts as a parameter of just these.
        """
        squares = self.squares(gradients)
        if self.observe is not None:
            self.observe(gradients, squares)
        return added([*squares, *(GradientNorm(rows, self._workspace).squares(rows) if rows else ())])


def added(squares: Iterable[float]) -> float:
    """The square root of the sum of the squares, added in their order."""
    total = 0.0
    for square in squares:
        total += square
    return math.sqrt(total)


def _widest_first(parameters: Sequence[Tensor]) -> list[_Piece]:
    """The blocks of all parameters, by falling width of the row that each is put into."""
    pieces = [
        _Piece(p, block, min(BLOCK, parameter.numel() - start))
        for p, parameter in enumerate(parameters)
        for block, start in enumerate(range(0, parameter.numel(), BLOCK))
    ]
    return sorted(pieces, key=lambda piece: -piece.width)


def multiply_in_place(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply gradients by a number."""
    torch._foreach_mul_(real_views(gradients), factor)


def clip_gradients(
    gradients: list[Tensor],
    norm: float,
    most: float,
    multiply: Callable[[list[Tensor], float], object] = multiply_in_place,
) -> None:
    """Scale the gradients down to the norm `most` where theirs is above it, by the formula of `clip_grad_norm_`."""
    factor = most / (norm + 1e-6)
    if not factor >= 1.0:  # written so that a NaN norm also scales
        multiply(gradients, factor)


def align_gradients(parameters: Iterable[Tensor], *, every: bool = False) -> None:
    """Move each gradient that lies unaligned in a bucket, or has other strides than it has there, to memory of its own.

    For optimizers that sum or multiply matrices: their kernels may choose an order by the alignment and the strides of their inputs. `every`
    one is moved where the job may keep what it sees: the next step writes into the bucket.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        strides = parameter.stride()
        if gradient.stride() != strides:
            strides = _in_a_bucket(parameter)
        unaligned = gradient.data_ptr() % ALIGNMENT.get(gradient.device.type, 64)
        if every or gradient.stride() != strides or unaligned:
            parameter.grad = gradient.new_empty_strided(gradient.shape, strides).copy_(gradient)


def _in_a_bucket(parameter: Tensor) -> tuple[int, ...]:
    """The strides of a gradient in a bucket of DDP: those of its parameter, or row-major ones where that has gaps."""
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    if parameter.permute(order).is_contiguous():
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()
