"""Whole copies of a run's essential checkpoints in its store, made in a lane of their own.

Invariants:

- The last call decides what the store should have: the newest checkpoint, the best one, the pinned ones. One is sent at a time.
- A checkpoint that is being sent is sent to its end, whatever is deleted meanwhile: links of its own hold its files. So a
slow store gets only some of the checkpoints, and the disk holds at most one checkpoint more.
- A copy that is no longer essential loses its files, and only after the newest checkpoint is whole in the store. As long as the run keeps the
checkpoint, a reference to it stays.
- A copy that this run's journal does not know, such as one from a storage that was lost, is left alone.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import LockstepError, first_line
from lockstep.files import NO_LINKS
from lockstep.parsing import MOST_BYTES, strict_json, without_hash
from lockstep.paths import OutsideError, component, open_beneath, read_beneath, shown
from lockstep.record.mirror.delivery_lanes import Call, Lane, Part
from lockstep.record.mirror.run_store import RunStore

HELD = ".copying"
"""The folder beside the checkpoints that holds the files being sent."""

SHARED = "shared"
"""The folder beside the checkpoints with the files that several of them name; in a whole copy they lie with the other files."""


class Reference(NamedTuple):
    """The checkpoint at `uri`, of which a store has no files."""

    uri: str


class Copies(Part):
    """The checkpoints that a store should have whole (folder by step), in a lane of their own.

    `report` is called in the lane with the step that is now whole in the store (and None), or with why one is not.
    `mb_per_s` bounds the mean rate at which files are sent, in megabytes per second.
    """

    def __init__(
        self, store: RunStore, report: Callable[[int, str | None], None], mb_per_s: float | None = None
    ) -> None:
        lane = Lane("copies", lambda label, error: None, low=True)
        super().__init__(lane, "checkpoint", self._send_copy, delete=store.delete_checkpoint)
        self._store, self._report = store, report
        self._bytes_per_s = None if mb_per_s is None else mb_per_s * 1e6
        self._known: Container[int] = ()
        self._references: Mapping[int, Reference] = {}
        """The checkpoints that the run keeps without a copy in the store."""
        self.published: dict[int, int] = {}
        """How often a checkpoint was published in the store, or seen there, by step. Read by another thread."""
        self._is_known = False
        """Whether `actual` has what the store had of the run's checkpoints."""
        self._closing = threading.Event()

    def keep(
        self, whole: Mapping[int, str], known: Container[int], kept: Mapping[int, str] | None = None
    ) -> None:
        """Make the store keep these checkpoints whole, of the others that the run has `kept` a reference, and drop the other `known` ones. Returns at once."""
        self._known = known
        self._references = {step: Reference(uri) for step, uri in (kept or {}).items() if step not in whole}
        self.desired = dict(sorted(whole.items(), reverse=True))
        self.retry()
        self._lane.wake()

    def close(self, deadline: float) -> bool:
        """Finish the work, up to `deadline` (monotonic seconds). Returns whether the store has what it should have."""
        self._closing.set()
        self._lane.hasten()  # nothing trains any more
        while not self._lane.idle and time.monotonic() < deadline:
            time.sleep(0.01)
        self._lane.stop()
        outage = self._lane.outage
        missing = [item for item in self.desired.items() if self.actual.get(item[0]) != item[1]]
        for step, uri in missing:
            if self._refused.get(step) != uri:
                self._report(step, str(outage.error) if outage else "the run ended before it was sent")
        return not missing

    def calls(self) -> Iterator[Call]:
        """The newest checkpoint first; what is no longer desired goes once that one is whole."""
        newest = next(iter(self.desired.items()), None)
        if newest is None:
            return
        if not self._is_known:
            if self._is_due(*newest):
                yield Call(self._read_actual, partial(self.refuse, [newest]))
            return
        yield from self._pushes()
        if self.actual.get(newest[0]) == newest[1]:
            for step, reference in self._references.items():
                if self._is_due(step, reference):
                    yield Call(
                        partial(self._refer, step, reference), partial(self.refuse, [(step, reference)])
                    )
            yield from self._deletions()

    def _deletions(self) -> Iterator[Call]:
        unreferenced = (name for name in list(self.actual) if name not in {*self.desired, *self._references})
        return self._delete_each(unreferenced)

    def refuse(self, items: Sequence[tuple[Any, Any]], error: Exception) -> None:
        self._refused.update(items)
        for step, _ in items:
            if step in self.desired or step in self.actual:  # else it was deleted during the call
                self._report(step, str(error) if isinstance(error, LockstepError) else first_line(error))

    def _read_actual(self) -> None:
        desired = self.desired
        self.actual = {
            step: desired.get(step, "") if whole else None
            for step, whole in self._store.checkpoints().items()
            if step in self._known or step in desired
        }
        for step in self.actual:
            self._count(step)
        self._is_known = True

    def _refer(self, step: int, reference: Reference) -> None:
        self._store.keep_reference(step, checkpoint_tags(reference.uri))
        self.actual[step] = reference
        self._count(step)

    def _count(self, step: int) -> None:
        self.published[step] = self.published.get(step, 0) + 1

    def _send_copy(self, items: Mapping[int, str]) -> None:
        ((step, folder),) = items.items()
        self.actual[step] = None
        with _linked(Path(folder)) as held_folder:
            self._began = time.monotonic()
            self._store.log_checkpoint(step, checkpoint_tags(folder), held_folder, self._sent)
        self._count(step)
        self._report(step, None)

    def _sent(self, nbytes: int) -> None:
        """Pause after a file to keep the mean rate, unless the run has ended."""
        if self._bytes_per_s is None:
            return
        until = self._began + nbytes / self._bytes_per_s
        self._closing.wait(max(0.0, until - time.monotonic()))
        self._began = time.monotonic()


