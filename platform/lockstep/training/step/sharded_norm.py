"""The norm of `step.norm` where each worker has rows of the gradients: the same blocks, and so the same bits.

A block is added up by one worker of those that hold a part of it. The others send theirs: less than a block for each place where a parameter is cut, and each
element at most once. Then every worker gets the sums of all blocks, and adds them up in index order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.communication.group import Group
from lockstep.training.step.complex_as_real import real_view
from lockstep.training.step.host_memory import HostMemory
from lockstep.training.step.norm import BLOCK, GradientNorm, workspace_bytes
from lockstep.training.step.shards import Shard, element_ranges


class _Part(NamedTuple):
    """Elements `start … stop - 1` of a block of a parameter, which rank `holder` has; in logical order of the parameter."""

    parameter: int
    block: int
    start: int
    stop: int
    holder: int


_Key = tuple[int, int]
"""A parameter and its block."""

ROUND = 1 << 20
"""Elements of the blocks that are put together at a time: what a round needs beside the gradients is about three times as much."""


class _Round(NamedTuple):
    """Blocks that are put together, and added up, at a time: this rank's `own`, what it sends to each rank, and what it receives from each."""

    own: dict[_Key, list[_Part]]
    sent: list[list[_Part]]
    received: list[list[_Part]]
    norm: GradientNorm

    @classmethod
    def of(
        cls,
        keys: Sequence[_Key],
        blocks: Mapping[_Key, list[_Part]],
        owners: Mapping[_Key, int],
        group: Group,
        workspace: Tensor,
    ) -> _Round:
        rank = group.rank
        own = {key: blocks[key] for key in keys if owners[key] == rank}
        sent = [
            [
                part
                for key in keys
                if owners[key] == owner != rank
                for part in blocks[key]
                if part.holder == rank
            ]
            for owner in range(group.size)
        ]
        received = [
            [part for parts in own.values() for part in parts if part.holder == holder != rank]
            for holder in range(group.size)
        ]
        lengths = [parts[-1].stop - parts[0].start for parts in own.values()]
        norm = GradientNorm([torch.empty(length, device="meta") for length in lengths], workspace)
        return cls(own, sent, received, norm)


def _owner(parts: Sequence[_Part]) -> int:
    """The rank that adds up a block: one of those that hold a part of it, in turn from block to block."""
    first = parts[0]
    return parts[(first.parameter + first.block) % len(parts)].holder


def _in_rounds(blocks: Mapping[_Key, list[_Part]]) -> Iterator[list[_Key]]:
    """The blocks, so many at a time that those which are cut have `ROUND` elements at most, or are one."""
    keys: list[_Key] = []
    elements = 0
    for key, parts in blocks.items():
        size = parts[-1].stop - parts[0].start if len(parts) > 1 else 0
        if keys and elements + size > ROUND:
            yield keys
            keys, elements = [], 0
        keys.append(key)
        elements += size
    if keys:
        yield keys


