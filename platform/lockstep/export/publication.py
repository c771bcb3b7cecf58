"""Giving an artifact and its description their names: together or not at all, however the export ends.

They are written into `.export-…` in the run's folder: `new`. Then each takes the place of what has its name, which goes into
`old`. The journal says which names these are as long as that is not done: while it is there, what was there before is put back,
by the export itself or, where that was killed, by the next one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import safetensors

from lockstep.export import problems
from lockstep.export.artifact import described, description, names_in
from lockstep.files import flush, lock, unlock

_PREFIX = ".export-"
_JOURNAL = "journal"


@contextmanager
def aside_of(folder: Path, file: Path) -> Iterator[Path]:
    """Where an artifact and its description are to be written, in a run's `folder`; after the block they are `file` and what is beside it.

    What a user has put into an artifact's folder is carried over. StorageError where something else is in the way.
    """
    try:
        with ExitStack() as held:
            with _alone(folder):
                _refuse_obstacles(folder, file, [])
                aside = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
                held.callback(_remove, aside)
                with suppress(OSError):  # no locks here: then it is never taken for one that was left behind
                    held.enter_context(_locked(aside, wait=True))
            path = aside / "new" / file.name
            path.parent.mkdir()
            yield path
            with _alone(folder):
                _publish(folder, aside, path, file)
    except (OSError, safetensors.SafetensorError) as error:
        got = getattr(error, "strerror", None) or error
        if not folder.is_dir():
            raise problems.FOLDER_GONE(folder=folder) from error
        if journal := next(folder.glob(f"{_PREFIX}*/{_JOURNAL}"), None):
            raise problems.NOT_PUT_BACK(file=file, got=got, folder=journal.parent) from error
        raise problems.UNWRITABLE(file=file, got=got) from error


def make_folder_below(folder: Path, path: Path) -> None:
    """Make a folder and its parents, each flushed into the folder that holds it; never `folder` itself."""
    if path != folder:
        make_folder_below(folder, path.parent)
        path.mkdir(exist_ok=True)
        flush(path.parent)


def _publish(folder: Path, aside: Path, path: Path, file: Path) -> None:
    """Have what is at `path`, and its description, take the place of `file` and of what is beside it."""
    _refuse_obstacles(folder, file, names_in(path))
    if path.is_dir() and file.is_dir():
        _carry_over(file, path)
    make_folder_below(folder, file.parent)
    old, journal, partial = aside / "old", aside / _JOURNAL, aside / "partial"
    old.mkdir()
    targets = [file, description(file)]
    partial.write_text("\n".join(str(target.relative_to(folder)) for target in targets), encoding="utf-8")
    written = [path, *path.rglob("*"), description(path), partial]
    for entry in [entry for entry in written if not entry.is_symlink()]:
        flush(entry)
    try:
        partial.rename(journal)
        flush(aside)
        for target in targets:
            if os.path.lexists(target):
                target.rename(old / target.name)
            (path.parent / target.name).rename(target)
        flush(file.parent)
        journal.unlink()
    except BaseException:
        _put_back(folder, aside)
        raise


def _put_back(folder: Path, aside: Path) -> None:
    """Put back what was there before a publication that was not done. It may be cut short, and begun again."""
    journal = aside / _JOURNAL
    if not journal.exists():
        return
    for line in journal.read_text(encoding="utf-8").splitlines():
        target = folder / line
        new, old = aside / "new" / target.name, aside / "old" / target.name
        if not os.path.lexists(new) and os.path.lexists(target):
            target.rename(new)
        if os.path.lexists(old):
            old.rename(target)
        flush(target.parent)
    journal.unlink()


def _remove(aside: Path) -> None:
    """Remove a folder unless what was there before is still in it."""
    if not (aside / _JOURNAL).exists():
        shutil.rmtree(aside, ignore_errors=True)


# --- what was there ---------------------------------------------------------------------------------------------


def _refuse_obstacles(folder: Path, file: Path, names: Sequence[str]) -> None:
    """StorageError where what is at an artifact's place is no artifact, or has one of its `names` and is none of its files."""
    parents = [folder / parent for parent in file.relative_to(folder).parents]
    kinds = [
        *((parent, True) for parent in reversed(parents)),
        (file, not file.suffix),
        (description(file), False),
    ]
    for path, is_folder in kinds:
        if os.path.lexists(path) and path.is_dir() != is_folder:
            kind = "a folder" if path.is_dir() else "a file" if path.exists() else "a link that leads nowhere"
            raise problems.IN_THE_WAY(file=path, got=kind)
    if not file.is_dir() or not any(file.iterdir()):
        return
    before = described(file)
    if before is None or not before.files:
        raise problems.IN_THE_WAY(file=file, got=f"a folder that no {description(file).name} describes")
    for name in names:
        if name not in before.files and os.path.lexists(file / name):
            raise problems.IN_THE_WAY(file=file / name, got="no file of the artifact")


def _carry_over(before: Path, new: Path) -> None:
    """Copy what a user has put into the folder of the artifact `before`."""
    artifact = described(before)
    own = set() if artifact is None else {before / name for name in artifact.files}

    def left_out(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(folder, name) in own]

    shutil.copytree(before, new, symlinks=True, ignore=left_out, dirs_exist_ok=True)


# --- other exports of the run -----------------------------------------------------------------------------------


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other export of the run begins or publishes; those that have ended without a word are undone."""
    with ExitStack() as held:
        with suppress(OSError):  # no locks here
            held.enter_context(_locked(folder, wait=True))
        for leftover in folder.glob(f"{_PREFIX}*"):
            try:
                with _locked(leftover, wait=False):
                    pass
            except OSError:  # its export is at work; or no locks here, and nobody can tell
                continue
            _put_back(folder, leftover)
            _remove(leftover)
        yield


@contextmanager
def _locked(folder: Path, *, wait: bool) -> Iterator[None]:
    """Have a folder locked. BlockingIOError where another has it and it is not to `wait`, another OSError where there are no locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        lock(descriptor, wait=wait)
        yield
    finally:
        unlock(descriptor)
        os.close(descriptor)
