"""Answers that are waited for, each with a limit: what does not answer in time is named in one line."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from lockstep.errors import SilentError

T = TypeVar("T")


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
