"""Opens a run's record: its store, its journal under a lock, and the parts that show and send what the journal has.

A store that does not answer is tried again for a while. If the run cannot be opened, an existing one is left as it was, and a
new one becomes FAILED. The store has the spec before anyone learns of the run, so from then on it can be resumed from there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.errors import RecordError
from lockstep.record.events.metrics import LOSS
from lockstep.record.events.union import Failed, Finished, Opened, Recorded, SetAside
from lockstep.record.ledger.admission import Admission
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.journal_file import LockedError
from lockstep.record.ledger.replay import GONE, last_words, unsaid
from lockstep.record.mirror.metric_sync import Delivery
from lockstep.record.mirror.projection import Page
from lockstep.record.mirror.run_store import DeniedError, RunStore, UnavailableError
from lockstep.record.mirror.status import RunState
from lockstep.record.mirror.sync_queue import SyncQueue
from lockstep.record.runs.heartbeat import process_tags
from lockstep.spec.fields import Spec
from lockstep.spec.locations import RECORD_OFF

OPENING_PATIENCE_S = 10.0
"""How long a store that does not answer may delay the start of a run."""

ENDING_S = 20.0
"""How long a resumed run waits for the process that records how its driver before ended."""

Fetch = Callable[[str, str], bytes]
"""Reads a file that checkpoints share, by run id and name. Raises StorageError."""


def no_fetch(run_id: str, name: str) -> bytes:
    """The `Fetch` of a run that has no checkpoints."""
    raise RecordError(f"record: {name} of run {run_id} cannot be read: nobody says where its checkpoints are")


@dataclass(frozen=True, slots=True)
class Request:
    """Which record to open: that of a new run or, with `run_id`, of a run that is resumed or (`replay`) reported again."""

    spec: Spec
    make_store: Callable[[Spec], RunStore]
    run_id: str | None
    patience_s: float
    source: Path | None
    replay: bool
    fetch: Fetch


class OpenRecord:
    """The parts of a record, once `open` was called. `failure` says what could not be recorded; `violated` is called for a step with other bits."""

    def __init__(
        self,
        request: Request,
        sync_queue: SyncQueue,
        failure: Callable[[], RecordError | None],
        violated: Callable[[str], None],
    ) -> None:
        self._request, self._sync_queue = request, sync_queue
        self._failure, self._violated = failure, violated
        self.folder: Path
        self.store: RunStore
        self.journal: Journal
        self.page: Page
        self.delivery: Delivery
        self.state: RunState
        self.admission: Admission
        self.url = ""
        self.again: list[Recorded] = []
        """What the page must show of an earlier attempt."""

    def open(self) -> None:
        """Open the store and the journal, and begin the run's page. RecordError where one of them refuses."""
        request = self._request
        self.store = request.make_store(request.spec)
        self.folder = request.spec.folder / self._open_store()
        try:
            self.journal = self._open_journal()
            try:
                self._begin()
            except Exception:
                self._sync_queue.give_up("")
                self.journal.close()  # so that another try, also in this process, finds it free
                raise
        except Exception:
            if request.run_id is None:  # an existing run may belong to another process: leave it
                # Raise the cause, even if the run stays RUNNING.
                with contextlib.suppress(RecordError):
                    self.store.set_status("FAILED")
            raise

    def _open_journal(self) -> Journal:
        """The run's journal. Where the driver before this one was killed, its end is being recorded: that is waited for."""
        until = time.monotonic() + (
            ENDING_S if self._request.run_id is not None and not self._request.replay else 0.0
        )
        while True:
            try:
                return Journal(self.folder)
            except LockedError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def _open_store(self) -> str:
        until = time.monotonic() + min(self._request.patience_s, OPENING_PATIENCE_S)
        while True:
            try:
                return self.store.open(self._request.run_id)
            except DeniedError:
                raise
            except UnavailableError:
                if time.monotonic() + 0.5 > until:
                    raise
                time.sleep(0.5)

    def _begin(self) -> None:
        spec, resumed = self._request.spec, self._request.run_id is not None
        if spec.record.private:  # also if the folder existed
            self.folder.chmod(0o700)
        if not self._request.replay:
            self._set_running()
        self._sync_queue.advice = f"`lockstep record sync {self.folder.name}` sends it again"
        last_steps = dict(self.store.last_steps())
        lost = self._has_lost(last_steps)
        previous_events, unsent = list(self.journal.events), lost or not self.journal.delivered
        self.journal.add([Opened(time.time(), process_tags(time.time()))])
        thorough = lost or (unsent and any(isinstance(event, SetAside) for event in previous_events))
        self._make_parts(last_steps, thorough=thorough)
        self.page.keep_spec()
        self._first_file()
        self.page.describe(resumed=resumed)
        self.state.begin(resumed=resumed)
        self.url = self.store.url()
        self.page.take_up_copies()
        self._tell_damage()
        if self._request.replay:
            *earlier, end = last_words(self.journal.events)
            self.again = [*earlier, self._as_known(end)]
        elif unsent and resumed:
            self.again = list(unsaid(previous_events))

    def _has_lost(self, last_steps: Mapping[str, int]) -> bool:
        """Whether the store lacks steps that it has confirmed, as after its database was put back from a backup."""
        if self._request.spec.record.uri == RECORD_OFF:
            return False  # it keeps no steps
        return self.journal.delivered and self.journal.last_step > last_steps.get(LOSS, 0)

    def _as_known(self, end: Recorded) -> Recorded:
        """An end of which the journal does not tell when it was, or why, as the store has it, or else at the last sign of life."""
        if not isinstance(end, Finished | Failed) or end.at is not None:
            return end
        stored_end, last_sign = self.store.ended(), self.journal.last_sign
        if stored_end is None or stored_end.status != end.status or stored_end.at < (last_sign or 0.0):
            return replace(end, at=last_sign)
        if isinstance(end, Failed) and end.message == GONE and stored_end.error:
            file = self.folder / "error.txt"
            text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
            details = text.removeprefix(stored_end.error).strip() if text.startswith(stored_end.error) else ""
            end = Failed(stored_end.error, details)
        return replace(end, at=stored_end.at)

    def _set_running(self) -> None:
        try:
            self.store.set_status("RUNNING")
        except UnavailableError:  # from here on it is a call like others
            self._sync_queue.send("status", "status RUNNING", self.store.set_status, "RUNNING")

    def _make_parts(self, last_steps: Mapping[str, int], *, thorough: bool) -> None:
        request, run_id = self._request, self.folder.name
        self.page = Page(request.spec, self.folder, self.journal, self.store, self._sync_queue.send)
        self.delivery = Delivery(
            self.journal,
            self.store,
            last_steps,
            scaled=request.spec.precision == "fp16",
            thorough=request.replay or thorough,
            sync_queue=self._sync_queue,
        )
        self.state = RunState(
            self.folder,
            self.page,
            self.delivery,
            self._sync_queue,
            self.store,
            self._failure,
            goes_on=not request.replay,
        )
        self.admission = Admission(
            self.journal,
            request.spec,
            request.source,
            lambda segment: request.fetch(run_id, segment.name),
            self._violated,
        )

    def _first_file(self) -> None:
        """Wait until the store has the spec, but no longer than a store may delay the start of a run."""
        until = time.monotonic() + OPENING_PATIENCE_S
        lane = self._sync_queue.lanes["files"]
        while len(lane) and not lane.outage and not lane.set_aside and time.monotonic() < until:
            time.sleep(0.002)

    def _tell_damage(self) -> None:
        if self.journal.damage:
            contents = "; ".join(f"byte {damage.start}: {damage.held}" for damage in self.journal.damage[:20])
            self.page.log(f"damaged lines of the journal are passed over: {contents}")
