"""Sends a store what a process could not: the journal of a run whose store did not answer, or that was killed."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from lockstep.errors import RecordError, SpecError
from lockstep.record.documents import HIDDEN
from lockstep.record.journal import Journal
from lockstep.record.journal_file import NAME
from lockstep.record.recorder import Recorder
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec


class Synced(NamedTuple):
    """The result of a sync. `sent` is False if there was nothing to send."""

    run_id: str
    sent: bool
    step: int
    folder: str
    url: str


def sync(folder: Path, uri: str | None = None, timeout_s: float = 600.0, *, again: bool = False) -> Synced:
    """Bring the store up to date with the run's folder, and give the run its final status.

    What the store has confirmed is not sent, unless `again` is set.
    RecordError where another process records the run, or the store does not answer.
    """
    check_there(folder)
    journal = Journal(folder)
    step, delivered = journal.last_step, journal.delivered
    journal.close()
    if delivered and not again:
        return Synced(folder.name, False, step, str(folder), "")
    recorder = Recorder(spec_of(folder, uri), run_id=folder.name, replay=True)
    recorder.start()
    recorder.close(timeout_s)
    return Synced(folder.name, True, step, str(folder), recorder.url())


def check_there(folder: Path) -> None:
    """SpecError if a folder has no journal."""
    if not (folder / NAME).is_file():
        raise SpecError(
            f"run {folder.name}: there is no {NAME} in {str(folder)!r}; name the run's folder, or its --storage"
        )


def spec_of(folder: Path, uri: str | None) -> Spec:
    """The spec of the run in `folder`, with its record there."""
    try:
        spec = load_spec(folder / "spec.yaml", uri=uri)
    except SpecError as error:
        raise RecordError(f"run {folder.name}: its spec cannot be read: {error}") from error
    if spec.record.uri is not None and HIDDEN in spec.record.uri:
        raise SpecError(
            f"run {folder.name}: the password of {spec.record.uri!r} is not recorded; give the whole --uri"
        )
    record = spec.record.model_copy(update={"folder": str(folder.absolute().parent)})
    return spec.model_copy(update={"record": record})
