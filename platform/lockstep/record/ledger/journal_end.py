"""How a run ended, by its journal. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.record.events.union import Failed, Finished, Opened, Recorded, Started, TakenOver

PROCESS = "lockstep.process"
"""The tag of a run with the process that recorded it last."""
GONE = "the process that recorded the run has gone without a word"


def end_of(events: Sequence[Recorded]) -> Finished | Failed | TakenOver:
    """How a run ended. An end before the last start belongs to an earlier attempt; a run without an end has failed."""
    for event in reversed(events):
        if isinstance(event, Finished | Failed | TakenOver):
            return event
        if isinstance(event, Started):
            break
    return Failed(GONE)


def status_of(events: Sequence[Recorded]) -> str:
    """The status that a run has by its journal; RUNNING where a newer attempt has taken it over."""
    end = end_of(events)
    return end.status if isinstance(end, Finished | Failed) else "RUNNING"


def lost_end(events: Sequence[Recorded], status: str, process: str | None) -> bool:
    """Whether a store has an end of the run, from `process`, that the journal has lost: an end is written to the journal first.

    It is not lost where the journal goes on after that end: then `process` has opened it, and another process after it.
    """
    opened = [event.process.get(PROCESS) for event in events if isinstance(event, Opened)]
    goes_on = process in opened and opened[-1] != process
    return status in {"FINISHED", "KILLED"} and status_of(events) not in {status, "FINISHED"} and not goes_on
