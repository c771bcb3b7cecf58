"""Saves beside training: the step pays for a copy to host memory, and a thread writes it.

Invariants:

- At most one save is in flight. A save that is requested while another is being written waits for it, because
the buffers are still in use; `Pause.waited_s` says how long.
- A save that fails is tried again, then given up and reported. What was published before stands, the next
save starts anew, and the run goes on.
- An attempt saves a step only once: there is one state after a step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from lockstep.checkpoint import problems
from lockstep.checkpoint.errors import StaleAttemptError, TakenError
from lockstep.checkpoint.manifest import Facts, SharedFile
from lockstep.checkpoint.pruning import Catalogue, clear_leftovers
from lockstep.checkpoint.reader import Checkpoint
from lockstep.checkpoint.retention import Keep
from lockstep.checkpoint.runs.run_folder import Attempt
from lockstep.checkpoint.snapshot import Block, Snapshot, snapshot
from lockstep.checkpoint.tree import Tree
from lockstep.checkpoint.writer import (
    Part,
    commit,
    gather_parts,
    post_failure,
    post_receipt,
    share,
    write_part,
)
from lockstep.errors import LockstepError, StorageError

T = TypeVar("T")

Share = Callable[[str, bytes], SharedFile]
"""Writes a file that checkpoints share, by its name."""
Sharing = Callable[[Share], Sequence[SharedFile]]
"""Returns the files that a checkpoint shares with others of the run, after writing the new ones with the `Share` that it gets."""

_ALIVE_S = 1.0


class Pause(NamedTuple):
    """What a save cost the training loop, in seconds: waiting for the previous save, and the copy."""

    waited_s: float
    copied_s: float


class Saved(NamedTuple):
    """A save that is done. `checkpoint` is set on rank 0, which publishes; `nbytes` are this rank's."""

    step: int
    nbytes: int
    written_s: float
    pause: Pause
    tries: int
    checkpoint: Checkpoint | None
    deleted: tuple[int, ...] = ()
    warning: str | None = None
    """What went wrong after the checkpoint was published, if anything did."""
    essential: tuple[tuple[int, str], ...] = ()
    """The newest checkpoint, the best one and the pinned ones, newest first: step, and folder for a person."""


class SaveFailed(NamedTuple):
    """A save that was given up. `error` is its last failure."""

    step: int
    pause: Pause
    tries: int
    error: LockstepError


