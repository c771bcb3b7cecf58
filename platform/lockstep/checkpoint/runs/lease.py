"""Who holds a run: one command at a time works on it, and a second one asks before it touches anything.

A command that takes a run creates `<run_id>/holds/0003.json`, one number above the newest, exclusively: of several
commands that find the run free, one goes on. While it lives it updates a counter in its own file each second or two. A
later command judges by that: on the same machine by the process itself, elsewhere by whether the counter moves while it
watches, timed by its own clock; no two clocks are compared. A holder that ends says so in its file, which stays as the
newest one, so that its number is not given again.

A takeover creates the next number while the holder lives. The holder sees it at its next beat, ends its run after the
current step with a checkpoint, and releases the run. A holder that does not answer is stopped by the fence (see `run_folder`).
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace

from lockstep.checkpoint import layout, problems
from lockstep.checkpoint.errors import LostFileError, StaleAttemptError, TakenError
from lockstep.checkpoint.storage.interface import Storage
from lockstep.errors import SpecError, StorageError
from lockstep.parsing import canonical_json, flat_record, strict_json
from lockstep.process import pid_namespace, started

BEAT_S = 1.0
"""Seconds between two updates of a holder's counter. In an object store each one is a put and a list."""
WATCH_S = 3.5
"""How long a counter must stand still before its holder is considered dead."""
GRACE_S = 60.0
"""How long a live holder may take to end after its step, when another command takes its run over."""
MISSES = 2
"""So many beats find the holder's own file gone before the folder is considered deleted."""
RELEASE_S = 2 * WATCH_S
"""How long a release waits for a storage that does not answer. It saves the next command the watch of a counter, so it is not worth much longer than that."""
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds a run, as its file describes it."""

    number: int
    token: str
    host: str
    place: str
    pid: int
    started: str
    attempt: int = 0
    step: int = 0
    beats: int = 0
    released: bool = False

    @classmethod
    def of_this_process(cls, number: int) -> Holder:
        """The holder with this number that stands for this process."""
        pid = os.getpid()
        return cls(number, uuid.uuid4().hex, socket.gethostname(), pid_namespace(), pid, started(pid))

    @property
    def shown(self) -> str:
        """The process, for a person."""
        return f"process {self.pid} on host {self.host}"

    @property
    def gone(self) -> bool:
        """Whether it is known to have ended, without watching it: it said so, or its process on this machine is gone."""
        if self.released:
            return True
        if not self.place or self.place != pid_namespace():
            return False
        if self.pid == os.getpid() and self.started == started(self.pid):
            return self.token not in _tokens
        return started(self.pid) != self.started

    @property
    def lives_here(self) -> bool:
        """Whether its process lives on this machine."""
        return bool(self.place) and self.place == pid_namespace() and not self.gone


class Lease:
    """Keeps the file of the process that holds a run up to date, in a thread of its own; `label` names the run to a person."""

    def __init__(self, storage: Storage, folder: str, label: str, holder: Holder) -> None:
        self.storage, self.folder, self.label, self.holder = storage, folder, label, holder
        self.taker: Holder | None = None
        """The process that has taken the run over."""
        self.deleted = False
        """Whether the run's folder was deleted meanwhile. Nothing is written there again."""
        self._missing = 0
        """At how many beats in succession the holder's own file was not there."""
        self._when_taken: Callable[[], None] = lambda: None
        self._beside: list[Lease] = []
        """The holds of the same run in other storages."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat_on, name="lockstep-lease", daemon=True)
        self._thread.start()

    def reached(self, step: int, attempt: int) -> None:
        """Report how far the run is."""
        self.holder = replace(self.holder, step=step, attempt=attempt)
        for lease in self._beside:
            lease.reached(step, attempt)

    def follow(self, lease: Lease) -> None:
        """Count as taken over once `lease`, a hold of the same run in another storage, is; and report to it how far the run is."""

        def note_taker() -> None:
            self.taker = self.taker or lease.taker
            self._when_taken()

        self._beside.append(lease)
        lease.when_taken(note_taker)

    def when_taken(self, action: Callable[[], None]) -> None:
        """Call `action` as soon as another command has taken the run over, or its folder was deleted, from the thread that beats."""
        self._when_taken = action
        if self.taker is not None or self.deleted:
            action()

    def ensure(self) -> None:
        """StaleAttemptError where another command has taken the run over, StorageError where its folder was deleted."""
        self._poll()
        if self.deleted:
            raise problems.FOLDER_DELETED(
                what=self.label, folder=f"{self.storage.shown.rstrip('/')}/{self.folder}"
            )
        if self.taker is not None:
            raise self._taken_over(self.taker)

    def _taken_over(self, taker: Holder) -> StaleAttemptError:
        return problems.TAKEN_OVER(what=self.label, taker=taker.shown, step=self.holder.step)

    def release(self) -> None:
        """Release the run, so that the next command need not wait. It waits no longer than RELEASE_S for that to be written."""
        self._over.set()
        self._thread.join(RELEASE_S)
        _tokens.discard(self.holder.token)

    def _beat_on(self) -> None:
        while not self._over.wait(BEAT_S):
            with suppress(StorageError):  # the next beat makes up for it; the fence protects the run anyway
                self._poll()
                if not self._missing:
                    self.holder = replace(self.holder, beats=self.holder.beats + 1)
                    self._write(self.holder)
        if not self.deleted:
            with suppress(StorageError):  # the next command then checks the process, or watches the counter
                self._write(replace(self.holder, beats=self.holder.beats + 1, released=True))

    def _poll(self) -> None:
        numbers = _numbers(self.storage, self.folder)
        newest = max(numbers, default=0)
        self._note_missing(self.holder.number > newest)
        if self.taker is None and newest > self.holder.number:
            text = _read(self.storage, self.folder, newest)
            self.taker = _holder(text) or replace(self.holder, number=newest, host="?", pid=0)
            self._when_taken()

    def _note_missing(self, missing: bool) -> None:
        """Note whether the holder's own file is gone. Where the run's owner file is there, that one alone is, and is written again."""
        if not missing or self.storage.exists(f"{self.folder}/{layout.OWNER}"):
            self._missing = 0
            return
        self._missing += 1
        if self._missing >= MISSES and not self.deleted:
            self.deleted = True
            self._when_taken()

    def _write(self, holder: Holder) -> None:
        self.storage.put(_path(self.folder, holder.number), canonical_json(asdict(holder)))


_leases: dict[tuple[str, str], Lease] = {}
"""The holds of this process, by storage and folder."""
_tokens: set[str] = set()
"""The tokens of this process's holds, added before their files exist."""


