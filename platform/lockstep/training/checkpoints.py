"""When the state of a run is saved, and from which checkpoint an attempt starts.

All ranks save at the same steps: the plan says when if the cadence counts epochs or steps; rank 0 votes in the step's
exchange if it counts seconds. A failed save is reported and training goes on, unless a newer attempt has taken this
one's place: then this attempt ends. A run whose last save failed has not finished: see `unsaved`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import astuple, replace
from types import TracebackType
from typing import Any, NamedTuple

from lockstep.checkpoint.errors import StaleAttemptError
from lockstep.checkpoint.manifest import Facts, SharedFile
from lockstep.checkpoint.reader import Loaded, load_newest, load_step, shared_files
from lockstep.checkpoint.retention import Keep
from lockstep.checkpoint.run_folder import Attempt, AttemptOrigin, RunFolder
from lockstep.checkpoint.runs import opened
from lockstep.checkpoint.saver import AsyncSaver, Failed, Pause, Saved, Share, Sharing
from lockstep.checkpoint.storages import open_storage
from lockstep.communication.group import Group
from lockstep.errors import DriftError, LockstepError, SpecError, StorageError
from lockstep.failure_kinds import kind_of
from lockstep.plan import Plan, Position
from lockstep.randomness import digest64
from lockstep.record.events import Alive, CheckpointRow, Segment, Tell, Warned
from lockstep.record.history import History, Saving
from lockstep.spec.fields import Spec
from lockstep.training.digest import tree_digest
from lockstep.training.digests import Digester, state_digests
from lockstep.training.relay import read_once
from lockstep.training.requests import Requests
from lockstep.training.state import TrainState

GRACE_S = 30.0
"""How long a failed attempt, or one whose workers change, waits for the save in flight."""


# --- resuming -----------------------------------------------------------------------------------------------


class Start(NamedTuple):
    """The checkpoint that an attempt starts from; a `fork` takes it from another run."""

    loaded: Loaded
    fork: bool
    exact: bool = False
    """Whether a fork takes over the whole state, as a resume does."""

    def without_state(self) -> Start:
        """A copy without the sections, for when they are restored: they would stay in memory for as long as the run."""
        return self._replace(loaded=self.loaded._replace(sections={}))

    @property
    def facts(self) -> Facts:
        return self.loaded.manifest.facts

    @property
    def parent(self) -> str | None:
        """For a fork, the identity and step of the run that it started from, which are part of its own identity; else None."""
        if self.fork:
            how = " exact" if self.exact else ""
            return f"{self.facts.identity}@{self.loaded.manifest.step}{how}"
        parent: str | None = self.facts.identity_fields.get("fork")
        return parent


def find_start(
    spec: Spec, group: Group, origin: AttemptOrigin | None, warn: Callable[[str], None]
) -> Start | None:
    """The checkpoint to start from, the same on every rank; None for a start from the beginning."""
    if origin is not None and origin.replay is not None and origin.replay.step:
        replay = origin.replay
        found = _load(replay.storage, replay.run_id, replay.step, group, warn)
        return Start(found, fork=False) if found is not None else None
    if origin is not None and origin.run_id is not None:
        own = _load(spec.checkpoint.storage, origin.run_id, origin.step, group, warn)
        if own is not None:
            return Start(own, fork=False)
    if spec.fork is None:
        return None
    loaded = _load(spec.fork.storage or spec.checkpoint.storage, spec.fork.run, spec.fork.step, group, warn)
    if loaded is None:
        raise SpecError(f"fork.run: run {spec.fork.run} has no good checkpoint to start from")
    return Start(loaded, fork=True, exact=spec.fork.exact)


def _load(
    storage: str, run_id: str, step: int | None, group: Group, warn: Callable[[str], None]
) -> Loaded | None:
    """A run's checkpoint of `step`, or its newest good one. Rank 0 reads it, and every rank verifies what it receives."""
    store = open_storage(storage)
    with read_once(store, group) as relayed:
        folder = RunFolder.open(relayed, run_id)
        found = load_newest(folder, warn) if step is None else load_step(folder, step)
    # Later reads come from one rank alone, so they must not go through the relay.
    return found and found._replace(checkpoint=replace(found.checkpoint, storage=store))


