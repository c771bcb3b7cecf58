"""The points of a journal on their way to a store: each once, in order, in batches, from a cursor.

The cursor moves when the store has confirmed a batch. What the store had when the run was opened is passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from lockstep.errors import RecordError
from lockstep.record.events import Opened, StepRow
from lockstep.record.journal import Journal
from lockstep.record.points import Point, points_of
from lockstep.record.run_store import POINTS_PER_CALL, RunStore, UnavailableError


class _Cursor(NamedTuple):
    offset: int
    before: StepRow | None
    """The step before the offset."""


class Delivery:
    """For a journal that was opened. `high_water` is the highest step that the store has of each key; `scaled` whether a loss scaler runs."""

    def __init__(
        self, journal: Journal, store: RunStore, high_water: Mapping[str, int], *, scaled: bool
    ) -> None:
        self._journal = journal
        self._store = store
        self._high_water = high_water
        self._scaled = scaled
        self._cursor = _Cursor(0, None)
        self._refused = False
        self._started_at = next(event.at for event in journal.events if isinstance(event, Opened))

    @property
    def due(self) -> bool:
        """Whether the journal has what the store has not."""
        return self._cursor.offset < self._journal.size and not self._refused

    def send(self) -> None:
        """Send all that is due. A batch that is refused is the last one: what follows it would hide the gap from a later try."""
        if self._refused:
            return
        for points, after in self._batches():
            if points:
                self._log(points)
            self._cursor = after

    def _log(self, points: list[Point]) -> None:
        try:
            self._store.log_metrics(points)
        except UnavailableError:
            raise
        except RecordError:
            self._refused = True
            raise

    def _batches(self) -> Iterator[tuple[list[Point], _Cursor]]:
        """Batches of whole rows, with where the cursor stands after each; a row of very many parts takes several."""
        points: list[Point] = []
        cursor = self._cursor
        for entry in self._journal.read(cursor.offset):
            made = points_of(entry.event, cursor.before, scaled=self._scaled, started_at=self._started_at)
            new = [point for point in made if self._is_new(point)]
            if points and len(points) + len(new) > POINTS_PER_CALL:
                yield points, cursor
                points = []
            points += new
            while len(points) > POINTS_PER_CALL:
                yield points[:POINTS_PER_CALL], cursor
                points = points[POINTS_PER_CALL:]
            cursor = _Cursor(entry.end, entry.event if isinstance(entry.event, StepRow) else cursor.before)
        yield points, cursor

    def _is_new(self, point: Point) -> bool:
        return point.step > self._high_water.get(point.key, -1)
