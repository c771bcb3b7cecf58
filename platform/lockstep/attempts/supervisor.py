"""The supervisor: it has attempts made at one run, and decides what follows on the end of each.

An attempt that lost a worker, and did not go on in memory, is followed at once by another from the newest good checkpoint, with as many workers
as the cluster has then. The steps since that checkpoint are taken again, with the same values, so the record stays as it is.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lockstep.attempts import problems
from lockstep.attempts.attempt_watch import AttemptWatch
from lockstep.attempts.attempts_account import RunAccount
from lockstep.attempts.chaos import Chaos
from lockstep.attempts.cluster_view import ON_RAY, ClusterView
from lockstep.attempts.failed_nodes import node_label
from lockstep.attempts.fault_attribution import Blame
from lockstep.attempts.mailbox import LOST
from lockstep.attempts.placement import WorkerPlacement
from lockstep.attempts.recording import Recording
from lockstep.attempts.retry_policy import RetryBudget, outcome_of
from lockstep.attempts.run_end import RunEnd
from lockstep.attempts.storage_retries import patiently
from lockstep.checkpoint.runs.run_checkpoints import claim, steps_of
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.clusters.core_watch import lost_core
from lockstep.driver.failure_report import with_run
from lockstep.driver.options import RunOptions
from lockstep.driver.result import Result, check_saved, result_of
from lockstep.driver.run_view import RunView
from lockstep.driver.signals import StopSignal
from lockstep.errors import (
    ClusterError,
    DeterminismError,
    JobError,
    LockstepError,
    RecordError,
    SilentError,
    StorageError,
)
from lockstep.record.events.union import Document
from lockstep.record.ledger.goodput import spent_text
from lockstep.record.mirror.documents import as_json
from lockstep.spec.fields import Spec


class Supervisor:
    """One run on a connected cluster."""

    def __init__(
        self,
        spec: Spec,
        options: RunOptions,
        stop: StopSignal,
        origin: AttemptOrigin,
        recording: Recording,
        environment: Mapping[str, str],
        warnings: list[str],
        on_run_id: Callable[[str], None],
        around: ClusterView = ON_RAY,
        chaos: Chaos | None = None,
    ) -> None:
        self._spec, self._options, self._stop, self._origin = spec, options, stop, origin
        self._recording, self._environment, self._around, self._chaos = recording, environment, around, chaos
        self._shown_as = uuid.uuid4().hex
        """The key under which Ray's dashboard shows all attempts as one run."""
        self._account = RunAccount(spec, options, recording, around, warnings, on_run_id)
        self._blame = Blame(spec.checkpoint.storage, self._account.warn_and_record, recording.tell)
        self._end = RunEnd(recording, self._account.run_registry, self._account.say, verbose=options.verbose)

    def run(self) -> Result:
        """Train until the run ends, however it does."""
        with self._account.waiting() as say:
            placement = self._around.first_place(self._spec, self._stop, say)
        try:
            summary, failure = self._attempts(placement)
            self._end.show(summary)
        except (KeyboardInterrupt, Exception) as error:
            self._end.early(error)
            if isinstance(error, LockstepError):
                raise with_run(error, self._recording.run_id, self._spec.folder) from error
            raise
        if failure is not None:
            raise failure
        state = self._recording.state
        if state.time_spent is not None and state.time_spent.interruptions:
            self._account.say(spent_text(state.time_spent))
        check_saved(summary, state.run_id or "", state.folder)
        return result_of(
            summary,
            run_id=state.run_id or "",
            url=state.url,
            tracking_uri=self._spec.record.uri or "",
            folder=state.folder,
            began_at=self._options.began_at,
            start=self._options.start.at,
            warnings=self._account.warnings,
            attempts=self._account.current.attempt,
            signal_number=self._stop.number,
            time_spent=state.time_spent,
        )

    def _attempts(self, placement: WorkerPlacement) -> tuple[Mapping[str, Any], RecordError | None]:
        """One attempt after another, until one comes to an end that is recorded, or no other is worth it.

        The run's summary, and what could not be recorded of it.
        """
        budget, account, stop = RetryBudget(self._spec.faults), self._account, self._stop
        while True:
            placement = self._healthy(placement)
            ended, moving = self._attempt(placement, saves_at_once=budget.lost > 1)
            current, error = account.current, ended.error
            if ended.summary is not None:
                stopped = ended.summary["stopped"]
                current.why, current.planned = moving or "stopped" if stopped else "finished", True
                account.publish()
                if stopped and moving and not stop.asked:
                    account.say(f"attempt {current.attempt} ended after a checkpoint: {moving}")
                else:
                    try:
                        return ended.summary, self._close(ended)
                    except LOST as lost:  # another attempt, which has no step left to take
                        error = self._recording.reopen(lost)
            if error is not None:
                current.why = str(error)
                account.publish()
                decision = budget.decide(
                    outcome_of(error), self._saved_step(), contradicts=self._contradicts(error)
                )
                if decision.again and stop.asked:
                    by_signal = error.with_message(
                        f"{error} (attempt {current.attempt}; a signal ends the run)"
                    )
                    self._end.give_up(stop.ended(by_signal), ended.details)
                if not decision.again:
                    more = (
                        f" (attempt {current.attempt}; {decision.why})" if len(account.attempts) > 1 else ""
                    )
                    self._end.give_up(error.with_message(f"{error}{more}") if more else error, ended.details)
                account.say(f"attempt {current.attempt} ended: {error}; {decision.why}")
                stop.wait(decision.pause_s)
            try:
                with account.waiting() as say:
                    placement = self._around.next_place(self._spec, self._blame.left_out, stop, say)
                self._origin = self._next()
            except (ClusterError, StorageError) as refused:
                self._end.give_up(stop.ended(refused) if stop.asked else refused, ended.details)

    def _healthy(self, placement: WorkerPlacement) -> WorkerPlacement:
        """The placement without the nodes that are found slow or wrong, if the spec asks for that. What is found is recorded."""
        if not self._spec.faults.health:
            return placement
        fleet = self._around.health(self._spec)
        self._recording.tell(Document("health.json", as_json([health.as_dict() for health in fleet])))
        reasons = {health.node: "; ".join(health.unwell) for health in fleet if health.unwell}
        left_out = self._blame.unwell(reasons)
        for health in fleet:
            if health.node in left_out:
                host = f" ({health.vitals.host})" if health.vitals.host else ""
                self._account.warn_and_record(
                    f"{node_label(health.node)}{host} is left out from now on: {reasons[health.node]}"
                )
        return self._around.find_place(self._spec, self._blame.left_out) if left_out else placement

    def _contradicts(self, error: LockstepError) -> bool:
        """Whether the newest attempt refused the job before its first step, though an earlier one had trained it."""
        *earlier, newest = self._account.attempts
        trained = any(attempt.last_step for attempt in earlier)
        refused = isinstance(error, JobError | DeterminismError) and error is not self._blame.fault_of_job
        return trained and not newest.last_step and refused

    def _attempt(self, placement: WorkerPlacement, *, saves_at_once: bool) -> tuple[RunView, str | None]:
        """One attempt, from its start to what it came to: a summary or an error; and why it was asked to move, if it was."""
        account, origin = self._account, self._origin
        again = bool(account.attempts)
        account.begin(origin.attempt, placement.workers)
        mailbox = self._recording.mailbox
        workers = self._around.workers(
            self._spec, origin, mailbox, placement, self._environment, self._shown_as, self._options.source
        )
        watch = AttemptWatch(
            self._spec, workers, self._around, account, self._recording, self._stop,
            self._blame, self._chaos, saves_at_once=saves_at_once, saved_step=self._saved_step,
        )  # fmt: skip
        view, mailbox_lost = RunView(origin.attempt), False
        try:
            # The first time the mailbox itself still starts: the workers need not wait for it.
            self._recording.begin(origin.attempt, placement.workers, wait=again)
            account.current.from_step = self._saved_step() if again or origin.run_id else 0
            watch.until_over(placement)
            status = self._recording.status()
            view = status.view
            watch.look(status)
        except LOST as lost:
            if (gone := lost_core()) is not None:
                raise gone from lost
            workers.end()
            view.error, mailbox_lost = self._recording.reopen(lost), True
        account.end(workers.stage_ends.at)
        at_fault = self._blame.end(view, account.current, self._recording.run_id, self._saved_step)
        view.error = at_fault or view.error
        # The ranks of a hung attempt that are killed last tell the loss of the others.
        # So do those of an attempt in which a process has ended, where Ray can say which; not those that are killed because the mailbox is lost.
        named = isinstance(workers.error, SilentError) or (workers.names_lost and not mailbox_lost)
        consequence = named and type(view.error) is ClusterError
        if view.summary is None and (view.error is None or consequence):
            view.error = view.lost(workers.error or problems.NO_RESULT())
        return view, watch.moving

    def _saved_step(self) -> int:
        """The step of the newest checkpoint; 0 without one."""
        run_id = self._recording.run_id
        if run_id is None:
            return 0
        storage = self._spec.checkpoint.storage
        return max(
            patiently(lambda: steps_of(storage, run_id), self._stop.wait, self._account.say), default=0
        )

    def _next(self) -> AttemptOrigin:
        """The next attempt; whatever still runs of the one before can publish nothing from here on."""
        run_id, least = self._recording.run_id, self._account.current.attempt + 1
        versions = self._account.table_versions or self._origin.table_versions
        same: dict[str, Any] = {
            "replay": self._origin.replay, "table_versions": versions, "doubts": self._blame.doubts
        }  # fmt: skip
        if run_id is None:  # it ended before there was a run
            return AttemptOrigin(None, least, **same)
        storage = self._spec.checkpoint.storage
        # The workers of a new run make its folder with their first checkpoint.
        begun = self._account.saved or self._origin.run_id is not None
        claimed = patiently(
            lambda: claim(storage, run_id, None, least, begun=begun), self._stop.wait, self._account.say
        )
        return replace(claimed, **same)

    def _close(self, ended: RunView) -> RecordError | None:
        """Have it recorded that the run has ended by itself or by a signal. Returns what could not be."""
        assert ended.summary is not None
        failure = self._end.finished(ended.summary, ended.files, self._stop.number)
        self._account.hear(self._recording.state)
        if self._recording.state.violation:
            self._account.warn(self._recording.state.violation)
        return failure
