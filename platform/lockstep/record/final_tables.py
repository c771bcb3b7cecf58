"""Turns a run's journal into its final files: tables of steps, evaluations and observations, and figures of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from lockstep.record import figures, ledger, observation_figures
from lockstep.record.journal import Journal

_DRAWING = threading.Lock()
"""Only one run of a process draws at a time: hundreds of trials may end together, and matplotlib holds Python's global lock."""


class FinalFile(NamedTuple):
    """A file in the run's folder."""

    path: Path
    is_figure: bool = False


def write(journal: Journal, folder: Path, *, scaled: bool, log: Callable[[str], None]) -> Iterator[FinalFile]:
    """Write the files that the journal has rows for, the tables first, and yield each when it is written. Raises OSError.

    `scaled` draws the loss scale. A figure that cannot be drawn is left out and told to `log`.
    """
    if journal.last_step:
        steps = folder / "ledger.parquet"
        ledger.write_tables(journal.tables, steps)
        yield FinalFile(steps)
    if evaluated := journal.evaluations():
        evaluations = folder / "evaluations.parquet"
        ledger.write_evaluations(evaluated, evaluations)
        yield FinalFile(evaluations)
    if observed := journal.observations():
        observations = folder / ledger.OBSERVATIONS
        ledger.write_observations(observed, observations)
        yield FinalFile(observations)
    drawn = []
    with _DRAWING:
        if journal.last_step:
            drawn += figures.draw(
                lambda name: ledger.column(journal.tables, name), evaluated, folder, scaled=scaled, log=log
            )
        if observed:
            drawn += observation_figures.draw(observed, folder, log)
    yield from (FinalFile(path, is_figure=True) for path in drawn)
