"""Comparing, and mending, what is kept of a run: its journal, its ledger, its checkpoints, and its store."""

from __future__ import annotations

from pathlib import Path

from lockstep.checkpoint.errors import LostFileError
from lockstep.checkpoint.reader import load_newest, shared_files
from lockstep.checkpoint.run_folder import RunFolder
from lockstep.checkpoint.storages import open_storage
from lockstep.errors import RecordError
from lockstep.record.check import (
    COPIED,
    Difference,
    check_journal,
    check_ledger,
    check_store,
)
from lockstep.record.history import History
from lockstep.record.journal import Journal
from lockstep.record.ledger import Rows
from lockstep.record.mlflow_store import in_mlflow
from lockstep.record.sync import check_there, spec_of, sync
from lockstep.spec.fields import Spec
from lockstep.spec.locations import RECORD_OFF


def check_record(folder: Path, uri: str | None, *, repair: bool) -> list[Difference]:
    """What is not as it should be of the run in `folder`, and with `repair` what of it is mended now.

    SpecError where the folder has no journal, RecordError where another process records the run or the store does not answer.
    """
    check_there(folder)
    spec = spec_of(folder, uri)
    found: list[Difference] = []
    history = _history(spec, folder.name, found)
    journal = Journal(folder, read_only=not repair)
    try:
        found += check_journal(journal, history, repair=repair)
        whole = not journal.missing_steps()
        if whole:
            found += check_ledger(folder, journal, repair=repair)
        differences = _in_store(spec, folder, journal)
    finally:
        journal.close()
    if not (repair and (differences or any(one.mended for one in found))):
        return [*found, *differences]
    try:
        sync(folder, uri, again=True)
    except RecordError as error:
        found.append(Difference("store", str(error)))
    journal = Journal(folder, read_only=True)
    try:
        left = _in_store(spec, folder, journal)
    finally:
        journal.close()
    return [*found, *(one._replace(mended=one not in left) for one in differences)]


def _in_store(spec: Spec, folder: Path, journal: Journal) -> list[Difference]:
    uri = spec.record.uri or RECORD_OFF
    if uri == RECORD_OFF or journal.missing_steps():
        return []
    store = in_mlflow(uri, folder.name, COPIED)
    return list(check_store(folder, journal, store, scaled=spec.precision == "fp16"))


def _history(spec: Spec, run_id: str, found: list[Difference]) -> Rows | None:
    """The rows that the newest good checkpoint has; those that are passed over are told."""
    storage = open_storage(spec.checkpoint.storage)
    try:
        run = RunFolder.open(storage, run_id)
    except LostFileError:
        return None

    def tell(text: str) -> None:
        found.append(Difference("checkpoint", text))

    newest = load_newest(run, tell)
    if newest is None:
        return None
    return History.whole(newest.sections, shared_files(newest, tell))
