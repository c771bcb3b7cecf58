"""A backend whose messages are like kernels of NCCL: one that waits for a lost rank waits until it is aborted, and then ends with anything in its memory.

It sends by gloo. What NCCL has besides, streams of a device on which the host only enqueues, needs a device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.communication.gloo_sockets import connected, opened_since, shut

NAME = "kernels"

LOOK_S = 0.05


class _Kernel(dist._Work):
    """A message under way; `into` is the memory that it fills."""

    def __init__(self, work: Any, into: Sequence[Tensor], aborted: threading.Event) -> None:
        super().__init__()
        self._work, self._into, self._aborted, self._lost = work, into, aborted, False

    def is_completed(self) -> bool:
        return self._aborted.is_set() or (not self._lost and bool(self._work.is_completed()))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait as the device does: no loss and no time ends it."""
        while not self._aborted.wait(LOOK_S if self._lost else 0.0):
            try:
                self._work.wait(timedelta(seconds=LOOK_S))
                return True
            except RuntimeError:
                self._lost |= bool(self._work.is_completed())
        for tensor in self._into:
            tensor.view(-1).view(torch.uint8).fill_(255)  # NaN, -1, true: whoever reads it is misled
        return True


class Kernels(dist.ProcessGroup):
    """The group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        earlier = connected()
        self._inner = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._sockets = opened_since(earlier)
        self._aborted = threading.Event()

    def getBackendName(self) -> str:
        return NAME

    # torch keeps it in the backends of a group, of which this one has none.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def abort(self) -> None:
        self._aborted.set()
        shut(self._sockets)

    def shutdown(self) -> None: ...

    def _begun(self, call: Callable[[], Any], into: Sequence[Tensor]) -> Any:
        try:
            return _Kernel(call(), into, self._aborted)
        except RuntimeError:  # a connection is closed already
            return _Kernel(_Never(), into, self._aborted)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:  # type: ignore[override]
        received = tensors if opts.rootRank != self.rank() else []
        return self._begun(lambda: self._inner.broadcast(tensors, opts), received)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        return self._begun(
            lambda: self._inner.allgather(outputs, inputs), [each for row in outputs for each in row]
        )

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any = None) -> Any:  # type: ignore[override]
        return self._begun(lambda: self._inner._allgather_base(output, own), [output])

    all_gather_single = _allgather_base
    """Its name in newer torch."""

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:  # type: ignore[override]
        return self._begun(
            lambda: self._inner.gather(outputs, inputs, opts), [each for row in outputs for each in row]
        )

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        return self._begun(lambda: self._inner.allreduce(tensors, opts), tensors)

    def alltoall_base(self, output: Tensor, message: Tensor, into: Any, of: Any, opts: Any = None) -> Any:  # type: ignore[override]
        return self._begun(lambda: self._inner.alltoall_base(output, message, into, of), [output])

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        return self._begun(lambda: self._inner.send(tensors, to, tag), [])

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        return self._begun(lambda: self._inner.recv(tensors, source, tag), tensors)

    def barrier(self, opts: Any = None) -> Any:  # type: ignore[override]
        return self._begun(lambda: self._inner.barrier(), [])


class _Never:
    """A message that nobody takes."""

    def is_completed(self) -> bool:
        return True

    def wait(self, _: timedelta) -> bool:
        raise RuntimeError("connection closed by peer")


def register() -> None:
    """Make the backend known to torch in this process."""

    def made(store: Any, rank: int, size: int, timeout: timedelta) -> Kernels:
        return Kernels(store, rank, size, timeout)

    dist.Backend.register_backend(NAME, made, devices=["cpu"])
