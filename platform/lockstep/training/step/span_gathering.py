"""Gives every rank the weights that each has updated, and compares those of which a rank is the mirror with what it has computed itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.communication.group import Group

UNIT = 64
"""Parameters are split at multiples of so many elements: at least the vectors of every processor, and 128 bytes of bf16."""

GATHER_BYTES = 16 << 20
"""Bytes that one collective gathers; two are in flight at a time."""


def gathering_width(ranks: int) -> int:
    """The most bytes that a rank sends in one round of gathering."""
    return max(1, GATHER_BYTES // ranks // UNIT) * UNIT


def gathering_bytes(most: int, ranks: int) -> int:
    """Temporary bytes of gathering, for the rounds that are in flight at once; `most` is the most bytes that any rank sends in all."""
    width = gathering_width(ranks)
    return min(2, -(-most // width)) * (ranks + 1) * min(width, most)


def flat(tensor: Tensor) -> Tensor | None:
    """All elements in the order of memory, as a view. None where the memory has gaps."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    in_order = tensor.permute(order)
    return in_order.reshape(-1) if in_order.is_contiguous() else None


class SpanGathering:
    """Gives every rank the bytes of all, in rounds of `GATHER_BYTES` that are the same on every rank."""

    def __init__(self, every: list[list[Tensor]], group: Group) -> None:
        self.group = group
        # Memory with gaps has no view as bytes: it goes through a copy.
        self._copies = [
            [
                (tensor, torch.empty_like(tensor, memory_format=torch.contiguous_format))
                for tensor in parts
                if flat(tensor) is None
            ]
            for parts in every
        ]
        through = {id(tensor): copy for parts in self._copies for tensor, copy in parts}
        rows = [
            [through.get(id(tensor), tensor).view(-1).view(torch.uint8) for tensor in parts]
            for parts in every
        ]
        most = max((sum(map(len, row)) for row in rows), default=0)
        width = gathering_width(group.size)
        self._rounds = [[_within(row, at, at + width) for row in rows] for at in range(0, most, width)]
        self._mirrored: int | None = None
        self._unlike: list[Tensor | bool] = []

    def __call__(self, mirrored: int | None = None) -> Tensor | bool:
        """Whether rank `mirrored` has sent other bytes than this rank has computed in their place; on a CUDA device a tensor, which waits for nothing."""
        self._mirrored, self._unlike = mirrored, []
        if self.group.size == 1:
            return False
        for rank, parts in enumerate(self._copies):
            for source, copy in parts if rank in (self.group.rank, mirrored) else ():
                copy.copy_(source)
        pending: tuple[Any, Tensor, list[list[Tensor]]] | None = None
        for pieces in self._rounds:
            begun = self._begun(pieces)
            if pending is not None:
                self._done(*pending)
            pending = begun
        if pending is not None:
            self._done(*pending)
        for rank, parts in enumerate(self._copies):
            for target, copy in parts if rank != self.group.rank else ():
                target.copy_(copy)
        unlike = [each for each in self._unlike if isinstance(each, Tensor)]
        return torch.stack(unlike).any() if unlike else any(self._unlike)

    def _begun(self, pieces: list[list[Tensor]]) -> tuple[Any, Tensor, list[list[Tensor]]]:
        """Begin one round: its collective, the tensor that it fills, and the pieces that tensor goes to."""
        outgoing = pieces[self.group.rank]
        length = max(sum(map(len, parts)) for parts in pieces)
        sent = torch.zeros(length, dtype=torch.uint8, device=self.group.device)
        if outgoing:
            torch.cat(outgoing, out=sent[: sum(map(len, outgoing))])
        received = sent.new_empty(self.group.size * length)
        gather = (
            getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        )  # its name since torch 2.13
        work = gather(received, sent, group=self.group.channel, async_op=True)
        return work, received, pieces

    def _done(self, work: Any, received: Tensor, pieces: list[list[Tensor]]) -> None:
        self.group.wait(work)
        for rank, row in enumerate(received.view(self.group.size, -1)):
            if rank != self.group.rank and pieces[rank]:
                sizes = [len(piece) for piece in pieces[rank]]
                sent = list(torch.split(row[: sum(sizes)], sizes))
                if rank == self._mirrored:
                    self._unlike += map(_unlike, pieces[rank], sent)
                torch._foreach_copy_(pieces[rank], sent)


def _unlike(first: Tensor, second: Tensor) -> Tensor | bool:
    """Whether two rows of bytes differ."""
    if first.device.type != "cpu":
        return (first != second).any()
    word = torch.int64.itemsize
    if any(row.storage_offset() % word for row in (first, second)):
        return not torch.equal(first, second)
    whole = len(first) - len(first) % word
    words = [row[:whole].view(torch.int64) for row in (first, second)]  # several times as fast as bytes
    return not (torch.equal(*words) and torch.equal(first[whole:], second[whole:]))


def _within(parts: list[Tensor], start: int, stop: int) -> list[Tensor]:
    """The elements `start … stop - 1` of the concatenation of `parts`, as views."""
    pieces, begin = [], 0
    for part in parts:
        piece = part[max(0, start - begin) : max(0, stop - begin)]
        if len(piece):
            pieces.append(piece)
        begin += len(part)
    return pieces
