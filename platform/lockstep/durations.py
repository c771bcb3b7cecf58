"""Writes a duration for a person."""

from __future__ import annotations


def duration_text(seconds: float) -> str:
    """A duration of `seconds`, which are not negative: `1:02:03`, or `2:03` below an hour."""
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"