class AsyncSaver:
    """Saves the state of one rank of an attempt. Calls come from one thread; reports come from another.

    All `ranks` request the same saves in the same order, and rank 0 publishes them. Writing a part and
    publishing it are each tried `tries` times, with a pause of `pause_s` seconds that doubles each time.
    `since` is the step that the attempt starts from, as for a `Catalogue`.
    """

    def __init__(
        self,
        attempt: Attempt,
        *,
        rank: int = 0,
        ranks: int = 1,
        keep: Keep | None = None,
        since: int = 0,
        tries: int = 3,
        pause_s: float = 1.0,
        parts_timeout_s: float = 300.0,
        on_saved: Callable[[Saved], None] | None = None,
        on_failure: Callable[[SaveFailed], None] | None = None,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self.attempt = attempt
        self.rank, self.ranks = rank, ranks
        self.keep = keep or Keep()
        self.tries, self.pause_s, self.parts_timeout_s = tries, pause_s, parts_timeout_s
        self.last: Saved | None = None
        """The newest save that is done."""
        self.failure: SaveFailed | None = None
        """The failure of the newest save, or None if it succeeded."""
        self._on_saved, self._on_failure, self._alive = on_saved, on_failure, alive
        self._catalogue = Catalogue(attempt, since)
        self._uncleared: set[int] | None = None
        """Steps in which a failed save may have left something; None until the leftovers of earlier attempts are cleared."""
        self._copied: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._abandoned = threading.Event()

    def save(
        self,
        step: int,
        sections: Mapping[str, Tree | Block],
        facts: Facts | None = None,
        sharing: Sharing = lambda share: (),
        kept: Collection[int] = (),
    ) -> Pause:
        """Copy the state and begin to write it. Returns as soon as the sections may change again.

        The checkpoints of the steps in `kept` are kept as long as later saves name them too.

        The writer thread calls `sharing` on the rank that publishes, and again after a failed try.
        Raises JobError for what no checkpoint can hold, and RuntimeError after `close` and where the machine starts no thread. Any
        other failure is reported instead.
        """
        began = time.perf_counter()
        self.settle()
        waited_s = time.perf_counter() - began
        if self._closed:
            raise RuntimeError("the saver is closed")
        if self.last is not None and self.last.step == step:
            return Pause(waited_s, 0.0)
        try:
            self._copied = snapshot(sections, self._copied, rank=self.rank, ranks=self.ranks)
            work = _Save(self, step, self._copied, facts or Facts(), sharing, frozenset(kept))
        except StorageError as error:
            self._copied = None
            work = _Save(self, step, error, Facts(), sharing, frozenset(kept))
        work.pause = Pause(waited_s, time.perf_counter() - began - waited_s)
        thread = threading.Thread(target=work.run, name=f"lockstep-save-{step}")
        thread.start()
        self._thread = thread
        return work.pause

    def settle(self) -> None:
        """Wait for the save in flight, and call `alive` each second meanwhile."""
        while not self.wait(_ALIVE_S):
            self._alive()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the save in flight, if any. False where it is still being written after `timeout_s`."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._thread = None
        return True

    def close(self, *, abandon: bool = False) -> None:
        """Finish the save in flight; no other can begin. `abandon` gives up tries and waiting for other ranks."""
        self._closed = True
        if abandon:
            self._abandoned.set()
        self.wait()
        self._copied = None

    def _sleep(self, seconds: float) -> None:
        if self._abandoned.wait(seconds):
            raise problems.NOT_SAVED(got="was abandoned")

    def _done(self, saved: Saved) -> None:
        self.last, self.failure = saved, None
        if self._on_saved is not None:
            self._on_saved(saved)

    def _failed(self, failed: SaveFailed) -> None:
        self.failure = failed
        if self._uncleared is not None:
            self._uncleared.add(failed.step)
        if self._on_failure is not None:
            self._on_failure(failed)


class _Save:
    """One save, from its copy to its report."""

    def __init__(
        self,
        saver: AsyncSaver,
        step: int,
        copied: Snapshot | StorageError,
        facts: Facts,
        sharing: Sharing,
        kept: frozenset[int],
    ) -> None:
        self.saver, self.step, self.copied, self.facts, self.sharing = saver, step, copied, facts, sharing
        self.kept = kept
        self.pause = Pause(0.0, 0.0)
        self.used = 0  # tries

    def run(self) -> None:
        began = time.perf_counter()
        try:
            checkpoint = self._write()
        except Exception as error:  # noqa: BLE001  the last line of a thread: any failure is reported, and ends no run
            self._give_up(
                error if isinstance(error, LockstepError) else problems.NOT_SAVED(got=f"failed: {error!r}")
            )
            return
        written_s = time.perf_counter() - began
        deleted, warning = self._prune() if checkpoint is not None else ((), None)
        nbytes = self.copied.nbytes if isinstance(self.copied, Snapshot) else 0
        self.saver._done(
            Saved(
                self.step, nbytes, written_s, self.pause, self.used, checkpoint, deleted, warning,
                self._essential() if checkpoint is not None else (),
            )
        )  # fmt: skip

    def _write(self) -> Checkpoint | None:
        """Write this rank's part; on rank 0, publish when the other parts are there."""
        saver, step, copied = self.saver, self.step, self.copied
        if isinstance(copied, StorageError):
            raise copied
        if saver.rank >= copied.writers:
            return None
        try:
            part: Part = self._tried(lambda: write_part(saver.attempt, step, copied))
        except TakenError:
            # A commit that was reported as failed had succeeded.
            return Checkpoint.of(saver.attempt.run, step) if saver.rank == 0 else None
        if saver.rank > 0:
            self._tried(lambda: post_receipt(saver.attempt, step, part))
            return None
        parts = gather_parts(
            saver.attempt, step, part, copied.writers, timeout_s=saver.parts_timeout_s, sleep=saver._sleep
        )
        shared = self._tried(lambda: self.sharing(partial(share, saver.attempt)))
        return self._tried(lambda: commit(saver.attempt, step, parts, self.facts, shared))

    def _tried(self, action: Callable[[], T]) -> T:
        """The result of `action`, tried again after a failure that may pass."""
        pause_s, used = self.saver.pause_s, 0
        while True:
            used += 1
            self.used = max(self.used, used)
            try:
                return action()
            except (StaleAttemptError, TakenError):
                raise
            except StorageError:
                if used >= self.saver.tries:
                    raise
            self.saver._sleep(pause_s)
            pause_s *= 2

    def _prune(self) -> tuple[tuple[int, ...], str | None]:
        """Delete what need not be kept. The checkpoint stands: a failure here is only a warning."""
        saver = self.saver
        try:
            if saver._uncleared is None or saver._uncleared:
                clear_leftovers(
                    saver.attempt, None if saver._uncleared is None else {*saver._uncleared, self.step}
                )
                saver._uncleared = set()
            return tuple(
                saver._catalogue.prune(
                    replace(saver.keep, pinned=saver.keep.pinned | self.kept), whole=self.step
                )
            ), None
        except LockstepError as error:
            return (), str(error)

    def _essential(self) -> tuple[tuple[int, str], ...]:
        """The essential checkpoints of the last pruning, and this one whether or not the pruning succeeded."""
        steps = {self.step, *self.saver._catalogue.essential}
        run = self.saver.attempt.run
        return tuple((step, Checkpoint.of(run, step).shown) for step in sorted(steps, reverse=True))

    def _give_up(self, error: LockstepError) -> None:
        saver = self.saver
        if saver.rank > 0 and not isinstance(error, StaleAttemptError):
            with suppress(StorageError):  # if it fails, rank 0 finds out by its timeout
                post_failure(saver.attempt, self.step, saver.rank, str(error))
        saver._failed(SaveFailed(self.step, self.pause, self.used, error))
