"""Turns a run's journal into its final files: tables of steps, evaluations and observations, and figures of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from lockstep.record.ledger import tables
from lockstep.record.ledger.journal import Journal
from lockstep.record.plots import observation_plots, run_plots

LEDGER = "ledger.parquet"
_DRAWING = threading.Lock()
"""Only one run of a process draws at a time: hundreds of trials may end together, and matplotlib holds Python's global lock."""


def write(journal: Journal, folder: Path) -> Iterator[Path]:
    """Write the tables that the journal has rows for, and yield each when it is written. Raises OSError."""
    if journal.last_step:
        steps = folder / LEDGER
        tables.write_parquet(journal.steps(), steps)
        yield steps
    if evaluated := journal.evaluations():
        evaluations = folder / "evaluations.parquet"
        tables.write_evaluations(evaluated, evaluations)
        yield evaluations
    if observed := journal.observations():
        observations = folder / tables.OBSERVATIONS
        tables.write_observations(observed, observations)
        yield observations


class Figures:
    """The figures of a run. `scaled` draws the loss scale; a figure that cannot be drawn is left out and told to `log`."""

    def __init__(self, journal: Journal, folder: Path, *, scaled: bool, log: Callable[[str], None]) -> None:
        self._journal, self._folder = journal, folder
        self._scaled, self._log = scaled, log
        self._drawn_of = (0, 0, 0)
        """The last step, and how many evaluations and observations, of what is drawn."""
        self.drawn: list[Path] = []

    def draw(self, *, written: bool = False) -> None:
        """Draw what the journal has, unless that is drawn. It takes a second, and may be called before the run's end is known. Raises OSError.

        With `written` the tables are there, from which the steps are read faster.
        """
        journal, folder = self._journal, self._folder
        evaluated, observed = journal.evaluations(), journal.observations()
        rows = (journal.last_step, len(evaluated), len(observed))
        if rows == self._drawn_of:
            return
        drawn = []
        with _DRAWING:
            if journal.last_step:
                steps = (
                    tables.columns_in(folder / LEDGER, run_plots.COLUMNS)
                    if written
                    else tables.columns(journal.steps(), run_plots.COLUMNS)
                )
                drawn += run_plots.draw(
                    steps,
                    evaluated,
                    folder,
                    scaled=self._scaled,
                    log=self._log,
                )
            if observed:
                drawn += observation_plots.draw(observed, folder, self._log)
        self.drawn, self._drawn_of = drawn, rows
