"""The clock of limits on other processes: it counts the seconds in which this process could run.

A queue may suspend a job (SIGSTOP, the freezer of its cgroup), and Ctrl-Z a command. Then all processes of a run stand still together
while the wall's clock goes on: by that clock each of them would have been silent for too long when it continues.
"""

from __future__ import annotations

import os
import threading
import time

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
