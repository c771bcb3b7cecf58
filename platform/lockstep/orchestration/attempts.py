"""The attempts of a run: how one begins, and what is known of each."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lockstep.checkpoint.errors import LostFileError, StaleAttemptError
from lockstep.checkpoint.layout import MANIFEST, step_folder
from lockstep.checkpoint.run_folder import Origin, RunFolder
from lockstep.checkpoint.storage import open_storage
from lockstep.errors import SpecError
from lockstep.spec import Spec


@dataclass(slots=True)
class Account:
    """What became of one attempt. Times are Unix seconds; steps are numbers of steps, 0 where there is none."""

    attempt: int
    workers: int
    began: float
    from_step: int = 0
    """The checkpoint that it started from."""
    last_step: int = 0
    """The last step that it was seen to do."""
    ended: float | None = None
    why: str | None = None
    repeated: int = 0
    """Steps at its beginning that an earlier attempt had done already."""
    lost_s: float | None = None
    """From the last step of the attempt before to its own first one."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def claim(spec: Spec, run_id: str, step: int | None, at_least: int = 1) -> Origin:
    """Begin the next attempt of a run, with a number of `at_least` so much: whatever still runs of it can publish nothing from here on."""
    storage = open_storage(spec.checkpoint.storage)
    try:
        folder = RunFolder.open(storage, run_id)
    except LostFileError:
        if step is not None:
            raise
        folder = RunFolder.create(storage, run_id)  # it ended before its first checkpoint
    if step is not None and step not in saved_steps(folder):
        kept = ", ".join(map(str, saved_steps(folder))) or "none"
        raise SpecError(f"resume: run {run_id} has no checkpoint of step {step}; it has {kept}")
    try:
        attempt = folder.claim(at_least)
    except StaleAttemptError:  # so many have begun already
        attempt = folder.claim()
    return Origin(run_id, attempt.number, step)


def saved_steps(folder: RunFolder) -> list[int]:
    """The steps that have a checkpoint, newest first, unverified."""
    return [
        step for step in folder.steps() if folder.storage.exists(folder.path(step_folder(step), MANIFEST))
    ]


def newest_step(spec: Spec, run_id: str) -> int:
    """The step of a run's newest checkpoint, unverified; 0 where it has none."""
    try:
        return next(iter(saved_steps(RunFolder.open(open_storage(spec.checkpoint.storage), run_id))), 0)
    except LostFileError:
        return 0
