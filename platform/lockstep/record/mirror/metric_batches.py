"""Pushes the points of a journal to a store: each once, in order, in batches, from a cursor.

The cursor moves when the store has confirmed a batch. In a run that goes on it begins at the last step that the store has: what is
before that was sent. Points that the store had when the run was opened are skipped: by the highest step that it has of each key, and where
points may be missing below that, by all of its steps. If the store refuses a point, no other is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from lockstep.record import problems
from lockstep.record.events.metrics import EVERY_STEP, Point, is_of_step, points_of
from lockstep.record.events.union import Corrupted, Opened, Recorded
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.journal_file import NAME
from lockstep.record.ledger.rows import StepRow
from lockstep.record.mirror.delivery_lanes import Call, Lane, Part, send_acceptable
from lockstep.record.mirror.run_store import POINTS_PER_CALL, Measured, RunStore

MOST_REFUSED = 1000
"""The most refused points that are kept, to be sent once more at the run's end."""


_BACKLOG = "backlog"
"""The name of what the journal has behind the cursor."""


class _Cursor(NamedTuple):
    offset: int
    previous: StepRow | None
    """The step before the offset."""


class Evaluations(Part):
    """What was measured of each checkpoint, linked to it in the store.

    Linking a point also adds it to the run: so it is due only when `cursor` has sent all points before it. Otherwise a process that is killed in between
    would leave a highest step below which points are missing, and the next one would not send them.
    """

    def __init__(self, cursor: MetricCursor, lane: Lane, store: RunStore) -> None:
        super().__init__(lane, "evaluation of checkpoint", self._link)
        self._cursor, self._store = cursor, store

    def calls(self) -> Iterator[Call]:
        return super().calls() if self._cursor.is_at_end else iter(())

    def _link(self, items: Mapping[int, tuple[Sequence[Measured], object]]) -> None:
        for step, (evaluation, _) in items.items():
            self._store.log_evaluation(step, evaluation)


class MetricCursor(Part):
    """The points of an open journal, in `lane`. `scaled` is whether a loss scaler runs. Refused points are its content, by themselves.

    `thorough` says that the store may lack points below the highest step that it has of each key.
    """

    def __init__(
        self,
        journal: Journal,
        store: RunStore,
        lane: Lane,
        *,
        scaled: bool,
        thorough: bool,
    ) -> None:
        super().__init__(lane, "metrics", self._send_again, together=True)
        self._journal, self._store = journal, store
        high_water = self._high_water = dict(store.last_steps())
        self._thorough = thorough
        self._scaled = scaled
        reached = min(high_water.get(key, 0) for key in EVERY_STEP)
        start = 0 if thorough else journal.start_up_to(reached)
        self._cursor = _Cursor(start, None)
        self._passed = {key: step for key, step in high_water.items() if start and not is_of_step(key)}
        """The highest step of each key up to the cursor. A row that was written late comes after later ones."""
        self._known: dict[str, Collection[int]] = {}
        self._replaced_after: int | None = None
        """If set: rows of later steps than this that come again replace others, which were made from corrupted bits."""
        self._started_at = next(event.at for event in journal.events if isinstance(event, Opened))

    @property
    def is_at_end(self) -> bool:
        """Whether the store has the points of everything that the journal has, but for those that it refuses."""
        return self._cursor.offset >= self._journal.size

    def calls(self) -> Iterator[Call]:
        """One call, which sends everything that the journal has when it is made; and those that repeat refused points."""
        backlog = (_BACKLOG, self._journal.size)
        if self._cursor.offset < backlog[1] and self._is_due(*backlog):
            yield Call(self._send_new, partial(self.refuse, [backlog]))
        yield from super().calls()

    def _send_new(self) -> None:
        try:
            for points, cursor in self._batches():
                if points:
                    send_acceptable(points, self._store.log_metrics, self._refuse_points)
                    self._lane.answered()
                self._cursor = cursor
        except OSError as error:  # from the journal's disk
            raise problems.CANNOT_READ(path=NAME, got=error.strerror or error) from error
        self._accepted([(_BACKLOG, None)])

    def _refuse_points(self, points: Sequence[Point], error: Exception) -> None:
        room = MOST_REFUSED - len(self.desired)
        self.desired = {**self.desired, **dict.fromkeys(points[:room], True)}
        self.refuse([(point, True) for point in points], error)

    def _send_again(self, points: Mapping[Point, bool]) -> None:
        unsent = list(points)
        for start in range(0, len(unsent), POINTS_PER_CALL):
            self._store.log_metrics(unsent[start : start + POINTS_PER_CALL])

    def _title(self, names: Sequence[Any]) -> str:
        points = [name for name in names if isinstance(name, Point)]
        if not points:
            return "metrics"
        steps = sorted({point.step for point in points})
        where = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        keys = sorted({point.key for point in points})
        return f"metrics of {where} ({', '.join(keys[:3])}{', …' if keys[3:] else ''})"

    def _batches(self) -> Iterator[tuple[list[Point], _Cursor]]:
        """Batches of whole rows, each with the cursor after it; a row with very many parts takes several batches."""
        points: list[Point] = []
        cursor = self._cursor
        for event, next_cursor in self._events(cursor):
            previous = cursor.previous
            if isinstance(event, Corrupted):
                least = event.since if self._replaced_after is None else self._replaced_after
                self._replaced_after = min(event.since, least)
            if isinstance(event, StepRow) and (previous is None or previous.step != event.step - 1):
                previous = self._journal.step(event.step - 1)
            event_points = points_of(event, previous, scaled=self._scaled, started_at=self._started_at)
            new = [point for point in event_points if self._is_new(point)]
            if points and len(points) + len(new) > POINTS_PER_CALL:
                yield points, cursor
                points = []
            points += new
            while len(points) > POINTS_PER_CALL:
                yield points[:POINTS_PER_CALL], cursor
                points = points[POINTS_PER_CALL:]
            cursor = next_cursor
        yield points, cursor

    def _events(self, cursor: _Cursor) -> Iterator[tuple[Recorded, _Cursor]]:
        """The events after the cursor, each with the cursor after it."""
        previous = cursor.previous
        for entry in self._journal.read(cursor.offset):
            if entry.event is not None:  # else damaged: its content comes again, or the run is not whole
                previous = entry.event if isinstance(entry.event, StepRow) else previous
                yield entry.event, _Cursor(entry.end, previous)

    def _is_new(self, point: Point) -> bool:
        key, step = point.key, point.step
        late = step <= self._passed.get(key, -1)
        if late and self._replaced_after is not None and step > self._replaced_after:
            return True
        if not late:
            self._passed[key] = step
        if step > self._high_water.get(key, -1):
            return True
        if step == self._high_water.get(key) or not (late or self._thorough):
            return False
        if key not in self._known:
            self._known[key] = self._store.recorded_steps(key)
        return step not in self._known[key]