def check_identity(start: Start, fields: dict[str, Any]) -> None:
    """SpecError for the first identity field in which a resumed run differs from the run that was saved. A fork may differ."""
    if start.fork:
        return
    saved = start.facts.identity_fields
    for name in sorted({*saved, *fields}):
        if saved.get(name) != _as_saved(fields.get(name)):
            raise SpecError(
                f"resume: {name} is {fields.get(name)!r} and was {saved.get(name)!r} in the run, which would go on with other bits; "
                "put it back, or start a new run from this state with --fork"
            )


def _as_saved(value: Any) -> Any:
    """A value as a manifest gives it back: JSON has lists and no tuples."""
    return list(value) if isinstance(value, tuple) else value


def check_facts(spec: Spec, plan: Plan, state: TrainState) -> dict[str, Any]:
    """What follows from the counters, saved beside them as a check: where the data, the schedule and the generators stand."""
    counters = state.counters
    return {
        "global_batch": plan.global_batch,
        "steps_per_epoch": plan.steps_per_epoch,
        "rate_factor": state.schedule.standing(counters.updates),
        "draw": digest64((spec.seed, "step", counters.step, 0)),
    }


def compare_check(saved: dict[str, Any], now: dict[str, Any], shown: str) -> None:
    """StorageError where a value of `now` differs from the one that was saved under the same name."""
    for name in now:
        if name in saved and now[name] != saved[name]:  # checkpoints of older versions have no digests
            raise StorageError(
                f"checkpoint {shown}: {name} was {saved[name]!r} when it was saved and is now {now[name]!r}; "
                "this Lockstep would go on with other bits"
            )


def restore(
    start: Start, spec: Spec, plan: Plan, state: TrainState, warn: Callable[[str], None] | None = None
) -> History:
    """Restore the state from the checkpoint. Returns the rows up to it; for a fork, which did not take those steps, none.

    Rank 0 reports the rows: it passes `warn`, and reads the files that the checkpoint shares.
    """
    sections = start.loaded.sections
    saved: Any = sections["check"]
    now = check_facts(spec, plan, state)
    for name, unit in (("global_batch", "batch.global"), ("steps_per_epoch", "the number of steps an epoch")):
        if saved[name] != now[name]:
            raise SpecError(
                f"fork: {unit} is {now[name]} and was {saved[name]}, so the run's place in its data would not be the same; "
                "keep it, or start a new run from its weights with initial_weights"
            )
    state.restore(sections, fork=start.fork and not start.exact)
    if start.fork:
        return History(reached=state.counters.step)
    now = check_facts(spec, plan, state)
    if "weights_digest" in saved:
        now |= state_digests(Digester(state.precision.device), state)
    compare_check(saved, now, start.loaded.checkpoint.shown)
    segments = [Segment.of(*astuple(one)) for one in start.loaded.manifest.shared]
    contents = shared_files(start.loaded, warn) if warn is not None else ()
    return History.restored(sections, segments, contents)


def check_same_state(group: Group, state: TrainState) -> None:
    """DriftError where the ranks hold different states after a restore, down to the last bit of the optimizer."""
    if group.size == 1:
        return
    digests = group.gather(tree_digest(state.sections()))
    strays = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if strays:
        raise DriftError(
            f"after step {state.counters.step} was restored ranks {strays} hold another state than rank 0; "
            "they read the same checkpoint: look for a job.load_state_dict that is not the same on every rank, or a fault of the machine"
        )


def _sharing(rows: Saving) -> Sharing:
    """Shares the sealed segments as files; the checkpoint itself holds only the rows after them."""

    def sharing(share: Share) -> list[SharedFile]:
        segments = rows.segments(lambda segment, content: share(segment.name, content))
        return [SharedFile(segment.name, segment.size, segment.sha256) for segment in segments]

    return sharing


