"""The supervisor: it watches an attempt, and decides what follows on its end.

Where workers go on in memory, or others join them there, the supervisor only follows. Any other attempt that lost a worker is
followed at once by another from the newest good checkpoint, with as many workers as the cluster has then. The steps since that
checkpoint are taken again, with the same values, so the record stays as it is.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lockstep.attempts.attempt_summary import AttemptSummary
from lockstep.attempts.chaos import Chaos
from lockstep.attempts.cluster_view import ON_RAY, ClusterView
from lockstep.attempts.cluster_watch import ClusterWatch
from lockstep.attempts.mailbox import LOOK_S, LOST, RunStatus, WentOn, look_every_s
from lockstep.attempts.placement import WorkerPlacement
from lockstep.attempts.planned_change import PlannedChange, joining_workers_for
from lockstep.attempts.policy import RetryBudget, outcome_of
from lockstep.attempts.progress_watchdog import end
from lockstep.attempts.quarantine import Blame
from lockstep.attempts.recording import Recording
from lockstep.attempts.run_end import RunEnd
from lockstep.attempts.stages import underway
from lockstep.attempts.storage_retries import patiently
from lockstep.attempts.worker_group import WorkerGroup
from lockstep.checkpoint.runs.run_checkpoints import claim, steps_of
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.clusters.core_watch import lost_core
from lockstep.driver.failure_report import with_run
from lockstep.driver.options import RunOptions
from lockstep.driver.result import Result, check_saved, result_of
from lockstep.driver.run_view import RunView
from lockstep.driver.signals import StopSignal
from lockstep.driver.silence import Patience
from lockstep.errors import (
    ClusterError,
    DeterminismError,
    JobError,
    LockstepError,
    RecordError,
    SilentError,
    SpecError,
    StorageError,
)
from lockstep.record.events.union import AttemptsSummarised, Document, Warned
from lockstep.record.recorder_state import RecorderState
from lockstep.spec.fields import Spec

NAMING_LOOK_S = 0.1
"""How often the driver looks at a run until its id is told: the workers wait for that."""


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
    ) -> None:
        self.spec = spec
        self._around = around
        self.progress, self.began_at = options.progress, options.began_at
        self._source = options.source
        self.stop = stop
        self.origin = origin
        self.environment = dict(environment)
        self.warnings = list(warnings)
        self.summaries: list[AttemptSummary] = []
        self._recording = recording
        self._warned = 0
        self._saved = False
        """Whether the workers have told of a checkpoint."""
        self._table_versions = origin.table_versions
        self._moving: str | None = None
        """Why the attempt at hand is asked to end, so that the next one runs elsewhere or on more workers."""
        self._last_step_at = self._looked_at = 0.0
        self._before: Mapping[str, float] = {}
        """When the attempt before came to the end of its stages."""
        self._cluster: ClusterWatch
        self._outlived: set[int] = set()
        """Workers of the attempt at hand, by their numbers, whose loss the others have outlived, and which are told."""
        self._change: PlannedChange | None = None
        """By which workers join or leave the attempt at hand, while it goes on."""
        self._standbys = around.standbys(self._warn_and_record)
        self._blame = Blame(spec.checkpoint.storage, self._warn_and_record, recording.tell)
        self.chaos: Chaos | None = None
        self._on_run_id = on_run_id
        self._named = False
        self._shown_as, self._gauges = uuid.uuid4().hex, around.gauges(spec.name)
        self._run_registry = around.run_registry(spec.name, spec.record.uri or "", options.began_at)
        self._end = RunEnd(recording, self._run_registry, self.progress.say, verbose=options.verbose)

    def run(self) -> Result:
        """Train until the run ends, however it does."""
        placement = self._around.first_place(self.spec, self.stop, self.progress.say)
        try:
            summary, failure = self._attempts(placement)
            self._end.show(summary)
        except (KeyboardInterrupt, Exception) as error:
            self._end.early(error)
            if isinstance(error, LockstepError):
                raise with_run(error, self._recording.run_id, self.spec.folder) from error
            raise
        if failure is not None:
            raise failure
        state = self._recording.state
        check_saved(summary, state.run_id or "", state.folder)
        return result_of(
            summary,
            run_id=state.run_id or "",
            url=state.url,
            tracking_uri=self.spec.record.uri or "",
            folder=state.folder,
            began_at=self.began_at,
            warnings=self.warnings,
            attempts=self.origin.attempt,
            signal_number=self.stop.number,
        )

    def _attempts(self, place: WorkerPlacement) -> tuple[Mapping[str, Any], RecordError | None]:
        """One attempt after another, until one comes to an end that is recorded, or no other is worth it.

        The run's summary, and what could not be recorded of it.
        """
        budget = RetryBudget(self.spec.faults)
        while True:
            ended = self._attempt(place)
            current, error = self.summaries[-1], ended.error
            if ended.summary is not None:
                stopped = ended.summary["stopped"]
                current.why = self._moving or "stopped" if stopped else "finished"
                self._tell_summaries()
                if stopped and self._moving and not self.stop.asked:
                    self.progress.say(f"attempt {current.attempt} ended after a checkpoint: {self._moving}")
                else:
                    try:
                        return ended.summary, self._close(ended)
                    except LOST as lost:  # another attempt, which has no step left to take
                        error = self._recording.reopen(lost)
            if error is not None:
                current.why = str(error)
                self._tell_summaries()
                decision = budget.decide(
                    outcome_of(error), self._saved_step(), contradicts=self._contradicts(error)
                )
                if decision.again and self.stop.asked:
                    by_signal = error.with_message(
                        f"{error} (attempt {current.attempt}; a signal ends the run)"
                    )
                    self._end.give_up(self.stop.ended(by_signal), ended.details)
                if not decision.again:
                    more = "" if len(self.summaries) == 1 else f" (attempt {current.attempt}; {decision.why})"
                    self._end.give_up(error.with_message(f"{error}{more}") if more else error, ended.details)
                self.progress.say(f"attempt {current.attempt} ended: {error}; {decision.why}")
                self.stop.wait(decision.pause_s)
            try:
                place = self._around.next_place(self.spec, self._blame.left_out, self.stop, self.progress.say)
                self.origin = self._next()
            except (ClusterError, StorageError) as refused:
                self._end.give_up(self.stop.ended(refused) if self.stop.asked else refused, ended.details)

    def _contradicts(self, error: LockstepError) -> bool:
        """Whether the newest attempt refused the job before its first step, though an earlier one had trained it."""
        *earlier, newest = self.summaries
        trained = any(summary.last_step for summary in earlier)
        return trained and not newest.last_step and isinstance(error, JobError | DeterminismError)

    def _attempt(self, place: WorkerPlacement) -> RunView:
        """One attempt, from its start to what it came to: a summary or an error."""
        current = AttemptSummary(self.origin.attempt, place.workers, time.time())
        place = self._standbys.first(place)
        mailbox = self._recording.mailbox
        attempt = self._around.workers(
            self.spec, self.origin, mailbox, place, self.environment, self._shown_as, self._source
        )
        again = bool(self.summaries)
        self.summaries.append(current)
        view = RunView(self.origin.attempt)
        try:
            # The first time the mailbox itself still starts: the workers need not wait for it.
            self._recording.begin(self.origin.attempt, place.workers, wait=again)
            current.from_step = self._saved_step() if again or self.origin.run_id else 0
            self._watch(attempt, place)
            status = self._recording.status()
            view = status.view
            self._look(status, attempt)
            self._name()
        except LOST as lost:
            if (gone := lost_core()) is not None:
                raise gone from lost
            attempt.end()
            view.error = self._recording.reopen(lost)
        self._before = attempt.stage_ends.at
        self.summaries[-1].ended = time.time()
        at_fault = self._blame.end(view, self.summaries[-1], self._recording.run_id, self._saved_step)
        view.error = at_fault or view.error
        # The ranks of a hung attempt that are killed last tell the loss of the others.
        hung = isinstance(attempt.error, SilentError) and type(view.error) is ClusterError
        if view.summary is None and (view.error is None or hung):
            view.error = view.lost(attempt.error or ClusterError("the workers ended without a result"))
        return view

    def _leave(self, nodes: frozenset[str], view: RunView) -> None:
        """Have an attempt that goes on move away from nodes that were found to be wrong before, where there is room elsewhere."""
        used = nodes & {member.node for member in view.members.values()}
        if not used or view.error is not None or self._moving is not None:
            return
        with suppress(SpecError):  # for the moment there is no room anywhere: the attempt goes on where it is
            if not used & self._around.find_place(self.spec, nodes).fit:
                self._moving = "a worker on one of its nodes had wrong bits"
                self._recording.ask_stop()

    def _watch(self, attempt: WorkerGroup, place: WorkerPlacement) -> None:
        """Until the attempt ends: show its progress, hand on a signal, end it where nothing can be recorded."""
        self._moving = self._change = None
        cluster = self._cluster = self._around.watch(self.spec, place, self._blame.left_out)
        self._outlived = set()
        try:
            self._watch_until_over(attempt, cluster)
        except (*LOST, LockstepError):
            raise
        except Exception:  # a fault of the driver's own: the steps since the last checkpoint are worth one
            self._recording.ask_stop()
            if not attempt.over.wait(self.spec.faults.longest_silence_s):
                attempt.end()
            raise
        finally:
            cluster.close()

    def _watch_until_over(self, attempt: WorkerGroup, cluster: ClusterWatch) -> None:
        attempt.start()
        lost_at, faults = time.monotonic(), self.spec.faults
        announced, patience = False, Patience(faults.longest_silence_s, faults.longest_start_s)
        while not attempt.over.wait(min(self._pace_s(attempt), LOOK_S)):
            if self.stop.asked and not announced:
                announced = True
                self._recording.guardian.tell(signal=self.stop.number)
                self._recording.ask_stop()
                self.progress.say("stopping after the next step; a second signal ends the run at once")
            if time.monotonic() - self._looked_at < self._pace_s(attempt):
                continue
            self._looked_at = time.monotonic()
            status = self._recording.status()
            if patience.is_over(status.view.signs_of_life, time.monotonic()):
                self._end_hung(attempt, patience, status.view)
                return
            if status.recorder.failure is not None and status.recorder.run_id is None:
                self._recording.ask_stop()
                if not attempt.over.wait(faults.longest_silence_s):
                    attempt.end()
                raise status.recorder.failure
            self._look(status, attempt)
            self._name()
            if len(attempt.lost) == len(self._outlived):
                lost_at = time.monotonic()
            elif time.monotonic() - lost_at > self.spec.faults.longest_silence_s:
                attempt.give_up()  # a worker has not come to the roll call, and nothing tells why
            self._leave(self._blame.judge(status.view, self.summaries[-1]), status.view)
            if self._moving is None and not announced and self.summaries[-1].last_step:
                self._tend(attempt, cluster, status)

    def _pace_s(self, attempt: WorkerGroup) -> float:
        """How often to look at the attempt: seldom where it goes on by itself, and nothing is asked of it."""
        if not self._named:
            return NAMING_LOOK_S
        pending = self.stop.asked or self._moving or self._change or len(attempt.lost) != len(self._outlived)
        return LOOK_S if pending else look_every_s(attempt.stage_ends.at.get("first_step"))

    def _tend(self, attempt: WorkerGroup, cluster: ClusterWatch, status: RunStatus) -> None:
        """While it trains: keep standbys for it, and have it save or change its workers as the cluster around it changes."""
        if self._change is not None:
            self._go_on_with(self._change, status)
            return
        members = [status.view.members[rank] for rank in sorted(status.view.members)]
        after_s = self.spec.faults.standby_after_s
        if after_s is not None and time.time() - attempt.stage_ends.at["first_step"] > after_s:
            self._standbys.fill(self.summaries[-1].attempt, members, cluster.each)
        advice = cluster.advice(members)
        if advice.save is not None:
            self.progress.say(f"saving, and continuing: {advice.save}")
            self._recording.ask_save()
        if advice.move is not None:
            self._change_workers(attempt, advice.move, advice.leaving, status)

    def _change_workers(
        self, attempt: WorkerGroup, why: str, leaving: frozenset[str], status: RunStatus
    ) -> None:
        """Have workers join, and those on nodes that are `leaving` leave: in memory where that can be, else all move."""
        members = None
        in_memory = attempt.can_regroup and status.able
        if in_memory:
            members = joining_workers_for(leaving, self.spec, attempt, status, self._blame.left_out)
        if members is not None:
            self._change = PlannedChange(why, members, attempt, self._recording)
            joining, gone = map(len, members)
            self.progress.say(f"{why}: {joining} workers are to join, {gone} to leave, while it trains")
        elif leaving or not in_memory:
            self._moving = why
            self._recording.ask_stop()

    def _go_on_with(self, change: PlannedChange, status: RunStatus) -> None:
        """Take the next step of a change of workers; where it cannot be done, the attempt moves."""
        problem = change.look(status)
        if problem is not None:
            self._change = None
            change.give_up(status)
            self._warn_and_record(f"{problem}; all workers are restarted from a checkpoint instead")
            self._moving = change.why
            self._recording.ask_stop()

    def _name(self) -> None:
        """Tell once which run this is, as soon as it exists: what is lost later can be resumed."""
        run_id = self._recording.run_id
        if run_id is None:
            return
        if not self._named:
            self._named = True
            self._run_registry.begins(run_id, self.summaries[-1].workers)
            self._on_run_id(run_id)
        self._recording.named()

    def _end_hung(self, attempt: WorkerGroup, patience: Patience, view: RunView) -> None:
        """End an attempt that makes no progress; its ranks' stacks go into the record."""
        bound_s = patience.bound_s
        self.progress.say(f"no progress for {bound_s:.0f} s: the attempt is ended")
        self._recording.refuse("it made no progress")
        name = f"stacks-attempt-{self.origin.attempt}.txt"
        stacks = end([view.members[rank] for rank in sorted(view.members)])
        if stacks:
            self._recording.tell(Document(name, stacks))
        where = f"; what each was doing is in {name}" if stacks else ""
        attempt.end()
        if patience.begun:
            attempt.error = SilentError(
                f"no rank made progress for {bound_s:.0f} s, so the attempt was ended{where} "
                "(faults.longest_silence_s is the shortest time for that)"
            )
        else:
            stage = underway({**attempt.stage_ends.at, **view.stage_ends})
            attempt.error = SilentError(
                f"no first step within {bound_s:.0f} s (faults.longest_start_s), so the attempt was ended in its stage {stage}{where}"
            )

    def _look(self, status: RunStatus, attempt: WorkerGroup | None = None) -> None:
        """Take in what is new of the attempt at hand."""
        view = status.view
        self._saved = self._saved or view.saved
        self._table_versions = view.table_versions or self._table_versions
        for text in view.warnings[self._warned :]:
            self._warn(text)
        self._warned = len(view.warnings)
        self._hear(status.recorder)
        self.progress.show(view.step, view.evaluation, view.total_steps)
        if attempt is not None and status.went_on is not None and view.attempt > self.summaries[-1].attempt:
            self._went_on(attempt, status, status.went_on)
        current, row = self.summaries[-1], view.step
        if attempt is not None:
            attempt.run_id = self._recording.run_id
        if attempt is None or row is None or row.attempt != current.attempt:
            return
        if "first_step" not in view.stage_ends:
            return  # a row that was restored, as of the same attempt: a span is taken again
        if len(view.stragglers) > len(current.stragglers):
            if not current.stragglers:  # once an attempt is enough for a person who looks on
                self._warn(view.stragglers[0])
            current.stragglers = list(view.stragglers)
            self._tell_summaries()
        first = not current.last_step
        if first:
            attempt.stage_ends.at |= view.stage_ends
            if len(self.summaries) > 1:
                self._goes_on(self.summaries[-2], current, attempt)
        current.last_step, self._last_step_at = row.step, row.wall_clock
        self._run_registry.reached(row.step, current.workers)
        if attempt.run_id is not None:
            self._gauges.show(attempt.run_id, row, current.workers)
        if first:
            self._tell_summaries()
        if self.chaos is not None:
            self.chaos.look(
                current.attempt, row.step, self._recording.members, lambda: self._recording.recorder
            )

    def _went_on(self, attempt: WorkerGroup, status: RunStatus, began: WentOn) -> None:
        """Workers go on in their processes, without those that were lost or left, and with those that joined: another attempt."""
        previous, number = self.summaries[-1], status.view.attempt
        why = [attempt.lost[worker] for worker in sorted(attempt.lost.keys() - self._outlived)]
        self._outlived |= attempt.lost.keys()
        current = AttemptSummary(
            number, began.workers, began.at, from_step=began.step, in_memory=True, joined=began.joined
        )
        attempt.let_in(status.numbers)
        change = self._change
        if change is not None and change.is_done(status):
            self._change = None
            why.append(change.why)
            joined = [status.everyone[worker] for worker in change.members.joining]
            current.standbys = self._standbys.took(joined, change.began_at)
            self._cluster.changed(began.workers)
        else:
            self._cluster.outlived(began.workers)
        previous.why = "; ".join(why) or "a connection between workers was lost"
        previous.ended, previous.last_step = began.at, max(previous.last_step, began.step)
        self.summaries.append(current)
        self.origin = replace(self.origin, attempt=number)
        self._before = {"detection": began.at}
        more = f", and {began.joined} join them" if began.joined else ""
        self.progress.say(
            f"attempt {previous.attempt} ended: {previous.why}; the others go on from step {began.step}{more}"
        )
        self._tell_summaries()

    def _goes_on(self, before: AttemptSummary, current: AttemptSummary, attempt: WorkerGroup) -> None:
        """The first step of an attempt after another: what the loss of that one cost."""
        ends = attempt.stage_ends.at
        if current.in_memory:
            ends = {"first_step": ends["first_step"]}
        else:
            current.standbys = self._standbys.took(self._recording.members(), ends["decision"])
        current.follows(before, self._last_step_at, self._before, ends)
        self.progress.say(f"attempt {current.attempt} continues {current.cost()}")

    def _hear(self, recorder: RecorderState) -> None:
        """Tell what the run has shown to be wrong with it. A recorder that took another's place has not told it again."""
        for text in recorder.diagnosed:
            if text not in self.warnings:
                self._warn(text)

    def _warn(self, text: str) -> None:
        self.progress.say(f"warning: {text}")
        self.warnings.append(text)

    def _warn_and_record(self, text: str) -> None:
        """Warn of what the driver has found: the workers' warnings and the recorder's are recorded already."""
        self._warn(text)
        self._recording.tell(Warned(text))

    def _tell_summaries(self) -> None:
        self._recording.tell(AttemptsSummarised([summary.as_dict() for summary in self.summaries]))

    def _saved_step(self) -> int:
        run_id = self._recording.run_id
        if run_id is None:
            return 0
        storage = self.spec.checkpoint.storage
        return max(patiently(lambda: steps_of(storage, run_id), self.stop.wait, self.progress.say), default=0)

    def _next(self) -> AttemptOrigin:
        """The next attempt; whatever still runs of the one before can publish nothing from here on."""
        run_id = self._recording.run_id
        if run_id is None:  # it ended before there was a run
            return AttemptOrigin(
                None,
                self.origin.attempt + 1,
                replay=self.origin.replay,
                table_versions=self._table_versions,
                doubts=self._blame.doubts,
            )
        storage, least = self.spec.checkpoint.storage, self.origin.attempt + 1
        # The workers of a new run make its folder with their first checkpoint.
        begun = self._saved or self.origin.run_id is not None
        claimed = patiently(
            lambda: claim(storage, run_id, None, least, begun=begun), self.stop.wait, self.progress.say
        )
        return replace(
            claimed,
            replay=self.origin.replay,
            table_versions=self._table_versions,
            doubts=self._blame.doubts,
        )

    def _close(self, ended: RunView) -> RecordError | None:
        """Have it recorded that the run has ended by itself or by a signal. Returns what could not be."""
        assert ended.summary is not None
        failure = self._end.finished(ended.summary, ended.files, self.stop.number)
        self._hear(self._recording.state)
        if self._recording.state.violation:
            self._warn(self._recording.state.violation)
        return failure
