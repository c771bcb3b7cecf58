"""Refuses to send and seal a run's folder whose files are not those that the run ended with: a store would get them in the place of good ones."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from lockstep.calls import problems
from lockstep.errors import LockstepError
from lockstep.proof.summary_checks import file_disagreements
from lockstep.record.events.union import Finished
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.journal_end import end_of
from lockstep.record.mirror.seal import digest_of, sealed_files
from lockstep.record.mirror.stores import find_files
from lockstep.record.mirror.sync import Synced, sync
from lockstep.record.redaction import without_uri_secrets
from lockstep.record.runs.record_differences import RecordDifference, check_folder
from lockstep.spec.fields import Spec
from lockstep.spec.locations import RECORD_OFF


def sync_whole(folder: Path, uri: str | None) -> Synced:
    """Bring the store up to date with the run's folder, as `record.mirror.sync.sync`. RecordError where its files of weights are not those that the run ended with."""

    def refuse(spec: Spec, journal: Journal) -> None:
        refuse_lost(
            spec,
            folder,
            journal,
            [*check_folder(folder, journal, None, spec), *weight_differences(folder, journal)],
        )

    return sync(folder, uri, refuse=refuse)


def weight_differences(folder: Path, journal: Journal) -> Iterator[RecordDifference]:
    """In what the files of weights that are there are not those that the run ended with, by the digests of its journal."""
    end = end_of(journal.events)
    if not isinstance(end, Finished):
        return
    last = journal.step(journal.last_step) if journal.last_step else None
    for name, stated, found in file_disagreements(end.summary, folder, last):
        yield RecordDifference("folder", f"{name} has {found}, where the journal has {stated}", lost=True)


def refuse_lost(spec: Spec, folder: Path, journal: Journal, differences: Sequence[RecordDifference]) -> None:
    """RecordError for the first of the differences that is one of a lost file."""
    for difference in differences:
        if difference.lost:
            name = difference.what.partition(" ")[0]
            remedy = _good_copy(spec, folder, journal, name)
            raise problems.FILE_DAMAGED(run=folder.name, got=difference.what, remedy=remedy)


def _good_copy(spec: Spec, folder: Path, journal: Journal, name: str) -> str:
    """Where a copy of a file is that has the digests of the journal or of the seal, and what to do with it."""
    target = f"in the place of {str(folder / name)!r}"
    uri = spec.record.uri or RECORD_OFF
    if uri != RECORD_OFF:
        with tempfile.TemporaryDirectory() as download, suppress(LockstepError, OSError):
            find_files(uri, folder.name, (name.partition("/")[0],), Path(download, "nowhere"), Path(download))
            if _is_good(Path(download), folder, journal, name):
                where = repr(without_uri_secrets(uri))
                return f"the good copy is the artifact {name!r} of this run in {where}: put it {target}"
    return f"no good copy is known: put one from a backup {target}"


def _is_good(download: Path, folder: Path, journal: Journal, name: str) -> bool:
    with suppress(OSError, ValueError):
        sealed = sealed_files(folder).get(name)
        with (download / name).open("rb") as file:
            if sealed is not None:
                return digest_of(file, None) == sealed
        return name not in {wrong.what.partition(" ")[0] for wrong in weight_differences(download, journal)}
    return False