@contextmanager
def leased(
    storage: Storage,
    folder: str,
    label: str,
    *,
    takeover: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Lease]:
    """Hold `folder`, a run's or a sweep's in `storage`, while the block runs.

    SpecError where another process holds it, found out within WATCH_S. With `takeover` that process is asked to end, and
    waited for no longer than GRACE_S. StaleAttemptError, with who did it, where the run in the block was fenced off.
    """
    lease = _take(storage, folder, label, takeover=takeover, say=say)
    key = storage.shown, folder
    _leases[key] = lease
    try:
        yield lease
    except StaleAttemptError as error:
        with suppress(StorageError):
            lease._poll()
        if lease.taker is None or error.code == problems.TAKEN_OVER.code:
            raise
        raise lease._taken_over(lease.taker) from error
    finally:
        _leases.pop(key, None)
        lease.release()


def refuse_leased(storage: Storage, folder: str, label: str, *, but: int | None = None) -> None:
    """SpecError where a process holds `folder`, this one included; found out within WATCH_S. Nothing is written.

    Process `but` of this machine may hold it.
    """
    newest = _newest(storage, folder)
    holder = None if newest is None else _holder(newest[1])
    if but is None or holder is None or (holder.place, holder.pid) != (pid_namespace(), but):
        _refuse(storage, folder, label, newest)


def _refuse(storage: Storage, folder: str, label: str, newest: tuple[int, bytes] | None) -> None:
    if newest is not None and (heard := _heard(storage, folder, newest)) is not None:
        raise _refused(label, *heard)


def ensure_leased(storage: Storage, folder: str) -> None:
    """StaleAttemptError where this process held `folder`, and another has taken it over."""
    lease = _leases.get((storage.shown, folder))
    if lease is not None:
        lease.ensure()


