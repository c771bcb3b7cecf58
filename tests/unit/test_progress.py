"""The line of progress: a rate, and so a time left, only once there is one."""

from __future__ import annotations

from lockstep.driver.progress import FEW_STEPS, Rate, describe
from tests.unit.record.rows import step_row


def shown(rate: Rate, step: int, wall_clock: float, attempt: int = 1) -> str:
    row = step_row(step, wall_clock=wall_clock, attempt=attempt)
    rate.add(row)
    return describe(row, None, 1000, rate)


def test_no_time_left_is_told_from_the_first_steps() -> None:
    """They are slower than all that follow, and on Ray two polls may be one step apart."""
    rate = Rate()
    assert "left" not in shown(rate, 1, 100.0)
    assert "left" not in shown(rate, 2, 130.0)
    assert "16:34 left" in shown(rate, 1 + FEW_STEPS, 100.0 + FEW_STEPS)


def test_a_resumed_run_does_not_count_the_time_in_between() -> None:
    """The rows of the attempt before are shown first."""
    rate = Rate()
    for step in range(1, 20):
        shown(rate, step, float(step))
    assert "left" not in shown(rate, 20, 90_000.0, attempt=2)
    assert "16:15 left" in shown(rate, 25, 90_005.0, attempt=2)
