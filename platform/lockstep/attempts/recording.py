"""The driver's side of a run's record: its mailbox, the recorder that empties it, and another one where that is lost or hangs."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Self

import ray

from lockstep.attempts import problems
from lockstep.attempts.mailbox import ANSWER_S, LOST, RunStatus, start_mailbox
from lockstep.attempts.recorder_actor import start_recorder
from lockstep.attempts.worker_group import why_lost
from lockstep.clusters.bounded_calls import answer_of, end_actor
from lockstep.clusters.core_watch import lost_core
from lockstep.driver.guardian import Guardian
from lockstep.errors import ClusterError, RecordError
from lockstep.record.events.union import Event, Joined
from lockstep.record.recorder_state import RecorderState
from lockstep.spec.fields import Spec

SILENT_S = 60.0
"""How long a recorder may leave the mailbox alone before it is replaced; it looks once a second or more often."""

STARTING_S = 300.0
"""How long its process, and that of the mailbox, may take to start."""

CLOSING_S = 3600.0
"""How long a recorder may take to write what is left, as long as it looks into the mailbox: figures, and uploads of any size."""

LOOK_S = 0.2
"""How often the end of the recording is looked for."""

MOST_RECORDERS = 20
"""So many recorders of one run are not lost by accident."""


class Recording:
    """The record of one run, as its driver has it, for the length of a block. `say` is told when a recorder is replaced."""

    def __init__(
        self,
        spec: Spec,
        environment: Mapping[str, str],
        run_id: str | None,
        say: Callable[[str], None],
        guardian: Guardian,
    ) -> None:
        self.run_id = run_id
        self.guardian = guardian
        self._spec, self._environment, self._say = spec, dict(environment), say
        self._recorders = 0
        self._open()

    def _open(self) -> None:
        self._named = False
        self._mailbox_pid: int | None = None
        self.mailbox: Any = start_mailbox(self._environment)
        self._start_recorder()

    def _start_recorder(self) -> None:
        self._recorders += 1
        self.recorder: Any = start_recorder(self._spec, self._environment, self.run_id, self.mailbox)
        self._work = self.recorder.record.remote()
        self.mailbox.recorded_by.remote(self.recorder)
        self._state = RecorderState()
        self._fetches, self._fetched_at = 0, time.monotonic()

    # --- while the run goes on --------------------------------------------------------------------------------

    def begin(self, attempt: int, workers: int, *, wait: bool) -> None:
        """Another attempt begins; with `wait` the mailbox knows when this returns."""
        begun = self.mailbox.begin.remote(attempt, workers, self._spec.workers.min)
        if wait:
            answer_of(begun, "the run's mailbox", STARTING_S)

    def status(self) -> RunStatus:
        """How the run stands. A recorder that is gone or hangs is replaced, which costs the attempt nothing."""
        status = self._look()
        if ray.wait([self._work], timeout=0)[0]:
            self._replace_lost()
        elif self._is_hung:
            self._replace_hung()
        return status

    def _look(self) -> RunStatus:
        if (lost := lost_core()) is not None:
            raise lost
        ref = self.mailbox.status.remote()
        status: RunStatus = answer_of(ref, "it", ANSWER_S if self._mailbox_pid else STARTING_S)
        self._mailbox_pid = status.mailbox
        self._note(status)
        return status

    @property
    def _is_hung(self) -> bool:
        return time.monotonic() - self._fetched_at > (SILENT_S if self._fetches else STARTING_S)

    def _note(self, status: RunStatus) -> None:
        if status.fetches != self._fetches:
            self._fetches, self._fetched_at = status.fetches, time.monotonic()
        self._state = status.recorder
        self.guardian.recorded_by(status.recorder.pid)
        if self.run_id is None and status.recorder.run_id is not None:
            self.run_id = status.recorder.run_id
            self.guardian.tell(run_id=self.run_id)

    def members(self) -> list[Joined]:
        """The workers of the attempt at hand, by rank."""
        view = self.status().view
        return [view.members[rank] for rank in sorted(view.members)]

    def named(self) -> None:
        """The run's id is told: the workers need not wait for it any more."""
        if not self._named:
            self._named = True
            self.mailbox.name.remote()

    def tell(self, *events: Event) -> None:
        """Have events of the driver's own recorded."""
        self.mailbox.record.remote(events)

    def ask_stop(self) -> None:
        """Ask the workers to end the attempt after their next step."""
        self.mailbox.ask_stop.remote()

    def ask_regroup(self, leaving: Collection[int]) -> bool:
        """Ask the workers to form another group after their next step, with the joining workers that wait and without these. Whether they do."""
        ref = self.mailbox.ask_regroup.remote(tuple(leaving))
        does: bool = answer_of(ref, "it", ANSWER_S)
        return does

    def ask_save(self) -> None:
        """Ask the workers for a checkpoint after their next step."""
        self.mailbox.ask_save.remote()

    def refuse(self, why: str) -> None:
        """Have no worker of the attempt at hand go on without the others, which are being ended."""
        answer_of(self.mailbox.refuse.remote(why), "it", ANSWER_S)

    def reopen(self, error: Exception) -> ClusterError:
        """The mailbox itself is lost, and with it what the recorder had not fetched: the attempt cannot go on. How that is told."""
        lost = problems.MAILBOX_LOST(got=why_lost(str(error)))
        if self.run_id is None:
            raise lost from error
        end_actor(self.mailbox, self._mailbox_pid)
        end_actor(self.recorder, self._state.pid)
        self._open()
        return lost

    # --- its end ----------------------------------------------------------------------------------------------

    def close(self) -> RecordError | None:
        """Nothing more will be told: wait until all of it is written. What could not be."""
        self.mailbox.close.remote()
        self.recorder.end.remote()
        until = time.monotonic() + CLOSING_S
        while True:
            done, _ = ray.wait([self._work], timeout=LOOK_S)
            self._look()
            if not done and time.monotonic() > until:
                end_actor(self.recorder, self._state.pid)
                return problems.UNWRITTEN(seconds=f"{CLOSING_S:.0f}", run=self.run_id)
            if done:
                try:
                    failure: RecordError | None = ray.get(self._work)
                    return failure
                except LOST:
                    self._replace_lost()
            elif self._is_hung:
                self._replace_hung()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """The run is over: end both actors now, rather than when the last reference to them goes."""
        if lost_core() is not None:
            return  # nobody would obey
        end_actor(self.recorder, self._state.pid)
        end_actor(self.mailbox, self._mailbox_pid)

    @property
    def state(self) -> RecorderState:
        """How the record stood when the recorder last fetched events."""
        return self._state

    # --- another recorder -------------------------------------------------------------------------------------

    def _replace_lost(self) -> None:
        try:
            ray.get(self._work)
            why = "it ended by itself"
        except LOST as error:
            why = why_lost(str(error))
        self._replace(f"the recorder was lost ({why})")

    def _replace_hung(self) -> None:
        end_actor(self.recorder, self._state.pid)
        self._replace(f"the recorder did nothing for {SILENT_S:.0f} s")

    def _replace(self, reason: str) -> None:
        if (
            self.run_id is None
        ):  # a run whose creation was not confirmed may exist: a second one would make two
            raise problems.RECORDER_LOST(got=reason)
        if self._recorders >= MOST_RECORDERS:
            raise problems.RECORDERS_LOST(got=reason, count=self._recorders - 1)
        self._say(f"{reason}: another recorder continues the run's journal")
        self._start_recorder()
