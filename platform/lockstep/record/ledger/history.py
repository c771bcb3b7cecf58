"""The rows of a run so far, as each rank holds them: rank 0 for its checkpoints, the others so that one can take rank 0's place.

Sealed segments are held by name, and the open segment by its rows. A save writes each segment that has become full, once, and the open one
with the checkpoint itself: its cost does not grow with the number of earlier steps. Rows of written segments are dropped.
"""

from __future__ import annotations

import math
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lockstep.record.events.union import Restored, Segment
from lockstep.record.ledger import tables
from lockstep.record.ledger.rows import EvaluationRow, Observation, StepRow
from lockstep.record.ledger.segments import end_of, evaluations_in, seal, steps_in
from lockstep.record.ledger.tables import Rows

MOST_OBSERVATIONS = 20
"""How many of the newest are held and saved: those that the record may lack if all processes of a run are killed at once."""

Put = Callable[[Segment, bytes], object]
"""Writes the file of a segment, whole and flushed. It may be called again for a segment that exists."""


class HandedRows(NamedTuple):
    """The rows of a run, as one worker hands them to another."""

    segments: tuple[Segment, ...]
    full: tuple[Rows | tuple[Segment, bytes], ...]
    steps: tuple[StepRow, ...]
    evaluations: tuple[EvaluationRow, ...]
    observations: tuple[Observation, ...]
    reached: int
    evaluated: int
    best: dict[tuple[str, str], tuple[float, int]]


