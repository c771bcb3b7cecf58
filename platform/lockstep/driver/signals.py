"""SIGTERM and SIGINT while a run goes on: the first asks it to stop after the next step, a second one ends it at once."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any


class StopSignal:
    """A context in which the two signals are noted. `number` is the signal that came, or None."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def asked(self) -> bool:
        """Whether a signal came."""
        return self.number is not None

    def ask(self) -> None:
        """Stop as a first SIGTERM would have it."""
        if self.number is None:
            self.number = signal.SIGTERM

    def wait(self, seconds: float) -> None:
        """Sleep, but no longer than until a signal comes."""
        until = time.monotonic() + seconds
        while not self.asked and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # python allows handlers nowhere else
            self._before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
            self.listen()
        return self

    def listen(self) -> None:
        """Take the signals over, again where a library took them meanwhile."""
        for kind in self._before:
            signal.signal(kind, self._note)

    def __exit__(self, *_: object) -> None:
        for kind, handler in self._before.items():
            signal.signal(kind, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number
