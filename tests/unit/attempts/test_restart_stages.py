"""Where the seconds of a restart go: every one of them, once."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from lockstep.attempts.restart_stages import STAGES, breakdown, underway

times = st.floats(0.0, 100.0)


def test_each_stage_has_its_own_seconds() -> None:
    before = {"detection": 11.0, "teardown": 11.5, "placement": 3.0}
    now = {
        "decision": 12.0, "placement": 12.5, "processes": 15.0, "group": 15.5, "arrival": 15.6,
        "checkpoint": 16.0, "data": 16.25, "model": 16.375, "rehearsal": 16.875, "preparation": 17.0, "first_step": 17.25, "detection": 99.0,
    }  # fmt: skip
    found = breakdown(10.0, before, now)
    assert tuple(found) == STAGES
    assert [round(seconds, 6) for seconds in found.values()] == [
        1.0, 0.5, 0.5, 0.5, 2.5, 0.5, 0.1, 0.4, 0.25, 0.125, 0.5, 0.125, 0.25,
    ]  # fmt: skip


@given(
    st.dictionaries(st.sampled_from(STAGES[:2]), times), st.dictionaries(st.sampled_from(STAGES[2:]), times)
)
def test_stages_add_up_to_the_whole_whatever_is_known(
    before: dict[str, float], now: dict[str, float]
) -> None:
    """Clocks of other nodes may be off: no stage is negative, and the sum is the time to the latest end."""
    found = breakdown(10.0, before, now)
    assert all(seconds >= 0 for seconds in found.values())
    assert math.isclose(
        sum(found.values()), max([10.0, *before.values(), *now.values()]) - 10.0, abs_tol=1e-9
    )


def test_the_stage_that_an_attempt_is_in_comes_after_the_last_that_ended() -> None:
    assert underway({}) == "decision"
    assert underway({"decision": 1.0}) == "placement"
    assert underway({"decision": 1.0, "group": 2.0}) == "arrival"
    assert underway({"detection": 1.0, "teardown": 2.0}) == "decision"  # of the attempt before
    assert underway(dict.fromkeys(STAGES, 1.0)) == "first_step"
