"""The way of a worker's events to the actor that takes them: in packs, and nothing waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray

from lockstep.attempts.mailbox import ANSWER_S, Asked
from lockstep.clusters.answers import answer_of
from lockstep.record.events import Alive, Event, Restored, StepRow

FLUSH_S = 0.25
"""How long rows are gathered before they are sent: a call costs about 0.2 ms of the training thread."""

ALIVE_S = 1.0
"""How often an evaluation or a save tells that it goes on."""

ROWS_PER_CALL = 10_000
"""Rows of an earlier attempt that are sent at once."""


class Sender:
    """Carries events to an actor. `post` calls it with a list of them, and its answer, which takes `answer_s` at the most, is what is asked of the workers.

    Used by several threads: the one that trains, the one that saves, those that sample and read what is printed.
    """

    def __init__(self, post: Callable[[list[Event]], Any], answer_s: float = ANSWER_S) -> None:
        self._post, self._answer_s = post, answer_s
        self._lock = threading.Lock()
        self._waiting: list[Event] = []
        self._sent_at = self._alive_at = 0.0
        self._answer: Any = None
        self._newest: Any = None
        self._asked = Asked()
        self._saves = 0

    def tell(self, event: Event) -> None:
        """Send an event: at once, but for rows, which wait for others a little while."""
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
        asked, self._saves = self._asked.saves > self._saves, self._asked.saves
        return asked

    def regroup(self) -> int:
        """The attempt whose workers the driver asks to form another group after their next step."""
        return self._asked.regroup

    def close(self) -> None:
        """Send what waits, and wait until all that was sent has arrived. SilentError where it has not in time."""
        with self._lock:
            if self._waiting:
                self._flush(time.monotonic())
            newest = self._newest
        if newest is not None:
            answer_of(newest, "whoever takes the events of this worker", self._answer_s)

    def _flush(self, now: float) -> None:
        events, self._waiting = self._waiting, []
        self._newest = self._post(
            events
        )  # calls of one handle arrive in order: the newest answer is the last
        self._answer = self._answer if self._answer is not None else self._newest
        self._sent_at = now

    def _hear(self) -> None:
        """Take in an answer that has come."""
        with self._lock:
            if self._answer is not None and ray.wait([self._answer], timeout=0)[0]:
                self._asked, self._answer = ray.get(self._answer), None


def _in_parts(event: Event) -> Iterator[Event]:
    """The event, a long history in several."""
    if not isinstance(event, Restored) or len(event.steps) <= ROWS_PER_CALL:
        yield event
        return
    yield Restored((), (), event.segments)
    for start in range(0, len(event.steps), ROWS_PER_CALL):
        yield Restored(event.steps[start : start + ROWS_PER_CALL], ())
    yield Restored((), event.evaluations, observations=event.observations)
