"""Answers that are waited for, each with a limit: what does not answer in time is named in one line, or ended."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]

from lockstep.errors import SilentError

T = TypeVar("T")

DEAF_S = 2.0
"""How long a process may take to heed Ray's word that it is to end; one that is stopped never does."""


def answer_of(reference: Any, whose: str, limit_s: float) -> Any:
    """What a call of an actor or a task of Ray returns. SilentError after `limit_s`; raises what the call raised."""
    import ray

    try:
        return ray.get(reference, timeout=limit_s)
    except ray.exceptions.GetTimeoutError as error:
        raise SilentError(f"{whose} did not answer for {limit_s:.0f} s") from error


def within(limit_s: float, whose: str, call: Callable[[], T]) -> T:
    """What `call` returns, which may wait without a limit of its own: it runs in a thread that is left alone after `limit_s`.

    SilentError after that; raises what the call raised. A signal is heard meanwhile.
    """
    returned: list[T] = []
    raised: list[Exception] = []

    def work() -> None:
        try:
            returned.append(call())
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits
            raised.append(error)

    thread = threading.Thread(target=work, name="lockstep-call", daemon=True)
    thread.start()
    thread.join(limit_s)
    for error in raised:
        raise error
    for value in returned:
        return value
    raise SilentError(f"{whose} did not answer for {limit_s:.0f} s")


def end_actor(actor: Any, pid: int | None) -> None:
    """End an actor, and what it locks, now: by Ray's word, else by SIGKILL to `pid`, its process on this node.

    Ray tells a driver of each process that ends without its word, as of a worker that the kernel's OOM killer may have ended.
    """
    import ray

    ray.kill(actor)
    if pid is None:
        return
    until = time.monotonic() + DEAF_S
    while _runs(pid):
        if time.monotonic() > until:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return False
    return bool(status != psutil.STATUS_ZOMBIE)