class ShardedNorm(GradientNorm):
    """The norm over gradients of which this worker has the rows in `shards`, by parameter, and the others whole. All ranks call it together."""

    def __init__(
        self,
        names: Sequence[str],
        local: Sequence[Tensor],
        shards: Mapping[str, Shard],
        group: Group,
        host: HostMemory | None = None,
    ) -> None:
        """`host` is where the rows are, if not on the device."""
        self._group, self._host = group, host
        self._starts = [shards[name].elements.start if name in shards else 0 for name in names]
        every = [
            part
            for i, (name, tensor) in enumerate(zip(names, local, strict=True))
            for part in _parts(
                i,
                element_ranges(shards[name].shape, group.size) if name in shards else None,
                real_view(tensor).numel(),
                group.rank,
            )
        ]
        blocks: dict[_Key, list[_Part]] = {}
        for part in every:
            blocks.setdefault((part.parameter, part.block), []).append(part)
        self._parameters, self._keys = len(names), sorted(blocks)
        wide = any(tensor.dtype == torch.float64 for tensor in local)
        self._type = torch.float64 if wide else torch.float32
        """That of messages: it holds every element as it is."""
        owners = {key: _owner(parts) for key, parts in blocks.items()}
        # What every worker has whole each adds up by itself: rank 0's sums count.
        counted = {key: owners[key] if names[key[0]] in shards else 0 for key in blocks}
        self._places = [
            [key for key, rank in counted.items() if rank == owner] for owner in range(group.size)
        ]
        workspace = torch.empty(workspace_bytes(group.device) // 8, dtype=torch.float64, device=group.device)
        self._workspace = workspace
        self._rounds = [_Round.of(keys, blocks, owners, group, workspace) for keys in _in_rounds(blocks)]
        self.observe = None

    def squares(self, gradients: Sequence[Tensor]) -> list[float]:
        """The sum of the squares of each parameter's whole gradient, of which `gradients` are this worker's rows."""
        own: dict[_Key, float] = {}
        for exchange in self._rounds:
            received = self._exchanged(gradients, exchange)
            assembled = [self._assembled(gradients, received, parts) for parts in exchange.own.values()]
            own |= dict(zip(exchange.own, exchange.norm.squares(assembled), strict=True))
        sums: dict[_Key, float] = {}
        for keys, of_rank in zip(self._places, self._of_every_rank(own), strict=True):
            sums |= dict(zip(keys, of_rank, strict=True))
        totals = [0.0] * self._parameters
        for key in self._keys:
            totals[key[0]] += sums[key]
        return totals

    def _assembled(
        self, gradients: Sequence[Tensor], received: Mapping[_Part, Tensor], parts: Sequence[_Part]
    ) -> Tensor:
        """A block, from its parts here and elsewhere."""
        rank = self._group.rank
        pieces = [self._piece(gradients, part) if part.holder == rank else received[part] for part in parts]
        return pieces[0] if len(pieces) == 1 else torch.cat([self._sendable(piece) for piece in pieces])

    def _sendable(self, piece: Tensor) -> Tensor:
        return (piece if self._host is None else self._host.on_device(piece)).to(self._type)

    def _piece(self, gradients: Sequence[Tensor], part: _Part) -> Tensor:
        begin = self._starts[part.parameter]
        return real_view(gradients[part.parameter]).reshape(-1)[part.start - begin : part.stop - begin]

    def _exchanged(self, gradients: Sequence[Tensor], one: _Round) -> dict[_Part, Tensor]:
        """The parts of this rank's blocks that other ranks hold."""
        outgoing = [[self._sendable(self._piece(gradients, part)) for part in parts] for parts in one.sent]
        sizes_out = [sum(map(len, parts)) for parts in outgoing]
        sizes_in = [sum(part.stop - part.start for part in parts) for parts in one.received]
        device = self._group.device
        sent = torch.cat(
            [torch.empty(0, dtype=self._type, device=device), *(one for parts in outgoing for one in parts)]
        )
        buffer = sent.new_empty(sum(sizes_in))
        work = dist.all_to_all_single(
            buffer,
            sent,
            output_split_sizes=sizes_in,
            input_split_sizes=sizes_out,
            group=self._group.channel,
            async_op=True,
        )
        self._group.wait(work)
        parts = [part for of_rank in one.received for part in of_rank]
        cuts = torch.split(buffer, [part.stop - part.start for part in parts])
        return dict(zip(parts, cuts, strict=True))

    def _of_every_rank(self, own: Mapping[_Key, float]) -> list[list[float]]:
        """The sums of the blocks in `_places`, by rank."""
        most, rank = max(map(len, self._places)), self._group.rank
        row = torch.zeros(most, dtype=torch.float64)
        values = [own[key] for key in self._places[rank]]
        row[: len(values)] = torch.tensor(values, dtype=torch.float64)
        row = row.to(self._group.device)
        received, wait = self._group.swap(
            row, [most if other != rank else 0 for other in range(self._group.size)], most
        )
        wait()
        rows = (
            [part.tolist() for part in torch.split(received, most)] if most else [[]] * (self._group.size - 1)
        )
        rows.insert(rank, values)
        return [each[: len(keys)] for each, keys in zip(rows, self._places, strict=True)]


def _parts(parameter: int, cut: Sequence[range] | None, length: int, rank: int) -> list[_Part]:
    """The parts of a parameter's blocks, in order; without a `cut` the whole of each is this rank's."""
    ranges = [range(length)] if cut is None else cut
    edges = sorted({0, *(r.stop for r in ranges), *range(0, ranges[-1].stop, BLOCK)})
    parts = []
    for start, stop in pairwise(edges):
        holder = rank if cut is None else start // len(ranges[0])
        parts.append(_Part(parameter, start // BLOCK, start, stop, holder))
    return parts
