"""Delivers the points of a journal to a store: each once, in order, in batches, from a cursor.

The cursor moves when the store has confirmed a batch. In a run that goes on it begins at the last step that the store has: what is
before that was sent. Points that the store had when the run was opened are skipped: by the highest step that it has of each key, and where
points may be missing below that, by all of its steps. If the store refuses a point, no other is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from lockstep.errors import RecordError
from lockstep.record.events.metrics import EVERY_STEP, Point, is_of_step, points_of
from lockstep.record.events.union import Corrupted, Opened, Recorded, StepRow
from lockstep.record.ledger.journal import Journal
from lockstep.record.mirror.run_store import POINTS_PER_CALL, RejectedError, RunStore, UnavailableError
from lockstep.record.mirror.sync_queue import SyncQueue

MOST_ASIDE = 1000
"""The most refused points that are kept, to be sent once more at the run's end."""
_MOST_SINGLE = 16
"""After so many refused points of one batch, its rest is no longer searched for good ones."""


class _Cursor(NamedTuple):
    offset: int
    before: StepRow | None
    """The step before the offset."""


class Delivery:
    """Delivers an open journal. `high_water` is the highest step that the store has of each key; `scaled` is whether a loss scaler runs.

    `thorough` says that the store may lack points below `high_water`. Calls go through the lane for points of `sync_queue`.
    """

    def __init__(
        self,
        journal: Journal,
        store: RunStore,
        high_water: Mapping[str, int],
        *,
        scaled: bool,
        thorough: bool,
        sync_queue: SyncQueue,
    ) -> None:
        self._journal = journal
        self._store = store
        self._high_water = high_water
        self._thorough = thorough
        self._sync_queue = sync_queue
        self._sending = self._again = False
        self._scaled = scaled
        reached = min(high_water.get(key, 0) for key in EVERY_STEP)
        start = 0 if thorough else journal.start_up_to(reached)
        self._cursor = _Cursor(start, None)
        self._passed = {key: step for key, step in high_water.items() if start and not is_of_step(key)}
        """The highest step of each key up to the cursor. A row that was written late comes after later ones."""
        self._known: dict[str, Collection[int]] = {}
        self._replaced_after: int | None = None
        """If set: rows of later steps than this that come again replace others, which were made from corrupted bits."""
        self._left: list[Point] = []
        self._started_at = next(event.at for event in journal.events if isinstance(event, Opened))

    @property
    def left(self) -> bool:
        """Whether there are refused points that may be sent once more."""
        return bool(self._left)

    def flush(self, *, again: bool = False) -> None:
        """Request that the journal's points are sent; `again` also repeats the refused ones. Called by one thread; never waits.

        At most one call waits at a time; it sends everything that is there when its turn comes.
        """
        self._again = self._again or again
        if (self._cursor.offset < self._journal.size or self._again) and not self._sending:
            self._sending = True
            self._sync_queue.send("points", "points", self._send)

    # --- in the lane ----------------------------------------------------------------------------------------

    def _send(self) -> None:
        again, self._again = self._again, False
        try:
            for points, cursor in self._batches():
                if points:
                    self._log(points)
                self._cursor = cursor
            if again:
                self._send_left()
        except (UnavailableError, OSError) as error:
            self._again = self._again or again
            if isinstance(error, OSError):  # from the journal's disk
                raise UnavailableError(f"record: cannot read the journal: {error}") from error
            raise  # the call stays in the lane, and is repeated
        except BaseException:
            self._sending = False
            raise
        self._sending = False

    def _send_left(self) -> None:
        """Send the refused points once more."""
        self._sync_queue.lanes["points"].set_aside.clear()
        points, self._left = self._left, []
        for start in range(0, len(points), POINTS_PER_CALL):
            self._log(points[start : start + POINTS_PER_CALL])

    def _log(self, points: Sequence[Point]) -> None:
        single = 0

        def log(part: Sequence[Point]) -> None:
            nonlocal single
            try:
                self._store.log_metrics(part)
            except UnavailableError:
                raise
            except Exception as error:  # noqa: BLE001 - a value that cannot even be sent is refused as well
                final = isinstance(error, RecordError) and not isinstance(error, RejectedError)
                if final or len(part) == 1 or single >= _MOST_SINGLE:
                    single += 1
                    self._refuse(part, error)
                else:
                    half = len(part) // 2
                    log(part[:half])
                    log(part[half:])

        log(points)

    def _refuse(self, points: Sequence[Point], error: Exception) -> None:
        steps = sorted({point.step for point in points})
        where = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        names = sorted({point.key for point in points})
        shown = ", ".join(names[:3]) + (", …" if names[3:] else "")
        self._sync_queue.lanes["points"].aside(f"metrics of {where} ({shown})", error)
        self._left.extend(points[: MOST_ASIDE - len(self._left)])

    def _batches(self) -> Iterator[tuple[list[Point], _Cursor]]:
        """Batches of whole rows, each with the cursor after it; a row with very many parts takes several batches."""
        points: list[Point] = []
        cursor = self._cursor
        for event, next_cursor in self._events(cursor):
            previous = cursor.before
            if isinstance(event, Corrupted):
                least = event.since if self._replaced_after is None else self._replaced_after
                self._replaced_after = min(event.since, least)
            if previous is None and isinstance(event, StepRow) and event.step > 1:
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
        previous = cursor.before
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
