"""What a journal reports again about a run whose process has gone. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.record.events import CheckpointRow, Failed, Finished, Recorded, Started, TakenOver

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
    left = [row for row in saved if row.step not in deleted]
    end: Finished | Failed | TakenOver = Failed(GONE)
    said: list[Recorded] = []
    for event in events:
        if isinstance(event, Finished | Failed | TakenOver):
            end = event
        elif isinstance(event, CheckpointRow):
            if event.step not in deleted:
                gone = tuple(sorted(deleted)) if event is left[-1] else ()
                said.append(event._replace(deleted=gone))
        else:
            if isinstance(event, Started):
                end = Failed(GONE)
            said.append(event)
    return [*said, end]
