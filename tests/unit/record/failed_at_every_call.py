"""Runs a record while one call of the file system or of the store fails, once or for good, and looks for lies afterwards.

A case is a scenario (`new`, or `resumed`: a run that an earlier attempt began), the number of the call, the fault and whether it
lasts. What is told after it: a process that says nothing of a failure has left the record of an uninterrupted run; a run that
is FINISHED in its store has that record; and after a resume without faults every run has it, with each point once.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import shutil
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import RecordError, StorageError
from lockstep.record import opening, writer
from lockstep.record.errors import DeniedError, RejectedError, UnavailableError
from lockstep.record.events.metrics import Point, evaluation_points, step_points
from lockstep.record.events.union import CheckpointRow, Document, Event, Failed, Finished, Restored, Started
from lockstep.record.ledger import segments
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.journal_file import NAME
from lockstep.record.ledger.rows import EvaluationRow, StepRow
from lockstep.record.ledger.tables import DETERMINISTIC, read_evaluations, read_parquet
from lockstep.record.mirror import delivery_lanes
from lockstep.record.mirror.folder import FolderStore
from lockstep.record.mirror.sync import sync
from lockstep.record.recorder import Recorder
from lockstep.spec.fields import Spec
from tests.unit.record.rows import evaluation_row, step_row

STEPS, SAVED = 8, 4
ERRNOS = ("ENOSPC", "EIO", "EINTR", "ESTALE")
COUNTED = ("open", "write", "pread", "fsync", "ftruncate", "replace", "unlink", "mkdir", "flock")
FILE_FAULTS = (*ERRNOS, "short", "torn")
"""`short` writes a half and says so, as a write may; `torn` writes a half and fails."""
STORE_FAULTS = ("unavailable", "denied", "rejected", "refused", "bug", "lost")
"""What a store's call raises; `lost` has acted before it does."""


class Case(NamedTuple):
    where: str
    """`file` or `store`, or `journal`: a write to that alone, whatever the other threads do meanwhile."""
    scenario: str
    at: int
    fault: str
    lasts: bool


# --- the calls of the file system ---------------------------------------------------------------------------


