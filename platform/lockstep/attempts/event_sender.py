"""Sends a worker's events to the actor that takes them, in batches and without waiting."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import ray

from lockstep.attempts.mailbox import ANSWER_S, Asked
from lockstep.clusters.bounded_calls import answer_of
from lockstep.record.events.union import Alive, Event, Restored
from lockstep.record.ledger.rows import StepRow

FLUSH_S = 0.25
"""Seconds for which rows are gathered before they are sent: a call costs the training thread about 0.2 ms."""

ALIVE_S = 1.0
"""Seconds between the signs of life of an evaluation or a save."""

HEARD_BEHIND = 8
"""The most answers that wait to be heard: a later one says all that an earlier one said."""

ROWS_PER_CALL = 10_000
"""The most rows of an earlier attempt in one call."""


class Sender:
    """Sends events to an actor. `post` calls it with a list of them; its answer says what is asked of the workers.

    `close` waits at most `answer_s` for the last answer. Used by several threads: those that train, save, sample, and read what is printed.
    """

    def __init__(self, post: Callable[[list[Event]], Any], answer_s: float = ANSWER_S) -> None:
        self._post, self._answer_s = post, answer_s
        self._lock = threading.Lock()
        self._waiting: list[Event] = []
        self._sent_at = self._alive_at = 0.0
        self._answers: deque[Any] = deque(maxlen=HEARD_BEHIND)
        """Those that have not been heard, oldest first."""
        self._newest: Any = None
        self._asked = Asked()
        self._saves = 0

    def tell(self, event: Event) -> None:
        """Send an event at once; rows wait a little for more."""
        with self._lock:
            now = time.monotonic()
            if isinstance(event, Alive):
                if now - self._alive_at < ALIVE_S:
                    return
                self._alive_at = now
            self._waiting.extend(_in_parts(event))
            if not isinstance(event, StepRow) or now - self._sent_at >= FLUSH_S:
                self._flush(now)

    def stop(self) -> bool:
        """Whether the driver asks the attempt to end after its next step."""
        self._hear()
        return self._asked.stop

    def save(self) -> bool:
        """Whether the driver has asked for a checkpoint since the last call."""
        requested, self._saves = self._asked.saves > self._saves, self._asked.saves
        return requested

    def regroup(self) -> int:
        """The number of the attempt whose workers the driver asks to form another group after their next step."""
        return self._asked.regroup

    def close(self) -> None:
        """Send what is waiting, and wait until everything sent has arrived. SilentError where it has not in time."""
        with self._lock:
            if self._waiting:
                self._flush(time.monotonic())
            newest = self._newest
        if newest is not None:
            answer_of(newest, "the receiver of this worker's events", self._answer_s)

    def _flush(self, now: float) -> None:
        events, self._waiting = self._waiting, []
        self._newest = self._post(
            events
        )  # calls of one handle arrive in order, so the newest one is answered last
        self._answers.append(self._newest)
        self._sent_at = now

    def _hear(self) -> None:
        """Take in the answers that have come. The newest one alone would not do: it is asked for just before."""
        with self._lock:
            while self._answers and ray.wait([self._answers[0]], timeout=0)[0]:
                self._asked = ray.get(self._answers.popleft())


def _in_parts(event: Event) -> Iterator[Event]:
    """The event; a long history is split into several."""
    if not isinstance(event, Restored) or len(event.steps) <= ROWS_PER_CALL:
        yield event
        return
    yield Restored((), (), event.segments)
    for start in range(0, len(event.steps), ROWS_PER_CALL):
        yield Restored(event.steps[start : start + ROWS_PER_CALL], ())
    yield Restored((), event.evaluations, observations=event.observations)
