"""Turns a run's journal into its final files: tables of steps, evaluations and observations, and figures of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lockstep.record import figures, ledger, observation_figures
from lockstep.record.journal import Journal

_DRAWING = threading.Lock()
"""Only one run of a process draws at a time: hundreds of trials may end together, and matplotlib holds Python's global lock."""


class Written(NamedTuple):
    """A file in the run's folder."""

    path: Path
    is_figure: bool = False


def write(journal: Journal, folder: Path, *, scaled: bool) -> Iterator[Written]:
    """Write the files that the journal has rows for, and yield each when it is written. `scaled` draws the loss scale. Raises OSError."""
    if journal.last_step:
        steps = folder / "ledger.parquet"
        ledger.write_tables(journal.tables, steps)
        yield Written(steps)
        with _DRAWING:
            drawn = figures.draw(
                lambda name: ledger.column(journal.tables, name), journal.evaluations(), folder, scaled=scaled
            )
        yield from (Written(path, is_figure=True) for path in drawn)
    if evaluated := journal.evaluations():
        evaluations = folder / "evaluations.parquet"
        ledger.write_evaluations(evaluated, evaluations)
        yield Written(evaluations)
    if observed := journal.observations():
        observations = folder / ledger.OBSERVATIONS
        ledger.write_observations(observed, observations)
        yield Written(observations)
        with _DRAWING:
            drawn = observation_figures.draw(observed, folder)
        yield from (Written(path, is_figure=True) for path in drawn)
