"""How a run's record stands, as its recorder reports it."""

from __future__ import annotations

from typing import NamedTuple

from lockstep.errors import RecordError
from lockstep.record.events.union import Alerted, TimeSpent


class RecorderState(NamedTuple):
    """What a recorder has written so far, and what went wrong."""

    run_id: str | None = None
    """None as long as the run does not exist in its store."""
    url: str = ""
    """The link to the run's page; empty if its store has none."""
    folder: str = ""
    """The run's folder."""
    failure: RecordError | None = None
    """What could not be recorded so far."""
    violation: str = ""
    """The first step or evaluation that gave other bits when it was repeated; else empty."""
    diagnosed: tuple[str, ...] = ()
    """What the run has shown to be wrong with it since it was opened, one line each."""
    alerted: tuple[Alerted, ...] = ()
    """The alerts that have fired since it was opened."""
    journaled: int = 0
    """How many of the reported events are in the journal (or have no place there) and are shown: they no longer depend on the recorder."""
    time_spent: TimeSpent | None = None
    """What became of the run's time, once its end is recorded."""
    pid: int | None = None
    """The process that writes."""
