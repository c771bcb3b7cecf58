"""Repeats the driver's own calls to storage when a failure may pass: a disk that is full for a moment ends no run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lockstep.errors import StorageError, first_line
from lockstep.failure_kinds import kind_of

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, *[30.0] * 20)
"""Ten and a half minutes in all: as long as a run waits for workers by default."""

T = TypeVar("T")


def patiently(call: Callable[[], T], wait: Callable[[float], object], say: Callable[[str], None]) -> T:
    """The result of `call`. A storage failure that may pass is reported to `say`, and the call repeated after each of PAUSES_S; then it is raised.

    It is raised too when `wait` returns True: a signal cut the wait short.
    """
    for pause_s in PAUSES_S:
        try:
            return call()
        except (OSError, StorageError) as error:
            if kind_of(error).kind != "storage":
                raise
            say(f"{first_line(error)}; tried again in {pause_s:.0f} s")
            if wait(pause_s):
                raise
    return call()
