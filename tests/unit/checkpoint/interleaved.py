"""Attempts against an S3 server, whose calls are let through one by one, in whatever order.

An attempt runs in a thread that stops before each call to the store. Whoever drives it lets the call through, ends the
attempt there, or has the call time out; a request that was under way then may still reach the server at any later time.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch

from lockstep.checkpoint import layout
from lockstep.checkpoint.errors import BadCheckpointError, StaleAttemptError, TakenError
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.pruning import Catalogue, clear_leftovers
from lockstep.checkpoint.reader import load_newest
from lockstep.checkpoint.retention import Keep
from lockstep.checkpoint.runs.run_folder import Attempt, RunFolder
from lockstep.checkpoint.storage.interface import Item, Written, hashed
from lockstep.checkpoint.storage.object_store import ObjectStorage
from lockstep.errors import StorageError
from tests.unit.checkpoint.one_process import write_checkpoint

T = TypeVar("T")

RUN = "run-a"


class Ended(BaseException):
    """The process is killed here."""


def state(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((3,), float(step))}}


class Gated(ObjectStorage):
    """The store as one attempt sees it: each call waits until it is let through."""

    def __init__(self, uri: str, actor: Actor) -> None:
        super().__init__(uri)
        self._actor = actor

    def write(self, path: str, pieces: Iterable[bytes | memoryview], *, staging: str) -> Written:
        content = b"".join(bytes(piece) for piece in pieces)
        self._actor.call(path, lambda: ObjectStorage.put(self, path, content))
        return hashed([content], lambda _: None)

    def put(self, path: str, content: bytes) -> None:
        self._actor.call(path, lambda: ObjectStorage.put(self, path, content))

    def delete(self, path: str, *, staging: str | None = None) -> None:
        self._actor.call(path, lambda: ObjectStorage.delete(self, path))

    def read(self, path: str) -> bytes:
        self._actor.call(path)
        return super().read(path)

    def list(self, folder: str) -> list[Item]:
        self._actor.call(folder)
        return super().list(folder)

    def tree(self, folder: str) -> Mapping[str, Sequence[Item]]:
        self._actor.call(folder)
        return super().tree(folder)

    def delete_folder(self, folder: str) -> None:
        """Nothing: there are no folders."""


class Actor:
    """One process: it claims the next attempt, goes on from the newest good checkpoint, and saves two more steps."""

    def __init__(self, uri: str, in_flight: list[Callable[[], None]]) -> None:
        self.number = 0
        self.error: BaseException | None = None
        self._in_flight = in_flight
        self._verdict = "go"
        self._turn, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.over = False
        self.at = ""
        """The path of the call that it is about to make."""
        self.changes = False
        """Whether that call changes what is there."""
        self._run = RunFolder(Gated(uri, self), RUN)
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    # --- the driver's side

    def step(self, verdict: str = "go") -> None:
        """Let it go on to its next call; or have this one time out, or be its last."""
        self._verdict = verdict
        self._turn.release()
        if not self._stopped.acquire(timeout=60):
            raise AssertionError("the attempt hangs")

    # --- the attempt's side

    def call(self, path: str, change: Callable[[], None] | None = None) -> None:
        """Before each call. A change that is not let through is under way: it may still come to pass."""
        self.at, self.changes = path, change is not None
        self._stopped.release()
        self._turn.acquire()
        if self._verdict == "go":
            if change is not None:
                change()
            return
        if change is not None:
            self._in_flight.append(change)
        if self._verdict == "end":
            raise Ended
        raise StorageError(f"{path}: timed out")

    def _live(self) -> None:
        self._turn.acquire()
        try:
            self._work()
        except (Ended, StorageError):
            pass
        except BaseException as error:  # noqa: BLE001  whoever drives it raises it
            self.error = error
        self.over = True
        self._stopped.release()

    def _work(self) -> None:
        attempt = again(self._run.claim)
        self.number = attempt.number
        newest = again(lambda: load_newest(self._run, lambda text: None))
        step = 0 if newest is None else newest.manifest.step
        catalogue = Catalogue(attempt, step)
        for following in (step + 1, step + 2):
            save(attempt, following)
            with suppress(StorageError):
                if following == step + 1:
                    clear_leftovers(attempt)
                catalogue.prune(Keep(last=1), whole=following)


def save(attempt: Attempt, step: int) -> None:
    def once() -> None:
        with suppress(TakenError):  # what was told as failed had been done
            write_checkpoint(attempt, step, state(step))

    again(once)


def again(action: Callable[[], T]) -> T:
    """Twice more after a failure that may pass, as the saver does."""
    for _ in range(2):
        with suppress(StorageError):
            try:
                return action()
            except StaleAttemptError as error:
                raise Ended from error
    return action()


def good_steps(objects: Mapping[str, bytes]) -> list[int]:
    """Steps with a checkpoint of which every byte is there, as the server has them."""
    found = []
    for path, content in objects.items():
        folder, _, name = path.rpartition("/")
        if not layout.manifests([name]):
            continue
        try:
            manifest = Manifest.decode(content)
        except BadCheckpointError:
            continue
        files = [(objects.get(f"{folder}/{entry.name}"), entry) for entry in manifest.files]
        if all(data is not None and hashlib.sha256(data).hexdigest() == e.sha256 for data, e in files):
            found.append(manifest.step)
    return sorted(found)