class Shim:
    """Stands before the calls of `os` below `folder`; call `at` fails, and where that `lasts` all later ones of its name.

    With `journal` only writes to a journal count.
    """

    def __init__(
        self, folder: Path, at: int | None, fault: str, *, lasts: bool, journal: bool = False
    ) -> None:
        self.folder, self.at, self.fault, self.lasts = str(folder), at, fault, lasts
        self.journal = journal
        self.log: list[tuple[str, str]] = []
        self._failed, self._failures = "", 0
        self._names: dict[int, str] = {}
        self._lock = threading.Lock()

    @contextmanager
    def watching(self) -> Iterator[Shim]:
        real = {name: getattr(os, name) for name in COUNTED if name != "flock"} | {"flock": fcntl.flock}
        close = os.close
        try:
            for name, call in real.items():
                setattr(fcntl if name == "flock" else os, name, self._counted(name, call))
            os.close = self._closing(close)
            yield self
        finally:
            for name, call in real.items():
                setattr(fcntl if name == "flock" else os, name, call)
            os.close = close

    def _closing(self, call: Callable[[int], None]) -> Callable[[int], None]:
        def closing(descriptor: int) -> None:
            self._names.pop(descriptor, None)
            call(descriptor)

        return closing

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            first = arguments[0]
            path = self._names.get(first, "") if isinstance(first, int) else os.fspath(first)
            counts = not self.journal or (name == "write" and str(path).endswith(NAME))
            injected = "injected" in threading.current_thread().name
            if injected or not counts or not str(path).startswith(self.folder):
                if name == "open":
                    return self._opened(call(*arguments, **options), path)
                return call(*arguments, **options)
            with self._lock:
                number = len(self.log)
                self.log.append((name, str(path)))
                fails = number == self.at or (self.lasts and name == self._failed)
                if fails:
                    self._failed = name
                    self._failures += 1
                    if (
                        self.fault == "EINTR" and self._failures == 5
                    ):  # signals come to an end; Python waits for that
                        self.lasts = False
            if fails:
                return self._fail(name, call, arguments)
            result = call(*arguments, **options)
            return self._opened(result, path) if name == "open" else result

        return counted

    def _opened(self, descriptor: int, path: Any) -> int:
        self._names[descriptor] = str(path)
        return descriptor

    def _fail(self, name: str, call: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        if self.fault in ("short", "torn"):
            if name != "write":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            data = bytes(arguments[1])
            written = call(arguments[0], data[: max(1, len(data) // 2)])
            if self.fault == "short":
                return written
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        number = getattr(errno, self.fault)
        raise OSError(number, os.strerror(number))


# --- the calls of the store ---------------------------------------------------------------------------------


class Kept:
    """What a server has of the points of one run: as MLflow's, each once by key, step, time and value."""

    def __init__(self) -> None:
        self.points: dict[Point, None] = {}


class KeepingStore(FolderStore):
    """A folder store that keeps its points as MLflow does, and whose call `at` fails."""

    def __init__(self, storage: Path, kept: Kept, at: int | None, fault: str, *, lasts: bool) -> None:
        super().__init__(storage, "kept", 1_700_000_000.0)
        self.kept = kept
        self.at, self.fault, self.lasts = at, fault, lasts
        self.calls: list[str] = []
        self._failed = ""
        self._counting = threading.Lock()
        for name in _CALLS:
            setattr(self, name, self._counted(name, getattr(self, name)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            with self._counting:
                number = len(self.calls)
                self.calls.append(name)
                fails = number == self.at or (self.lasts and name == self._failed)
                if fails:
                    self._failed = name
            if fails and self.fault == "lost" and name != "open":
                call(*arguments)
            if fails:
                raise _store_error(self.fault)
            return call(*arguments)

        counted.__name__ = name
        return counted

    def last_steps(self) -> Mapping[str, int]:
        steps: dict[str, int] = {}
        for point in self.kept.points:
            steps[point.key] = max(point.step, steps.get(point.key, -1))
        return steps

    def recorded_steps(self, key: str) -> Collection[int]:
        return {point.step for point in self.kept.points if point.key == key}

    def log_metrics(self, points: Sequence[Point]) -> None:
        for point in points:
            self.kept.points[point] = None

    def log_file(self, path: Path, folder: str) -> None:
        if not path.exists():
            raise RecordError(f"no file {path}")


_CALLS = (
    "open", "last_steps", "recorded_steps", "log_metrics", "log_params", "set_tags", "log_data", "log_file",
    "log_checkpoint", "aliased_steps", "set_status",
)  # fmt: skip


def _store_error(fault: str) -> Exception:
    match fault:
        case "denied":
            return DeniedError("record.uri: 'kept' refuses: 401")
        case "rejected":
            return RejectedError("record.uri: 'kept' refuses: 413")
        case "refused":
            return RecordError("record.uri: 'kept' refuses: no such run")
        case "bug":
            return ValueError("a value out of range")
    return UnavailableError("record.uri: 'kept' does not answer")


# --- a run --------------------------------------------------------------------------------------------------


def row(step: int, attempt: int = 1) -> StepRow:
    return step_row(step, attempt=attempt, wall_clock=1_700_000_000.0 + step + 100 * (attempt - 1))


def evaluation(step: int, attempt: int = 1) -> EvaluationRow:
    return evaluation_row(step)._replace(wall_clock=1_700_000_000.5 + step + 100 * (attempt - 1))


def saved(step: int) -> CheckpointRow:
    return CheckpointRow(step, f"/nowhere/step-{step}", None, 10, 0.0, 0.0, 0.1, 1_700_000_000.7 + step)


def rows(first: int, last: int, attempt: int) -> list[Event]:
    events: list[Event] = []
    for step in range(first, last + 1):
        events.append(row(step, attempt))
        if step % 2 == 0:
            events.append(evaluation(step, attempt))
    return events


def history(last: int) -> Restored:
    return Restored(
        [row(step) for step in range(1, last + 1)], [evaluation(step) for step in range(2, last + 1, 2)]
    )


def started(attempt: int) -> Started:
    return Started({"identity": "abc", "plan": {"m": 8}, "environment": {"python": "3"}, "attempt": attempt})


def waves(scenario: str) -> list[list[Event]]:
    """What one process tells, with time between to write it down."""
    if scenario == "new":
        return [
            [started(1), *rows(1, 3, 1)],
            [*rows(4, SAVED, 1), saved(SAVED), Document("stacks.txt", "where each rank was")],
            rows(SAVED + 1, STEPS, 1),
            [Finished({"step": STEPS})],
        ]
    return [
        [started(2), history(SAVED), *rows(SAVED + 1, SAVED + 1, 2)],
        [*rows(SAVED + 2, STEPS, 2), saved(STEPS)],
        [Finished({"step": STEPS})],
    ]


def recorded(recorder: Recorder, told: list[list[Event]], timeout_s: float = 20.0) -> str:
    """Tell a recorder; what it says of failures, or nothing."""
    recorder.start()
    try:
        recorder.run_id()
    except RecordError as error:
        return f"not started: {error}"
    count = 0
    for wave in told:
        recorder.tell(*wave)
        count += len(wave)
        until = time.monotonic() + 0.15
        while recorder.state.journaled < count and time.monotonic() < until:
            time.sleep(0.001)
    try:
        recorder.close(timeout_s)
    except RecordError as error:
        return str(error)
    return ""


@contextmanager
def quick() -> Iterator[None]:
    """Pauses in proportion to runs that take milliseconds."""
    changes = [
        (writer, "FLUSH_S", 0.005), (writer, "DISK_PATIENCE_S", 0.2), (opening, "OPENING_PATIENCE_S", 0.1),
        (delivery_lanes, "_SHORTEST_PAUSE_S", 0.005), (delivery_lanes, "_LONGEST_PAUSE_S", 0.02), (delivery_lanes, "_LONGEST_DENIED_S", 0.02),
        (opening, "job_sources", lambda _: {}),
        (segments, "SEGMENT_STEPS", 3),
    ]  # fmt: skip
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    try:
        for module, name, value in changes:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


# --- what is told of it -------------------------------------------------------------------------------------


def bits(value: Any) -> Any:
    return struct.pack(">d", value) if isinstance(value, float) else value


def exact(found: StepRow) -> list[Any]:
    return [
        {name: bits(part) for name, part in value.items()} if isinstance(value, Mapping) else bits(value)
        for value in (getattr(found, name) for name in DETERMINISTIC)
    ]


STEP_ROWS = [exact(row(step)) for step in range(1, STEPS + 1)]
EVALUATIONS = [(step, {n: bits(v) for n, v in evaluation(step).metrics.items()}) for step in range(2, STEPS + 1, 2)]  # fmt: skip
POINTS = sorted(
    {(p.key, p.step) for step in range(1, STEPS + 1) for p in step_points(row(step), None if step == 1 else row(step - 1), scaled=False)}
    | {(p.key, p.step) for step in range(2, STEPS + 1, 2) for p in evaluation_points(evaluation(step))}
)  # fmt: skip


def not_whole(folder: Path, kept: Kept | None) -> list[str]:
    """How the record differs from that of an uninterrupted run."""
    found = []
    try:
        if [exact(one) for one in read_parquet(folder / "ledger.parquet")] != STEP_ROWS:
            found.append("the ledger has other steps")
        evaluations = read_evaluations(folder / "evaluations.parquet")
        if [(one.step, {n: bits(v) for n, v in one.metrics.items()}) for one in evaluations] != EVALUATIONS:
            found.append("the ledger has other evaluations")
    except StorageError as error:
        found.append(str(error))
    found += [f"no {name}" for name in ("spec.yaml", "summary.json") if not (folder / name).exists()]
    if kept is not None:
        points = sorted((p.key, p.step) for p in kept.points if p.key.startswith(("train/", "eval/")))
        wanted = [point for point in POINTS if point[0].startswith(("train/", "eval/"))]
        if points != wanted:
            missing, more = len(set(wanted) - set(points)), len(points) - len(set(points))
            found.append(f"the store lacks {missing} points and has {more} twice")
    return found


def status(folder: Path) -> tuple[str, dict[str, str]]:
    run: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return run["status"], run["tags"]


def lies(storage: Path, spec: Spec, case: Case) -> list[str]:
    """What was untrue after the case, and after its resume; nothing where all was told as it is."""
    shutil.rmtree(storage, ignore_errors=True)
    kept = Kept()
    first = None
    if case.scenario == "resumed":
        told = [[started(1), *rows(1, SAVED + 2, 1), saved(SAVED)], [Failed("killed")]]
        recorder = Recorder(spec, lambda _: store(storage, kept))
        failure = recorded(recorder, told)
        assert not failure, failure
        first = recorder.run_id()
    shim = Shim(
        storage,
        None if case.where == "store" else case.at,
        case.fault,
        lasts=case.lasts,
        journal=case.where == "journal",
    )
    at = case.at if case.where == "store" else None
    with shim.watching():
        recorder = Recorder(
            spec,
            lambda _: KeepingStore(storage, kept, at, case.fault, lasts=case.lasts),
            first,
            patience_s=0.05,
        )
        failure = recorded(recorder, waves(case.scenario), timeout_s=0.25)
    found = [f"at once: {lie}" for lie in judged(storage, recorder, failure, kept)]
    folders = [path.parent for path in storage.glob("*/run.json")]
    if len(folders) > 1:
        return [*found, f"{len(folders)} runs"]
    if not folders:
        return found
    again = Recorder(spec, lambda _: store(storage, kept), folders[0].name)
    failure = recorded(again, waves("resumed"))
    if failure:
        return [*found, f"resumed: {failure}"]
    found += [f"resumed: {lie}" for lie in judged(storage, again, failure, kept)]
    if not journal_delivered(folders[0]):
        found.append("resumed: not delivered")
    return found


def journal_delivered(folder: Path) -> bool:
    journal = Journal(folder, read_only=True)
    journal.close()
    return journal.delivered


def judged(storage: Path, recorder: Recorder, failure: str, kept: Kept) -> list[str]:
    """A process without a complaint has a whole record; a FINISHED run has one, or says what it lacks."""
    if recorder.state.run_id is None:
        return [] if failure else ["it neither started nor failed"]
    folder = storage / recorder.run_id()
    differences = not_whole(folder, kept)
    with suppress(FileNotFoundError, ValueError):
        state, tags = status(folder)
        if not failure:
            wrong = [] if state == "FINISHED" else [f"it ended well and is {state}"]
            return [*differences, *wrong]
        if state == "FINISHED" and differences and not tags.get("lockstep.record_error"):
            return [f"FINISHED, but {difference}" for difference in differences]
        return []
    return [] if failure else ["it ended well and has no status"]


def store(storage: Path, kept: Kept) -> KeepingStore:
    return KeepingStore(storage, kept, None, "", lasts=False)


def calls(storage: Path, spec: Spec, scenario: str) -> tuple[int, int]:
    """How many calls of the file system and of the store an undisturbed process makes."""
    shutil.rmtree(storage, ignore_errors=True)
    kept, first = Kept(), None
    if scenario == "resumed":
        recorder = Recorder(spec, lambda _: store(storage, kept))
        assert not recorded(
            recorder, [[started(1), *rows(1, SAVED + 2, 1), saved(SAVED)], [Failed("killed")]]
        )
        first = recorder.run_id()
    shim, keeping = Shim(storage, None, "", lasts=False), store(storage, kept)
    with shim.watching():
        recorder = Recorder(spec, lambda _: keeping, first)
        failure = recorded(recorder, waves(scenario))
        assert not failure, failure
    assert not not_whole(storage / recorder.run_id(), kept)
    return len(shim.log), len(keeping.calls)


def cases(storage: Path, spec: Spec) -> list[Case]:
    """All of them, in an order that a seed has chosen."""
    found = []
    for scenario in ("new", "resumed"):
        files, of_store = calls(storage, spec, scenario)
        for lasts in (False, True):
            found += [Case("file", scenario, at, f, lasts) for at in range(files) for f in FILE_FAULTS]
            found += [Case("store", scenario, at, f, lasts) for at in range(of_store) for f in STORE_FAULTS]
    random.Random(16).shuffle(found)
    return found


__all__ = ["Case", "cases", "lies", "quick", "sync"]
