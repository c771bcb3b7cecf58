"""The attempts of a run: how one begins, and what is known of each."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.checkpoint.errors import LostFileError, StaleAttemptError
from lockstep.checkpoint.layout import MANIFEST, step_folder
from lockstep.checkpoint.pins import ALIAS, pin_exactly
from lockstep.checkpoint.run_folder import Origin, RunFolder
from lockstep.checkpoint.storages import open_storage
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
    seconds: dict[str, float] = field(default_factory=dict)
    """`lost_s` by stage, in the order of `stages.STAGES`."""
    stragglers: list[str] = field(default_factory=list)
    """Ranks that kept the others waiting, with how much slower they were and in which steps."""
    standbys: int = 0
    """How many of its workers were processes that stood by."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def claim(spec: Spec, run_id: str, step: int | None, at_least: int = 1) -> Origin:
    """Begin the next attempt of a run, with a number of `at_least` so much: whatever still runs of it can publish nothing from here on."""
    folder = opened(spec, run_id)
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


def steps_of(spec: Spec, run_id: str) -> list[int]:
    """The same for a run by its id; none where its folder is not there."""
    try:
        return saved_steps(RunFolder.open(open_storage(spec.checkpoint.storage), run_id))
    except LostFileError:
        return []


def opened(spec: Spec, run_id: str) -> RunFolder:
    """The run's folder, made where there is none: it ended before its first checkpoint, or on another machine."""
    storage = open_storage(spec.checkpoint.storage)
    try:
        return RunFolder.open(storage, run_id)
    except LostFileError:
        return RunFolder.create(storage, run_id)


def pin_aliased(spec: Spec, run_id: str, steps: frozenset[int]) -> None:
    """Keep the checkpoints that the model registry has an alias for, and let go of those whose alias was taken away."""
    with suppress(LostFileError):  # no checkpoint yet, and so no alias
        pin_exactly(RunFolder.open(open_storage(spec.checkpoint.storage), run_id), steps, ALIAS)


def adopt(spec: Spec, run_id: str, step: int, files: Path) -> None:
    """Make a verified folder of files the run's checkpoint of `step`, in one rename; it lies on the storage's own disk."""
    place = Path(spec.checkpoint.storage, opened(spec, run_id).path(step_folder(step)))
    if place.exists():  # what is there is no checkpoint
        shutil.rmtree(place)
    files.rename(place)
