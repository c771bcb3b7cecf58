"""The records of a sweep and of all its trials, written by one process on the driver's node: MLflow is imported once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import ray

from lockstep.attempts.recorder_actor import RecorderActor
from lockstep.attempts.watchdog import Member
from lockstep.errors import RecordError
from lockstep.record.ledger import EvaluationRow
from lockstep.record.run_store import Recorded
from lockstep.record.stores import find_finished, find_history
from lockstep.record.sweep_record import SweepRecord
from lockstep.spec.fields import Spec
from lockstep.spec.places import RECORD_OFF
from lockstep.spec.sweep import SweepSpec


class Heard(NamedTuple):
    """What is heard of a trial."""

    attempt: int
    alive: int
    """Grows with everything that the attempt tells from its first step on; 0 before."""
    members: list[Member]


class TrialRecorder(RecorderActor):
    """The recorder of one trial. A run of the same identity that is finished already is found before this one exists."""

    def __init__(self, spec: Spec, name: str, run_id: str | None, *, may_reuse: bool) -> None:
        super().__init__(spec, run_id)
        self.spec, self.name = spec, name
        self._looks = may_reuse and run_id is None
        self._looked = threading.Event()
        self.found: Recorded | None = None
        self.closed = False

    @ray.method(concurrency_group="write")
    def started(self, facts: Mapping[str, Any]) -> None:
        if self._looks and not self._open:
            self.found = find_finished(self.spec.record.uri or "", facts["identity"], self.spec.folder)
        if self.found is None:
            super().started(facts)
        else:
            self._facts = dict(facts)
        self._looked.set()

    @ray.method(concurrency_group="write")
    def reused(self) -> str | None:
        """The id of the finished run that this trial would repeat."""
        return self.found.run_id if self.found is not None else None

    @ray.method(concurrency_group="ask")
    def known_or_reused(self) -> str | None:
        """Wait until the run exists; its id, or None where a finished one stands for it."""
        self._looked.wait()
        return self.run_id() if self.found is None else None

    @ray.method(concurrency_group="write")
    def adopt(self) -> tuple[list[EvaluationRow], str]:
        """Record the run that was found as this trial: the same rows, and a tag that says whose they are. Its evaluations and digest."""
        assert self.found is not None
        found, self.found = self.found, None
        history = find_history(self.spec.record.uri or "", found.run_id, self.spec.folder)
        super().started({**self._facts, "reused_from": found.run_id})
        self._recorder.restored(history)
        self._recorder.finished({**found.summary, "reused_from": found.run_id})
        return history.evaluations, found.summary["weights_digest"]

    def begun(self) -> str | None:
        """The id of the run, which is waited for where it is on its way; None where nothing has begun one."""
        return self.run_id() if self._open else None

    def heard(self) -> Heard:
        return Heard(self._attempt, self._alive, self.members())

    def end(self) -> RecordError | None:
        """Write what is left, once."""
        if self.closed:
            return None
        self.closed = True
        failure: RecordError | None = self.close()
        return failure


class RecordersActor:
    """Methods of the recorders by the key of their trial; `write` in the order of the calls."""

    def __init__(self) -> None:
        self._recorders: dict[str, TrialRecorder] = {}
        self._sweep: SweepRecord
        self._closing: list[threading.Thread] = []
        self._failures: list[RecordError] = []
        self._stop: tuple[bool, int | None] | None = None

    # --- the sweep's own run --------------------------------------------------------------------------------

    @ray.method(concurrency_group="sweep")
    def prepare(self, uri: str) -> None:
        """Import what a store needs: some seconds, in which the driver has other things to do."""
        if uri != RECORD_OFF:
            from lockstep.record.mlflow_store.client import import_mlflow

            import_mlflow()

    @ray.method(concurrency_group="sweep")
    def open_sweep(self, sweep: SweepSpec, sweep_id: str | None) -> tuple[str, str, str]:
        """Create the sweep's run, or reopen it; its id, link and folder."""
        self._sweep = SweepRecord(sweep, sweep_id)
        return self._sweep.run_id, self._sweep.url, str(self._sweep.folder)

    @ray.method(concurrency_group="sweep")
    def update_sweep(self, trials: Sequence[Mapping[str, Any]]) -> RecordError | None:
        """The table of trials as it is now; what could not be recorded."""
        return self._sweep.update(trials)

    @ray.method(concurrency_group="sweep")
    def end_sweep(self, trials: Sequence[Mapping[str, Any]], status: str, verdict: str) -> RecordError | None:
        """The sweep is over."""
        return self._sweep.end(trials, status, verdict)  # type: ignore[arg-type]

    # --- its trials' -----------------------------------------------------------------------------------------

    @ray.method(concurrency_group="ask")
    def begun(self, key: str, name: str) -> str | None:
        """The run of this name that the trial's last attempt has begun, and may not have lived to name."""
        recorder = self._recorders.get(key)
        return None if recorder is None or recorder.closed or recorder.name != name else recorder.begun()

    @ray.method(concurrency_group="write")
    def open(
        self, key: str, name: str, spec: Spec, run_id: str | None, attempt: int, may_reuse: bool
    ) -> None:
        """An attempt of a trial begins. One that goes on keeps its recorder; another run under the same key ends the one before."""
        recorder = self._recorders.get(key)
        if recorder is not None and (
            recorder.closed or recorder.name != name or recorder.known_run_id() not in {None, run_id}
        ):
            self._end(recorder, "another run has taken its place in the population", "KILLED")
            recorder = None
        if recorder is None:
            recorder = self._recorders[key] = TrialRecorder(spec, name, run_id, may_reuse=may_reuse)
        recorder.begin(attempt)
        if self._stop is not None:  # it was asked to before this one began
            recorder.stop(*self._stop)

    @ray.method(concurrency_group="write")
    def write(self, key: str, method: str, *arguments: Any) -> Any:
        return getattr(self._recorders[key], method)(*arguments)

    @ray.method(concurrency_group="ask")
    def ask(self, key: str, method: str, *arguments: Any) -> Any:
        return getattr(self._recorders[key], method)(*arguments)

    @ray.method(concurrency_group="news")
    def news(self, key: str, method: str, *arguments: Any) -> Any:
        return getattr(self._recorders[key], method)(*arguments)

    @ray.method(concurrency_group="write")
    def end_trial(self, key: str, message: str, details: str, status: str) -> None:
        """A trial has ended early: `message` says why."""
        if key in self._recorders:
            self._end(self._recorders[key], message, details, status)

    @ray.method(concurrency_group="write")
    def close_trial(self, key: str) -> None:
        """A trial came to its end; the rest of its record is written meanwhile."""
        self._close(self._recorders[key])

    @ray.method(concurrency_group="news")
    def heard(self) -> dict[int, Heard]:
        """What is heard of each trial that trains, by its number."""
        return {int(key): r.heard() for key, r in list(self._recorders.items()) if not r.closed}

    @ray.method(concurrency_group="news")
    def stop_all(self, signal_number: int | None) -> None:
        """Ask every trial to end after its next step, with a checkpoint."""
        self._stop = (False, signal_number)
        for recorder in list(self._recorders.values()):
            recorder.stop(*self._stop)

    @ray.method(concurrency_group="write")
    def close(self, message: str) -> list[RecordError]:
        """End what is left, for `message`, and wait until all is written. What could not be."""
        for recorder in self._recorders.values():
            if not recorder.closed:
                self._end(recorder, message, "", "KILLED")
        for thread in self._closing:
            thread.join()
        return self._failures

    def _end(self, recorder: TrialRecorder, message: str, details: str = "", status: str = "KILLED") -> None:
        if not recorder.closed and recorder.found is None:
            recorder.ended(message, details, status)
            self._close(recorder)

    def _close(self, recorder: TrialRecorder) -> None:
        """In a thread: drawing and uploading take a second or two, and the other trials write on."""

        def close() -> None:
            failure = recorder.end()
            if failure is not None:
                self._failures.append(failure)

        thread = threading.Thread(target=close, name="lockstep-close")
        thread.start()
        self._closing.append(thread)


