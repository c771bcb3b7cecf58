"""The watchdog over the trials of a sweep, in the driver: one that is silent for too long is ended, and Tune begins it again."""

from __future__ import annotations

from typing import Any

import ray

from lockstep.attempts.hung_workers import end_with_stacks, hung
from lockstep.clusters.bounded_calls import unanswered
from lockstep.driver.hang_limit import Patience
from lockstep.driver.run_view import RunView
from lockstep.running_time import running_s
from lockstep.spec.fields import Faults
from lockstep.sweeps.recorders import GOES_ON, NEWS_S, WHOSE, answer_of_recorders

ASK_S = 1.0
"""How often the trials are listened to."""


class SweepWatchdog:
    """Listens to the trials of a sweep through their recorders."""

    def __init__(self, recorders: Any, faults: Faults) -> None:
        self._recorders, self._faults = recorders, faults
        self._patience: dict[tuple[int, int], Patience] = {}
        self._ended: set[tuple[int, int]] = set()
        self._asked: Any = None
        self._asked_at = 0.0

    def end_hung(self) -> dict[int, str]:
        """End the trials that hang; why, by their number. The stacks of their ranks go into their records.

        SilentError where the recorders themselves are lost, or do not answer for NEWS_S.
        """
        reasons = {}
        for number, view in self._views().items():
            attempt = (number, view.attempt)
            patience = self._patience.setdefault(
                attempt, Patience(self._faults.longest_silence_s, self._faults.longest_start_s)
            )
            if attempt not in self._ended and patience.is_over(view.signs_of_life, running_s()):
                self._ended.add(attempt)
                name = f"stacks-attempt-{view.attempt}.txt"
                members = [view.members[rank] for rank in sorted(view.members)]
                self._recorders.document.remote(str(number), name, end_with_stacks(members))
                reasons[number] = str(hung(patience, view.stage_ends, name))
        return reasons

    def _views(self) -> dict[int, RunView]:
        """What the recorders have answered since the last call, if they have; they are asked again. Never waits."""
        answer: dict[int, RunView] = {}
        if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
            answer, self._asked = answer_of_recorders(self._asked, NEWS_S), None
        elif self._asked is not None and running_s() - self._asked_at > NEWS_S:
            raise unanswered(WHOSE, NEWS_S, GOES_ON)
        if self._asked is None and running_s() - self._asked_at >= ASK_S:
            self._asked, self._asked_at = self._recorders.views.remote(), running_s()
        return answer