# --- saving -------------------------------------------------------------------------------------------------


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
    ) -> None:
        self.spec, self.plan, self.group, self.state, self.facts = spec, plan, group, state, facts
        self.history, self.tell, self.requests, self.origin = history, tell, requests, origin
        self._digests = digests
        self.hasty = False
        """Whether to give up the save in flight at once when another rank is lost: those that go on save the state again."""
        self.newest: str | None = None
        """Where the newest checkpoint is; known on rank 0."""
        self.unsaved = ""
        """Why the newest save failed; empty where it did not. Known on rank 0."""
        own = start is not None and not start.fork
        self._saved_step = state.counters.step if own else -1
        if start is not None and own:
            self.newest = start.loaded.checkpoint.shown
        self._own: RunFolder | None = None
        self._token = uuid.uuid4().hex
        """Identifies rank 0's claim, which is repeated at the next save if it failed half-way or another rank could not join."""
        self._saver: AsyncSaver | None = None
        self._saved_at = time.monotonic()

    def wanted(self) -> bool:
        """Whether this rank votes to save after this step. Only rank 0 does: on request, or if the cadence counts seconds and one is due."""
        every = self.spec.checkpoint.every
        if self.origin is None or self.group.rank > 0:
            return False
        if self.requests.save():
            return True
        return (
            every is not None
            and every.seconds is not None
            and time.monotonic() - self._saved_at >= every.seconds
        )

    def due(self, position: Position, *, agreed: bool) -> bool:
        """Whether the state is saved after this step."""
        every = self.spec.checkpoint.every
        return self.origin is not None and (agreed or (every is not None and every.due(position)))

    def save(self) -> None:
        """Copy the current state, to be written in the background. All ranks call it at the same step.

        Raises StaleAttemptError where a newer attempt has begun.
        """
        step = self.state.counters.step
        if self.origin is None or step == self._saved_step:
            return
        self._saved_step, self._saved_at = step, time.monotonic()
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
        saver.save(step, {**sections, **blocks}, facts, _sharing(rows))
        self._end_if_stale(saver)

    def make_up(self) -> None:
        """Save the current state if the plan has a checkpoint here: the previous attempt may have been lost while writing it."""
        step = self.state.counters.step
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
            self._saver.wait(GRACE_S)
            self._saver.close(abandon=True)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._saver is not None:
            # A save in which a lost rank had a part never ends, so nobody waits for it.
            if error is not None and not (self.hasty and kind_of(error).kind == "peer"):
                self._saver.wait(GRACE_S)
            self._saver.close(abandon=error is not None)

    def _evaluated_now(self) -> dict[str, float]:
        if self.state.counters.evaluated != self.state.counters.step:
            return {}
        return {name: value for name, value in self.state.metrics.items() if name.startswith("eval/")}

    def _open(self, origin: AttemptOrigin) -> AsyncSaver | None:
        """A saver for the run's folder, once this attempt may publish there. None where a rank cannot open it: the next save tries again."""
        attempt, error = self._joined(lambda: self._claimed(origin)) if self.group.rank == 0 else (None, None)
        own = attempt and (attempt.run.run_id, attempt.number)
        joined, error = self.group.gather((own, error))[0]
        if self.group.rank > 0 and joined is not None:
            attempt, error = self._joined(lambda: self._folder(joined[0]).attempt(joined[1]))
        error = next((failed for failed in self.group.gather(error) if failed), None)
        if attempt is None or error is not None:
            self._saved_step = -1
            self._failed(Failed(self.state.counters.step, Pause(0.0, 0.0), 1, StorageError(error or "")))
            return None
        rule = self.spec.checkpoint
        best = rule.keep_best
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
            on_saved=self._saved,
            on_failure=self._failed,
            alive=lambda: self.tell(Alive()),
        )

    def _joined(self, action: Callable[[], Attempt]) -> tuple[Attempt | None, str | None]:
        """The attempt, or why there is none for now. StaleAttemptError where a newer one has begun."""
        try:
            return action(), None
        except StaleAttemptError:
            raise
        except LockstepError as error:
            return None, str(error)

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

    def _failed(self, failed: Failed) -> None:
        """Told by the thread that writes."""
        if self.group.rank > 0:
            return
        self.unsaved = f"the checkpoint of step {failed.step} could not be saved: {failed.error}"
        self.tell(CheckpointRow(failed.step, None, str(failed.error), 0, *failed.pause, 0.0, time.time()))
        self.tell(Warned(f"{self.unsaved}; training goes on"))