_GROUPS = {"known_run_id": "news", "news": "news", "stop": "news", "wishes": "news"} | dict.fromkeys(
    ("run_folder", "run_id", "names", "known_or_reused"), "ask"
)


class Channel:
    """One trial's recorder, spoken to as if it were an actor of its own."""

    def __init__(self, actor: Any, key: str) -> None:
        self._actor, self._key = actor, key

    def __reduce__(self) -> tuple[Any, ...]:
        return Channel, (self._actor, self._key)

    def __getattr__(self, method: str) -> _Method:
        return _Method(getattr(self._actor, _GROUPS.get(method, "write")), self._key, method)


class _Method:
    def __init__(self, call: Any, key: str, method: str) -> None:
        self._call, self._key, self._method = call, key, method

    def remote(self, *arguments: Any) -> Any:
        return self._call.remote(self._key, self._method, *arguments)


@contextmanager
def recorders_here(concurrency: int) -> Iterator[Any]:
    """The actor, on this node, while the block runs; it takes no CPU from the trials."""
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    groups = {"write": 1, "ask": concurrency + 1, "news": 2, "sweep": 1}
    actor = (
        ray.remote(num_cpus=0, concurrency_groups=groups)(RecordersActor)
        .options(scheduling_strategy=here)
        .remote()
    )
    try:
        yield actor
    finally:  # Tune keeps what it was given, and would keep this with it
        ray.kill(actor)
