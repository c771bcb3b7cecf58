"""What rank 0 of a trial tells and is asked: Tune holds `fit` at the gate after an evaluation, and learns from it there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lockstep.attempts.event_sender import ALIVE_S, Sender
from lockstep.clusters.bounded_calls import answer_of
from lockstep.record.events.union import Alive, CheckpointRow, Event, Restored, Started
from lockstep.record.ledger.rows import EvaluationRow
from lockstep.running_time import wait_for
from lockstep.sweeps import problems
from lockstep.sweeps.recorders import ANSWER_S

RECORDER = "the recorder of the trial"

SAVE_S = 600.0
"""How long a save may take that a population waits for."""


class TrialRun:
    """Takes a trial's events to its recorder, and holds `fit` between an evaluation and the next step until Tune wants more.

    `facts` are added to those of each start; `give` is called with each evaluation for Tune.
    """

    def __init__(
        self, recorders: Any, key: str, facts: Mapping[str, Any], give: Callable[[EvaluationRow], None]
    ) -> None:
        self.pending: EvaluationRow | None = None
        """An evaluation that Tune has not been given yet."""
        self.reused = False
        """Whether a finished run has this trial's identity, and so stands for it."""
        self.on_run_id: Callable[[str], None] | None = None
        self._recorders, self._key = recorders, key
        self._facts, self._give = dict(facts), give
        self._sender: Sender
        self.attempt = 0
        """That which trains: it began by itself, or the workers went on in memory as it."""
        self._given_step = -1
        """The step of the last evaluation that Tune was given."""
        self._given = self._wanted = 0
        """How many evaluations Tune was given, and how many results it has asked for: it has decided about one when it asks for the next."""
        self._verdict = threading.Condition()
        self._dismissed = threading.Event()
        self._broken: str | None = None
        """Why the training has ended early, if it has."""
        self._save_errors: dict[int, str | None] = {}
        self._saved = threading.Condition()

    # --- Tune's side -------------------------------------------------------------------------------------------

    def begin(self, attempt: int) -> Sender:
        """An attempt begins; the way of its events to the recorder."""
        self.attempt = attempt
        self._sender = Sender(
            lambda events: self._recorders.tell.remote(self._key, self.attempt, events), ANSWER_S
        )
        return self._sender

    def goes_on(self, attempt: int) -> None:
        """The workers go on in memory, as this attempt."""
        self.attempt = attempt

    def want(self) -> None:
        """Tune wants the next result."""
        with self._verdict:
            self._wanted += 1
            self._verdict.notify_all()

    @property
    def is_dismissed(self) -> bool:
        """Whether Tune wants no more of this trial."""
        return self._dismissed.is_set()

    def leave(self) -> None:
        """Tune wants no more of this trial."""
        self._dismissed.set()
        with self._verdict:
            self._verdict.notify_all()

    def broke(self, why: str) -> None:
        """The training has ended early: nothing is saved any more."""
        with self._saved:
            self._broken = why
            self._saved.notify_all()

    def pause(self, seconds: float) -> None:
        """Wait, but no longer than until Tune wants no more of this trial."""
        self._dismissed.wait(seconds)

    def wait_for_checkpoint(self, step: int) -> None:
        """Until the checkpoint of a step is published. StorageError where the save failed, the training ends without it, or nobody saves the state."""

        def is_over() -> bool:
            return step in self._save_errors or self._broken is not None

        with self._saved:
            wait_for(partial(self._saved.wait_for, is_over), SAVE_S)
        error = self._save_errors.get(step, self._broken or f"no result of the save after {SAVE_S:.0f} s")
        if error is not None:
            raise problems.UNSAVED(step=step, got=error)

    # --- fit's -------------------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """Take an event of rank 0."""
        if self._dismissed.is_set():
            return  # the code that ended the trial records its outcome
        match event:
            case Started():
                event = Started({**event.facts, **self._facts})
            case Restored():
                for row in event.evaluations[:-1]:
                    self._give_once(row)
                for row in event.evaluations[
                    -1:
                ]:  # Tune may not have decided about it: it waits for the gate
                    self.pending = row
            case EvaluationRow():
                self._let_decide_before(event)
                if self._dismissed.is_set():
                    return
                self.pending = event
            case CheckpointRow():
                with self._saved:
                    self._save_errors[event.step] = event.error
                    self._saved.notify_all()
            case _:
                pass
        self._sender.tell(event)

    def stop(self) -> bool:
        return self._dismissed.is_set() or self._sender.stop()

    def save(self) -> bool:
        return self._sender.save()

    def regroup(self) -> bool:
        return False

    def run_id(self) -> str:
        run_id: str = answer_of(self._recorders.run_id.remote(self._key), RECORDER, ANSWER_S)
        return run_id

    def go_on(self, look: Callable[[], object], *, ends: bool) -> bool:
        """The gate: a new run waits for its name, an evaluation for Tune's verdict. False for a run that has both, or that Tune ends.

        Where the run `ends`, its last evaluation comes with the end, and Tune decides nothing.
        """
        if self.on_run_id is not None and not self._learn():
            return False
        if not ends:
            self._hold(look)
        return not self._dismissed.is_set()

    def _hold(self, look: Callable[[], object] = lambda: None) -> None:
        """Give Tune the evaluation that it has not been given yet, if any, and wait until it has decided about all that it was given."""
        row, self.pending = self.pending, None
        if row is not None:
            self._give_once(row)
        while not self._decided(ALIVE_S):
            self._sender.tell(Alive())  # held, and not hung
            look()

    def _decided(self, limit_s: float) -> bool:
        """Whether Tune has decided about all that it was given, or wants no more; waits so long for that."""
        with self._verdict:
            return self._verdict.wait_for(
                lambda: self._wanted > self._given or self._dismissed.is_set(), limit_s
            )

    def _let_decide_before(self, row: EvaluationRow) -> None:
        """Have Tune decide by an earlier evaluation that is told after the same step: a delayed one, before that of the run's last weights."""
        if self.pending is not None and self.pending.step != row.step:
            self._hold()

    def _give_once(self, row: EvaluationRow) -> None:
        """Give Tune an evaluation, unless it had it: workers that go on in memory tell it again, and may have made it again."""
        if row.step > self._given_step:
            self._given_step = row.step
            self._given += 1
            self._give(row)

    def _learn(self) -> bool:
        """Take in the id of a new run. False where a finished one stands for it."""
        name, self.on_run_id = self.on_run_id, None
        ref = self._recorders.known_or_reused.remote(self._key)
        run_id: str | None = answer_of(ref, RECORDER, ANSWER_S)
        self.reused = run_id is None
        if run_id is not None and name is not None:
            name(run_id)
        return run_id is not None
