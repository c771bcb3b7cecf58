"""How a run's record is opened: its store, its journal under a lock, and what shows and sends what the journal has.

A store that does not answer is tried again for a while; a run that could not be opened is left as it was, or FAILED where it
is new. The spec is with the store before anyone learns of the run: from then on it can be resumed from there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import RecordError
from lockstep.record.admission import Admission
from lockstep.record.delivery import Delivery
from lockstep.record.events import Opened, Recorded, SetAside
from lockstep.record.heartbeat import process_tags
from lockstep.record.journal import Journal
from lockstep.record.outbox import Outbox
from lockstep.record.page import Page
from lockstep.record.replay import last_words, unsaid
from lockstep.record.run_state import RunState
from lockstep.record.run_store import DeniedError, RunStore, UnavailableError
from lockstep.spec.fields import Spec

OPENING_PATIENCE_S = 10.0
"""How long a store that does not answer may keep a run from starting."""

Fetch = Callable[[str, str], bytes]
"""Reads a file that checkpoints share, by the run's id and its name. Raises StorageError."""


def no_fetch(run_id: str, name: str) -> bytes:
    """For a run that has no checkpoints."""
    raise RecordError(f"record: {name} of run {run_id} cannot be read: nobody says where its checkpoints are")


@dataclass(frozen=True, slots=True)
class Request:
    """Which record is wanted: that of a new run, or where `run_id` is given of the one that goes on, or is said again (`replay`)."""

    spec: Spec
    make_store: Callable[[Spec], RunStore]
    run_id: str | None
    patience_s: float
    source: Path | None
    replay: bool
    fetch: Fetch


class OpenRecord:
    """The parts of a record, from `open` on. `failure` says what could not be recorded; `violated` hears of a step with other bits."""

    def __init__(
        self,
        request: Request,
        outbox: Outbox,
        failure: Callable[[], RecordError | None],
        violated: Callable[[str], None],
    ) -> None:
        self._request, self._outbox = request, outbox
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
        """What the page is to show of an attempt before."""

    def open(self) -> None:
        """Open store and journal, and begin the run's page. RecordError where one of them refuses."""
        request = self._request
        self.store = request.make_store(request.spec)
        self.folder = request.spec.folder / self._open_store()
        try:
            self.journal = Journal(self.folder)
            try:
                self._begin()
            except Exception:
                self._outbox.give_up("")
                self.journal.close()  # whoever tries again, in this process too, finds it free
                raise
        except Exception:
            if request.run_id is None:  # a run that another process records is not touched
                # The cause is raised; that the run stays RUNNING comes second.
                with contextlib.suppress(RecordError):
                    self.store.set_status("FAILED")
            raise

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
        if spec.record.private:  # also where the folder was there
            self.folder.chmod(0o700)
        try:
            self.store.set_status("RUNNING")
        except UnavailableError:  # a call like others, from here on
            self._outbox.send("status", "status RUNNING", self.store.set_status, "RUNNING")
        self._outbox.advice = f"`lockstep record sync {self.folder.name}` sends it again"
        before, left = list(self.journal.events), not self.journal.delivered
        self.journal.add([Opened(time.time(), process_tags(time.time()))])
        self._make_parts(thorough=left and any(isinstance(event, SetAside) for event in before))
        self.page.keep_spec()
        self._first_file()
        self.page.describe(resumed=resumed)
        self.state.begin(resumed=resumed)
        self.url = self.store.url()
        self.page.take_up_copies()
        self._tell_damage()
        if self._request.replay:
            self.again = list(last_words(self.journal.events))
        elif left and resumed:
            self.again = list(unsaid(before))

    def _make_parts(self, *, thorough: bool) -> None:
        request, run_id = self._request, self.folder.name
        self.page = Page(request.spec, self.folder, self.journal, self.store, self._outbox.send)
        self.delivery = Delivery(
            self.journal,
            self.store,
            dict(self.store.last_steps()),
            scaled=request.spec.precision == "fp16",
            thorough=request.replay or thorough,
            outbox=self._outbox,
        )
        self.state = RunState(self.folder, self.page, self.delivery, self._outbox, self.store, self._failure)
        self.admission = Admission(
            self.journal,
            request.spec,
            request.source,
            lambda segment: request.fetch(run_id, segment.name),
            self._violated,
        )

    def _first_file(self) -> None:
        """Wait until the spec is with the store, or as long as a store that does not answer may keep a run from starting."""
        until = time.monotonic() + OPENING_PATIENCE_S
        lane = self._outbox.lanes["files"]
        while len(lane) and not lane.outage and not lane.set_aside and time.monotonic() < until:
            time.sleep(0.002)

    def _tell_damage(self) -> None:
        if self.journal.lost:
            steps = ", ".join(f"{one.first} to {one.last}" for one in self.journal.lost[:20])
            self.page.log(f"damaged files of sealed steps are passed over: {steps}")
        if self.journal.damage:
            held = "; ".join(f"byte {damage.start}: {damage.held}" for damage in self.journal.damage[:20])
            self.page.log(f"damaged lines of the journal are passed over: {held}")
