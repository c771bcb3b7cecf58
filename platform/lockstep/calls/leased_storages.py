"""Which storages a command leases a run in (`checkpoint/runs/lease.py` is the lease itself): before it touches anything of the run, until it ends.

Of several commands all but one are told here, so nothing is imported that takes long: no torch, Ray or MLflow, and no job.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.checkpoint.runs.lease import Lease, leased, refuse_leased
from lockstep.checkpoint.runs.names import run_of_name
from lockstep.checkpoint.runs.run_folder import RunFolder
from lockstep.checkpoint.storage.interface import Storage
from lockstep.checkpoint.storage.local import LocalStorage
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.driver.progress import Progress, ProgressLine
from lockstep.errors import LockstepError, StorageError
from lockstep.files import is_there
from lockstep.process import under_torchrun
from lockstep.record.mirror.run_store import SWEEP_FILE
from lockstep.record.redaction import redacted_fields
from lockstep.spec.document import read_document
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec


def leads() -> bool:
    """Whether this process speaks for the run: under torchrun the first rank does."""
    return not under_torchrun() or os.environ.get("RANK", "0") == "0"


@contextmanager
def leased_run(
    spec: Spec, run_id: str, progress: Progress, *, takeover: bool = False, recorded: str | None = None
) -> Iterator[Lease | None]:
    """Hold a run that exists. SpecError where another command does, unless it is taken over.

    Where its checkpoints were moved, it is held in the storage that is `recorded` too, as long as it can be read and has the run: that
    is where other commands look.
    """
    if not leads():
        yield None
        return
    storage = open_storage(spec.checkpoint.storage)
    take = partial(leased, folder=run_id, label=f"run {run_id}", takeover=takeover, say=progress.say)
    with ExitStack() as stack:
        recorded_storage = None if recorded is None else open_storage(recorded)
        recorded_lease = None
        if (
            recorded_storage is not None
            and _has(recorded_storage, run_id)
            and not _same(recorded_storage, storage, run_id)
        ):
            recorded_lease = stack.enter_context(take(recorded_storage))
        run_lease = stack.enter_context(take(storage))
        if recorded_lease is not None:
            run_lease.follow(recorded_lease)
        yield run_lease


def _has(storage: Storage, run_id: str) -> bool:
    with suppress(StorageError):
        return RunFolder.open(storage, run_id).run_id == run_id
    return False


def _same(first: Storage, second: Storage, run_id: str) -> bool:
    """Whether a run that is in the first storage is the very same folder in the other one."""
    if isinstance(first, LocalStorage) and isinstance(second, LocalStorage):
        with suppress(OSError):
            return (first.root / run_id).samefile(second.root / run_id)
    return first.shown == second.shown


def refuse_leased_run(run_id: str, overrides: Sequence[str]) -> None:
    """SpecError where another command works on the run or the sweep of this id, as far as can be told without its store.

    Asked is where `overrides` say that it lies, and where its own record there says that its checkpoints are.
    """
    if not leads():
        return
    where = lies_where(overrides)
    kind = "sweep" if is_there(where.folder / run_id / SWEEP_FILE) else "run"
    for storage in _storages(where, run_id):
        refuse_leased(storage, run_id, f"{kind} {run_id}")


def refuse_held_job(target: str, overrides: Sequence[str], name: str | None) -> None:
    """SpecError where another command works on what is to be sent to a cluster, as far as can be told from here.

    `target` is a run's id or a spec's file. A run by its name is looked for in an object store alone: a path may be another
    one there. What this machine cannot read is for the cluster to ask.
    """
    with suppress(StorageError):
        if not Path(target).exists():
            refuse_leased_run(target, overrides)
        elif name is not None:
            uri = load_spec(target, overrides).checkpoint.storage
            if not isinstance(storage := open_storage(uri), LocalStorage):
                run_id = run_of_name(storage, name)
                if run_id is not None:
                    refuse_leased(storage, run_id, f"run {run_id}")


def lies_where(overrides: Sequence[str]) -> Spec:
    """A spec that has nothing but what `overrides` say of where a run lies."""
    return load_spec(
        {"job": {"use": "any:Job"}}, [o for o in overrides if o.startswith(("record.", "checkpoint."))]
    )


def _storages(where: Spec, run_id: str) -> Iterator[Storage]:
    """Where the run may be held: a sweep is beside its record, a run beside its checkpoints."""
    recorded = where.folder / run_id / "spec.yaml"
    places = {where.checkpoint.storage: None, str(where.folder): None}
    if is_there(recorded):
        with suppress(LockstepError):  # one that cannot be read is told by what goes on with it
            document = read_document(recorded)
            if "checkpoint.storage" not in redacted_fields(document):
                places[load_spec(document).checkpoint.storage] = None
    yield from map(open_storage, places)


class HeldProgress:
    """Progress that also knows, and tells others, how far the run is."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.lease: Lease | None = None
        self.step = 0
        """The last step that is done."""

    def say(self, text: str) -> None:
        self._progress.say(text)

    def show(self, line: ProgressLine) -> None:
        self.step = line.step
        if self.lease is not None:
            self.lease.reached(line.step, line.attempt)
        self._progress.show(line)

    def table(self, headline: str, trials: Sequence[Mapping[str, Any]]) -> None:
        self._progress.table(headline, trials)
