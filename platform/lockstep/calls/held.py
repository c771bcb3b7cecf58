"""A run in the hands of one command: it is held before anything of it is touched, and let go when the command ends."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lockstep.checkpoint.holder import Hold, holding
from lockstep.checkpoint.storages import open_storage
from lockstep.driver.progress import Progress
from lockstep.process import under_torchrun
from lockstep.record.events import EvaluationRow, StepRow
from lockstep.spec.fields import Spec


def leads() -> bool:
    """Whether this process speaks for the run: under torchrun the first rank does."""
    return not under_torchrun() or os.environ.get("RANK", "0") == "0"


def held_run(
    spec: Spec, run_id: str, progress: Progress, *, takeover: bool = False
) -> AbstractContextManager[Hold | None]:
    """Hold a run that exists. SpecError where another command does, unless it is taken over."""
    if not leads():
        return nullcontext()
    storage = open_storage(spec.checkpoint.storage)
    return holding(storage, run_id, f"run {run_id}", takeover=takeover, say=progress.say)


class HeldProgress:
    """Progress that also knows, and tells others, how far the run is."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.hold: Hold | None = None
        self.step = 0
        """The last step that is done."""

    def say(self, text: str) -> None:
        self._progress.say(text)

    def show(self, step: StepRow | None, evaluation: EvaluationRow | None, total_steps: int | None) -> None:
        if step is not None:
            self.step = step.step
            if self.hold is not None:
                self.hold.reached(step.step, step.attempt)
        self._progress.show(step, evaluation, total_steps)

    def table(self, headline: str, trials: Sequence[Mapping[str, Any]]) -> None:
        self._progress.table(headline, trials)
