"""A worker's shard of a tensor that all workers hold together: consecutive rows of it, as FSDP2 cuts them.

The rows of a tensor of d rows go to W workers in order, ⌈d/W⌉ to each as long as there are any. So a shard is a range of the elements in
logical order, and what is added up over blocks of elements, such as a norm or a digest, can be added up by the workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint.stored_tensor import StoredTensor
from lockstep.communication.group import Group


def row_ranges(rows: int, ranks: int) -> list[range]:
    """The rows that each rank holds."""
    each = -(-rows // ranks)
    return [range(min(rank * each, rows), min((rank + 1) * each, rows)) for rank in range(ranks)]


def element_ranges(shape: torch.Size, ranks: int) -> list[range]:
    """The elements that each rank holds, in logical order."""
    inner = shape[1:].numel()
    return [range(rows.start * inner, rows.stop * inner) for rows in row_ranges(shape[0], ranks)]


class Elements(NamedTuple):
    """Consecutive elements of a tensor of the shape `shape`, in logical order."""

    values: Tensor
    shape: torch.Size
    start: int
    is_first: bool
    """Whether these are the first ones: of an empty tensor only one rank has those."""


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """The rows of one rank: `local`, of a tensor of the shape `shape`."""

    local: Tensor
    shape: torch.Size
    rank: int
    ranks: int
    mirror: Shard | None = None
    """The rows of the rank that this one mirrors, if it does."""

    @property
    def elements(self) -> range:
        """Its elements, in logical order."""
        return element_ranges(self.shape, self.ranks)[self.rank]

    def as_elements(self) -> Elements:
        """Its rows, as elements."""
        return Elements(self.local, self.shape, self.elements.start, self.rank == 0)

    def like(self, local: Tensor, mirror: Tensor | None = None) -> Shard:
        """The same rows of another tensor of that shape, and of those that are mirrored."""
        mirrored = None if self.mirror is None or mirror is None else self.mirror.like(mirror)
        return Shard(local, self.shape, self.rank, self.ranks, mirrored)

    def copied(self) -> Shard:
        """A copy in host memory."""
        mirror = None if self.mirror is None else self.mirror.local.detach().cpu().clone()
        return self.like(self.local.detach().cpu().clone(), mirror)

    def cut(self, whole: Tensor | StoredTensor) -> Shard:
        """The same rows of another whole tensor, in memory of their own. Errors as of `rows_of`."""
        mirror = None if self.mirror is None else self.mirror.rows_of(whole).clone()
        return self.like(self.rows_of(whole).clone(), mirror)

    def fill(self, whole: Tensor | StoredTensor) -> None:
        """Take the values of the rows from a whole tensor. Errors as of `rows_of`."""
        self.local.copy_(self.rows_of(whole))
        if self.mirror is not None:
            self.mirror.fill(whole)

    def rows_of(self, whole: Tensor | StoredTensor) -> Tensor:
        """The rows of this rank in a tensor of the same shape; of a stored one no others are read. ValueError where it has another."""
        if whole.shape != self.shape:
            raise ValueError(f"a tensor of shape {tuple(whole.shape)}, wanted {tuple(self.shape)}")
        rows = row_ranges(self.shape[0], self.ranks)[self.rank]
        return whole[rows.start : rows.stop]

    def meta(self) -> Tensor:
        """The type and shape of the whole tensor, without memory."""
        return torch.empty(self.shape, dtype=self.local.dtype, device="meta")

    def gathered(self, group: Group, target: int) -> Tensor | None:
        """The whole tensor on rank `target`, in memory of its own where its rows are; None on the others. All ranks call it, in the same order of tensors."""
        local = self.local.detach().to(group.device).contiguous()
        if group.rank != target:
            if local.numel():
                group.wait_for_messages(
                    dist.batch_isend_irecv([dist.P2POp(dist.isend, local.view(-1), target, group.channel)])
                )
            return None
        whole = local.new_empty(self.shape)
        flat = whole.view(-1)
        receives = []
        for rank, elements in enumerate(element_ranges(self.shape, self.ranks)):
            part = flat[elements.start : elements.stop]
            if rank == target:
                part.copy_(local.view(-1))
            elif len(elements):
                receives.append(dist.P2POp(dist.irecv, part, rank, group.channel))
        if receives:
            group.wait_for_messages(dist.batch_isend_irecv(receives))
        return whole.to(self.local.device)