@contextmanager
def _linked(folder: Path) -> Iterator[Path]:
    """Hold the files of a checkpoint while they are sent. OSError where they are already gone.

    The manifest is linked first and then the files that it names, so that all are of one checkpoint. On a file
    system without links the folder itself is used: if the checkpoint is deleted before it is sent, the copy is given up. A checkpoint that
    shares files with others is copied.
    """
    held_folder = folder.parent / HELD / folder.name
    # Left by a recorder that was killed: no other one copies now.
    shutil.rmtree(held_folder.parent, ignore_errors=True)
    try:
        try:
            held_folder.mkdir(parents=True)
            _link(folder, MANIFEST, held_folder)
            names = named_by(read_beneath(held_folder, MANIFEST, MOST_BYTES))
            for name in names.files:
                _link(folder, name, held_folder)
            for name in names.shared:
                _link(folder.parent / SHARED, name, held_folder)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            _copy_shared(folder, held_folder)
            yield held_folder if any(held_folder.iterdir()) else folder
            return
        yield held_folder
    finally:
        shutil.rmtree(held_folder.parent, ignore_errors=True)


def _copy_shared(folder: Path, target: Path) -> None:
    """Copy a checkpoint that shares files into `target`, which stays empty if it shares none."""
    names = named_by(read_beneath(folder, MANIFEST, MOST_BYTES))
    if not names.shared:
        return
    for name in names.shared:
        _copy(folder.parent / SHARED, name, target)
    for name in (*names.files, MANIFEST):
        _copy(folder, name, target)


def _link(folder: Path, name: str, target: Path) -> None:
    """Give a file of `folder` a second name in `target`. OSError or ValueError for anything but a file in that folder."""
    os.close(open_beneath(folder, component(name)))
    os.link(folder / component(name), target / component(name), follow_symlinks=False)
    if not stat.S_ISREG((target / component(name)).lstat().st_mode):
        raise OutsideError(f"{shown(name)} in {str(folder)!r} is no file of its own")


def _copy(folder: Path, name: str, target: Path) -> None:
    with (
        os.fdopen(open_beneath(folder, component(name)), "rb") as original,
        (target / component(name)).open("xb") as file,
    ):
        shutil.copyfileobj(original, file)


MANIFEST = "manifest.json"


def checkpoint_tags(uri: str) -> dict[str, str]:
    """Where a checkpoint is, and the digest of its manifest, which has the digests of its files, if this machine can see it."""
    tags = {"lockstep.uri": uri}
    with suppress(OSError, ValueError):
        manifest = read_beneath(Path(uri), MANIFEST, MOST_BYTES)
        tags["lockstep.manifest"] = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    return tags


class Named(NamedTuple):
    """The names of a checkpoint's own files, and of those that it shares with others: each that of one file in one folder."""

    files: tuple[str, ...]
    shared: tuple[str, ...]


def named_by(text: bytes) -> Named:
    """The files that a manifest names. ValueError unless its hash is that of its content, before any name is used."""
    manifest = without_hash(strict_json(text), text)
    try:
        files = tuple(component(entry["name"]) for entry in manifest["files"])
        return Named(files, tuple(component(entry.split(" ")[0]) for entry in manifest["shared"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no manifest of a checkpoint: {error!r}") from error
