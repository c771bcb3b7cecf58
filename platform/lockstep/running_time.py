"""The clock of limits on other processes: it counts the seconds in which this process could run.

A queue may suspend a job (SIGSTOP, the freezer of its cgroup), and Ctrl-Z a command. Then all processes of a run stand still together
while the wall's clock goes on: by that clock each of them would have been silent for too long when it continues.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

MOST_S = 3.0
"""The most that counts of the time between two readings: whoever waits reads the clock more often. This process hardly ran in a longer gap."""


class _RunningTime:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counted_s, self._read_at = 0.0, time.monotonic()
        os.register_at_fork(after_in_child=self._unlock)

    def read_s(self) -> float:
        with self._lock:
            now = time.monotonic()
            self._counted_s += min(now - self._read_at, MOST_S)
            self._read_at = now
            return self._counted_s

    def _unlock(self) -> None:
        self._lock = threading.Lock()  # a thread that is not in the child may hold the other one


running_s = _RunningTime().read_s
"""Seconds, from an arbitrary start. While something is waited for, read it at least once every MOST_S."""

SLICE_S = 1.0
"""Seconds of one call of what waits, so that the clock is read often enough."""


def wait_for(wait: Callable[[float], bool], limit_s: float) -> bool:
    """Call `wait`, such as an `Event.wait`, with a few seconds at a time, until it returns True or `limit_s` are over. Returns what it returned last."""
    until = running_s() + limit_s
    while (remaining_s := until - running_s()) > 0:
        if wait(min(SLICE_S, remaining_s)):
            return True
    return wait(0.0)


def join(thread: threading.Thread, limit_s: float) -> bool:
    """Wait for at most `limit_s` until a thread has ended. Returns whether it has."""

    def joined(seconds: float) -> bool:
        thread.join(seconds)
        return not thread.is_alive()

    return wait_for(joined, limit_s)
