"""Groups whose messages are kernels of a device, as NCCL's are, and how they are broken off.

Such a kernel waits for a lost rank until its communicator is aborted from outside. Then it ends like any other, and leaves anything in the memory that it
should have filled: the host hears of neither. So whoever breaks a group off notes that first, and whoever uses what a group has given looks at the note before
(`Group.settle`). Where a communicator does not let go in time, the process ends: the others go on without it as well.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lockstep.communication.waits import Waits
from lockstep.running_time import join

T = TypeVar("T")

ABORT_S = 30.0
"""How long a communicator may take to be aborted, and a device to be done with what it was told before."""

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""What torch does by itself where a communicator fails: by default its watchdog ends the process."""


def backend_of(device: torch.device) -> str:
    """The backend by which workers on such devices talk."""
    return "nccl" if device.type == "cuda" else "gloo"


def has_kernels(channel: Any) -> bool:
    """Whether the messages of a process group are kernels of a device."""
    return bool(dist.get_backend(channel) != "gloo")


def options_of(backend: str) -> Any:
    """The options of a group that can be broken off: calls of NCCL return at once, so that none of them waits in the host for a lost rank."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.blocking = 0
    return options


@contextmanager
def errors_left_alone() -> Iterator[None]:
    """Where a communicator of a group that is made in the block fails, torch leaves that to `KernelWaits`: its watchdog would end the process."""
    previous = os.environ.get(_HANDLING)
    os.environ[_HANDLING] = "0"
    try:
        yield
    finally:
        del os.environ[_HANDLING]
        os.environ |= {} if previous is None else {_HANDLING: previous}


def end_stuck() -> None:
    """End this process, whatever it waits for: its device does not let go of a group that has lost a member."""
    os.write(
        2,
        b"lockstep: the communicator of a group that has lost a worker could not be aborted; this worker ends, and the others go on\n",
    )
    os._exit(1)


class KernelWaits(Waits):
    """The waits of a group of kernels. The device waits, and the host only where it reads what was sent."""

    def __init__(self, channel: Any, device: torch.device, stuck: Callable[[], object] = end_stuck) -> None:
        """`stuck` is called where `channel` cannot be aborted within ABORT_S."""
        super().__init__()
        self._channel, self._device, self._stuck = channel, device, stuck
        self._aborting = threading.Lock()
        self._aborted = False

    def end(self) -> None:
        """Make every wait, now or later, raise an error, and every kernel of the group end. Returns once its communicator is aborted."""
        super().end()  # first: what a kernel gives that is aborted must not be used
        with self._aborting:
            if not self._aborted:
                self._bounded(self._channel.abort)
                self._aborted = True

    def drain(self) -> None:
        """Wait until the device is done with everything that it was told, after `end`."""
        self._bounded(self._synchronise)

    def _bounded(self, call: Callable[[], object]) -> None:
        thread = threading.Thread(target=call, name="lockstep-abort", daemon=True)
        thread.start()
        if not join(thread, ABORT_S):
            self._stuck()

    def for_collective(self, work: Any) -> None:
        """Have the device wait for a collective. RuntimeError where the group is broken off."""
        work.wait()
        self.look()

    def for_call(self, call: Callable[[], T]) -> T:
        """The result of a call that waits in the host. RuntimeError where the group is broken off, also if the call fails by what it was given."""
        try:
            return call()
        finally:
            self.look()

    def settle(self) -> None:
        """Wait in the host until all that was received is there. RuntimeError where the group is broken off."""
        self._synchronise()
        self.look()

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
