"""Calls that a store is still to be made, in order.

A call leaves the outbox only when it has succeeded or was refused for good. While the store does not answer, the first
call is tried again with growing pauses and the others wait behind it: nothing is dropped and nothing overtakes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from lockstep.errors import RecordError, first_line
from lockstep.record.run_store import UnavailableError

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0


class _Outage(NamedTuple):
    """The store has not answered since `since` (monotonic seconds), in so many tries."""

    since: float
    tries: int
    error: UnavailableError


class Outbox:
    """Filled and delivered by one thread; `failure` may be read by any."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._calls: deque[Callable[[], None]] = deque()
        self._outage: _Outage | None = None
        self._refused: RecordError | None = None
        self.delivered = 0
        """Calls that were made, for whoever waits to see that it goes on."""

    def __len__(self) -> int:
        return len(self._calls)

    def send(self, call: Callable[..., None], *arguments: Any) -> None:
        """Have a call made after those that wait."""
        self._calls.append(partial(call, *arguments))

    def deliver(self) -> None:
        """Make the calls that wait, up to the first that the store does not answer."""
        while self._calls:
            try:
                self._calls[0]()
            except UnavailableError as error:
                before = self._outage or _Outage(time.monotonic(), 0, error)
                self._outage = before._replace(tries=before.tries + 1, error=error)
                return
            except Exception as error:  # noqa: BLE001 - what one call breaks on must not cost the calls behind it
                self.refuse(error)
            self._outage = None
            self._calls.popleft()
            self.delivered += 1

    def refuse(self, error: Exception) -> None:
        """Note what cannot be recorded. The first is kept: it is the cause, and others mostly follow from it."""
        told = error if isinstance(error, RecordError) else RecordError(f"record: {first_line(error)}")
        self._refused = self._refused or told

    def give_up(self, kept: str) -> None:
        """No more tries; `kept` says where what was recorded is all the same."""
        if self._outage and self._calls:
            self.refuse(RecordError(f"{self._outage.error}; calls not made: {len(self._calls)}; {kept}"))

    @property
    def away(self) -> str:
        """What the store's absence looks like, while it does not answer."""
        return str(self._outage.error) if self._outage else ""

    @property
    def away_since(self) -> float:
        """When the store fell silent, in monotonic seconds; 0 where it answers."""
        return self._outage.since if self._outage else 0.0

    def pause_s(self) -> float:
        """How long to wait before the next delivery; 0 where the last one met no outage."""
        if not self._outage:
            return 0.0
        return float(min(_SHORTEST_PAUSE_S * 2 ** (self._outage.tries - 1), _LONGEST_PAUSE_S))

    def failure(self) -> RecordError | None:
        """What was refused for good, or what an outage that has lasted longer than the patience looks like."""
        outage = self._outage
        if self._refused or not outage:
            return self._refused
        return outage.error if time.monotonic() - outage.since > self._patience_s else None
