"""Pinning a checkpoint of a recorded run, so that retention leaves it."""

from __future__ import annotations

from pathlib import Path

from lockstep.calls import problems
from lockstep.checkpoint.runs.pins import ASKED, pin, pinned, unpin
from lockstep.checkpoint.runs.run_checkpoints import saved_steps
from lockstep.checkpoint.runs.run_folder import RunFolder
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.errors import SpecError
from lockstep.record.mirror.stores import find_run
from lockstep.spec.loading import load_spec
from lockstep.spec.locations import tracking_uri


def change_pin(run_id: str, step: int, *, uri: str | None, folder: Path, remove: bool) -> list[int]:
    """Pin the checkpoint of `step`, or take the pin away; the steps that are pinned then.

    The run is looked up in the store at `uri`, for `off` in `folder`. SpecError where it has no such checkpoint.
    """
    stored_run = find_run(tracking_uri(uri), run_id, folder)
    run = RunFolder.open(open_storage(load_spec(stored_run.spec).checkpoint.storage), run_id)
    if remove:
        unpin(run, step, ASKED)
    else:
        _check_saved(run, step)
        pin(run, step, ASKED)
        try:
            _check_saved(run, step)  # retention may have deleted it before there was a pin
        except SpecError:
            unpin(run, step, ASKED)
            raise
    return sorted(pinned(run))


def _check_saved(run: RunFolder, step: int) -> None:
    if step not in (saved := saved_steps(run)):
        available = ", ".join(map(str, saved)) or "none"
        raise problems.PIN_WITHOUT_CHECKPOINT(run=run.run_id, got=step, wanted=available)
