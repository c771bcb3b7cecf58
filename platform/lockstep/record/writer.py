"""The thread that writes a run's record: only it adds rows to the journal, and projects them to what folder and store should have.

* Events arrive in the inbox, in order, and are in the journal before a store gets them. What the disk refuses is
kept and written again, so that one failed write leaves no hole.
* What the store lacks is pushed by the lanes of the reconciler, in threads of their own.
* A step that the journal already has is compared with it, not added again: with `determinism: strict` and
`reduction: exact` a replayed step has the same bits, or the run's promise is broken, which is reported.
* Nothing here stops training: a failure is kept; `failure` returns it and `Recorder.close` raises it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from lockstep.errors import LockstepError, RecordError, StorageError
from lockstep.files import private
from lockstep.record import problems
from lockstep.record.alerts import Alerts
from lockstep.record.diagnosis.stream import Diagnosing
from lockstep.record.errors import DeniedError, UnavailableError
from lockstep.record.events.union import (
    Alerted,
    Delivered,
    Diagnosed,
    Event,
    Failed,
    Finished,
    Mended,
    PeakMemory,
    Printed,
    Recorded,
    TakenOver,
    TimeSpent,
    Violated,
)
from lockstep.record.ledger.goodput import with_time
from lockstep.record.mirror.projection import log_line
from lockstep.record.mirror.run_store import RunStore
from lockstep.record.opening import Fetch, OpenRecord, Request, no_fetch
from lockstep.record.recorder_state import RecorderState
from lockstep.spec.fields import Spec

FLUSH_S = 1.0
"""Seconds for which points are gathered before they are sent."""
DISK_PATIENCE_S = 30.0
"""How long the journal's last lines are tried again after the run's end, if the disk refuses them."""

Aliases = Callable[[str, frozenset[int]], None]


class Writer:
    """Writes one run's record: of a new run or, with `run_id`, of one that is resumed.

    `patience_s` is how long a store may be silent before the state reports it. `on_aliases` is called, in the writer's thread and after
    each checkpoint, with the run's id and the steps whose checkpoints have an alias in the store's registry. `source` is the folder
    whose git state is recorded. `fetch` reads what checkpoints share. With `replay` the journal is reported again instead of continued.
    """

    def __init__(
        self,
        spec: Spec,
        make_store: Callable[[Spec], RunStore],
        run_id: str | None,
        patience_s: float,
        on_aliases: Aliases,
        source: Path | None = None,
        replay: bool = False,
        fetch: Fetch = no_fetch,
    ) -> None:
        self.spec = spec
        self.opened = threading.Event()
        self._state = RecorderState(pid=os.getpid())
        """All but the failure. The thread changes it."""
        self._on_aliases = on_aliases
        self._replay = replay
        request = Request(spec, make_store, run_id, patience_s, source, replay, fetch)
        self._record = OpenRecord(request, self._pin_aliased)
        self._opening_failure: RecordError | None = None
        self._inbox: queue.SimpleQueue[Sequence[Event]] = queue.SimpleQueue()
        self._unwritten: list[Event] = []
        """Events that are not in the journal yet."""
        self._untaken: deque[Recorded] = deque()
        """Events in the journal that are not projected yet."""
        self._journal_failure: RecordError | None = None
        self._folder_failure: RecordError | None = None
        """Why the disk has refused what the run's folder should have."""
        # The thread does not wait on the inbox: waking for each step would slow every step by 10 %.
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._closing_s = 0.0
        self._closing_at = float("inf")
        self._thread = threading.Thread(target=self._run, name="lockstep-record", daemon=True)

    # --- called by other threads --------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def tell(self, events: Sequence[Event]) -> None:
        """Record events, after everything told before. Returns at once."""
        if (
            self._state.run_id is not None or not self.opened.is_set()
        ):  # if opening failed, nobody reads the inbox
            self._inbox.put(events)

    @property
    def state(self) -> RecorderState:
        """How the record stands. Never waits."""
        return self._state._replace(failure=self._failure())

    def _failure(self) -> RecordError | None:
        if self._opening_failure is not None or not self._is_open:
            return self._opening_failure
        return self._journal_failure or self._folder_failure or self._record.reconciler.failure()

    @property
    def _is_open(self) -> bool:
        return self._state.run_id is not None

    def close(self, timeout_s: float) -> None:
        """Write what is left and end the thread. A silent store is waited for up to `timeout_s`; work is waited for until it is done."""
        if self._thread.ident is None:
            return  # never started, so nothing can be lost
        self._closing_s, self._closing_at = timeout_s, time.monotonic()
        self._closing.set()
        self._wake.set()
        until = self._closing_at + timeout_s + 0.5
        while self._thread.is_alive():
            # Once the run is open, the thread itself enforces the limit.
            if not self.opened.is_set() and time.monotonic() > until:
                self._opening_failure = problems.SLOW_STORE(what="a call", waited_s=f"{timeout_s:.0f}")
                return
            self._thread.join(0.05)

    # --- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        with private(self.spec.record.private):
            self._write_record()

    def _write_record(self) -> None:
        try:
            self._open()
        except Exception as error:  # noqa: BLE001 - the driver waits to hear of any failure
            self._opening_failure = self._opening_failure or problems.as_record_error(error)
            return
        finally:
            self.opened.set()
        while True:
            self._wait()
            # Read before the inbox, so everything told before closing is in there.
            closing = self._closing.is_set()
            self._receive()
            if not closing and not self._replay:
                self._look_at_the_clock()
            self._project()
            if closing and not self._is_behind:
                if self._record.projection.end is not None:
                    break
                self._end_without_result()
        self._guarded(self._record.files.keep_output)
        self._guarded(self._record.reconciler.seal)
        self._finish()

    @property
    def _is_behind(self) -> bool:
        """Whether something is not written yet, mostly because the disk refuses it."""
        return bool(self._unwritten or self._untaken or self._folder_failure)

    def _end_without_result(self) -> None:
        """Mark a run that is closed without an end as FAILED."""
        failure = self._failure()
        why = f"the run ended without a result{f' ({failure})' if failure else ''}"
        end = Failed(why, at=time.time())
        with contextlib.suppress(RecordError):  # the disk refuses, but the store still hears of it
            self._record.journal.add(events := self._with_time([end]))
            self._untaken.extend(events[:-1])
        self._untaken.append(end)

    def _finish(self) -> None:
        """End the record: no more events will come."""
        copied = self._record.reconciler.finish(self._closing_at, self._closing_s)
        try:
            if copied and self._failure() is None:
                self._record.journal.add([Delivered()])
        except RecordError as error:
            self._refuse(error)
        try:
            self._record.journal.close()
        except RecordError as error:
            self._refuse(error)

    def _open(self) -> None:
        self._record.open()
        if self._replay:
            self._untaken.append(self._record.last_end())
        self._diagnosing = Diagnosing(self._record.journal, self.spec)
        storage = self.spec.checkpoint.storage
        disks = [self._record.folder, *([] if "://" in storage else [Path(storage)])]
        self._alerts = Alerts(self.spec, self._record.journal, disks)
        folder = self._record.folder
        self._state = self._state._replace(run_id=folder.name, url=self._record.url, folder=str(folder))

    def _refuse(self, error: Exception) -> None:
        self._record.reconciler.refuse(error)

    def _wait(self) -> None:
        """Let points gather."""
        if self._closing.is_set():  # no more events come; only what the disk refused is left
            time.sleep(FLUSH_S / 5 if self._is_behind else 0.0)
        else:
            self._wake.wait(FLUSH_S)

    def _receive(self) -> None:
        """Record all new events, and those that could not be written before."""
        events = self._unwritten
        with contextlib.suppress(queue.Empty):
            while True:
                events.extend(self._inbox.get_nowait())
        if not events:
            return
        try:
            recorded = self._add(events)
        except RecordError as error:
            self._not_written(error)
            return
        count = len(events)
        self._unwritten, self._journal_failure = [], None
        for line in filter(None, map(log_line, recorded)):
            self._record.files.log(line)
        self._untaken.extend(recorded)
        self._project()
        for event in events:
            if isinstance(event, Printed):
                self._guarded(partial(self._record.files.output, event.name, event.text))
        del events, recorded  # the count may rise only when they are no longer in memory
        self._state = self._state._replace(journaled=self._state.journaled + count)

    def _add(self, events: Sequence[Event]) -> list[Recorded]:
        """Put the admitted ones of these events into the journal, and return them. RecordError where the disk refuses them all."""
        try:
            admitted = self._diagnosing.with_diagnoses(events, self._record.admission.admit(events))
            recorded = self._with_time(admitted)
            if self._alerts.any:
                recorded = self._alerts.with_alerts(events, recorded)
            self._record.journal.add(recorded)
        except RecordError:
            self._diagnosing = self._diagnosing.again()  # the rows will come again
            self._alerts = self._alerts.again()
            raise
        except Exception as error:  # noqa: BLE001 - one bad event must not prevent the others
            self._diagnosing = self._diagnosing.again()
            self._alerts = self._alerts.again()
            if len(events) == 1:
                self._refuse(error)
                return []
            return [added for event in events for added in self._add([event])]
        diagnoses = tuple(str(event) for event in recorded if isinstance(event, Diagnosed))
        violation = next((event.text for event in recorded if isinstance(event, Violated)), "")
        spent = next((event for event in recorded if isinstance(event, TimeSpent)), self._state.time_spent)
        self._note_alerts(recorded)
        self._state = self._state._replace(
            diagnosed=self._state.diagnosed + diagnoses,
            violation=self._state.violation or violation,
            time_spent=spent,
        )
        return recorded

    def _with_time(self, events: list[Recorded]) -> list[Recorded]:
        """These events, with what became of the run's time before each end of it. A step that cannot be read costs that, and not the end."""
        try:
            return with_time(self._record.journal, events)
        except (RecordError, OSError) as error:
            self._record.files.log(f"what became of the run's time is not known: {error}")
            return events

    def _note_alerts(self, recorded: Sequence[Recorded]) -> None:
        alerts = tuple(event for event in recorded if isinstance(event, Alerted))
        self._state = self._state._replace(alerted=self._state.alerted + alerts)

    def _look_at_the_clock(self) -> None:
        """Record the alerts that have become due by themselves. What the disk refuses is not repeated: these rules fire once."""
        alerts = self._alerts.by_clock() if self._alerts.any else []
        if alerts:
            with contextlib.suppress(RecordError):
                self._record.journal.add(alerts)
                self._untaken.extend(alerts)
            for alert in alerts:
                self._record.files.log(log_line(alert))
            self._note_alerts(alerts)

    def _not_written(self, error: RecordError) -> None:
        """The disk refuses: keep the events in memory and try again, until the patience after closing is over."""
        self._journal_failure = error
        if self._out_of_patience:
            lost = len(self._unwritten)
            self._unwritten, self._journal_failure = [], None
            self._refuse(problems.EVENTS_LOST(got=error, count=lost))
            self._end_badly(error)

    @property
    def _out_of_patience(self) -> bool:
        return self._closing.is_set() and time.monotonic() - self._closing_at > DISK_PATIENCE_S

    def _project(self) -> None:
        """Project new events of the journal, and make folder and store have what follows. What the disk refuses is tried again."""
        try:
            while self._untaken:
                self._take(self._untaken[0])
                self._untaken.popleft()
            self._record.reconciler.reconcile()
            self._folder_failure = None
        except (OSError, StorageError, RecordError) as error:
            self._folder_failure = (
                problems.CANNOT_WRITE(path=self._record.folder, got=error.strerror or error)
                if isinstance(error, OSError)
                else problems.as_record_error(error)
            )
            if self._out_of_patience:
                self._refuse(self._folder_failure)
                self._untaken.clear()
                self._end_badly(self._folder_failure)
                self._folder_failure = None
        except Exception as error:  # noqa: BLE001 - a fact that cannot be shown must not cost the others
            self._refuse(error)
            if self._untaken:
                self._untaken.popleft()
            elif self._record.projection.end is not None:
                self._end_badly(error)

    def _end_badly(self, error: Exception) -> None:
        """Show a failed end: the real end of the run cannot be recorded."""
        self._record.projection.take(Failed(str(error)))
        self._record.reconciler.end_without_files()

    def _take(self, event: Recorded) -> None:
        projection = self._record.projection
        if isinstance(event, Finished | Failed | TakenOver):
            self._record.journal.flush()  # before the store learns how the run ended
        if isinstance(event, Finished) and not self._replay:
            projection.lost = self._record.admission.lost
            self._mend()
        projection.take(event)
        if isinstance(event, Finished) and projection.lack is not None:
            self._refuse(projection.lack)
        if isinstance(event, PeakMemory) and not self._replay:
            # All steps are taken, and rank 0 still exports the final model: by the run's end they are drawn.
            self._record.files.figures.draw()

    def _mend(self) -> None:
        """Note that the rows of damaged lines are recorded again, once all steps were told again."""
        damage = self._record.journal.damage
        if damage and self._record.admission.retold:
            contents = ", ".join(damage.content for damage in damage[:20])
            mended = Mended(
                [damage.start for damage in damage],
                f"lines of it were damaged ({contents}); all steps and evaluations were told again",
            )
            self._record.journal.add([mended])
            self._record.files.log(log_line(mended))

    def _guarded(self, show: Callable[[], None]) -> None:
        try:
            show()
        except Exception as error:  # noqa: BLE001 - a fact that cannot be shown must not cost the others
            self._refuse(error)

    def _pin_aliased(self) -> None:
        try:
            self._on_aliases(self._record.folder.name, self._record.store.aliased_steps())
        except DeniedError as error:  # the registry has its own permissions
            self._record.files.log(f"aliases of checkpoints: {error}")
        except UnavailableError:
            raise
        except LockstepError as error:  # such as a store without a registry: pins stay as they are
            self._record.files.log(f"aliases of checkpoints: {error}")
