"""The watch over one attempt, until its workers have ended: it follows what they do, hands on a signal, and has them save, stop or change.

Where workers go on in memory, or others join them there, the watch only follows: that is another attempt in the account, and the same workers here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from lockstep.attempts.attempts_account import RunAccount
from lockstep.attempts.chaos import Chaos
from lockstep.attempts.cluster_view import ClusterView
from lockstep.attempts.fault_attribution import Blame
from lockstep.attempts.hung_workers import hung
from lockstep.attempts.mailbox import LOOK_S, LOST, RunStatus, WentOn, look_every_s
from lockstep.attempts.placement import WorkerPlacement
from lockstep.attempts.planned_change import Members, PlannedChange
from lockstep.attempts.recording import Recording
from lockstep.attempts.worker_group import WorkerGroup
from lockstep.driver.hang_limit import Patience
from lockstep.driver.run_view import RunView
from lockstep.driver.signals import StopSignal
from lockstep.errors import DeviceError, LockstepError, SpecError
from lockstep.record.events.union import Document
from lockstep.running_time import running_s, wait_for
from lockstep.spec.fields import Spec

NAMING_LOOK_S = 0.1
"""How often the driver looks at a run until its id is told: the workers wait for that."""


class AttemptWatch:
    """One attempt by `workers`, which are started and watched by `until_over`."""

    def __init__(
        self,
        spec: Spec,
        workers: WorkerGroup,
        around: ClusterView,
        account: RunAccount,
        recording: Recording,
        stop: StopSignal,
        blame: Blame,
        chaos: Chaos | None,
        *,
        saves_at_once: bool,
        saved_step: Callable[[], int],
    ) -> None:
        """`saves_at_once`: attempts before this one came to no checkpoint, so one is saved as soon as a step is done. `saved_step` gives that of the newest."""
        self.moving: str | None = None
        """Why the attempt is asked to end, so that the next one runs elsewhere or on more workers."""
        self._spec, self._workers, self._around = spec, workers, around
        self._account, self._recording, self._stop = account, recording, stop
        self._blame, self._chaos = blame, chaos
        self._saves_at_once, self._saved_step = saves_at_once, saved_step
        self._stopping = False
        """Whether a signal was handed on to the workers."""
        self._change: PlannedChange | None = None
        """By which workers join or leave while the attempt goes on."""
        self._outlived: set[int] = set()
        """Workers, by their numbers, whose loss the others have outlived, and which are told."""
        self._left = 0
        """How many attempts that these workers have left because something failed are taken in."""
        self._looked_at = 0.0

    def until_over(self, placement: WorkerPlacement) -> None:
        """Start the workers and follow them until they have ended, or are ended because nothing can be recorded."""
        self._cluster = self._around.watch(self._spec, placement, self._blame.left_out)
        try:
            self._follow()
        except (*LOST, LockstepError):
            raise
        except Exception:  # a fault of the driver's own: the steps since the last checkpoint are worth one
            self._end_saved()
            raise
        finally:
            self._cluster.close()

    def look(self, status: RunStatus) -> None:
        """Take in what is new of the workers, and tell it."""
        view, account = status.view, self._account
        account.show(view, status.recorder)
        if status.went_on is not None and view.attempt > account.current.attempt:
            self._went_on(status, status.went_on)
        self._workers.run_id = self._recording.run_id
        row = account.newest_step(view)
        if row is not None:
            account.slowed(view)
            if not account.current.last_step:
                self._began(view)
            account.reached(row)
            if self._chaos is not None:
                members, recorder = self._recording.members, lambda: self._recording.recorder
                self._chaos.look(row.attempt, row.step, members, recorder)
        account.name()

    def _follow(self) -> None:
        self._workers.start()
        lost_at, faults = running_s(), self._spec.faults
        patience = Patience(faults.longest_silence_s, faults.longest_start_s)
        while not self._workers.over.wait(min(self._pace_s(), LOOK_S)):
            if self._stop.asked and not self._stopping:
                self._stopping = True
                self._recording.guardian.tell(signal=self._stop.number)
                self._recording.ask_stop()
                self._account.say("stopping after the next step; a second signal ends the run at once")
            if time.monotonic() - self._looked_at < self._pace_s():
                continue
            self._looked_at = time.monotonic()
            status = self._recording.status()
            if patience.is_over(status.view.signs_of_life, running_s()):
                self._end_hung(patience, status.view)
                return
            if status.recorder.failure is not None and status.recorder.run_id is None:
                self._end_saved()
                raise status.recorder.failure
            self.look(status)
            if len(self._workers.lost) == len(self._outlived):
                lost_at = running_s()
            elif running_s() - lost_at > faults.longest_silence_s:
                self._workers.give_up()  # a worker has not come to the rendezvous, and nothing tells why
            self._leave(self._blame.judge(status.view, self._account.current), status.view)
            if self.moving is None and not self._stopping and self._account.current.last_step:
                self._tend(status)

    def _pace_s(self) -> float:
        """How often to look at the attempt: seldom where it goes on by itself, and nothing is asked of it."""
        if not self._account.is_named:
            return NAMING_LOOK_S
        untold = len(self._workers.lost) != len(self._outlived)
        if self._stop.asked or self.moving or self._change or untold:
            return LOOK_S
        return look_every_s(self._workers.stage_ends.at.get("first_step"))

    # --- what is asked of the workers -------------------------------------------------------------------------

    def _tend(self, status: RunStatus) -> None:
        """While it trains: have it save or change its workers as the cluster around it changes."""
        if self._change is not None:
            self._go_on_with(self._change, status)
            return
        if status.waiting and self._workers.replaced_by_ray:
            joining = Members(tuple(status.waiting), ())
            self._change = PlannedChange(
                "Ray has replaced a lost worker", joining, self._workers, self._recording
            )
            return
        members = [status.view.members[rank] for rank in sorted(status.view.members)]
        advice = self._cluster.advice(members)
        if advice.save is not None:
            self._account.say(f"saving, and continuing: {advice.save}")
            self._recording.ask_save()
        if advice.move is not None:
            self._change_workers(advice.move, advice.leaving, status)

    def _change_workers(self, why: str, leaving: frozenset[str], status: RunStatus) -> None:
        """Have workers join, and those on nodes that are `leaving` leave: in memory where that can be, else all move."""
        members = None
        if self._workers.replaced_by_ray:
            if not leaving and len(status.numbers) < self._cluster.workers:
                return  # Ray starts others in the place of those that were lost
            self._move(why)
            return
        in_memory = self._workers.can_regroup and status.able
        if in_memory:
            members = self._around.start_joining(
                leaving, self._spec, self._workers, status, self._blame.left_out
            )
        if members is not None:
            self._change = PlannedChange(why, members, self._workers, self._recording)
            joining, gone = map(len, members)
            self._account.say(f"{why}: {joining} workers are to join, {gone} to leave, while it trains")
        elif leaving or not in_memory:
            self._move(why)

    def _go_on_with(self, change: PlannedChange, status: RunStatus) -> None:
        """Take the next step of a change of workers; where it cannot be done, the attempt moves."""
        problem = change.look(status)
        if problem is not None:
            self._change = None
            change.give_up(status)
            self._account.warn_and_record(f"{problem}; all workers are restarted from a checkpoint instead")
            self._move(change.why)

    def _leave(self, nodes: frozenset[str], view: RunView) -> None:
        """Move away from nodes that were just found to be wrong, where there is room elsewhere."""
        used = nodes & {member.node for member in view.members.values()}
        if not used or view.error is not None or self.moving is not None:
            return
        with suppress(SpecError):  # for the moment there is no room anywhere: the attempt goes on where it is
            if not used & self._around.find_place(self._spec, nodes).fit:
                self._move("a worker on one of its nodes had wrong bits")

    def _move(self, why: str) -> None:
        """Have the workers end after a checkpoint, from which the next attempt goes on."""
        self.moving = why
        self._recording.ask_stop()

    def _end_saved(self) -> None:
        """Have the workers save and end; whoever has not within the longest silence is ended."""
        self._recording.ask_stop()
        if not wait_for(self._workers.over.wait, self._spec.faults.longest_silence_s):
            self._workers.end()

    # --- what the workers do ----------------------------------------------------------------------------------

    def _began(self, view: RunView) -> None:
        """The newest attempt has done its first step."""
        ends = self._workers.stage_ends.at
        ends |= view.stage_ends
        if self._saves_at_once:
            self._saves_at_once = False
            self._recording.ask_save()
        self._account.started(ends)
        if len(self._account.attempts) == 1:
            return
        if self._account.current.in_memory:
            self._account.continued({"first_step": ends["first_step"]})
        else:
            self._account.continued(ends)

    def _went_on(self, status: RunStatus, began: WentOn) -> None:
        """Workers go on in their processes, without those that were lost or left, and with those that joined: another attempt."""
        lost, change = self._workers.lost, self._change
        left, self._left = began.left[self._left :], len(began.left)
        why = [str(view.error) for view in left if isinstance(view.error, DeviceError)]
        why += [str(lost[worker]) for worker in sorted(lost.keys() - self._outlived)]
        self._outlived |= lost.keys()
        self._workers.let_in(status.numbers)
        planned = not why and change is not None and change.is_done(status)
        if change is not None and change.is_done(status):
            self._change = None
            why.append(change.why)
            self._cluster.changed(began.workers)
        else:
            self._cluster.outlived(began.workers)
        text = "; ".join(why) or "a connection between workers was lost"
        for view in left:
            self._blame.end(view, self._account.current, self._recording.run_id, self._saved_step)
        if self._blame.fault_of_job is not None:  # its other workers would fail alike
            self._workers.end()
        self._account.went_on(status.view.attempt, began, text, planned=planned)

    def _end_hung(self, patience: Patience, view: RunView) -> None:
        """End an attempt that makes no progress; its ranks' stacks go into the record."""
        workers = self._workers
        self._account.say(f"no progress for {patience.bound_s:.0f} s: the attempt is ended")
        self._recording.refuse("it made no progress")
        name = f"stacks-attempt-{self._account.current.attempt}.txt"
        stacks = self._around.end_workers([view.members[rank] for rank in sorted(view.members)])
        if stacks:
            self._recording.tell(Document(name, stacks))
        workers.end()
        workers.error = hung(patience, {**workers.stage_ends.at, **view.stage_ends}, name if stacks else "")
