"""What a run's journal comes to at its end: tables of its steps, evaluations and observations, and the figures drawn of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lockstep.record import figures, ledger, observation_figures
from lockstep.record.journal import Journal

_DRAWING = threading.Lock()
"""One run of a process at a time draws: hundreds of trials may end together, and matplotlib computes under Python's global lock."""


class Written(NamedTuple):
    """A file in the run's folder."""

    path: Path
    is_figure: bool = False


def write(journal: Journal, folder: Path, *, scaled: bool) -> Iterator[Written]:
    """Write those that the journal has rows for, and give each when it is there. `scaled` draws the loss scale. Raises OSError."""
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
