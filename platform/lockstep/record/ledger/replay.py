"""What a journal reports again about a run whose process has gone. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.record.events.union import CheckpointRow, Failed, Finished, Opened, Recorded, Started, TakenOver

PROCESS = "lockstep.process"
"""The tag of a run with the process that recorded it last."""
GONE = "the process that recorded the run has gone without a word"


def unsaid(events: Sequence[Recorded]) -> list[Recorded]:
    """The events that a store may lack of a run that is resumed: all but its end."""
    return last_words(events)[:-1]


def last_words(events: Sequence[Recorded]) -> list[Recorded]:
    """The events to tell a store again: checkpoints only if they still exist, and the run's end last.

    An end before the last start belongs to an earlier attempt. A run without an end has failed.
    """
    saved = [event for event in events if isinstance(event, CheckpointRow)]
    deleted = {step for row in saved for step in row.deleted}
    existing = [row for row in saved if row.step not in deleted]
    end: Finished | Failed | TakenOver = Failed(GONE)
    replayed: list[Recorded] = []
    for event in events:
        if isinstance(event, Finished | Failed | TakenOver):
            end = event
        elif isinstance(event, CheckpointRow):
            if event.step not in deleted:
                gone = tuple(sorted(deleted)) if event is existing[-1] else ()
                replayed.append(event._replace(deleted=gone))
        else:
            if isinstance(event, Started):
                end = Failed(GONE)
            replayed.append(event)
    return [*replayed, end]


def status_of(events: Sequence[Recorded]) -> str:
    """The status that a run has by its journal; RUNNING where a newer attempt has taken it over."""
    end = last_words(events)[-1]
    return end.status if isinstance(end, Finished | Failed) else "RUNNING"


def lost_end(events: Sequence[Recorded], status: str, process: str | None) -> bool:
    """Whether a store was told an end, by `process`, that is not among a journal's events: it was written down there first.

    The journal may also go on after what the store was told: then `process` has opened it, and another one after it.
    """
    opened = [event.process.get(PROCESS) for event in events if isinstance(event, Opened)]
    goes_on = process in opened and opened[-1] != process
    return status in {"FINISHED", "KILLED"} and status_of(events) not in {status, "FINISHED"} and not goes_on
