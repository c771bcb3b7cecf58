"""Deletes what retention decides: the manifest first, then the files, and only as the current attempt.

Before anything is deleted, one checkpoint that stays is known to be whole, and those that the attempt has passed over do not
count. The cost of a save does not grow with the number of checkpoints that are kept: an attempt lists them once, and then
knows what it has saved and deleted itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from lockstep.checkpoint import layout
from lockstep.checkpoint.errors import BadCheckpointError, LostFileError, OtherFormatError
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.reader import Checkpoint, check_sizes, checkpoints_of, listed, verify
from lockstep.checkpoint.retention import Keep, Known, StepFolder, essential, leftovers, surplus
from lockstep.checkpoint.runs.pins import pinned
from lockstep.checkpoint.runs.run_folder import Attempt


class Catalogue:
    """The checkpoints of a run as its current attempt knows them: nobody else adds or deletes any meanwhile.

    Listing costs one request for a thousand files and one for each manifest. After that, each save adds what it has
    published. A file that is lost later is noticed by a reader of the checkpoint, and by the next attempt.

    `since` is the step that the attempt starts from. The newer checkpoints that it finds may have been passed over as damaged:
    their hashes are compared before the first deletion. An older one is good if its files have the right sizes.
    """

    def __init__(self, attempt: Attempt, since: int = 0) -> None:
        self.attempt, self.since = attempt, since
        self._known: dict[int, Known] | None = None
        self.essential: list[int] = []
        """After `prune`: the newest good step, the best one and the pinned ones, newest first."""

    def prune(self, keep: Keep, *, whole: int | None = None) -> list[int]:
        """Delete the checkpoints that `keep` does not ask for, as the function `prune` does. Returns the deleted steps."""
        checkpoint = None if whole is None else self._just_published(whole)
        if whole is not None and checkpoint is None:
            return []
        checkpoints = self._known = self._read(whole) if self._known is None else self._known
        if checkpoint is not None:
            checkpoints[checkpoint.step] = checkpoint
        keep = replace(keep, pinned=keep.pinned | pinned(self.attempt.run))
        self.essential = essential(checkpoints.values(), keep)
        steps = [step for step in surplus(checkpoints.values(), keep) if step != whole]
        deleted, ended = [], False
        for step in steps:
            if step in pinned(self.attempt.run):  # since the pins were read
                continue
            ended |= apply(self.attempt, [step])
            del checkpoints[step]
            deleted.append(step)
        if ended:
            _clear_shared(self.attempt)
        return deleted

    def _just_published(self, step: int) -> Known | None:
        """The checkpoint that this attempt has just published, without reading its files back; None where a file is missing."""
        try:
            manifest = verify(
                Checkpoint.of(self.attempt.run, step, self.attempt.manifest), hashes=False, shared=False
            )
        except (BadCheckpointError, LostFileError):
            return None
        return Known(step, True, manifest.facts.metrics)

    def _read(self, whole: int | None) -> dict[int, Known]:
        """Every checkpoint of this format. One before `since`, and `whole`, is judged by names and sizes only."""
        checkpoints = {}
        for step, sizes in listed(self.attempt.run):
            hashes = step > self.since and step != whole
            candidates = [
                _known(self.attempt, step, name, sizes, hashes=hashes) for name in layout.manifests(sizes)
            ]
            best = next(
                (candidate for candidate in candidates if candidate is not None and candidate.good), None
            )
            if best is not None or (candidates and None not in candidates):
                checkpoints[step] = best or Known(step, good=False)
        return checkpoints


def prune(attempt: Attempt, keep: Keep, *, whole: int | None = None) -> list[int]:
    """Delete the checkpoints that `keep` does not ask for. Returns the deleted steps.

    Pinned ones stay as well. `whole` is a step that this process has just written, which stays and is not read back. All others are
    verified. One of a newer format is neither counted nor deleted.
    """
    return Catalogue(attempt).prune(keep, whole=whole)


def apply(attempt: Attempt, steps: Iterable[int]) -> bool:
    """Delete these checkpoints. Returns whether one belonged to an ended attempt. StaleAttemptError where this attempt is over."""
    ended = False
    for step in steps:
        folder = layout.step_folder(step)
        named: list[str] = []
        for checkpoint in reversed(checkpoints_of(attempt.run, step)):
            with suppress(BadCheckpointError):  # then its files are leftovers
                manifest = checkpoint.manifest()
                named += [entry.name for entry in manifest.files]
                ended |= manifest.attempt < attempt.number
            attempt.withdraw((folder, checkpoint.name))
        for name in named:
            attempt.discard((folder, name))
        attempt.run.storage.delete_folder(attempt.run.path(folder))
    return ended


def clear_leftovers(attempt: Attempt, only: Collection[int] | None = None) -> list[str]:
    """Delete what crashed or failed saves and abandoned attempts have left. Returns the deleted files, as `step-…/name`.

    Call it when an attempt has begun; and after a failed save, with `only` the steps in which it may have left something.
    """
    attempt.ensure_current()
    attempt.run.clear_ended()
    folders = [_step_folder(attempt, step, names) for step, names in _folders(attempt, only)]
    by_step = leftovers(folders, attempt.number, fenced=attempt.run.storage.fences)
    for folder in folders:
        name = layout.step_folder(folder.step)
        for file in by_step.get(folder.step, ()):
            attempt.discard((name, file))
        if folder.names == set(by_step.get(folder.step, ())):
            attempt.run.storage.delete_folder(attempt.run.path(name))
    cleared = [f"{layout.step_folder(step)}/{file}" for step, files in by_step.items() for file in files]
    return cleared + (_clear_shared(attempt) if only is None else [])


def _clear_shared(attempt: Attempt) -> list[str]:
    """Delete the shared files that no checkpoint names: those of an attempt whose checkpoints are all gone, or of a failed save.

    Nothing is deleted before this attempt has published, or while a manifest cannot be read or may still be on its way: the files of
    its step are there already.
    """
    run = attempt.run
    listings = listed(run)
    checkpoints = [
        Checkpoint.of(run, step, name) for step, names in listings for name in layout.manifests(names)
    ]
    manifests = [_readable(checkpoint) for checkpoint in checkpoints]
    readable = [manifest for manifest in manifests if manifest is not None]
    published = max(
        (candidate.step for candidate in readable if candidate.attempt == attempt.number), default=None
    )
    if published is None or len(readable) < len(manifests):
        return []
    if not run.storage.fences and any(_may_come(step, names, published, attempt) for step, names in listings):
        return []
    named = {entry.name for manifest in readable for entry in manifest.shared}
    items = run.storage.list(run.path(layout.SHARED))
    orphans = [item.name for item in items if layout.is_shared(item.name) and item.name not in named]
    for name in orphans:
        attempt.discard((layout.SHARED, name))
    return [f"{layout.SHARED}/{name}" for name in orphans]


def _may_come(step: int, names: Iterable[str], published: int, attempt: Attempt) -> bool:
    """Whether a manifest of an ended attempt may still arrive in a step's folder and count."""
    ended = (parts for name in names if (parts := layout.file_name(name)) and parts.attempt < attempt.number)
    return step > published and any(ended) and not layout.manifests(names)


