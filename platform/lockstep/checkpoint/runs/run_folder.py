"""The folder of a run: it belongs to one run, and only one attempt at a time may publish and delete in it.

Invariants:
- `owner.json` is created exclusively: of two runs that want one folder, one is refused.
- Attempt numbers only rise. Before `attempt.json` names the new attempt, the staging folders of all older ones
have ended. Publishing and withdrawing are renames through an attempt's own staging folder, so from then on no older
attempt can do either, however late it wakes.
- An object store has no rename. There an attempt begins with an empty object whose name is its number and a token,
`attempts/0003.1f6c…`; the highest number is the current attempt. Of two that want one number, each looks after it
has put its own, so the later one sees the earlier and gives way. An attempt checks right before it publishes. If it
is late all the same, its files have names of their own: they replace and delete nothing of a newer attempt.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lockstep.checkpoint import layout, problems
from lockstep.checkpoint.errors import LostFileError, StaleAttemptError, TakenError
from lockstep.checkpoint.storage.interface import Storage, Written
from lockstep.checkpoint.storage.local import ENDED
from lockstep.errors import StorageError
from lockstep.parsing import canonical_json, one_line, strict_json
from lockstep.paths import component


class Fence(NamedTuple):
    """What `attempt.json` says: the attempt that may publish and delete. Number 0 means none has begun."""

    number: int
    token: str


@dataclass(frozen=True, slots=True)
class Replay:
    """Steps of a recorded run that are taken again for comparison. Nothing of that run is written to, and nothing is saved."""

    run_id: str
    storage: str
    """Where the checkpoint of `step` is; it is only read."""
    step: int
    """The step whose checkpoint it starts from; 0 for the run's beginning."""
    until: int
    """The last step that is taken."""
    source: Mapping[str, bytes] | None = None
    """The job's files by their paths below a source root, which are imported instead of those on this machine."""
    probe: Any = None
    """A `training.integrity.probe.Probe` that sees its micro-batches, in this process."""
    weights: str | None = None
    """The folder of a run into which the weights are written that the steps lead to; None where nobody asks for them."""


