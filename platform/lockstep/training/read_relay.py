"""One rank reads, and passes on what it has read: the store sees one reader, whatever the number of workers.

What rank 0 reads goes from rank to rank along a tree: over the first ranks of the nodes, then over the ranks of each node. So it
crosses the network once for each other node. All ranks run the same code on the same bytes. Each verifies the hashes itself, and all
get the same errors. A rank that received other bytes makes another request than rank 0, and gets an error for it.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint.storage.interface import Item, Reading, Storage
from lockstep.communication.group import Group
from lockstep.errors import LockstepError
from lockstep.process import network
from lockstep.training import problems

T = TypeVar("T")

PIECE = 16 << 20
"""Bytes of a file that are read and passed on at a time: the next piece is read while this one travels down the tree."""


def links(nodes: Sequence[str], rank: int) -> tuple[int | None, list[int]]:
    """The rank that a rank receives from, and those that it passes on to, other nodes first; `nodes` has the node of each rank.

    Two binary heaps: over the first ranks of the nodes, and over the ranks of a node. Rank 0 receives from nobody, and no rank
    passes on to more than four.
    """
    rows: dict[str, list[int]] = {}
    for member, node in enumerate(nodes):
        rows.setdefault(node, []).append(member)
    source, targets = None, []
    for row in ([ranks[0] for ranks in rows.values()], rows[nodes[rank]]):
        if rank in row:
            i = row.index(rank)
            targets += row[2 * i + 1 : 2 * i + 3]
            source = row[(i - 1) // 2] if i else source
    return source, targets


class Relay:
    """Gives every rank of a group what rank 0 reads. All ranks make the same requests in the same order."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._source, self._targets = links(group.gather(network()), group.rank)
        over_gpu = dist.get_backend(group.channel) == "nccl"
        self._device = group.device if over_gpu else torch.device("cpu")

    @property
    def reads(self) -> bool:
        """Whether this is the rank that reads."""
        return self._group.rank == 0

    def hand(self, request: str, make: Callable[[], T]) -> T:
        """The result of `make` on rank 0, for small objects. If it raises a LockstepError, all ranks do.

        DriftError where rank 0 answers another request than this rank's.
        """
        value: Any = None
        error: LockstepError | None = None
        content = b""
        if self.reads:
            try:
                value = make()
            except LockstepError as raised:
                error = raised
            content = pickle.dumps((value, error))
        checksum = zlib.crc32(request.encode())
        front = torch.tensor([checksum, len(content)])
        self.move(front)
        if front[0] != checksum:
            raise problems.OTHER_BYTES(rank=self._group.rank, what=request)
        packed = torch.frombuffer(bytearray(content or int(front[1])), dtype=torch.uint8)
        self.move(packed)
        if not self.reads:
            value, error = pickle.loads(packed.numpy().tobytes())
        if error is not None:
            raise error
        return cast(T, value)

    def tensors(self, request: str, read: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Contiguous tensors in host memory that `read` gives on rank 0; errors as in `hand`."""
        result: dict[str, Tensor] = {}

        def contents() -> dict[str, tuple[torch.Size, torch.dtype]]:
            result.update(read())
            return {name: (tensor.shape, tensor.dtype) for name, tensor in result.items()}

        for name, (shape, dtype) in self.hand(request, contents).items():
            if not self.reads:
                result[name] = torch.empty(shape, dtype=dtype)
            for piece in torch.split(result[name].view(-1).view(torch.uint8), PIECE):
                self.move(piece)
        return result

    def move(self, tensor: Tensor) -> None:
        """Overwrite `tensor`, in host memory, with rank 0's."""
        if not tensor.numel():
            return
        there = tensor.to(self._device)
        if self._source is not None:
            self._wait([dist.P2POp(dist.irecv, there, self._source, self._group.channel)])
        self._wait([dist.P2POp(dist.isend, there, rank, self._group.channel) for rank in self._targets])
        if there is not tensor:
            tensor.copy_(there)

    def _wait(self, calls: Sequence[dist.P2POp]) -> None:
        if calls:
            self._group.wait_for_messages(dist.batch_isend_irecv(list(calls)))


@contextmanager
def read_once(storage: Storage, group: Group) -> Iterator[Storage]:
    """A read-only view of the storage that all ranks use together: rank 0 reads, and the others get the same."""
    if group.size == 1:
        yield storage
        return
    relay = Relay(group)
    yield cast(Storage, _ReadOnce(storage, relay))
    relay.hand(f"the checkpoints of {storage.shown}", lambda: None)  # a rank that asks for more gets an error


class _ReadOnce:
    """The reading half of a storage, on every rank."""

    def __init__(self, storage: Storage, relay: Relay) -> None:
        self.shown, self.fences = storage.shown, storage.fences
        self._storage, self._relay = storage, relay

    def read(self, path: str) -> bytes:
        return self._relay.hand(f"read {path}", lambda: self._storage.read(path))

    def list(self, folder: str) -> list[Item]:
        return self._relay.hand(f"list {folder}", lambda: self._storage.list(folder))

    def tree(self, folder: str) -> Mapping[str, Sequence[Item]]:
        return self._relay.hand(f"tree {folder}", lambda: self._storage.tree(folder))

    def exists(self, path: str) -> bool:
        return self._relay.hand(f"look at {path}", lambda: self._storage.exists(path))

    @contextmanager
    def open(self, path: str) -> Iterator[Reading]:
        reading = _Relayed(self._storage, path, self._relay)
        try:
            yield reading
        finally:
            reading.close()


class _Relayed:
    """A file that rank 0 reads, a piece at a time."""

    def __init__(self, storage: Storage, path: str, relay: Relay) -> None:
        self._path, self._relay = path, relay
        self._piece = torch.empty(PIECE, dtype=torch.uint8)
        self._bytes = memoryview(cast(Any, self._piece.numpy()))
        self._pieces = self._read(storage)
        self._at = self._end = 0
        self._next()  # so a missing file raises where it is opened

    def readinto(self, buffer: memoryview, /) -> int:
        if self._at == self._end:
            self._next()
        size = min(len(buffer), self._end - self._at)
        buffer[:size] = self._bytes[self._at : self._at + size]
        self._at += size
        return size

    def close(self) -> None:
        self._pieces.close()

    def _next(self) -> None:
        self._at = 0
        self._end = self._relay.hand(f"open {self._path}", lambda: next(self._pieces, 0))
        if self._end:
            self._relay.move(self._piece[: self._end])

    def _read(self, storage: Storage) -> Any:
        """On rank 0, fill the buffer again and again, and yield how many bytes."""
        with storage.open(self._path) as reading:  # inside, errors of the system become StorageErrors
            while size := reading.readinto(self._bytes):
                yield size
