"""The headline of a sweep's table: how long the trials that remain will take, by those that have ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.driver.progress import Silent
from lockstep.driver.signals import StopSignal
from lockstep.sweeps.decisions import Decisions
from lockstep.sweeps.sweep_progress import SweepTable
from tests.unit.sweeps.tune_order import NoRecorders, Tuned, sweep_of


class Headlines(Silent):
    """Keeps the headlines that a table shows."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def table(self, headline: str, trials: Sequence[Mapping[str, Any]]) -> None:
        self.shown.append(headline)


def test_the_time_left_has_hours(tmp_path: Path) -> None:
    """One trial of three took six hours: twelve are left. Before one has ended, none is told."""
    progress = Headlines()
    tuned = Tuned(sweep_of({"optimizer.lr": {"grid": [0.1, 0.2, 0.3]}}), tmp_path)
    tuned.table = SweepTable(tuned.sweep, Decisions(tmp_path), NoRecorders(), progress, StopSignal())
    number = tuned.begin()
    assert "left" not in progress.shown[-1]
    tuned.table._began -= 6 * 3600
    tuned.report(number, 30, 0.5, "finished")
    assert " · about 12:00:0" in progress.shown[-1]
    assert progress.shown[-1].endswith(" left")