@dataclass(frozen=True, slots=True)
class AttemptOrigin:
    """Which attempt of which run this is. It saves under this number, until a newer attempt takes over."""

    run_id: str | None = None
    """The run to resume, whose attempt is claimed already; None for a new run, whose id the record knows."""
    attempt: int = 1
    step: int | None = None
    """Resume from the checkpoint of this step; None for the newest good one."""
    in_memory: bool = False
    """Whether it goes on from what the workers of the previous attempt hold, of the same run; rank 0 claims it at its first save."""
    replay: Replay | None = None
    """Set for an attempt that only takes steps of another run again."""
    table_versions: Mapping[str, str] = field(default_factory=dict)
    """In which versions it reads tables that change, by their names, where no checkpoint says so; what is not there it reads in the newest."""
    doubts: tuple[Any, ...] = ()
    """Undecided `Corrupted` events of earlier attempts, to be settled when this one has taken their steps."""

    @property
    def saves(self) -> bool:
        """Whether the attempt writes checkpoints and weights."""
        return self.replay is None


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`<storage>/<run_id>/`. Make one with `create` for a new run, with `open` for one that exists."""

    storage: Storage
    run_id: str

    @classmethod
    def create(cls, storage: Storage, run_id: str, token: str | None = None) -> RunFolder:
        """The folder of a new run. StorageError where it already belongs to a run.

        A call may be repeated with the same `token` if the first answer was lost.
        """
        folder = cls(storage, _checked(run_id))
        content = canonical_json({"run": run_id, "token": token or uuid.uuid4().hex})
        try:
            storage.create(folder.path(layout.OWNER), content)
        except TakenError as error:
            if token and storage.read(folder.path(layout.OWNER)) == content:
                return folder
            raise problems.OWNED(folder=folder.shown, owner=folder._owner() or "?") from error
        return folder

    @classmethod
    def open(cls, storage: Storage, run_id: str) -> RunFolder:
        """The folder of a run that exists. StorageError where it does not, or belongs to another."""
        folder = cls(storage, _checked(run_id))
        try:
            owner = folder._owner()
        except LostFileError as error:
            raise problems.NO_RUN(run=run_id, storage=storage.shown) from error
        if owner != run_id:
            raise problems.OTHER_OWNER(
                folder=folder.shown, got=owner or "?", wanted=run_id, file=layout.OWNER
            )
        return folder

    @property
    def shown(self) -> str:
        """The folder, for a person."""
        return f"{self.storage.shown.rstrip('/')}/{self.run_id}"

    def path(self, *names: str) -> str:
        """A path in this folder, within the storage."""
        return "/".join((self.run_id, *names))

    def steps(self) -> list[int]:
        """The steps that have a folder, newest first, whether or not it holds a checkpoint."""
        candidates = (layout.step_of(item.name) for item in self.storage.list(self.run_id) if item.is_folder)
        return sorted((step for step in candidates if step is not None), reverse=True)

    def fence(self) -> Fence:
        """The attempt that may publish and delete."""
        if not self.storage.fences:
            return Fence(*max(self._claims(), default=(0, "")))
        try:
            document = self._read(layout.ATTEMPT)
            return Fence(int(document["number"]), component(document["token"]))
        except LostFileError:
            return Fence(0, "")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise problems.FENCE(
                file=f"{self.shown}/{layout.ATTEMPT}", got=f"cannot be understood ({one_line(error)})"
            ) from error

    def claim(self, number: int | None = None, token: str | None = None) -> Attempt:
        """Begin an attempt, by default the next one; every older attempt is over from here on.

        StaleAttemptError where an attempt of this number or a newer one has begun. If another StorageError ended a claim
        half-way, it is repeated with the same `number` and `token`, which is the claimant's own.
        """
        staged = self._staged()
        newest = max(self._begun(staged))
        attempt = Attempt(self, newest + 1 if number is None else number, token or uuid.uuid4().hex)
        if attempt.number <= newest and not self._has_begun(attempt):
            raise attempt.late(f"attempt {newest} has begun")
        try:
            if not self.storage.fences:
                self._begin_by_name(attempt)
            elif attempt.number not in staged:
                self.storage.begin_staging(self.path(layout.staging_folder(attempt.number)), attempt.token)
        except TakenError as error:
            raise attempt.late("another process has just begun it") from error
        try:
            if self.storage.fences:
                # Look again: of two that began at once, at least one sees the other's folder.
                staged = self._staged()
                newest = max(self._begun(staged))
                if newest > attempt.number:
                    raise attempt.late(f"attempt {newest} has begun")
            for older in set(staged) - {attempt.number}:
                self._end(layout.staging_folder(older))
            attempt.write(
                (layout.ATTEMPT,), [canonical_json({"number": attempt.number, "token": attempt.token})]
            )
            attempt.ensure_current()
        except StorageError:
            if self.storage.fences and not self._has_begun(attempt):
                with suppress(StorageError):  # otherwise nobody could tell whose number it is
                    if self.storage.exists(attempt.staging):
                        self._end(layout.staging_folder(attempt.number))
            raise
        return attempt

    def _has_begun(self, attempt: Attempt) -> bool:
        """Whether exactly this attempt is the current one."""
        with suppress(StorageError):  # unknown for now
            return self.fence() == (attempt.number, attempt.token)
        return False

    def _begin_by_name(self, attempt: Attempt) -> None:
        """Begin an attempt by an object's name. TakenError where another process begins one of this number, or a newer one, at the same time."""
        own_claim = (attempt.number, attempt.token)
        self.storage.put(self._claim_path(own_claim), b"")
        others = [claim for claim in self._claims() if claim != own_claim]
        rivals = [claim for claim in others if claim[0] >= attempt.number]
        for claim in [own_claim] if rivals else others:
            with suppress(LostFileError):  # another process has deleted it too
                self.storage.delete(self._claim_path(claim))
        if rivals:
            raise problems.TAKEN(path=self._claim_path(max(rivals)))

    def _claim_path(self, claim: tuple[int, str]) -> str:
        return self.path(layout.CLAIMS, layout.claim_name(*claim))

    def attempt(self, number: int) -> Attempt:
        """Join an attempt that was claimed elsewhere. StaleAttemptError where another one is current."""
        attempt = Attempt(self, number, self.fence().token)
        attempt.ensure_current()
        return attempt

    def clear_ended(self) -> None:
        """Delete what a crash has left in the run's folder itself: ended staging folders, and half-made owner files."""
        for item in self.storage.list(self.run_id):
            if item.is_folder and item.name.startswith(ENDED):
                self._end(item.name)
            elif item.name.startswith(f".{layout.OWNER}."):
                with suppress(LostFileError):
                    self.storage.delete(self.path(item.name))

    def _end(self, folder: str) -> None:
        with suppress(LostFileError):  # another process has ended it too
            self.storage.end_staging(self.path(folder))

    def _staged(self) -> list[int]:
        numbers = (layout.attempt_of(item.name) for item in self.storage.list(self.run_id) if item.is_folder)
        return [number for number in numbers if number is not None]

    def _claims(self) -> list[tuple[int, str]]:
        names = (layout.claim_of(item.name) for item in self.storage.list(self.path(layout.CLAIMS)))
        return [claim for claim in names if claim is not None]

    def _begun(self, staged: list[int]) -> Iterator[int]:
        """Numbers of attempts that have left a trace, including the newest. So no number is given twice, even if `attempt.json` is lost."""
        yield 0
        yield from staged
        with suppress(StorageError):  # the next claim replaces a fence that cannot be parsed
            number = self.fence().number
            yield number
            if number > 0:
                return
        for items in self.storage.tree(self.run_id).values():
            for item in items:
                if name := layout.file_name(item.name):
                    yield name.attempt

    def _owner(self) -> str:
        try:
            owner = self._read(layout.OWNER)["run"]
            return owner if layout.is_run_id(owner) and len(owner) <= 255 else ""
        except (KeyError, TypeError, ValueError):
            return ""

    def _read(self, name: str) -> Any:
        return strict_json(self.storage.read(self.path(name)))


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt's right to publish and delete in the run's folder. Paths are those of `run.path`."""

    run: RunFolder
    number: int
    token: str

    @property
    def staging(self) -> str:
        """The folder in which only this attempt, and no other of its number, writes aside."""
        return self.run.path(layout.staging_folder(self.number), self.token)

    @property
    def manifest(self) -> str:
        """The name of this attempt's manifests."""
        return layout.MANIFEST if self.run.storage.fences else layout.manifest_of(self.number)

    def ensure_current(self) -> None:
        """StaleAttemptError where a newer attempt has begun. StorageError where the run's folder was deleted, or the fence in it."""
        fence = self.run.fence()
        if fence.number == 0:  # this attempt has written one that says otherwise
            if not self.run.storage.exists(self.run.path(layout.OWNER)):
                raise problems.FOLDER_DELETED(what=f"run {self.run.run_id}", folder=self.run.shown)
            raise problems.FENCE(
                file=f"{self.run.shown}/{layout.ATTEMPT}", got="was deleted while the run trained"
            )
        if fence != (self.number, self.token):
            raise self._stale(f"attempt {fence.number} has taken its place")

    def write(self, path: tuple[str, ...], pieces: Iterable[bytes | memoryview]) -> Written:
        """Write a file whole or not at all. StaleAttemptError where this attempt is over."""
        try:
            return self.run.storage.write(self.run.path(*path), pieces, staging=self.staging)
        except LostFileError as error:
            raise self._over(error) from error

    def publish(self, path: tuple[str, ...], content: bytes) -> None:
        """Write the file that makes others count, only as the current attempt."""
        self.ensure_current()
        self.write(path, [content])

    def withdraw(self, path: tuple[str, ...]) -> None:
        """Delete the file that makes others count, only as the current attempt; it may be gone."""
        self.ensure_current()
        full_path = self.run.path(*path)
        try:
            self.run.storage.delete(full_path, staging=self.staging)
        except LostFileError as error:
            if self.run.storage.exists(full_path):
                raise self._over(error) from error

    def discard(self, path: tuple[str, ...]) -> None:
        """Delete a file that nothing refers to any more; it may be gone."""
        with suppress(LostFileError):
            self.run.storage.delete(self.run.path(*path))

    def _over(self, error: LostFileError) -> StorageError:
        """Why a file went missing while it was written: this attempt has ended, or else the error itself."""
        storage, run = self.run.storage, self.run
        # An attempt that has not written its fence yet may be ended by a claim of a newer one, which has not either.
        if (
            run.fence().number == 0
            and storage.exists(run.path(layout.OWNER))
            and not storage.exists(self.staging)
        ):
            return self._stale("its folder has been ended")
        self.ensure_current()
        if self.run.storage.exists(self.staging):
            return error
        return self._stale("its folder has been ended")

    def late(self, why: str) -> StaleAttemptError:
        """The error for a claim of this attempt that came too late."""
        return problems.LATE(attempt=self.number, run=self.run.run_id, reason=why)

    def _stale(self, why: str) -> StaleAttemptError:
        return problems.OVER(attempt=self.number, run=self.run.run_id, reason=why)


def _checked(run_id: str) -> str:
    if not layout.is_run_id(run_id):
        raise problems.RUN_ID(run=run_id)
    return run_id
