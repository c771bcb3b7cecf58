"""Where the seconds of a restart go: the stages between the last step of one attempt and the first of the next. Pure."""

from __future__ import annotations

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
    "data",
    "model",
    "rehearsal",
    "preparation",
    "first_step",
)
"""In order; docs/attempts.md explains each."""


def underway(ends: Mapping[str, float]) -> str:
    """The stage that an attempt is in: the one after the last that is known to have ended. The first two belong to the previous attempt."""
    ended = [number for number, stage in enumerate(STAGES) if stage in ends and number > 1]
    return STAGES[min(max(ended, default=1) + 1, len(STAGES) - 1)]


def breakdown(
    last_step_at: float, previous_ends: Mapping[str, float], ends: Mapping[str, float]
) -> dict[str, float]:
    """Seconds by stage, from the last step of an attempt that ended to the first step of the next. `previous_ends` and `ends` are the times at which the stages of each ended.

    They add up to the whole. The seconds of a stage whose end is unknown count for the stage after it.
    """
    seconds, mark = {}, last_step_at
    for stage in STAGES:
        end = (previous_ends if stage in STAGES[:2] else ends).get(stage)
        if end is not None:
            seconds[stage] = max(0.0, end - mark)
            mark = max(mark, end)
    return seconds
