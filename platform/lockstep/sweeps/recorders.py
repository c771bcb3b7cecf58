"""The records of a sweep and of all its trials, written by one process on the driver's node: MLflow is imported once."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray

from lockstep.attempts.attempt_summary import AttemptSummary
from lockstep.attempts.mailbox import Asked
from lockstep.attempts.recording import CLOSING_S
from lockstep.checkpoint.runs.run_checkpoints import pin_aliased, read_shared
from lockstep.clusters.bounded_calls import answer_of, end_actor, unanswered
from lockstep.driver.finished_run import find_proven
from lockstep.driver.run_view import RunView
from lockstep.errors import RecordError
from lockstep.record.events.union import (
    AttemptsSummarised,
    Document,
    EndStatus,
    Event,
    Failed,
    Finished,
    Joined,
    Restored,
    Started,
)
from lockstep.record.ledger.rows import EvaluationRow
from lockstep.record.mirror.run_store import Status, StoredRun
from lockstep.record.mirror.stores import find_history, warm_up
from lockstep.record.recorder import Recorder
from lockstep.running_time import join, running_s, wait_for
from lockstep.spec.fields import Spec
from lockstep.spec.sweep import SweepSpec
from lockstep.sweeps import problems
from lockstep.sweeps.sweep_record import SweepRecord
from lockstep.sweeps.trial_rendezvous import TrialRendezvous
from lockstep.training.elastic.membership import Formation, Refused

ANSWER_S = 900.0
"""How long the recorders may take to answer: it may take minutes to import MLflow and to wait for the store."""

NEWS_S = 60.0
"""How long they may take to say how the trials stand, for which nothing is waited."""

WHOSE = "the process of the sweep's recorders"

GOES_ON = "lockstep resume goes on with the sweep"
"""What to do where the recorders are lost."""

AGAIN = "no trial has begun since: give the command again"
"""What to do where they are lost before that."""


class TrialRecorder:
    """The record of one trial, and its state. A finished run of the same identity is looked for before the trial has a run of its own."""

    def __init__(self, spec: Spec, name: str, run_id: str | None, source: Path, *, may_reuse: bool) -> None:
        self.spec, self.name = spec, name
        self.view, self.asked = RunView(attempt=0), Asked()
        self.rendezvous, self._first, self._began = TrialRendezvous(0, 0, self._gone_on), 0, 0.0
        self.reused_run: StoredRun | None = None
        """A finished run of the same identity, which stands for this trial."""
        self.closed = False
        self._recorder: Recorder | None = Recorder(
            spec,
            run_id=run_id,
            on_aliases=partial(pin_aliased, spec.checkpoint.storage),
            source=source,
            fetch=partial(read_shared, spec.checkpoint.storage),
        )
        self._looks = may_reuse and run_id is None
        self._looked = threading.Event()
        self._started: Started | None = None
        self._signal: int | None = None
        self._closed_as: str | None = None

    @property
    def run_id_now(self) -> str | None:
        """The run's id, or None as long as there is no run."""
        recorder = self._recorder
        if recorder is None:
            return self._closed_as
        return recorder.state.run_id

    def run_id(self) -> str:
        """Wait until the run exists; its id."""
        recorder = self._recorder
        if recorder is not None:
            return recorder.run_id()
        if self._closed_as is None:
            raise problems.NO_RUN()
        return self._closed_as

    def begun(self) -> str | None:
        """The id of the run, which is waited for where it is on its way; None where nothing has begun one."""
        return self.run_id() if self._started is not None and self.reused_run is None else None

    def known_or_reused(self) -> str | None:
        """Wait until the run exists; its id, or None where a finished one stands for it."""
        if not wait_for(self._looked.wait, ANSWER_S):
            raise unanswered("rank 0, which should have described the trial,", ANSWER_S)
        return self.run_id() if self.reused_run is None else None

    def begin(self, attempt: int, workers: int) -> None:
        """Another attempt begins, with so many workers."""
        self.view, self.asked = self.view.next(attempt), Asked()
        self._began = time.time()
        self._first, self.rendezvous = attempt, TrialRendezvous(attempt, workers, self._gone_on)

    def _gone_on(self, formation: Formation) -> None:
        """The workers go on in memory, as another attempt."""
        self._began, self.view.members = time.time(), self.rendezvous.members
        self.view = self.view.gone_on(formation.attempt, formation.workers)

    def leave(self, attempt: int) -> None:
        """Tune wants no more of the trial for now: its attempt ends as planned, and nothing has interrupted it."""
        row = self.view.step
        if attempt == self.view.attempt and row is not None:  # else another has begun, or none did a step
            left = AttemptSummary(attempt, len(self.view.members), self._began, last_step=row.step)
            left.ended, left.why, left.planned = time.time(), "the sweep trained other trials", True
            self.record(AttemptsSummarised([left.as_dict()]))

    def ask_rendezvous(self, attempt: int, name: str, arguments: Sequence[Any]) -> Any:
        """What `TrialRendezvous` answers to workers that began with this attempt; those of an earlier one are not waited for."""
        if attempt != self._first:
            return Refused("another attempt of the trial has begun") if name == "ask" else None
        return getattr(self.rendezvous, name)(*arguments)

    def stop(self, signal_number: int | None) -> None:
        """Ask the workers to end the trial after their next step."""
        self.asked, self._signal = self.asked._replace(stop=True), signal_number

    def tell(self, attempt: int, events: Sequence[Event]) -> Asked:
        """Take events of an attempt."""
        for event in events:
            if isinstance(event, Joined) and attempt == self._first:
                self.rendezvous.members[event.rank] = event
            if attempt == self.view.attempt:
                self.view.take(event)
            if isinstance(event, Started):
                self._start(event)
            elif isinstance(event, Finished):
                self.record(Finished({**event.summary, "signal": self._signal}, event.files))
            else:
                self.record(event)
        return self.asked

    def record(self, *events: Event) -> None:
        """Have events recorded, unless a finished run stands for this one."""
        recorder = self._recorder
        if self.reused_run is None and recorder is not None:
            recorder.tell(*events)

    def _start(self, started: Started) -> None:
        first, self._started = self._started is None, started
        if first and self._looks:
            self.reused_run = find_proven(
                self.spec.record.uri or "",
                started.facts["identity"],
                self.spec.folder,
                started.facts.get("plan") or {},
                early_stop=self.spec.early_stop is not None,
                environment=started.facts.get("environment") or {},
            )
        recorder = self._recorder
        if self.reused_run is None and recorder is not None:
            if first:
                recorder.start()
            recorder.tell(started)
        self._looked.set()

    def adopt(self) -> tuple[str, list[EvaluationRow], str]:
        """Record the run that was found as this trial: the same rows, and a tag that says whose they are. Its id, evaluations and digest."""
        assert self.reused_run is not None and self._started is not None and self._recorder is not None
        stored_run, self.reused_run = self.reused_run, None
        history = find_history(self.spec.record.uri or "", stored_run.run_id, self.spec.folder)
        self._recorder.start()
        self._recorder.tell(
            Started({**self._started.facts, "reused_from": stored_run.run_id}),
            Restored(history.steps, history.evaluations),
            Finished({**stored_run.summary, "reused_from": stored_run.run_id}),
        )
        return stored_run.run_id, list(history.evaluations), stored_run.summary["weights_digest"]

    def end(self, message: str, details: str, status: EndStatus) -> None:
        """The trial ended early, as the driver sees it."""
        assert self._recorder is not None, "ended once"
        if self._started is None:
            self._recorder.start()
        self._recorder.tell(Failed(message, details, status))

    def close(self) -> RecordError | None:
        """Write what is left, once. What could not be. Of the recorder nothing stays in memory but the run's id."""
        recorder = self._recorder
        if self.closed or recorder is None:
            return None
        self.closed = True
        try:
            recorder.close()
        except RecordError as error:
            return error
        finally:
            self._closed_as = recorder.state.run_id
            self._recorder, self._started = None, self._started and Started({})
        return None


