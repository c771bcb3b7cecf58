"""Copies of checkpoints on their way to a store, in a thread of their own: at most one is sent, and one waits.

A checkpoint that waits gives way to a newer one; so a store that is slower than the checkpoints gets every so many of
them, and neither training nor the rest of the record waits for it. A copy whose checkpoint is deleted meanwhile is
given up, and leaves nothing READY.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import RecordError
from lockstep.record.run_store import RunStore, UnavailableError

PAUSE_S = 2.0


class _Copy(NamedTuple):
    step: int
    folder: Path
    tags: Mapping[str, str]


class Uploads:
    """`told` hears, in the thread, of a copy that was not made, and why."""

    def __init__(self, store: RunStore, told: Callable[[int, str], None]) -> None:
        self._store = store
        self._told = told
        self._changed = threading.Condition()
        self._waiting: _Copy | None = None
        self._deleted: set[int] = set()
        self._sent: set[int] = set()
        self._closing = False
        self._deadline = float("inf")
        self._thread: threading.Thread | None = None

    def send(self, step: int, folder: Path, tags: Mapping[str, str]) -> None:
        """Have a checkpoint's folder copied, in place of one that still waits."""
        with self._changed:
            self._waiting = _Copy(step, folder, tags)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lockstep-upload", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def delete(self, step: int) -> None:
        """Have the copy of a checkpoint deleted, if there is one."""
        with self._changed:
            self._deleted.add(step)
            self._changed.notify_all()

    def close(self, deadline: float) -> None:
        """Finish what waits, up to `deadline` (monotonic seconds)."""
        if self._thread is None:
            return
        with self._changed:
            self._closing, self._deadline = True, deadline
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline - time.monotonic()) + 0.5)

    # --- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._closing or self._deleted & self._sent):
                    self._changed.wait()
                copy, self._waiting = self._waiting, None
                gone = sorted(self._deleted & self._sent)
            for step in gone:
                self._try(step, partial(self._store.delete_checkpoint, step))
                self._sent.discard(step)
            if copy is not None:
                self._copy(copy)
            elif self._closing:
                return

    def _copy(self, copy: _Copy) -> None:
        if copy.step in self._deleted:
            return
        self._sent.add(copy.step)  # or a part of it, which is to be deleted as well
        self._try(copy.step, partial(self._store.log_checkpoint, copy.step, copy.tags, copy.folder))

    def _try(self, step: int, call: Callable[[], None]) -> None:
        """Make a call, again while the store is away and nothing newer waits."""
        while True:
            try:
                call()
                return
            except UnavailableError as error:
                if self._waiting is not None or time.monotonic() + PAUSE_S > self._deadline:
                    self._told(step, str(error))
                    return
                with self._changed:
                    self._changed.wait(PAUSE_S)
            except (RecordError, OSError) as error:
                if step not in self._deleted:  # deleted under the copy: that is no failure
                    self._told(step, str(error))
                return
