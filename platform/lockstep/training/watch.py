"""What a run looks at while it trains, every `record.observe_every` steps, beside the rows of its steps.

`begin` and `end` stand around a step. In all other steps they cost a comparison of numbers.
"""

from __future__ import annotations

import time

from lockstep.checkpoint.run_folder import AttemptOrigin
from lockstep.plan import Position
from lockstep.record.events import Observation, Tell
from lockstep.training.layers import LayerFlow
from lockstep.training.setup import Run


class Watch:
    """Watches the steps of one worker. A replay, whose steps are recorded already, is not watched."""

    def __init__(self, run: Run, origin: AttemptOrigin | None = None) -> None:
        replays = origin is not None and origin.replay is not None
        self._every = None if replays else run.spec.record.observe_every
        self._norm = run.step.norm
        self._flow: LayerFlow | None = None
        if run.group.rank == 0 and self._every is not None:
            conditional = run.step.module.conditional
            self._flow = LayerFlow(
                run.state.model, run.step.names, run.step.parameters, self._norm, conditional
            )

    def begin(self, position: Position) -> None:
        """The step at `position` begins."""
        if self._flow is not None and self._is_due(position):
            self._norm.observe = self._flow.note

    def end(self, position: Position, tell: Tell) -> None:
        """It is done, and its row is told."""
        if not self._is_due(position):
            return
        self._norm.observe = None
        if self._flow is not None:
            tell(Observation(position.number, self._flow.taken(), time.time()))

    def _is_due(self, position: Position) -> bool:
        """In the first step, and every so many: it follows from the plan alone."""
        return self._every is not None and (position.number == 1 or position.number % self._every == 0)
