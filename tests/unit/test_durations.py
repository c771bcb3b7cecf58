"""A duration is written in minutes and seconds, and in hours where there are hours; its seconds never reach 60."""

from __future__ import annotations

import pytest

from lockstep.durations import duration_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (0.6, "0:01"),
        (59.7, "1:00"),
        (61.4, "1:01"),
        (3599.6, "1:00:00"),
        (3723, "1:02:03"),
        (45250, "12:34:10"),
        (360_000, "100:00:00"),
    ],
)
def test_a_duration_has_hours_where_there_are_hours(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
