"""A copy of named sections in host memory: all that a training step pays for a checkpoint.

The copy is one pass over the tensors' memory, into buffers that the next save uses again. Ranks that
hold the same state share the bytes: each copies and writes its own range of them. From CUDA the copies
are queued on the current stream into page-locked memory, so the host does not wait. Whatever changes the
state next is queued behind them, so there is nothing that a caller could forget to wait for. (A stream of their
own would let them overlap with the next forward pass, which changes BatchNorm's buffers.)
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint import layout, problems
from lockstep.checkpoint.tree import Elsewhere, Packed, Tree, pack

Block = bytes | Callable[[], bytes]
"""Bytes, or a function that makes them. The writer thread calls it later, so it must use only what no step changes any more."""

SMALLEST_SHARE = 4 << 20
"""Below so many bytes a rank, another rank that writes costs more than it saves."""

_ALIGNED = 64


@dataclass(slots=True)
class Snapshot:
    """The sections at one moment; of the tensors, only those that this rank writes."""

    trees: dict[str, Any]
    """Each section's skeleton."""
    blocks: dict[str, Block]
    tensors: dict[str, dict[str, Tensor]]
    rank: int
    writers: int
    """Ranks 0 … writers-1 write a part, the others none."""
    buffers: Buffers
    copied: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's tensors."""
        return sum(tensor.nbytes for section in self.tensors.values() for tensor in section.values())

    def wait(self) -> None:
        """Wait until the copies are made."""
        if self.copied is not None:
            self.copied.synchronize()

    def structure(self) -> str:
        """A digest that is equal on all ranks with the same state. It takes milliseconds: leave it to the writer thread."""
        return sha256(json.dumps(self.trees, allow_nan=False).encode()).hexdigest()


def snapshot(
    sections: Mapping[str, Tree | Block], into: Snapshot | None = None, *, rank: int = 0, ranks: int = 1
) -> Snapshot:
    """Copy `sections` to host memory, reusing the memory of `into`, which is no longer valid afterwards.

    Trees are the same on all `ranks`; blocks of bytes are taken from rank 0 only.
    JobError for what is not a tree, StorageError where there is no memory for the copy.
    """
    packed, blocks = _packed(sections)
    sources = [tensor for packed_section in packed.values() for tensor in packed_section.tensors.values()]
    shares = _shares(sources, ranks)
    share = shares[rank] if rank < len(shares) else range(0)
    buffers = into.buffers if into is not None else Buffers()
    mine = [tensor for tensor in sources[share.start : share.stop] if isinstance(tensor, Tensor)]
    if len(mine) < len(share):
        raise RuntimeError(
            f"rank {rank} was not given {len(share) - len(mine)} of the tensors that it writes"
        )
    copies, copied = buffers.copy(mine)
    tensors, start = dict[str, dict[str, Tensor]](), 0
    for section, packed_section in packed.items():
        overlap = range(max(share.start, start), min(share.stop, start + len(packed_section.tensors)))
        if overlap:
            names = islice(packed_section.tensors, overlap.start - start, overlap.stop - start)
            tensors[section] = dict(zip(names, copies[overlap.start - share.start :], strict=False))
        start += len(packed_section.tensors)
    trees = {section: packed_section.skeleton for section, packed_section in packed.items()}
    return Snapshot(trees, blocks if rank == 0 else {}, tensors, rank, len(shares), buffers, copied)


def writers(sections: Mapping[str, Tree | Block], ranks: int) -> dict[int, int]:
    """The rank that writes each tensor that stands as `Elsewhere`, by the id of that object. The same on every rank."""
    sources = [
        tensor
        for packed_section in _packed(sections)[0].values()
        for tensor in packed_section.tensors.values()
    ]
    return {
        id(sources[i]): rank
        for rank, share in enumerate(_shares(sources, ranks))
        for i in share
        if isinstance(sources[i], Elsewhere)
    }