def _take(storage: Storage, folder: str, label: str, *, takeover: bool, say: Callable[[str], None]) -> Lease:
    newest = _newest(storage, folder)  # read once: a later holder may begin while this one is watched
    if not takeover:
        _refuse(storage, folder, label, newest)
    holder = Holder.of_this_process(1 if newest is None else newest[0] + 1)
    _tokens.add(holder.token)
    try:
        _create(storage, folder, holder, label)
    except BaseException:
        _tokens.discard(holder.token)
        raise
    lease = Lease(storage, folder, label, holder)
    if newest is not None:
        if takeover:
            _await_end(storage, folder, *newest, label, say)
        _forget(storage, folder, holder.number)
    return lease


def _create(storage: Storage, folder: str, holder: Holder, label: str) -> None:
    """Take the next number. SpecError where another process has taken it, or a later one, meanwhile."""
    path = _path(folder, holder.number)
    try:
        storage.create(path, canonical_json(asdict(holder)))
    except TakenError as error:
        winner = _newest(storage, folder)
        raise _refused(
            label, None if winner is None else _holder(winner[1]), "which has just begun"
        ) from error
    newest = _newest(storage, folder)
    if newest is not None and newest[0] > holder.number:  # ours was used before, and its file deleted
        storage.delete(path)
        raise _refused(label, _holder(newest[1]), "which has just begun")


def _heard(storage: Storage, folder: str, newest: tuple[int, bytes]) -> tuple[Holder | None, str] | None:
    """The holder if it lives, and when it was last heard; else None."""
    number, text = newest
    holder = _holder(text)
    if holder is not None and holder.gone:
        return None
    began = time.monotonic()
    while time.monotonic() - began < WATCH_S:
        time.sleep(_LOOK_S)
        latest = _read(storage, folder, number)
        if latest != text:
            holder = _holder(latest) or holder
            return None if holder is not None and holder.gone else (holder, f"heard {_LOOK_S} s ago")
        if holder is not None and holder.gone:
            return None
    if holder is not None and holder.lives_here:  # it or its disk is stopped: no reason to take its run
        return holder, f"which lives, but was not heard for {WATCH_S:g} s"
    return None


def _await_end(
    storage: Storage, folder: str, number: int, text: bytes, label: str, say: Callable[[str], None]
) -> None:
    """Wait until the holder that was asked to end has ended, stops updating its counter, or has used up its time."""
    began = moved = time.monotonic()
    announced = False
    while time.monotonic() - began < GRACE_S:
        holder = _holder(text)
        if holder is None or holder.gone or time.monotonic() - moved > WATCH_S:
            return
        if not announced:
            announced = True
            say(f"{label} is taken over from {holder.shown}, which ends after its next step")
        time.sleep(_LOOK_S)
        latest = _read(storage, folder, number)
        if latest != text:
            text, moved = latest, time.monotonic()


def _refused(label: str, holder: Holder | None, heard: str) -> SpecError:
    who = "another process" if holder is None else holder.shown
    step = "" if holder is None else f" at step {holder.step}"
    return problems.HELD(what=label, holder=f"{who}{step}", heard=heard)


def _forget(storage: Storage, folder: str, number: int) -> None:
    """Delete the files of earlier holders. One that still lives may write its own again, but an older number counts for nothing."""
    for older in _numbers(storage, folder):
        if older < number:
            with suppress(LostFileError):
                storage.delete(_path(folder, older))


def _newest(storage: Storage, folder: str) -> tuple[int, bytes] | None:
    numbers = _numbers(storage, folder)
    return (max(numbers), _read(storage, folder, max(numbers))) if numbers else None


def _numbers(storage: Storage, folder: str) -> list[int]:
    names = (layout.hold_of(item.name) for item in storage.list(f"{folder}/{layout.HOLDS}"))
    return [number for number in names if number is not None]


def _read(storage: Storage, folder: str, number: int) -> bytes:
    try:
        return storage.read(_path(folder, number))
    except LostFileError:  # a later holder has deleted it
        return b""


def _path(folder: str, number: int) -> str:
    return f"{folder}/{layout.HOLDS}/{layout.hold_name(number)}"


def _holder(text: bytes) -> Holder | None:
    """The holder in a file; None for one that cannot be parsed, such as after a loss of power."""
    try:
        return flat_record(Holder, strict_json(text))
    except ValueError:
        return None
