"""A trial that hangs is ended with the words of an attempt that hangs, and its stacks go into its record."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.attempts import problems
from lockstep.driver.run_view import RunView
from lockstep.spec.fields import Faults
from lockstep.sweeps.trial_watchdog import SweepWatchdog


class Watchdog(SweepWatchdog):
    """Listens to trials whose views are given."""

    def __init__(self, views: dict[int, RunView]) -> None:
        self.views, self.documents = views, list[tuple[str, str, str]]()
        document = SimpleNamespace(remote=lambda *arguments: self.documents.append(arguments))
        faults = Faults(longest_silence_s=0.05, longest_start_s=0.05)
        super().__init__(SimpleNamespace(document=document), faults)

    def _views(self) -> dict[int, RunView]:
        return self.views


@pytest.mark.parametrize(
    ("signs", "stage_ends", "problem", "facts"),
    [
        (1, {}, problems.NO_PROGRESS, {}),
        (0, {"arrival": 1.0}, problems.NO_FIRST_STEP, {"stage": "checkpoint"}),
        (0, {"arrival": 1.0, "checkpoint": 2.0}, problems.NO_FIRST_STEP, {"stage": "data"}),
    ],
    ids=["after a step", "while it reads its checkpoint", "while it opens its data"],
)
def test_a_trial_that_hangs_is_ended_once_and_told_as_an_attempt(
    signs: int, stage_ends: dict[str, float], problem: Any, facts: dict[str, str]
) -> None:
    """The control is a trial that goes on."""
    hanging, going = (RunView(attempt=2, signs_of_life=1) for _ in range(2))
    hanging.signs_of_life, hanging.stage_ends = signs, stage_ends
    watchdog = Watchdog({3: hanging, 4: going})
    reasons = dict[int, str]()
    until = time.monotonic() + 30
    while not reasons:
        assert time.monotonic() < until
        going.signs_of_life += 1
        reasons = watchdog.end_hung()
        time.sleep(0.01)
    where = "what each was doing is in stacks-attempt-2.txt"
    assert reasons == {3: str(problem(seconds=0, where=where, **facts))}
    assert watchdog.documents == [("3", "stacks-attempt-2.txt", "")]
    assert watchdog.end_hung() == {}
