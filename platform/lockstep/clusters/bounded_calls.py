"""Waits for answers with a limit: what does not answer in time is named in one line, or killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]

from lockstep.clusters import problems
from lockstep.errors import SilentError
from lockstep.running_time import SLICE_S, join, running_s

T = TypeVar("T")

DEAF_S = 2.0
"""How long a process may take to obey Ray's order to end; one that is stopped never does."""


def unanswered(whose: str, limit_s: float, advice: str | None = None) -> SilentError:
    """The error where something did not answer for `limit_s`; `advice` says what to do."""
    return problems.UNANSWERED(whose=whose, seconds=f"{limit_s:.0f}", advice=advice or "")


def answer_of(reference: Any, whose: str, limit_s: float, advice: str | None = None) -> Any:
    """The result of a call of an actor or a task of Ray. SilentError with `advice` after `limit_s`; raises what the call raised."""
    import ray

    try:
        return get_within(reference, limit_s)
    except ray.exceptions.GetTimeoutError as error:
        raise unanswered(whose, limit_s, advice) from error


def get_within(reference: Any, limit_s: float) -> Any:
    """As `ray.get` with a timeout, which counts no time in which this process was stopped."""
    import ray

    until = running_s() + limit_s
    while True:
        try:
            return ray.get(reference, timeout=max(0.0, min(SLICE_S, until - running_s())))
        except ray.exceptions.GetTimeoutError:
            if running_s() >= until:
                raise


def within(limit_s: float, whose: str, call: Callable[[], T]) -> T:
    """The result of `call`, which may wait without a limit of its own: it runs in a thread that is abandoned after `limit_s`.

    SilentError after that; raises what the call raised. Signals are handled meanwhile.
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
    join(thread, limit_s)
    for error in raised:
        raise error
    for value in returned:
        return value
    raise unanswered(whose, limit_s)


def end_actor(actor: Any, pid: int | None) -> None:
    """End an actor now, and with it what it locks: by Ray's order, else by SIGKILL to `pid`, its process on this node.

    SIGKILL comes last because Ray reports a process that ends without its order to the driver, as if the OOM killer might have ended it.
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
