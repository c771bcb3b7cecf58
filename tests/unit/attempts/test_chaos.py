"""What is killed when follows from the seed, and comes as often as it is asked for."""

from __future__ import annotations

import pytest

from lockstep.attempts import problems
from lockstep.attempts.chaos import due, parse
from tests.raised import raises


def test_rates_are_read() -> None:
    assert parse("worker:0.02, node:1") == {"worker": 0.02, "node": 1.0}


@pytest.mark.parametrize(
    "text", ["worker", "worker:", "worker:2", "raylet:0.1", "worker:-0.1", "worker:nan", ""]
)
def test_what_is_no_rate_is_refused(text: str) -> None:
    with raises(problems.CHAOS):
        parse(text)


def test_kills_follow_from_the_seed_and_are_as_frequent_as_their_rate() -> None:
    rates = {"worker": 0.05, "driver": 0.01}
    fates = [due(rates, 7, 1, step) for step in range(4000)]
    assert fates == [due(rates, 7, 1, step) for step in range(4000)]
    assert fates != [due(rates, 8, 1, step) for step in range(4000)]
    assert fates != [due(rates, 7, 2, step) for step in range(4000)]
    assert 140 < sum("worker" in fate for fate in fates) < 260
    assert 20 < sum("driver" in fate for fate in fates) < 60
