"""The record of a trial's rank 0, through which Tune holds `fit` and learns from it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from torch import Tensor

from lockstep.attempts.recorder_actor import ALIVE_S, RemoteRecord
from lockstep.errors import StorageError
from lockstep.record.ledger import CheckpointRow, EvaluationRow, History

SAVE_S = 600.0
"""How long a save may take that a population waits for."""


class LeftError(BaseException):
    """Tune wants no more of this trial."""


class ReusedError(BaseException):
    """A finished run has this identity."""


class TrialRecord(RemoteRecord):
    """The record of rank 0, which holds `fit` between an evaluation and the next step until Tune wants to know more."""

    def __init__(
        self, channel: Any, folder: Path, facts: Mapping[str, Any], give: Callable[[EvaluationRow], None]
    ) -> None:
        super().__init__(channel, folder, attempt=1)
        self.pending: EvaluationRow | None = None
        """An evaluation that Tune has not been given yet."""
        self.on_run_id: Callable[[str], None] | None = None
        self._facts, self._give = dict(facts), give
        self._asked_run: Any = None
        self._wanted = threading.Event()
        self._left = False
        self._save_errors: dict[int, str | None] = {}
        self._saved = threading.Condition()

    # --- Tune's side -------------------------------------------------------------------------------------------

    def begin(self, attempt: int) -> None:
        self._attempt = attempt

    def go_on(self) -> None:
        self._wanted.set()

    def leave(self) -> None:
        self._left = True
        self._wanted.set()

    def wait_for_checkpoint(self, step: int) -> None:
        """Until the checkpoint of a step is published. StorageError where it was given up, or nobody saves it."""
        with self._saved:
            self._saved.wait_for(lambda: step in self._save_errors, SAVE_S)
        error = self._save_errors.get(step, f"nothing was heard of it for {SAVE_S:.0f} s")
        if error is not None:
            raise StorageError(f"the checkpoint of step {step} could not be saved: {error}")

    # --- fit's -------------------------------------------------------------------------------------------------

    def started(self, facts: Mapping[str, Any]) -> None:
        super().started({**facts, **self._facts})
        if self.on_run_id is not None:
            self._asked_run = self._actor.known_or_reused.remote()

    def restored(self, history: History) -> None:
        super().restored(history)
        for row in history.evaluations:
            self._give(row)

    def evaluation(self, row: EvaluationRow) -> None:
        super().evaluation(row)
        self._learn(wait=True)
        self.pending = row

    def stopping(self) -> bool:
        self._learn(wait=False)
        if self.pending is not None:
            self._wanted.clear()
            row, self.pending = self.pending, None
            self._give(row)
            while not self._left and not self._wanted.wait(ALIVE_S):
                self.alive()  # held, and not hung
        if self._left:  # at the gate, or on the way there
            raise LeftError
        return super().stopping()

    def finished(self, summary: Mapping[str, Any], weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._learn(wait=True)
        super().finished(summary, weights)

    def run_id(self) -> str:
        self._learn(wait=True)
        return super().run_id()

    def checkpoint(self, row: CheckpointRow) -> None:
        super().checkpoint(row)
        with self._saved:
            self._save_errors[row.step] = row.error
            self._saved.notify_all()

    def _learn(self, *, wait: bool) -> None:
        """Take in the id of a new run as soon as it has one; ReusedError where a finished one stands for it."""
        if self._asked_run is None or not (wait or ray.wait([self._asked_run], timeout=0)[0]):
            return
        run_id = ray.get(self._asked_run)
        self._asked_run = None
        if run_id is None:
            raise ReusedError
        assert self.on_run_id is not None
        self.on_run_id(run_id)
