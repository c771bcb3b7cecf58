"""The checkpoints of a run by its id: which steps are saved, the next attempt's claim, and pins that follow the registry."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.checkpoint import problems
from lockstep.checkpoint.errors import BadCheckpointError, LostFileError, StaleAttemptError
from lockstep.checkpoint.layout import SHARED, is_shared, manifests, step_folder
from lockstep.checkpoint.reader import Checkpoint, checkpoints_of, listed, verify
from lockstep.checkpoint.runs.lease import ensure_leased
from lockstep.checkpoint.runs.pins import ALIAS, pin_exactly
from lockstep.checkpoint.runs.run_folder import AttemptOrigin, RunFolder
from lockstep.checkpoint.storage.local import LocalStorage
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.files import flush, make_folder


def claim(
    storage: str, run_id: str, step: int | None, at_least: int = 1, *, begun: bool = False
) -> AttemptOrigin:
    """Begin the next attempt of a run, with a number of at least `at_least`. Earlier attempts that still run can publish nothing from here on.

    StaleAttemptError where another command has taken the run over from this process. With `begun`, a StorageError where nothing is left of
    the run: it had a folder there, and would begin anew in a place that may not be its own.
    """
    folder = _begun(storage, run_id) if begun else opened(storage, run_id)
    ensure_leased(folder.storage, run_id)
    if step is not None:
        check_step(run_id, step, saved_steps(folder))
    try:
        attempt = folder.claim(at_least)
    except StaleAttemptError:  # that many attempts have begun already
        attempt = folder.claim()
    return AttemptOrigin(run_id, attempt.number, step)


def check_step(run_id: str, step: int, saved: Sequence[int]) -> None:
    """SpecError where `step` is none of the steps that have a checkpoint."""
    if step not in saved:
        available = ", ".join(map(str, sorted(saved))) or "none"
        raise problems.NO_STEP(run=run_id, got=step, wanted=available)


def saved_steps(folder: RunFolder) -> list[int]:
    """The steps that have a checkpoint, newest first, unverified."""
    return [step for step, names in listed(folder) if manifests(names)]


def steps_of(storage: str, run_id: str) -> list[int]:
    """`saved_steps` of a run by its id; empty where its folder does not exist."""
    try:
        return saved_steps(RunFolder.open(open_storage(storage), run_id))
    except LostFileError:
        return []


def whole_steps(storage: str, run_id: str) -> Iterator[int]:
    """The saved steps whose files all exist with the right sizes, newest first; hashes are compared only when a checkpoint is read.

    Each one is checked when it is asked for: a caller that wants the newest of thousands checks one.
    """
    try:
        folder = RunFolder.open(open_storage(storage), run_id)
    except LostFileError:
        return
    yield from (s for s in saved_steps(folder) if any(map(_has_its_files, checkpoints_of(folder, s))))


def _has_its_files(checkpoint: Checkpoint) -> bool:
    try:
        verify(checkpoint, hashes=False)
    except (BadCheckpointError, LostFileError):
        return False
    return True


def read_shared(storage: str, run_id: str, name: str) -> bytes:
    """A file that the run's checkpoints share, unverified. StorageError where it cannot be read."""
    folder = RunFolder.open(open_storage(storage), run_id)
    return folder.storage.read(folder.path(SHARED, name))


def opened(storage: str, run_id: str) -> RunFolder:
    """The run's folder. It is created if the run ended before its first checkpoint, or on another machine."""
    store = open_storage(storage)
    try:
        return RunFolder.open(store, run_id)
    except LostFileError:
        return RunFolder.create(store, run_id)


def _begun(storage: str, run_id: str) -> RunFolder:
    """The folder of a run that has trained."""
    store = open_storage(storage)
    try:
        return RunFolder.open(store, run_id)
    except LostFileError as error:
        raise problems.NOTHING_LEFT(run=run_id, storage=store.shown) from error


def pin_aliased(storage: str, run_id: str, steps: frozenset[int]) -> None:
    """Pin the checkpoints that have an alias in the model registry, and unpin those whose alias was removed."""
    with suppress(LostFileError):  # no checkpoint yet, and so no alias
        pin_exactly(RunFolder.open(open_storage(storage), run_id), steps, ALIAS)


def on_disk(storage: str) -> Path | None:
    """The folder of a storage on a disk; None for an object store."""
    store = open_storage(storage)
    return store.root if isinstance(store, LocalStorage) else None


_ASIDE = ".download-"


@contextmanager
def aside(storage: str, run_id: str) -> Iterator[Path]:
    """A new folder in that of a run, on the storage's own disk, for files that `adopt` may take; what it does not take is deleted.

    StorageError where the disk refuses what the block writes there.
    """
    root = on_disk(storage)
    assert root is not None
    folder = root / run_id / f"{_ASIDE}{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True)  # with the mode of every other folder there, which a temporary one has not
        yield folder
    except OSError as error:
        raise problems.NOT_DOWNLOADED(folder=folder, got=error.strerror or error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def clear_asides(storage: str, run_id: str) -> None:
    """Delete what a process that was killed in `aside` has left. Only for the command that holds the run."""
    root = on_disk(storage)
    assert root is not None
    for folder in (root / run_id).glob(f"{_ASIDE}*"):
        shutil.rmtree(folder, ignore_errors=True)


def adopt(storage: str, run_id: str, step: int, files: Path) -> None:
    """Make a verified folder of files the run's checkpoint of `step`, by one rename; it is on the storage's own disk.

    First the files that it shares are moved beside the run's checkpoints. Who may read a file, and write it, is who may do so with a
    folder that is made there.
    """
    run, root = opened(storage, run_id), on_disk(storage)
    assert root is not None
    target, shared = root / run.path(step_folder(step)), root / run.path(SHARED)
    for file in files.iterdir():
        file.chmod(files.stat().st_mode & 0o666)
    for file in [file for file in files.iterdir() if is_shared(file.name)]:
        make_folder(shared)
        flush(file)
        file.replace(shared / file.name)
        flush(shared)
    if target.exists():  # what is there is not a checkpoint
        shutil.rmtree(target)
    for file in files.iterdir():
        flush(file)
    flush(files)
    files.rename(target)
    flush(target.parent)
