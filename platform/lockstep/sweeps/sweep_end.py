"""Records the end of a sweep whose own processes can no longer do so, and that of each of its trials that has none.

A trial is a run like any other: its journal says whether somebody still writes it. The sweep itself is held by one command at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.checkpoint.runs.lease import refuse_leased
from lockstep.checkpoint.storage.local import LocalStorage
from lockstep.errors import LockstepError, SpecError
from lockstep.record.errors import LockedError
from lockstep.record.events.union import Document, Failed
from lockstep.record.ledger.journal_file import NAME
from lockstep.record.mirror.stores import reader
from lockstep.record.mirror.sync import spec_of
from lockstep.record.runs.abandoned_run import RELEASE_S, answered, ended_by_now, record_end
from lockstep.spec.sweep import SweepSpec, load_sweep
from lockstep.sweeps.sweep_record import SEEN, end_abandoned

OPENED = b'{"opened":'
"""How the line of a journal begins that names the process which writes what follows."""


def record_sweep_end(
    sweep: SweepSpec,
    sweep_id: str | None,
    failed: Failed,
    documents: Sequence[Document],
    recorders: Sequence[str],
    *,
    driver: int | None = None,
    release_s: float = RELEASE_S,
) -> str | None:
    """Record that a sweep has failed, and its trials with it, unless it has an end or another command holds it. Its id where it did.

    `driver` is the process whose sweep it is, which may hold it still. `recorders` are the processes that may have recorded it, as `lockstep.process` names them. RecordError where the store refuses, once
    all trials are ended that can be.
    """
    ended_by_now(recorders, release_s)
    problems: list[LockstepError | OSError] = []
    for run_id in _trials_of(recorders, sweep.base.folder):
        try:
            with suppress(LockedError):  # another command has resumed it
                spec = spec_of(sweep.base.folder / run_id, sweep.base.record.uri)
                record_end(spec, run_id, failed, documents, recorders, new=False, release_s=release_s)
        except (LockstepError, OSError) as error:
            problems.append(error)
    sweep_id = sweep_id or _begun_by(sweep, recorders)
    if sweep_id is None:
        return None
    try:
        refuse_leased(LocalStorage(sweep.base.folder), sweep_id, f"sweep {sweep_id}", but=driver)
    except SpecError:  # another command goes on with it
        return None
    ended = end_abandoned(sweep, sweep_id, failed)
    for problem in problems:
        raise problem
    return sweep_id if ended else None


def _trials_of(recorders: Sequence[str], folder: Path) -> Iterator[str]:
    """The runs whose journal was opened last by one of these processes.

    One that has no spec yet has done nothing. It could only be reported with the sweep's own, which it was not to be trained by.
    """
    for path in folder.glob(f"*/{NAME}"):
        if not path.with_name("spec.yaml").exists():
            continue
        with suppress(OSError), path.open("rb") as file:
            opened = [line for line in file if line.startswith(OPENED)]
            if opened and any(json.dumps(process).encode() in opened[-1] for process in recorders):
                yield path.parent.name


def _begun_by(sweep: SweepSpec, recorders: Sequence[str]) -> str | None:
    """The sweep that one of these processes has begun, and did not live to name."""
    if not recorders:
        return None
    for run in reader(sweep.base.record.uri or "", sweep.base.folder).runs(None, SEEN):
        if run.tags.get("lockstep.kind") == "sweep" and run.tags.get("lockstep.process") in recorders:
            return run.run_id
    return None


def main() -> None:
    """As `lockstep.record.runs.abandoned_run.main`, for a sweep."""

    def recorded(
        request: Mapping[str, Any], failed: Failed, documents: Sequence[Document], release_s: float
    ) -> str | None:
        sweep, sweep_id, recorders = load_sweep(request["sweep"]), request["run_id"], request["recorders"]
        return record_sweep_end(
            sweep, sweep_id, failed, documents, recorders, driver=request["driver"], release_s=release_s
        )

    answered(recorded)
