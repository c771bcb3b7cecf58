"""Threads of a driver that use Ray, and the end of its connection, which no thread may use afterwards.

Ray may end a process in which a thread calls it after the connection has ended: with exit code 1, before an error is reported.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from lockstep.running_time import running_s

LEAVING_S = 5.0
"""How long the threads may take to end, all together: one may wait for a cluster that is gone."""

SLICE_S = 0.2
"""How often a wait looks whether the connection is about to end."""

leaving = threading.Event()
"""Set while the connection ends."""

_threads: list[threading.Thread] = []


def in_background(work: Callable[..., object], *args: Any, name: str) -> None:
    """Run `work` in a daemon thread, for whose end `disconnect` waits. Work without an end of its own must return once `leaving` is set."""
    thread = threading.Thread(target=work, args=args, name=name, daemon=True)
    _threads[:] = [*(earlier for earlier in _threads if earlier.is_alive()), thread]
    thread.start()


def answered(reference: Any, limit_s: float) -> bool:
    """Wait for a call of an actor, in the background. False after `limit_s`, or if the connection is about to end."""
    import ray

    until = running_s() + limit_s
    while not leaving.is_set() and running_s() < until:
        if ray.wait([reference], timeout=SLICE_S)[0]:
            return True
    return False


def disconnect() -> None:
    """End the connection, once no other thread uses it, and with it a cluster that began with it."""
    import ray

    leaving.set()
    until = time.monotonic() + LEAVING_S
    for thread in _threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))
    try:
        ray.shutdown()
    finally:
        leaving.clear()
