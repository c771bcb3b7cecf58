"""Where the time between a command and its first step goes."""

from __future__ import annotations

import time
from collections.abc import Mapping


class StageEnds:
    """When each stage of a start ended, in Unix seconds; the first report counts."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}

    def note(self, stage: str, at: float | None = None) -> None:
        """Note that the stage ends now, or ended at `at`."""
        self.at.setdefault(stage, time.time() if at is None else at)


def seconds_by_stage(
    began_at: float, ends: Mapping[str, float], first_step_at: float | None
) -> dict[str, float]:
    """Seconds of each stage from `began_at` to the end of the first step, in the order in which they ended. All times are Unix seconds.

    They add up to the whole. Nothing where no step was done.
    """
    if first_step_at is None or first_step_at < began_at:
        return {}
    at = {stage: end for stage, end in ends.items() if began_at <= end <= first_step_at}
    at["first_step"] = first_step_at
    seconds, mark = {}, began_at
    for stage, end in sorted(at.items(), key=lambda item: item[1]):
        seconds[stage], mark = end - mark, end
    return seconds


_WIDTH = 40
"""Columns of the longest bar."""


def picture(seconds: Mapping[str, float]) -> str:
    """The stages as lines with bars, under a heading with the whole."""
    if not seconds:
        return "no step was done: there is no start to show"
    longest, name_width = max(*seconds.values(), 1e-9), max(map(len, seconds))
    lines = [f"{sum(seconds.values()):.1f} s from the command to the end of its first step"]
    for stage, spent in seconds.items():
        bar = "█" * round(spent / longest * _WIDTH)
        lines.append(f"  {stage:<{name_width}}  {spent:6.2f}  {bar}".rstrip())
    return "\n".join(lines)
