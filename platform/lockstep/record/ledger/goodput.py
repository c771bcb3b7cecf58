"""The goodput of a run: how much of its time went into steps that count, and how much its interruptions took. Pure.

A step counts once, with the time of its row, which is that of the execution whose row is kept. Whatever else passed since the run began is the rest:
starting, restoring, waiting for room, steps that were taken again, evaluations, saves, and the time in which no command was at the run.

An interruption is whatever ended an attempt but a plan: a signal, a move, workers that join or leave, the run's end. It took the time from the last
step before it to the beginning of the first new step after it, less the time in which no command was at the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

from lockstep.durations import duration_text
from lockstep.record.events.codec import StepTime
from lockstep.record.events.union import (
    AttemptsSummarised,
    Failed,
    Finished,
    Opened,
    Recorded,
    Started,
    TimeSpent,
)
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.rows import StepRow

_SKEW_S = 60.0
"""The clocks of machines that record a run one after another may differ by as much."""

TIMED = (Opened, Started, AttemptsSummarised, Finished, Failed, TimeSpent)
"""The events, beside the steps, from which follows what became of a run's time."""


class _Away(NamedTuple):
    """A time in which no command was at the run, in Unix seconds, and whether the one before had come to a planned end."""

    since: float
    until: float
    planned: bool


def time_spent(
    events: Sequence[Recorded], rows: Iterable[StepRow | StepTime], began: float, ended: float
) -> TimeSpent | None:
    """What became of the time from `began` to `ended` (Unix seconds), by the `rows` of a run's steps, in order, and the other events of its journal.

    None for a run for which another one stands: its rows are that one's; and where a clock was set back, so that nothing tells how long it took.
    """
    times = [
        began,
        *(each.at for each in events if isinstance(each, Opened | Finished | Failed) and each.at),
        ended,
    ]
    if any(later < earlier - _SKEW_S for earlier, later in pairwise(times)):
        return None
    if any(isinstance(event, Started) and "reused_from" in event.facts for event in events):
        return None
    account, away = _account(events), _away(events)
    # The journal is opened when the first worker is ready: attempts that were lost before belong to the run as well.
    begins = [attempt.get("began") for attempt in account.values()]
    began = min([began, *(float(at) for at in begins if isinstance(at, float | int) and at > 0)])
    workers = _workers(events)
    attempt, reached = 1, began
    counted_s = lost_s = lost_worker_s = 0.0
    interruptions = 0

    def interrupted(first: int, last: int, until: float) -> None:
        """Attempts `first` to `last` have ended since `reached`, and the next step begins, or the run ends, at `until`."""
        nonlocal lost_s, lost_worker_s, interruptions
        between = [each for each in away if each.since < until and each.until > reached]
        ended = [account.get(number) for number in range(first, last + 1)]
        if any(ended):  # one of which nothing is known was lost with what would have known it
            planned = all(each is not None and each.get("planned") is True for each in ended)
        else:
            planned = bool(between) and all(each.planned for each in between)
        if planned:
            return
        absent_s = sum(min(each.until, until) - max(each.since, reached) for each in between)
        seconds = max(0.0, until - reached - absent_s)
        interruptions += 1
        lost_s += seconds
        lost_worker_s += seconds * _count(account.get(first, {}).get("workers"), workers)

    for row in rows:
        counted_s += row.step_s
        if row.attempt > attempt:
            interrupted(attempt, row.attempt - 1, row.wall_clock - row.step_s)
            attempt = row.attempt
        reached = max(reached, row.wall_clock)
    last = next((event for event in reversed(events) if isinstance(event, Failed | Finished | Started)), None)
    if isinstance(last, Failed) and last.status == "FAILED":
        interrupted(attempt, max(account, default=attempt), ended)
    absent_s = sum(max(0.0, min(each.until, ended) - max(each.since, began)) for each in away)
    return TimeSpent(
        at=ended,
        wall_s=max(ended - began, counted_s),
        counted_s=counted_s,
        away_s=absent_s,
        interruptions=interruptions,
        lost_s=lost_s,
        lost_worker_h=lost_worker_s / 3600,
    )


def _rounded(effective: float, away_s: float, lost_worker_h: float) -> tuple[float, float, float]:
    """The figures as tags keep them; a text is made of these, so that a figure is never rounded from another value elsewhere."""
    return round(effective, 4), round(away_s, 3), round(lost_worker_h, 6)


