"""When the state of a run is saved.

All ranks save at the same steps: the plan says when if the cadence counts epochs or steps; rank 0 votes in the step's
exchange if it counts seconds. With `keep_best` they also save after an evaluation that is the best so far, which all ranks know, and where one begins that decides later. A failed save is reported and training goes on, unless a newer attempt has taken this
one's place: then this attempt ends. A run whose last save failed has not finished: see `unsaved`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from lockstep.checkpoint.errors import StaleAttemptError
from lockstep.checkpoint.manifest import Facts, SharedFile
from lockstep.checkpoint.retention import Keep
from lockstep.checkpoint.runs.run_checkpoints import opened
from lockstep.checkpoint.runs.run_folder import Attempt, AttemptOrigin, RunFolder
from lockstep.checkpoint.saver import AsyncSaver, Pause, Saved, SaveFailed, Share, Sharing
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.communication.group import Group
from lockstep.errors import LockstepError
from lockstep.failure_kinds import kind_of
from lockstep.plan import Plan, Position
from lockstep.record.events.union import Alive, CheckpointRow, Tell, Warned
from lockstep.record.ledger.history import History, Saving
from lockstep.spec.fields import Spec
from lockstep.training.driver_requests import Requests
from lockstep.training.start import Start, check_facts
from lockstep.training.state import TrainState

GRACE_S = 30.0
"""How long a failed attempt, or one whose workers change, waits for the save in flight."""


@dataclass(slots=True)
class LastSave:
    """When this process last saved the run, by its clock. It outlives a group: else workers that come and go more often than a save is due would put it off for ever."""

    at: float = field(default_factory=lambda: time.monotonic())


def _sharing(rows: Saving) -> Sharing:
    """Shares the sealed segments as files; the checkpoint itself holds only the rows after them."""

    def sharing(share: Share) -> list[SharedFile]:
        segments = rows.segments(lambda segment, content: share(segment.name, content))
        return [SharedFile(segment.name, segment.size, segment.sha256) for segment in segments]

    return sharing


class Checkpoints:
    """Saves the state of a run when it is due. A context manager, which finishes the save in flight on exit."""

    def __init__(
        self,
        spec: Spec,
        plan: Plan,
        group: Group,
        state: TrainState,
        facts: dict[str, Any],
        history: History,
        tell: Tell,
        requests: Requests,
        origin: AttemptOrigin | None,
        start: Start | None = None,
        digests: Callable[[], dict[str, Any]] = dict,
        last: LastSave | None = None,
    ) -> None:
        self.spec, self.plan, self.group, self.state, self.facts = spec, plan, group, state, facts
        self.history, self.tell, self.requests, self.origin = history, tell, requests, origin
        self._digests = digests
        self.hasty = False
        """Whether to give up the save in flight at once when another rank is lost: those that go on save the state again."""
        self.newest: str | None = None
        """Where the newest checkpoint is; known on rank 0."""
        self.published_step = -1
        """The step of the newest checkpoint that this attempt has published; known on rank 0."""
        self.run_id = ""
        """The run that it belongs to."""
        self.unsaved = ""
        """Why the newest save failed; empty where it did not. Known on rank 0."""
        is_resume = start is not None and not start.fork
        self._began_at = state.counters.step
        self._saved_step = self._began_at if is_resume else -1
        if start is not None and is_resume:
            self.newest = start.loaded.checkpoint.shown
        self._own: RunFolder | None = None
        self._token = uuid.uuid4().hex
        """Identifies rank 0's claim, which is repeated at the next save if it failed half-way or another rank could not join."""
        self._saver: AsyncSaver | None = None
        self._last = last or LastSave()
        self._before = self._last.at
        """When the state was saved before the save in flight."""
        self._gave_up = False
        """Whether the save in flight was given up because the group ends."""

    def wanted(self) -> bool:
        """Whether this rank votes to save after this step. Only rank 0 does: on request, or if the cadence counts seconds and one is due."""
        every = self.spec.checkpoint.every
        if self.origin is None or self.group.rank > 0:
            return False
        if self.requests.save():
            return True
        return every is not None and every.due_after(time.monotonic() - self._last.at)

    def due(self, position: Position, *, agreed: bool) -> bool:
        """Whether the state is saved after this step, once it is evaluated if that is due."""
        every = self.spec.checkpoint.every
        at_cadence = every is not None and every.due(position)
        return self.origin is not None and (agreed or at_cadence or self._is_best())

    def _is_best(self) -> bool:
        """Whether the current state is the one to keep: it has just been evaluated and is the best so far, or may turn out to be when its evaluation decides."""
        best, counters = self.spec.checkpoint.keep_best, self.state.counters
        if best is None or counters.step == 0 or self.state.evaluation_begun != counters.step:
            return False
        if self.state.pending is not None:
            return True
        return self.history.best_step(best.metric, best.mode) == counters.step

    def save(self) -> None:
        """Copy the current state, to be written in the background. All ranks call it at the same step.

        Raises StaleAttemptError where a newer attempt has begun.
        """
        step = self.state.counters.step
        if self.origin is None or step == self._saved_step:
            return
        self._saved_step = step
        self._before, self._last.at = self._last.at, time.monotonic()
        saver = self._saver = self._saver or self._open(self.origin)
        if saver is None:
            return
        check = check_facts(self.spec, self.plan, self.state) | self._digests()
        sections = self.state.assembled({**self.state.sections(), "check": check}, self.group.size)
        facts = Facts(
            self.facts["identity"],
            self.facts["fields"],
            self.facts["environment"],
            sections["counters"],
            self._evaluated_now(),
        )
        rows = self.history.saving()
        blocks = rows.blocks() if self.group.rank == 0 else {}
        saver.save(step, {**sections, **blocks}, facts, _sharing(rows), self._kept())
        self._end_if_stale(saver)

    def _kept(self) -> frozenset[int]:
        """The steps whose checkpoints stay though their manifests have no metrics: the best one, and the one whose evaluation is pending."""
        best, pending = self.spec.checkpoint.keep_best, self.state.pending
        if best is None or not self.spec.evaluate.delay:
            return frozenset()
        steps = {
            self.history.best_step(best.metric, best.mode),
            None if pending is None else pending.step,
        }
        return frozenset(step for step in steps if step is not None)

    def make_up(self, *, evaluated: bool) -> None:
        """Save the current state if a save is due here: the previous attempt may have been lost while writing it.

        It may have saved the state, and have `evaluated` it no more: a checkpoint without metrics is the best of none.
        """
        step = self.state.counters.step
        if evaluated and self._is_best():
            self._saved_step = -1
            self.save()
        goes_on = self.origin is not None and self.origin.in_memory and step > 0
        if goes_on and self.due(self.plan.position(step - 1), agreed=False):
            self.save()

    def finish(self) -> None:
        """Save the final state, and wait until it is written."""
        self.save()
        if self._saver is not None:
            self._saver.settle()
            self._end_if_stale(self._saver)

    def leave(self) -> None:
        """Finish the save in flight before the ranks form another group. Give up after `GRACE_S`: a rank lost meanwhile may have a part in it."""
        if self._saver is not None:
            self._give_up(self._saver, GRACE_S)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._saver is not None:
            if error is None:
                self._saver.close()
            else:
                # A save in which a lost rank had a part never ends, so nobody waits for it.
                self._give_up(self._saver, 0.0 if self.hasty and kind_of(error).kind == "peer" else GRACE_S)

    def _give_up(self, saver: AsyncSaver, grace_s: float) -> None:
        """End the save in flight, after so many seconds at most. One that is given up does not count."""
        if not saver.wait(grace_s):
            self._last.at, self._gave_up = self._before, True
        saver.close(abandon=True)

    def _evaluated_now(self) -> dict[str, float]:
        if self.state.counters.evaluated != self.state.counters.step:
            return {}
        return {name: value for name, value in self.state.metrics.items() if name.startswith("eval/")}

    def _open(self, origin: AttemptOrigin) -> AsyncSaver | None:
        """A saver for the run's folder, once this attempt may publish there. None where a rank cannot open it: the next save tries again."""
        attempt, error = self._joined(lambda: self._claimed(origin)) if self.group.rank == 0 else (None, None)
        claim = attempt and (attempt.run.run_id, attempt.number)
        joined, error = self.group.gather((claim, error))[0]
        if self.group.rank > 0 and joined is not None:
            attempt, error = self._joined(lambda: self._folder(joined[0]).attempt(joined[1]))
        error = next((failed for failed in self.group.gather(error) if failed), None)
        if attempt is None or error is not None:
            self._saved_step = -1
            assert error is not None
            self._failed(SaveFailed(self.state.counters.step, Pause(0.0, 0.0), 1, error))
            return None
        rule = self.spec.checkpoint
        best = None if self.spec.evaluate.delay else rule.keep_best  # else `_kept` names it
        return AsyncSaver(
            attempt,
            rank=self.group.rank,
            ranks=self.group.size,
            keep=Keep(
                rule.keep_last,
                best.metric if best else None,
                best.mode if best else "min",
                rule.keep_every,
            ),
            since=self._began_at,
            on_saved=self._saved,
            on_failure=self._failed,
            alive=self._wait_on,
        )

    def _wait_on(self) -> None:
        """Called each second of a wait for the save in flight. RuntimeError where the group is broken off: a lost rank's part never comes."""
        self.tell(Alive())
        self.group.waits.look()

    def _joined(self, action: Callable[[], Attempt]) -> tuple[Attempt | None, LockstepError | None]:
        """The attempt, or why there is none for now. StaleAttemptError where a newer one has begun."""
        try:
            return action(), None
        except StaleAttemptError:
            raise
        except LockstepError as error:
            return None, error

    def _folder(self, run_id: str) -> RunFolder:
        return RunFolder.open(open_storage(self.spec.checkpoint.storage), run_id)

    def _claimed(self, origin: AttemptOrigin) -> Attempt:
        """Rank 0's attempt. A new run's folder is claimed now; that of a resumed run was claimed before its state was read."""
        if self._own is None and origin.run_id is None:
            storage, run_id = open_storage(self.spec.checkpoint.storage), self.requests.run_id()
            if origin.in_memory:  # the previous attempt may have created the folder already
                self._own = opened(self.spec.checkpoint.storage, run_id)
            else:
                self._own = RunFolder.create(storage, run_id, self._token)
        if origin.run_id is None and self._own is not None:
            return self._own.claim(origin.attempt, self._token)
        return self._folder(origin.run_id or "").attempt(origin.attempt)

    def _end_if_stale(self, saver: AsyncSaver) -> None:
        if saver.failure is not None and isinstance(saver.failure.error, StaleAttemptError):
            raise saver.failure.error

    def _saved(self, saved: Saved) -> None:
        """Told by the thread that writes."""
        if saved.checkpoint is None:
            return  # rank 0 publishes and reports
        self.newest, self.unsaved = saved.checkpoint.shown, ""
        self.run_id, self.published_step = saved.checkpoint.run_id or "", saved.step
        self.tell(
            CheckpointRow(
                saved.step,
                self.newest,
                None,
                saved.nbytes,
                *saved.pause,
                saved.written_s,
                time.time(),
                saved.deleted,
                saved.essential,
            )
        )
        if saved.warning is not None:
            self.tell(Warned(saved.warning))

    def _failed(self, failed: SaveFailed) -> None:
        """Told by the thread that writes."""
        if self.group.rank > 0:
            return
        self.unsaved = f"the checkpoint of step {failed.step} could not be saved: {failed.error}"
        if not self._gave_up:  # else whoever waits for it waits on: those that go on save the state again
            self.tell(CheckpointRow(failed.step, None, str(failed.error), 0, *failed.pause, 0.0, time.time()))
        self.tell(Warned(f"{self.unsaved}; training goes on"))
