"""The driver's own calls to storage, tried again where what went wrong may pass: a disk that is full for a moment ends no run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lockstep.errors import StorageError, first_line
from lockstep.failure_kinds import kind_of

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, *[30.0] * 20)
"""Ten minutes and a half: as long as a run waits for workers by default."""

T = TypeVar("T")


def patiently(call: Callable[[], T], wait: Callable[[float], None], say: Callable[[str], None]) -> T:
    """What `call` returns. A failure of storage that may pass is told to `say` and tried again after each of PAUSES_S; then it is raised."""
    for pause_s in PAUSES_S:
        try:
            return call()
        except (OSError, StorageError) as error:
            if kind_of(error).kind != "storage":
                raise
            say(f"{first_line(error)}; tried again in {pause_s:.0f} s")
            wait(pause_s)
    return call()
