"""Deleting what retention decides: the manifest first, then the files, and only as the current attempt.

Before anything is deleted, a checkpoint that stays is known to be whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lockstep.checkpoint import layout
from lockstep.checkpoint.errors import BadCheckpointError, LostFileError, NewerFormatError
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.pins import pinned
from lockstep.checkpoint.reader import Checkpoint, checkpoints, verify
from lockstep.checkpoint.retention import Keep, Known, StepFolder, leftovers, surplus
from lockstep.checkpoint.run_folder import Attempt


def prune(attempt: Attempt, keep: Keep, *, whole: int | None = None) -> list[int]:
    """Delete the checkpoints that `keep` does not ask for; the steps that were deleted.

    What is pinned stays as well. `whole` is a step that this process has just written: it is not read back. Without it, checkpoints are
    verified from the newest on until one is whole. One of a newer format is neither counted nor deleted.
    """
    known = _known(attempt, whole)
    if whole is not None and whole not in {checkpoint.step for checkpoint in known if checkpoint.good}:
        return []
    steps = surplus(known, replace(keep, pinned=keep.pinned | pinned(attempt.run)))
    apply(attempt, steps)
    return steps


def apply(attempt: Attempt, steps: Iterable[int]) -> None:
    """Delete these checkpoints. StaleAttemptError where the attempt is over."""
    for step in steps:
        folder = layout.step_folder(step)
        try:
            listed = [entry.name for entry in Checkpoint.of(attempt.run, step).manifest().files]
        except BadCheckpointError:
            listed = []  # its files are leftovers from here on
        attempt.withdraw((folder, layout.MANIFEST))
        for name in listed:
            attempt.discard((folder, name))
        attempt.run.storage.delete_folder(attempt.run.path(folder))


def clear_leftovers(attempt: Attempt) -> list[str]:
    """Delete what crashed and failed saves have left; the files that were deleted, as `step-…/name`.

    Call it when an attempt has begun, before its first save, and after a save that failed.
    """
    attempt.ensure_current()
    attempt.run.clear_ended()
    folders = [_step_folder(attempt, step) for step in attempt.run.steps()]
    found = leftovers(folders, attempt.number)
    for folder in folders:
        name = layout.step_folder(folder.step)
        for file in found.get(folder.step, ()):
            attempt.discard((name, file))
        if folder.names == set(found.get(folder.step, ())):
            attempt.run.storage.delete_folder(attempt.run.path(name))
    return [f"{layout.step_folder(step)}/{file}" for step, files in found.items() for file in files]


def _known(attempt: Attempt, whole: int | None) -> list[Known]:
    """Every checkpoint of this format, newest first, and whether it is good as far as it was looked at."""
    known, sure = [], whole is not None
    for checkpoint in checkpoints(attempt.run):
        step = _step(checkpoint)
        try:
            manifest = verify(checkpoint, hashes=not sure)
            known.append(Known(step, True, manifest.facts.metrics))
            sure = True
        except NewerFormatError:
            continue
        except (BadCheckpointError, LostFileError):
            known.append(Known(step, good=False))
    return known


def _step_folder(attempt: Attempt, step: int) -> StepFolder:
    checkpoint = Checkpoint.of(attempt.run, step)
    names = frozenset(item.name for item in attempt.run.storage.list(checkpoint.folder))
    manifest = _readable(checkpoint) if layout.MANIFEST in names else None
    if manifest is None:
        return StepFolder(step, names)
    listed = frozenset(entry.name for entry in manifest.files) | {layout.MANIFEST}
    return StepFolder(step, names, listed, manifest.attempt)


def _readable(checkpoint: Checkpoint) -> Manifest | None:
    try:
        return checkpoint.manifest()
    except BadCheckpointError:
        return None


def _step(checkpoint: Checkpoint) -> int:
    assert checkpoint.step is not None
    return checkpoint.step
