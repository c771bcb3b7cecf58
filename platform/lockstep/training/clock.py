"""The timing columns of a run."""

from __future__ import annotations

import time

from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.data.loader import Loader
from lockstep.plan import Position
from lockstep.record.ledger.rows import StepRow


class Clock:
    """Measures the timing columns: what a run took, apart from what it computed."""

    def __init__(self, origin: AttemptOrigin | None = None) -> None:
        self.attempt = 1 if origin is None else origin.attempt
        self.first_step_at: float | None = None
        self._mark = time.perf_counter()
        self._waited_s = 0.0
        self._steps = self._samples = 0
        self._steady_s = self._steady_wait_s = 0.0

    def timed(self, row: StepRow, position: Position, batches: Loader) -> StepRow:
        """The row of the step that has just ended, with its times."""
        now, wall = time.perf_counter(), time.time()
        step_s, wait_s = now - self._mark, batches.waited_s - self._waited_s
        self._mark, self._waited_s = now, batches.waited_s
        if self.first_step_at is None:
            self.first_step_at = wall
        else:
            self._steps, self._samples = self._steps + 1, self._samples + position.samples
            self._steady_s, self._steady_wait_s = self._steady_s + step_s, self._steady_wait_s + wait_s
        return row._replace(data_wait_s=wait_s, step_s=step_s, wall_clock=wall, attempt=self.attempt)

    def leave_out(self) -> None:
        """Start the next step's time here: an evaluation or a save is not part of it."""
        self._mark = time.perf_counter()

    def figures(self) -> dict[str, float | None]:
        """Rates over all steps but the first, which pays for warming up."""
        seconds = self._steady_s
        return {
            "first_step_at": self.first_step_at,
            "steps_per_s": self._steps / seconds if seconds else None,
            "samples_per_s": self._samples / seconds if seconds else None,
            "data_wait_share": self._steady_wait_s / seconds if seconds else None,
        }