class History:
    """Rows are only added, by one thread. Another thread may write them meanwhile, through what `saving` gave."""

    def __init__(self, segments: Sequence[Segment] = (), reached: int = 0) -> None:
        self.segments = list(segments)
        """The written segments, in order."""
        self.steps: list[StepRow] = []
        """The rows of the open segment."""
        self.evaluations: list[EvaluationRow] = []
        """The evaluations since the open segment began."""
        self.observations: deque[Observation] = deque(maxlen=MOST_OBSERVATIONS)
        self._full: list[Rows | tuple[Segment, bytes]] = []
        """Segments that are full and not written yet, in order: as rows, or sealed."""
        self._past = Restored((), ())
        self._sealing = threading.Lock()
        self.reached = reached
        """The newest step that has a row, or the step that a fork begins after."""
        self._evaluated = 0
        self._best: dict[tuple[str, str], tuple[float, int]] = {}
        """The best value of each metric in each direction, and its step; of several the first, and NaN is never best."""

    def add(self, row: StepRow) -> None:
        """Add the row of a step. An existing row is kept: a repeated step has the same bits."""
        if row.step <= self.reached:
            return
        self.reached = row.step
        if self.steps and row.step > end_of(self.steps[-1].step):
            self._close()
        self.steps.append(row)

    def add_evaluation(self, row: EvaluationRow) -> None:
        """Add an evaluation, unless it exists."""
        if row.step > self._evaluated:
            self._evaluated = row.step
            self.evaluations.append(row)
            self._note_best(row)

    def _note_best(self, row: EvaluationRow) -> None:
        for name, value in row.metrics.items():
            for mode, better in (("min", operator.lt), ("max", operator.gt)):
                best = self._best.get((name, mode))
                if not math.isnan(value) and (best is None or better(value, best[0])):
                    self._best[name, mode] = value, row.step

    def best_step(self, metric: str, mode: str) -> int | None:
        """The step of the best evaluation so far by a metric, also of those before a resume; None where none has it."""
        best = self._best.get((metric, mode))
        return None if best is None else best[1]

    def add_observation(self, row: Observation) -> None:
        """Add an observation, unless it exists."""
        if not self.observations or row.step > self.observations[-1].step:
            self.observations.append(row)

    def take_back(self, step: int, evaluated: int) -> None:
        """Forget the row of a step after `step`, and an evaluation after `evaluated`: they will be made again. No save may be in flight."""
        if self.observations and self.observations[-1].step > step:
            self.observations.pop()
        if self.steps and self.steps[-1].step > step:
            del self.steps[-1]
            self.reached = step
        if self.evaluations and self.evaluations[-1].step > evaluated:
            del self.evaluations[-1]
            self._evaluated = evaluated

    def newest(self) -> Restored:
        """The newest row of a step and of an evaluation, if they are held."""
        return Restored(
            tuple(self.steps[-1:]), tuple(self.evaluations[-1:]), observations=tuple(self.observations)[-1:]
        )

    def retold(self) -> Restored:
        """Every row that is held, for receivers that may have missed some; written segments by name."""
        with self._sealing:
            full = [entry if isinstance(entry, Rows) else _opened(entry[1]) for entry in self._full]
        steps = [row for rows in full for row in rows.steps]
        evaluations = [row for rows in full for row in rows.evaluations]
        return Restored(
            (*steps, *self.steps),
            (*evaluations, *self.evaluations),
            tuple(self.segments),
            tuple(self.observations),
        )

    def handed(self) -> HandedRows:
        """Everything that is held, for a worker that holds nothing. No save may be in flight."""
        with self._sealing:
            full = tuple(self._full)
        rows = tuple(self.steps), tuple(self.evaluations), tuple(self.observations)
        return HandedRows(tuple(self.segments), full, *rows, self.reached, self._evaluated, dict(self._best))

    @classmethod
    def of(cls, handed: HandedRows) -> History:
        """The same rows in another process."""
        history = cls(handed.segments, handed.reached)
        history.steps, history.evaluations = list(handed.steps), list(handed.evaluations)
        history._full, history._evaluated = list(handed.full), handed.evaluated
        history._best = dict(handed.best)
        history.observations.extend(handed.observations)
        return history

    def _close(self) -> None:
        """Close the open segment, which is full."""
        with self._sealing:
            # For runs that rarely save: a row takes 0.7 KB as an object and 0.07 KB sealed.
            self._full = [seal(entry) if isinstance(entry, Rows) else entry for entry in self._full]
            self._full.append(Rows(self.steps, self.evaluations))
        self.steps, self.evaluations = [], []

    def saving(self) -> Saving:
        """The current rows, to be saved in a checkpoint."""
        if self.steps and self.steps[-1].step == end_of(self.steps[-1].step):
            self._close()
        with self._sealing:
            return Saving(self, len(self.segments) + len(self._full))

    def write(self, count: int, put: Put) -> list[Segment]:
        """Write the full segments among the first `count`. Returns the first `count` segments."""
        while len(self.segments) < count:
            with self._sealing:
                first = self._full[0]
                segment, content = self._full[0] = seal(first) if isinstance(first, Rows) else first
            put(segment, content)
            with self._sealing:
                del self._full[0]
                self.segments.append(segment)
        return self.segments[:count]

    @classmethod
    def restored(
        cls, blocks: Mapping[str, Any], segments: Sequence[Segment] = (), contents: Iterable[bytes] = ()
    ) -> History:
        """The rows that a checkpoint has in `blocks`, after those of its `segments`; `contents` are the contents of their files, held one at a time."""
        history = cls(segments)
        steps, evaluations = (
            tables.decode_steps(blocks["steps"]),
            tables.decode_evaluations(blocks["evaluations"]),
        )
        earlier, content = list[EvaluationRow](), b""
        for content in contents:
            earlier += evaluations_in(content)
        newest = steps or (steps_in(content)[-1:] if content else [])
        if "observations" in blocks:
            history.observations.extend(tables.decode_observations(blocks["observations"]))
        observed = tuple(history.observations)
        history._past = Restored(tuple(newest), (*earlier, *evaluations), tuple(segments), observed)
        for row in steps:
            history.add(row)
        for evaluation in history._past.evaluations:
            history._note_best(evaluation)
        history.evaluations = evaluations
        last = segments[-1].last if segments else 0
        history.reached = steps[-1].step if steps else last
        history._evaluated = evaluations[-1].step if evaluations else 0
        return history

    def past(self) -> Restored:
        """The restored rows, to be told once: they are dropped here."""
        past, self._past = self._past, Restored((), ())
        return past

    @classmethod
    def whole(cls, blocks: Mapping[str, Any], contents: Iterable[bytes] = ()) -> Rows:
        """All rows that a checkpoint has in `blocks` and in its segments' files."""
        steps, evaluations = list[StepRow](), list[EvaluationRow]()
        for content in contents:
            steps += steps_in(content)
            evaluations += evaluations_in(content)
        return Rows(
            steps + tables.decode_steps(blocks["steps"]),
            evaluations + tables.decode_evaluations(blocks["evaluations"]),
        )


def _opened(content: bytes) -> Rows:
    """The rows of a segment's file."""
    return Rows(steps_in(content), evaluations_in(content))


class Saving:
    """The rows of a run at one moment: the first `count` segments and the rows behind them."""

    def __init__(self, history: History, count: int) -> None:
        self._history, self._count = history, count
        self._steps, self._evaluations = history.steps, history.evaluations
        self._lengths = len(self._steps), len(self._evaluations)
        self._observations = tuple(history.observations)

    def blocks(self) -> dict[str, Callable[[], bytes]]:
        """The rows after the segments and the newest observations, as Parquet that is made when it is asked for."""
        steps, evaluations = self._lengths
        blocks = {
            "steps": lambda: tables.encode_steps(self._steps[:steps]),
            "evaluations": lambda: tables.encode_evaluations(self._evaluations[:evaluations]),
        }
        if self._observations:
            blocks["observations"] = lambda: tables.encode_observations(self._observations)
        return blocks

    def segments(self, put: Put) -> list[Segment]:
        """The segments before those rows; `put` writes the ones that are not written yet. For one thread."""
        return self._history.write(self._count, put)