class RecordersActor:
    """One recorder a trial, by the key of the trial. Methods in the group `write` are carried out in the order of the calls."""

    def __init__(self, source: str, paths: Sequence[str]) -> None:
        sys.path[:0] = [
            path for path in paths if path not in sys.path
        ]  # where the driver imports the job from
        self._recorders: dict[str, TrialRecorder] = {}
        self._source = Path(source)
        self._sweep: SweepRecord
        self._closing: list[threading.Thread] = []
        self._failures: list[RecordError] = []
        self._stopping: list[int | None] = []
        """The signal for which every trial is asked to stop, if it is."""

    @ray.method(concurrency_group="news")
    def process(self) -> int:
        """The process id of the recorders, on the driver's node."""
        return os.getpid()

    # --- the sweep's own run --------------------------------------------------------------------------------

    @ray.method(concurrency_group="sweep")
    def prepare(self, uri: str) -> None:
        """Import what a store needs: some seconds, in which the driver has other things to do."""
        warm_up(uri)

    @ray.method(concurrency_group="sweep")
    def open_sweep(
        self, sweep: SweepSpec, sweep_id: str | None, source: Mapping[str, bytes] | None = None
    ) -> tuple[str, str, str]:
        """Create the sweep's run, or reopen it; its id, link and folder. `source` are the files of a job of `__main__`."""
        self._sweep = SweepRecord(sweep, sweep_id, source)
        return self._sweep.run_id, self._sweep.url, str(self._sweep.folder)

    @ray.method(concurrency_group="sweep")
    def update_sweep(self, trials: Sequence[Mapping[str, Any]]) -> RecordError | None:
        """Trials as they are now, which were not when the table was last told; what could not be recorded."""
        return self._sweep.update(trials)

    @ray.method(concurrency_group="sweep")
    def end_sweep(
        self, trials: Sequence[Mapping[str, Any]], status: Status, verdict: str
    ) -> RecordError | None:
        """The sweep is over."""
        return self._sweep.end(trials, status, verdict)

    # --- its trials' -----------------------------------------------------------------------------------------

    @ray.method(concurrency_group="ask")
    def begun(self, key: str, name: str) -> str | None:
        """The run of this name that the trial's last attempt has begun, and may not have lived to name."""
        recorder = self._recorders.get(key)
        return None if recorder is None or recorder.closed or recorder.name != name else recorder.begun()

    @ray.method(concurrency_group="write")
    def open(
        self,
        key: str,
        name: str,
        spec: Spec,
        run_id: str | None,
        attempt: int,
        workers: int,
        may_reuse: bool,
    ) -> None:
        """An attempt of a trial begins, with so many workers. One that goes on keeps its recorder; another run under the same key ends the one before."""
        recorder = self._recorders.get(key)
        if recorder is not None and (
            recorder.closed or recorder.name != name or recorder.run_id_now not in {None, run_id}
        ):
            self._end(recorder, "another run has taken its place in the population", "KILLED")
            recorder = None
        if recorder is None:
            recorder = TrialRecorder(spec, name, run_id, self._source, may_reuse=may_reuse)
            self._recorders[key] = recorder
        recorder.begin(attempt, workers)
        for signal_number in self._stopping:  # it was asked to before this one began
            recorder.stop(signal_number)

    @ray.method(concurrency_group="write")
    def tell(self, key: str, attempt: int, events: Sequence[Event]) -> Asked:
        """Take events of a trial's attempt; what is asked of its workers."""
        return self._recorders[key].tell(attempt, events)

    @ray.method(concurrency_group="write")
    def leave(self, key: str, name: str, attempt: int) -> None:
        """Tune wants no more of the trial of this name for now, in whose place another may be already."""
        recorder = self._recorders.get(key)
        if recorder is not None and recorder.name == name:
            recorder.leave(attempt)

    @ray.method(concurrency_group="write")
    def document(self, key: str, name: str, text: str) -> None:
        """Keep a text with a trial."""
        self._recorders[key].record(Document(name, text))

    @ray.method(concurrency_group="write")
    def adopt(self, key: str) -> tuple[str, list[EvaluationRow], str]:
        """Record the finished run that stands for a trial as the trial's own."""
        return self._recorders[key].adopt()

    @ray.method(concurrency_group="ask")
    def run_id(self, key: str) -> str:
        """Wait until a trial's run exists; its id."""
        return self._recorders[key].run_id()

    @ray.method(concurrency_group="ask")
    def known_or_reused(self, key: str) -> str | None:
        """Wait until a trial's run exists; its id, or None where a finished one stands for it."""
        return self._recorders[key].known_or_reused()

    @ray.method(concurrency_group="write")
    def end_trial(self, key: str, message: str, details: str, status: EndStatus) -> None:
        """A trial has ended early: `message` says why."""
        if key in self._recorders:
            self._end(self._recorders[key], message, status, details)

    @ray.method(concurrency_group="write")
    def close_trial(self, key: str) -> None:
        """A trial came to its end; the rest of its record is written meanwhile."""
        self._close(self._recorders[key])

    @ray.method(concurrency_group="news")
    def ask_rendezvous(self, key: str, attempt: int, name: str, *arguments: Any) -> Any:
        """A call of `TrialRendezvous` from a worker of a trial that began with this attempt."""
        return self._recorders[key].ask_rendezvous(attempt, name, arguments)

    @ray.method(concurrency_group="news")
    def views(self) -> dict[int, RunView]:
        """What is seen of each trial that trains, by its number."""
        return {int(key): r.view for key, r in list(self._recorders.items()) if not r.closed}

    @ray.method(concurrency_group="news")
    def stop_all(self, signal_number: int | None) -> None:
        """Ask every trial to end after its next step, with a checkpoint."""
        self._stopping = [signal_number]
        for recorder in list(self._recorders.values()):
            recorder.stop(signal_number)

    @ray.method(concurrency_group="write")
    def close(self, message: str) -> list[RecordError]:
        """End what is left, for `message`, and wait until all is written. What could not be."""
        for recorder in self._recorders.values():
            if not recorder.closed:
                self._end(recorder, message, "KILLED")
        until = running_s() + CLOSING_S
        for thread in self._closing:
            join(thread, until - running_s())
        if any(thread.is_alive() for thread in self._closing):
            return [*self._failures, problems.UNWRITTEN(seconds=f"{CLOSING_S:.0f}")]
        return self._failures

    def _end(self, recorder: TrialRecorder, message: str, status: EndStatus, details: str = "") -> None:
        if not recorder.closed and recorder.reused_run is None:
            recorder.end(message, details, status)
            self._close(recorder)

    def _close(self, recorder: TrialRecorder) -> None:
        """In a thread: drawing and uploading take a second or two, and the other trials write on."""

        def close() -> None:
            failure = recorder.close()
            if failure is not None:
                self._failures.append(failure)

        thread = threading.Thread(target=close, name="lockstep-close")
        thread.start()
        self._closing = [*filter(threading.Thread.is_alive, self._closing), thread]


def answer_of_recorders(reference: Any, limit_s: float, then: str = GOES_ON) -> Any:
    """What a call of the actor returns to the driver; raises what the call raised.

    SilentError, which tells to do what `then` says, where the actor's process is lost, or does not answer for `limit_s`.
    """
    try:
        return answer_of(reference, WHOSE, limit_s, then)
    except ray.exceptions.RayActorError as error:
        raise problems.RECORDERS_LOST(then=then) from error


@contextmanager
def recorders_here(concurrency: int, begun: Callable[[int], object]) -> Iterator[Any]:
    """The actor, on this node, while the block runs; it takes no CPU from the trials. `begun` is told its process id."""
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    groups = {"write": 1, "ask": concurrency + 1, "news": 2, "sweep": 1}
    actor = (
        ray.remote(num_cpus=0, concurrency_groups=groups)(RecordersActor)
        .options(scheduling_strategy=strategy)
        .remote(str(Path.cwd()), list(sys.path))
    )
    pid = answer_of_recorders(actor.process.remote(), ANSWER_S, AGAIN)
    begun(pid)
    try:
        yield actor
    finally:  # Tune keeps what it was given, and would keep this with it
        end_actor(actor, pid)
