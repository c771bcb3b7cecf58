"""Sends a store what a process could not: the journal of a run whose store did not answer, or that was killed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import SpecError
from lockstep.process import pid_namespace
from lockstep.record import problems
from lockstep.record.events.union import Failed, Finished, Opened
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.journal_end import PROCESS, lost_end
from lockstep.record.ledger.journal_file import NAME
from lockstep.record.mirror.run_store import RunInfo
from lockstep.record.mirror.stores import reader
from lockstep.record.recorder import Recorder
from lockstep.record.runs.heartbeat import SILENT_S
from lockstep.redaction_marks import HIDDEN
from lockstep.spec.document import read_document
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec
from lockstep.spec.locations import RECORD_OFF

FOLDER = "lockstep.folder"
"""The tag of a run with the folder that it used."""


class Synced(NamedTuple):
    """The result of a sync. `sent` is False if there was nothing to send."""

    run_id: str
    sent: bool
    step: int
    folder: str
    url: str


def refuse_nothing(spec: Spec, journal: Journal) -> None:
    """The `refuse` of callers that have compared the folder themselves."""


def sync(
    folder: Path,
    uri: str | None = None,
    timeout_s: float = 600.0,
    *,
    again: bool = False,
    refuse: Callable[[Spec, Journal], None] = refuse_nothing,
) -> Synced:
    """Bring the store up to date with the run's folder, and give the run its final status.

    What the store has confirmed is not sent, unless `again` is set; `refuse` raises where what is there must not be sent. SpecError where the run was continued in another folder, or
    its store knows an end that the journal has lost.
    RecordError where another process records the run, or the store does not answer.
    """
    require_journal(folder)
    with closing(Journal(folder)) as journal:
        step = journal.last_step
        if journal.delivered and not again:
            return Synced(folder.name, False, step, str(folder), "")
        spec = spec_of(folder, uri)
        refuse_strangers(folder, journal, spec)
        _refuse_lost_end(folder, journal, _stored(folder, spec))
        refuse(spec, journal)
    recorder = Recorder(spec, run_id=folder.name, replay=True)
    recorder.start()
    recorder.close(timeout_s)
    return Synced(folder.name, True, step, str(folder), recorder.state.url)


def refuse_strangers(folder: Path, journal: Journal, spec: Spec) -> None:
    """SpecError or RecordError where the run's state is not for `folder` to report: the journal is of another run, or the run was continued elsewhere, or may live."""
    journal.check_run()
    is_off = (spec.record.uri or RECORD_OFF) == RECORD_OFF
    since = takewhile(lambda event: not isinstance(event, Opened), reversed(journal.events))
    has_ended = any(isinstance(event, Finished | Failed) for event in since)
    if is_off and has_ended:
        return  # the folder is the store
    run = _stored(folder, spec)
    if not is_off:
        _refuse_continued(folder, journal, run)
    if not has_ended:
        _refuse_living(folder, run)


def _stored(folder: Path, spec: Spec) -> RunInfo:
    """The run as its store has it, which marks it once it is silent."""
    return reader(spec.record.uri or RECORD_OFF, spec.folder).run(folder.name)


def _refuse_continued(folder: Path, journal: Journal, run: RunInfo) -> None:
    """SpecError where the run's store has more of it than `folder`, from another process or another folder.

    So it is where an attempt that resumed the run recorded it in another folder.
    """
    opened = [event.process.get(PROCESS) for event in journal.events if isinstance(event, Opened)]
    other_process = run.tags.get(PROCESS) not in (None, *opened)
    recorded_folder = Path(run.tags.get(FOLDER, folder))
    other_folder = recorded_folder.resolve() != folder.resolve()  # or this one was moved
    if not other_folder and lost_end(journal.events, run.status, run.tags.get(PROCESS)):
        return  # that is reported, and mended, by itself
    ahead = run.step > journal.last_step and (other_process or other_folder)
    if ahead or (other_process and other_folder and run.status in {"RUNNING", "FINISHED"}):
        raise problems.CONTINUED(
            run=folder.name,
            folder=recorded_folder,
            step=run.step,
            status=run.status,
            storage=recorded_folder.parent,
        )


def _refuse_living(folder: Path, run: RunInfo) -> None:
    """RecordError where a process on another machine may still record the run: as long as its beat is not known to be silent.

    On this machine the lock of the journal tells. It does not where the folder is a copy, or its file system locks for one machine alone.
    """
    machine = run.tags.get(PROCESS, "").partition(" ")[0]
    if run.status == "RUNNING" and machine != pid_namespace():
        host = run.tags.get("lockstep.host", "?")
        raise problems.LIVING(run=folder.name, host=host, silent_s=f"{SILENT_S:.0f}")


def _refuse_lost_end(folder: Path, journal: Journal, run: RunInfo) -> None:
    if lost_end(journal.events, run.status, run.tags.get(PROCESS)):
        raise problems.END_LOST(
            run=folder.name, status=run.status, file=NAME, folder=folder, step=journal.last_step
        )


def require_journal(folder: Path) -> None:
    """SpecError if a folder has no journal, RecordError if it may not be read."""
    try:
        exists = (folder / NAME).is_file()
    except OSError as error:
        raise problems.DENIED(run=folder.name, folder=folder, got=error.strerror) from error
    if not exists:
        raise problems.NO_JOURNAL(run=folder.name, file=NAME, folder=folder)


def spec_of(folder: Path, uri: str | None) -> Spec:
    """The spec of the run in `folder`, with its record there."""
    try:
        spec = load_spec(read_document(folder / "spec.yaml"), uri=uri)
    except SpecError as error:
        raise problems.UNREADABLE(run=folder.name, file="spec", got=error) from error
    if spec.record.uri is not None and HIDDEN in spec.record.uri:
        raise problems.PASSWORD(run=folder.name, uri=spec.record.uri)
    record = spec.record.model_copy(update={"folder": str(folder.absolute().parent)})
    return spec.model_copy(update={"record": record})
