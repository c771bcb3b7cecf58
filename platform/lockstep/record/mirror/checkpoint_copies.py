"""Whole copies of a run's essential checkpoints in its store, made by a thread beside training and recording.

Invariants:

- The last call decides what the store should have: the newest checkpoint, the best one, the pinned ones. One is sent at a time.
- A checkpoint that is being sent is sent to its end, whatever is deleted meanwhile: links of its own hold its files. So a
slow store gets only some of the checkpoints, and the disk holds at most one checkpoint more.
- A copy is deleted when it is no longer essential, and only after the newest checkpoint is whole in the store.
- A copy that this run's journal does not know, such as one from a storage that was lost, is left alone.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import LockstepError, first_line
from lockstep.files import NO_LINKS
from lockstep.parsing import MOST_BYTES, strict_json, without_hash
from lockstep.paths import OutsideError, component, open_beneath, read_beneath, shown
from lockstep.record.mirror.run_store import RunStore, UnavailableError

PAUSE_S = 2.0
HELD = ".copying"
"""The folder beside the checkpoints that holds the files being sent."""

SHARED = "shared"
"""The folder beside the checkpoints with the files that several of them name; in a whole copy they lie with the other files."""

_NICE = 10


class Copies:
    """`on_result` is called in the thread with the step that is now whole in the store (and None), or with why one is not.

    `mb_per_s` bounds the mean rate at which files are sent, in megabytes per second.
    """

    def __init__(
        self,
        store: RunStore,
        on_result: Callable[[int, str | None], None],
        tags: Callable[[str], Mapping[str, str]],
        mb_per_s: float | None = None,
    ) -> None:
        self._store = store
        self._on_result = on_result
        self._tags = tags
        self._bytes_per_s = None if mb_per_s is None else mb_per_s * 1e6
        self._changed = threading.Condition()
        self._wanted: dict[int, str] = {}
        """The folder of each wanted checkpoint by step, newest first."""
        self._known: set[int] = set()
        self._whole: dict[int, bool] | None = None
        """The checkpoints of which the store has something, and whether each is whole."""
        self._new = self._closing = False
        self._failed: set[int] = set()
        self._deadline = float("inf")
        self._thread: threading.Thread | None = None

    def keep(self, essential: Iterable[tuple[int, str]], known: Iterable[int]) -> None:
        """Make the store keep these checkpoints (step and folder), and drop the other `known` ones of the run. Returns at once."""
        with self._changed:
            self._wanted = dict(sorted(essential, reverse=True))
            self._known.update(known, self._wanted)
            self._new = True
            self._failed.clear()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lockstep-copies", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self, deadline: float) -> bool:
        """Finish the work, up to `deadline` (monotonic seconds). Returns whether the store has what it should have."""
        if self._thread is None:
            return True
        with self._changed:
            self._closing, self._deadline = True, deadline
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline - time.monotonic()) + 0.5)
        complete = self._whole or {}
        missing = [step for step in self._wanted if not complete.get(step)]
        for step in set(missing) - self._failed:
            self._on_result(step, "the run ended before it was sent")
        return not missing

    # --- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        if sys.platform == "linux":  # on Linux each thread has its own priority
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            with self._changed:
                while not (self._new or self._closing):
                    self._changed.wait()
                if not self._new:
                    return
                self._new = False
            self._reconcile()

    def _reconcile(self) -> None:
        if self._whole is None and not self._try(0, self._look):
            return
        assert self._whole is not None
        wanted, complete = self._wanted, self._whole
        for step, uri in wanted.items():
            if not complete.get(step):
                complete[step] = False
                complete[step] = self._try(step, partial(self._send, step, Path(uri)))
                if complete[step]:
                    self._on_result(step, None)
            if self._new:
                return  # newer checkpoints go first
        newest = next(iter(wanted), None)
        if newest is None or not complete.get(newest):
            return
        for step in sorted((set(complete) & self._known) - set(wanted)):
            if self._try(step, partial(self._store.delete_checkpoint, step)):
                del complete[step]

    def _look(self) -> None:
        self._whole = dict(self._store.checkpoints())

    def _send(self, step: int, folder: Path) -> None:
        with _held(folder) as held_folder:
            self._began = time.monotonic()
            self._store.log_checkpoint(step, self._tags(str(folder)), held_folder, self._sent)

    def _sent(self, nbytes: int) -> None:
        """Pause after a file to keep the mean rate, unless the run has ended."""
        if self._bytes_per_s is None:
            return
        until = self._began + nbytes / self._bytes_per_s
        with self._changed:
            self._changed.wait_for(lambda: self._closing, max(0.0, until - time.monotonic()))
        self._began = time.monotonic()

    def _try(self, step: int, call: Callable[[], None]) -> bool:
        """Make a call, repeated while the store does not answer and nothing newer waits. Returns whether it succeeded."""
        while True:
            try:
                call()
                return True
            except UnavailableError as error:
                failure = str(error)
                if self._new or time.monotonic() + PAUSE_S > self._deadline:
                    break
                with self._changed:
                    self._changed.wait(PAUSE_S)
            except Exception as error:  # noqa: BLE001 - one failed copy must not prevent those after it
                failure = str(error) if isinstance(error, LockstepError) else first_line(error)
                break
        if not self._new:  # else the checkpoint was deleted during the call, or is tried again
            self._failed.add(step)
            self._on_result(step, failure)
        return False


@contextmanager
def _held(folder: Path) -> Iterator[Path]:
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


def _copy_shared(folder: Path, held: Path) -> None:
    """Copy a checkpoint that shares files into `held`, which stays empty if it shares none."""
    names = named_by(read_beneath(folder, MANIFEST, MOST_BYTES))
    if not names.shared:
        return
    for name in names.shared:
        _copy(folder.parent / SHARED, name, held)
    for name in (*names.files, MANIFEST):
        _copy(folder, name, held)


def _link(folder: Path, name: str, held: Path) -> None:
    """Give a file of `folder` a second name in `held`. OSError or ValueError for anything but a file in that folder."""
    os.close(open_beneath(folder, component(name)))
    os.link(folder / component(name), held / component(name), follow_symlinks=False)
    if not stat.S_ISREG((held / component(name)).lstat().st_mode):
        raise OutsideError(f"{shown(name)} in {str(folder)!r} is no file of its own")


def _copy(folder: Path, name: str, held: Path) -> None:
    with (
        os.fdopen(open_beneath(folder, component(name)), "rb") as original,
        (held / component(name)).open("xb") as file,
    ):
        shutil.copyfileobj(original, file)


MANIFEST = "manifest.json"


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
