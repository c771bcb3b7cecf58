"""Opens a run's record: its store, its journal under a lock, and the parts that show and send what the journal has.

A store that does not answer is tried again for a while. If the run cannot be opened, an existing one is left as it was, and a
new one becomes FAILED. The store has the spec before anyone learns of the run, so from then on it can be resumed from there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.errors import RecordError, SpecError
from lockstep.job.source import job_sources
from lockstep.record import problems
from lockstep.record.errors import DeniedError, LockedError, UnavailableError
from lockstep.record.events.metrics import LOSS
from lockstep.record.events.union import Failed, Opened, Recorded, SetAside, TakenOver
from lockstep.record.ledger.admission import Admission
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.journal_end import GONE, end_of
from lockstep.record.mirror.projection import Projection
from lockstep.record.mirror.reconciler import Reconciler
from lockstep.record.mirror.run_files import RunFiles
from lockstep.record.mirror.run_store import RunStore
from lockstep.record.mirror.seal import SEAL
from lockstep.record.runs.heartbeat import process_tags
from lockstep.spec.document import read_document
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec
from lockstep.spec.locations import RECORD_OFF

OPENING_PATIENCE_S = 10.0
"""How long a store that does not answer may delay the start of a run."""

ENDING_S = 20.0
"""How long a resumed run waits for the process that records how its driver before ended."""

Fetch = Callable[[str, str], bytes]
"""Reads a file that checkpoints share, by run id and name. Raises StorageError."""


def no_fetch(run_id: str, name: str) -> bytes:
    """The `Fetch` of a run that has no checkpoints."""
    raise problems.UNREADABLE(run=run_id, file=name, got="nobody says where its checkpoints are")


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
    """The parts of a record, once `open` was called. `on_save` is called after each checkpoint."""

    def __init__(self, request: Request, on_save: Callable[[], None]) -> None:
        self._request, self._on_save = request, on_save
        self.folder: Path
        self.store: RunStore
        self.journal: Journal
        self.projection: Projection
        self.files: RunFiles
        self.reconciler: Reconciler
        self.admission: Admission
        self.url = ""

    def open(self) -> None:
        """Open the store and the journal, and begin the run's page. RecordError where one of them refuses."""
        request = self._request
        self.store = request.make_store(request.spec)
        self.folder = request.spec.folder / self._open_store()
        if request.replay:
            self._request = replace(request, spec=_as_recorded(request.spec, self.folder))
        try:
            self.journal = self._open_journal()
            with contextlib.ExitStack() as begun:
                begun.callback(self.journal.close)  # so that another try, also in this process, finds it free
                self.journal.check_run()
                self._begin(begun)
                begun.pop_all()
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

    def _begin(self, begun: contextlib.ExitStack) -> None:
        """Begin the run's page. `begun` gets what is to be ended if this fails."""
        request, spec = self._request, self._request.spec
        if spec.record.private:  # also if the folder existed
            self.folder.chmod(0o700)
        if not request.replay:
            (self.folder / SEAL).unlink(missing_ok=True)  # the run goes on
            with contextlib.suppress(UnavailableError):  # the first beat sets it
                self.store.set_status("RUNNING")
        lost = self._has_lost()
        doubted = lost or request.replay or not self.journal.delivered
        refused = any(isinstance(event, SetAside) for event in self.journal.events)
        thorough = lost or request.replay or (refused and not self.journal.delivered)
        self.projection = Projection(spec, self.folder, self.journal)
        errors = self.projection.fold(self.journal.events)
        self.projection.end = None  # that of an earlier attempt, or `last_end`
        self.journal.add([Opened(time.time(), process_tags(time.time()), self.folder.name)])
        self._make_parts(doubted=doubted, thorough=thorough)
        begun.callback(self.reconciler.stop)
        for error in errors:
            self.reconciler.refuse(error)
        self.projection.describe(_sources(spec.job.use))
        self.url = self.store.url()
        self._first_file()
        self._log_damage()

    def _has_lost(self) -> bool:
        """Whether the store lacks steps that it has confirmed, as after its database was put back from a backup."""
        if self._request.spec.record.uri == RECORD_OFF:
            return False  # it keeps no steps
        return self.journal.delivered and self.journal.last_step > self.store.last_steps().get(LOSS, 0)

    def last_end(self) -> Recorded:
        """The end of a run that is reported again, by its journal.

        If that does not tell when it was, or why, it is as the store has it, or else at the last sign of life.
        """
        end = end_of(self.journal.events)
        if isinstance(end, TakenOver) or end.at is not None:
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

    def _make_parts(self, *, doubted: bool, thorough: bool) -> None:
        request, run_id = self._request, self.folder.name
        self.files = RunFiles(self.folder, self.journal, scaled=request.spec.precision == "fp16")
        self.reconciler = Reconciler(
            request.spec,
            self.projection,
            self.files,
            self.journal,
            self.store,
            patience_s=request.patience_s,
            doubted=doubted,
            thorough=thorough,
            goes_on=not request.replay,
            on_save=self._on_save,
        )
        self.admission = Admission(
            self.journal,
            request.spec,
            request.source,
            lambda segment: request.fetch(run_id, segment.name),
        )

    def _first_file(self) -> None:
        """Wait until the store has the spec, without which a run cannot be resumed, but no longer than a store may delay the start of a run."""
        name = "spec.yaml"
        self.files.write({name: self.projection.documents[name]})
        self.reconciler.await_file(name, OPENING_PATIENCE_S)

    def _log_damage(self) -> None:
        if self.journal.damage:
            contents = "; ".join(
                f"byte {damage.start}: {damage.content}" for damage in self.journal.damage[:20]
            )
            self.files.log(f"damaged lines of the journal are passed over: {contents}")


def _as_recorded(spec: Spec, folder: Path) -> Spec:
    """The spec that a run has on record, with the `spec.record` of now: a run that is reported again stays what was trained.

    It is `spec` where the run's folder has none that can be read.
    """
    try:
        recorded = load_spec(read_document(folder / "spec.yaml"), uri=spec.record.uri)
    except SpecError:
        return spec
    return recorded.model_copy(update={"record": spec.record})


def _sources(job: str) -> dict[str, bytes]:
    """The files of a job by their path below the root of its package."""
    return {
        name.replace(".", "/") + ("/__init__.py" if path.name == "__init__.py" else ".py"): path.read_bytes()
        for name, path in sorted(job_sources(job).items())
    }
