"""A run whose checkpoints are not where they should be: its storage is not mounted, or was moved or deleted.

Such a run is not begun anew under its own id: its record would have its steps twice, and the storage, once it is back, another state.
"""

from __future__ import annotations

from typing import NamedTuple

from lockstep.calls import problems
from lockstep.checkpoint.runs.run_checkpoints import on_disk, steps_of
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.record.ledger.journal import newest_checkpoint, newest_step
from lockstep.record.mirror.stores import find_copies, reader
from lockstep.spec.fields import Spec


class Known(NamedTuple):
    """The newest checkpoint that a run's record knows of."""

    step: int
    location: str


def refuse_lost(spec: Spec, run_id: str, *, copies: bool = True) -> None:
    """SpecError where the record knows a checkpoint of the run and none is left, neither in the storage nor, where `copies` count, in the record.

    A run that ended before its first checkpoint has lost none.
    """
    storage = spec.checkpoint.storage
    if steps_of(storage, run_id):
        return
    recorded = _known(spec, run_id)
    if recorded is None or (
        copies and on_disk(storage) is not None and find_copies(spec.record.uri or "", run_id)
    ):
        return
    raise problems.STORAGE_LOST(
        run=run_id, step=recorded.step, wanted=recorded.location, got=open_storage(storage).shown
    )


def attempts_recorded(spec: Spec, run_id: str, *, in_store: bool) -> int:
    """The number of the newest attempt of which the run's folder has a step and, with `in_store`, of those that its store knows."""
    newest = newest_step(spec.folder / run_id)
    tags = reader(spec.record.uri or "", spec.folder).run(run_id).tags if in_store else {}
    attempts_tag = tags.get("lockstep.attempts", "")
    return max(0 if newest is None else newest.attempt, int(attempts_tag) if attempts_tag.isdigit() else 0)


def _known(spec: Spec, run_id: str) -> Known | None:
    tags = reader(spec.record.uri or "", spec.folder).run(run_id).tags
    step, location = tags.get("lockstep.checkpoint_step", ""), tags.get("lockstep.checkpoint", "")
    if step.isdigit():
        return Known(int(step), location)
    # Its recorder may have been killed before it told the store.
    row = newest_checkpoint(spec.folder / run_id)
    return None if row is None or row.uri is None else Known(row.step, row.uri)