def _folders(attempt: Attempt, only: Collection[int] | None) -> list[tuple[int, dict[str, int]]]:
    if only is None:
        return listed(attempt.run)
    paths = {step: attempt.run.path(layout.step_folder(step)) for step in only}
    return [
        (step, {item.name: item.size for item in attempt.run.storage.list(path)})
        for step, path in paths.items()
    ]


def _known(attempt: Attempt, step: int, name: str, sizes: Mapping[str, int], *, hashes: bool) -> Known | None:
    """A checkpoint judged by its manifest and the sizes, or `hashes`, of its files; None for one of another format."""
    checkpoint = Checkpoint.of(attempt.run, step, name)
    try:
        if hashes:
            manifest = verify(checkpoint, shared=False)
        else:
            manifest = checkpoint.manifest()
            check_sizes(checkpoint, manifest.files, sizes)
    except OtherFormatError:
        return None
    except (BadCheckpointError, LostFileError):
        return Known(step, good=False)
    return Known(step, True, manifest.facts.metrics)


def _step_folder(attempt: Attempt, step: int, sizes: Mapping[str, int]) -> StepFolder:
    names = frozenset(sizes)
    parsed = [parts for name in names if (parts := layout.file_name(name))]
    makers = {parts.attempt for parts in parsed}
    if layout.manifests(names) and len(makers) == 1 and all(parts.kind != layout.RECEIPT for parts in parsed):
        return StepFolder(
            step, names, names, makers.pop()
        )  # the normal state after a save: no need to read the manifest
    manifests = [_readable(Checkpoint.of(attempt.run, step, name)) for name in layout.manifests(names)]
    readable = [manifest for manifest in manifests if manifest is not None]
    if not readable or len(readable) < len(manifests):
        return StepFolder(step, names)
    named = {entry.name for manifest in readable for entry in manifest.files}
    newest = max(manifest.attempt for manifest in readable)
    return StepFolder(step, names, frozenset(named) | set(layout.manifests(names)), newest)


def _readable(checkpoint: Checkpoint) -> Manifest | None:
    try:
        return checkpoint.manifest()
    except BadCheckpointError:
        return None
