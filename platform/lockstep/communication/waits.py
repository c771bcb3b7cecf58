"""Waits for other ranks that end when the group is broken off, whether or not gloo notices.

When a connection ends, gloo (in torch 2.13) raises in most waits, but not in one for a message that was half sent or half received
over it: that wait lasts until the timeout of a collective. So a CPU group never waits inside gloo alone. It waits for a collective
in short pieces; for anything without such a wait, a thread of the group's own waits, which may be left behind.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch.distributed import Work

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(minutes=15)
"""How long a rank waits for the others in one collective before it gives up."""

LOOK_S = 0.1
"""Seconds between a wait's checks whether its group was broken off or has lost a connection."""


class Waits:
    """The waits of one group. The training thread waits; any other thread may end the wait."""

    def __init__(self, is_cut: Callable[[], bool] = lambda: False) -> None:
        """`is_cut`: whether one of the group's connections is closed."""
        self._is_cut = is_cut
        self._ended = threading.Event()
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] | None = None
        self.on_cut: Callable[[], None] = _nothing
        """Called repeatedly while something is waited for and a connection is closed."""

    def end(self) -> None:
        """Make every wait, now or later, raise an error."""
        self._ended.set()
        if self._calls is not None:
            self._calls.put(None)

    @property
    def is_ended(self) -> bool:
        """Whether the group was broken off."""
        return self._ended.is_set()

    def settle(self) -> None:
        """Wait until all that was received is there: a wait for it has seen to that."""

    def for_collective(self, work: Work) -> None:
        """Wait for a collective. Raises what it fails with, or RuntimeError where the group is broken off."""
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_S))
                return
            except RuntimeError:  # it failed, or is not done yet
                if work.is_completed():
                    work.wait()
                    return
            self.look()

    def for_call(self, call: Callable[[], T]) -> T:
        """The result of a call that waits for other ranks inside itself. Raises what it fails with, or RuntimeError where the group is broken off."""
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            weakref.finalize(self, self._calls.put, None)
            threading.Thread(target=_called, args=(self._calls,), name="lockstep-waits", daemon=True).start()
        future: Future[T] = Future()
        self._calls.put((future, call))
        while True:
            try:
                return future.result(LOOK_S)
            except TimeoutError:  # of the call itself, or of this look
                if future.done():
                    return future.result()
            self.look()

    def look(self) -> None:
        """Called now and then during a wait. RuntimeError where the group is broken off."""
        if self._ended.is_set():
            raise RuntimeError("connection closed by peer: the group was broken off")
        if self._is_cut():
            self.on_cut()


def _called(calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (item := calls.get()) is not None:
        future, call = item
        del item
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            del call
            future.set_exception(error)
        else:
            del call  # free what it holds before the waiting thread goes on
            future.set_result(result)
            del result
        del future


def _nothing() -> None: ...