def _packed(sections: Mapping[str, Tree | Block]) -> tuple[dict[str, Packed], dict[str, Block]]:
    """The sections that are trees, packed, and those that are blocks."""
    packed, blocks = {}, {}
    for section, content in sections.items():
        if not layout.is_section(section):
            raise ValueError(f"{section!r} cannot name a section; wanted lower case, digits and _")
        if isinstance(content, bytes) or callable(content):
            blocks[section] = content
        else:
            packed[section] = pack(content, section)
    return packed, blocks


def _shares(sources: Sequence[Tensor | Elsewhere], ranks: int) -> list[range]:
    return [range(len(sources))] if ranks == 1 else share_out([tensor.nbytes for tensor in sources], ranks)


def share_out(sizes: Sequence[int], ranks: int) -> list[range]:
    """Which items each rank takes, given their sizes: consecutive items of nearly the same number of bytes.

    An item goes to the rank in whose range of bytes its middle lies. Pure: every rank finds the same. There are
    at least one range, and no more than are worth a rank each.
    """
    total = sum(sizes)
    writers = max(1, min(ranks, total // SMALLEST_SHARE))
    ends = list(accumulate(sizes))
    takers = [
        (2 * end - size) * writers // (2 * total) if total else 0
        for size, end in zip(sizes, ends, strict=True)
    ]
    takers = [min(taker, writers - 1) for taker in takers]
    counts = [takers.count(writer) for writer in range(writers)]
    starts = [0, *accumulate(counts)]
    return [range(starts[writer], starts[writer + 1]) for writer in range(writers)]


class Buffers:
    """Host memory for the copies of one snapshot, kept for the next.

    One block holds them all. A first copy into fresh memory takes seven times as long (0.42 s against 0.06 s
    for 500 MB), because the system clears each page when it is first touched.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._layout: list[tuple[torch.dtype, torch.Size]] = []
        self._views: list[Tensor] = []
        self._for_cuda = False

    def copy(self, sources: list[Tensor]) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """A copy of each tensor and, for tensors on CUDA, the event after which the copies are made."""
        on_cuda = any(tensor.is_cuda for tensor in sources)
        new_layout = [(tensor.dtype, tensor.shape) for tensor in sources]
        if new_layout != self._layout or (on_cuda and not self._for_cuda):
            self._allocate(new_layout, for_cuda=on_cuda)
        if sources:
            with torch.no_grad():
                torch._foreach_copy_(self._views, sources, non_blocking=on_cuda)
        if not on_cuda:
            return self._views, None
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return self._views, copied

    def _allocate(self, new_layout: list[tuple[torch.dtype, torch.Size]], *, for_cuda: bool) -> None:
        sizes = [-(-dtype.itemsize * shape.numel() // _ALIGNED) * _ALIGNED for dtype, shape in new_layout]
        starts = [0, *accumulate(sizes)]
        if starts[-1] > len(self._block) or (for_cuda and not self._for_cuda):
            self._layout, self._views = [], []
            self._block = torch.empty(
                0, dtype=torch.uint8
            )  # free the old block before allocating the new one
            self._block = _host_block(starts[-1])
            self._for_cuda = for_cuda
            if for_cuda:
                _lock(self._block)
        self._views = [
            self._block[start : start + dtype.itemsize * shape.numel()].view(dtype).view(shape)
            for start, (dtype, shape) in zip(starts, new_layout, strict=False)
        ]
        self._layout = new_layout


def _host_block(size: int) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8)
    except (RuntimeError, MemoryError) as error:
        raise problems.NO_MEMORY(size_gb=f"{size / 1e9:.1f}") from error


def _lock(block: Tensor) -> None:
    """Lock the pages of a block for CUDA. torch's own pinned memory comes in powers of two, which can be twice as much."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if not len(block):
        return
    if int(runtime.cudaHostRegister(block.data_ptr(), len(block), 1)) == 0:
        weakref.finalize(block, runtime.cudaHostUnregister, block.data_ptr())
        return
    # There is too much to lock: the copies are still made, but the host waits for them. CUDA tells the failure once more, to the next kernel.
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