def time_text(effective: float, away_s: float, interruptions: int, lost_worker_h: float) -> str:
    """What became of a run's time, for a person: the same from the event as from the run's tags."""
    effective, away_s, lost_worker_h = _rounded(effective, away_s, lost_worker_h)
    parts = [f"{effective:.1%} of its time went into steps that count"]
    if away_s >= 1:
        parts.append(f"no command was at it for {duration_text(away_s)}")
    if interruptions:
        times = "one interruption" if interruptions == 1 else f"{interruptions} interruptions"
        parts.append(f"{times} took {lost_worker_h:.2g} worker-hours")
    return "; ".join(parts)


def spent_text(spent: TimeSpent) -> str:
    """What became of a run's time, for a person."""
    return time_text(spent.effective, spent.away_s, spent.interruptions, spent.lost_worker_h)


def time_tags(spent: TimeSpent) -> dict[str, float | int]:
    """The tags of a run with what became of its time, without the prefix of all."""
    effective, away_s, lost_worker_h = _rounded(spent.effective, spent.away_s, spent.lost_worker_h)
    return {
        "effective": effective,
        "away_s": away_s,
        "interruptions": spent.interruptions,
        "lost_worker_h": lost_worker_h,
    }


def text_of_tags(tags: Mapping[str, str]) -> str:
    """What a run's tags say of its time, for a person; empty where they say nothing."""
    try:
        effective, away_s, interruptions, lost = (
            float(tags[f"lockstep.{name}"])
            for name in ("effective", "away_s", "interruptions", "lost_worker_h")
        )
        return time_text(effective, away_s, int(interruptions), lost)
    except (KeyError, ValueError, OverflowError):  # not ended, or anyone's tags
        return ""


def with_time(journal: Journal, events: Sequence[Recorded]) -> list[Recorded]:
    """Events that a journal is to get, with what became of the run's time before each of its ends. RecordError where a step cannot be read."""
    timed: list[Recorded] = []
    for event in events:
        if isinstance(event, Finished | Failed) and event.at is not None:
            new = {row.step: row for row in timed if isinstance(row, StepRow)}
            rows: list[StepRow | StepTime] = [row for row in journal.step_times() if row.step not in new]
            rows = sorted([*rows, *new.values()], key=attrgetter("step"))
            past = [*journal.events, *timed, event]
            if rows:
                spent = time_spent(past, rows, began_at(past, rows[0]), event.at)
                timed += [] if spent is None else [spent]
        timed.append(event)
    return timed


def began_at(events: Sequence[Recorded], first: StepRow | StepTime) -> float:
    """When a run with this first step began, Unix seconds. A journal that was lost and begun again is younger than its first step."""
    opened = [event.at for event in events if isinstance(event, Opened)][:1]
    return min([*opened, first.wall_clock - first.step_s])


def _account(events: Sequence[Recorded]) -> dict[int, Mapping[str, Any]]:
    """What is known of each attempt, by its number."""
    return {
        attempt["attempt"]: attempt
        for event in events
        if isinstance(event, AttemptsSummarised)
        for attempt in event.attempts
        if isinstance(attempt.get("attempt"), int)
    }


def _workers(events: Sequence[Recorded]) -> int:
    """The workers of a run that keeps no account of its attempts."""
    facts = [event.facts for event in events if isinstance(event, Started)]
    return _count(facts[-1].get("workers") if facts else None, 1)


def _count(value: Any, default: int) -> int:
    return value if isinstance(value, int) and value > 0 else default


def _away(events: Sequence[Recorded]) -> list[_Away]:
    """The times between the recorded end of one command and the beginning of the next that has prepared an attempt, or come to an end itself.

    A command that only reports an end again opens the journal as well.
    """
    absences: list[_Away] = []
    end: Finished | Failed | None = None
    opened: float | None = None
    for event in events:
        if isinstance(event, Opened):
            opened = event.at
        elif isinstance(event, Started | Finished | Failed):
            if end is not None and end.at is not None and opened is not None and opened > end.at:
                absences.append(_Away(end.at, opened, _is_planned(end)))
            end, opened = None if isinstance(event, Started) else event, None
    return absences


def _is_planned(end: Finished | Failed) -> bool:
    return isinstance(end, Finished) or end.status == "KILLED"
