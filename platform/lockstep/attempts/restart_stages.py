"""Where the seconds of a restart go: the stages between the last step of one attempt and the first of the next. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping

STAGES = (
    "detection",
    "teardown",
    "decision",
    "placement",
    "processes",
    "group",
    "arrival",
    "checkpoint",
    "preparation",
    "first_step",
)
"""In order; docs/attempts.md explains each."""


class StageEnds:
    """When each stage of an attempt ended, in Unix seconds; the first report counts."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}

    def note(self, stage: str, at: float | None = None) -> None:
        """Note that the stage ends now, or ended at `at`."""
        self.at.setdefault(stage, time.time() if at is None else at)


def underway(ends: Mapping[str, float]) -> str:
    """The stage that an attempt is in: the one after the last that is known to have ended. The first two belong to the previous attempt."""
    ended = [number for number, stage in enumerate(STAGES) if stage in ends and number > 1]
    return STAGES[min(max(ended, default=1) + 1, len(STAGES) - 1)]


def breakdown(last_step_at: float, before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Seconds by stage, from the last step of an attempt that ended (`before`) to the first step of the next (`now`).

    They add up to the whole. A stage whose end is unknown counts in the one after it.
    """
    ends = {stage: (before if stage in STAGES[:2] else now).get(stage) for stage in STAGES}
    seconds, mark = {}, last_step_at
    for stage, end in ends.items():
        if end is not None:
            seconds[stage] = max(0.0, end - mark)
            mark = max(mark, end)
    return seconds
