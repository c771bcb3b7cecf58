"""The watchdog over the trials of a sweep, in the driver: one that is silent for too long is ended, and Tune begins it again."""

from __future__ import annotations

import time
from typing import Any

import ray

from lockstep.attempts.watchdog import Patience, end
from lockstep.driver.run_view import RunView

ASK_S = 1.0
"""How often the trials are listened to."""


class Watch:
    """Listens to the trials of a sweep through their recorders; `floor_s` is the shortest silence that is too long."""

    def __init__(self, recorders: Any, floor_s: float) -> None:
        self._recorders, self._floor_s = recorders, floor_s
        self._patience: dict[tuple[int, int], Patience] = {}
        self._ended: set[tuple[int, int]] = set()
        self._asked: Any = None
        self._asked_at = 0.0

    def end_hung(self) -> dict[int, str]:
        """End the trials that hang; why, by their number. What their ranks were doing goes into their records."""
        found = {}
        for number, view in self._views().items():
            attempt = (number, view.attempt)
            patience = self._patience.setdefault(attempt, Patience(self._floor_s))
            if attempt not in self._ended and patience.is_over(view.signs_of_life, time.monotonic()):
                self._ended.add(attempt)
                name = f"stacks-attempt-{view.attempt}.txt"
                members = [view.members[rank] for rank in sorted(view.members)]
                self._recorders.document.remote(str(number), name, end(members))
                found[number] = (
                    f"no rank made progress for {patience.bound_s:.0f} s; what each was doing is in {name}"
                )
        return found

    def _views(self) -> dict[int, RunView]:
        """What the recorders have answered since the last call, if they have; they are asked again. Never waits."""
        answer: dict[int, RunView] = {}
        if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
            answer, self._asked = ray.get(self._asked), None
        if self._asked is None and time.monotonic() - self._asked_at >= ASK_S:
            self._asked, self._asked_at = self._recorders.views.remote(), time.monotonic()
        return answer
