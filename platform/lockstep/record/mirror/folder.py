"""A run kept in its own folder, `<storage>/<run_id>/`, for `record.uri: off`: needs nothing but a disk.

`run.json` holds its status, parameters and tags. Metrics are only in the ledger, which the recorder writes.
"""

from __future__ import annotations

import errno
import json
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from lockstep.errors import RecordError
from lockstep.files import as_text, is_there, replacing, write_text
from lockstep.parsing import MOST_BYTES, MOST_YAML_BYTES, conforms, json_document, yaml_value
from lockstep.paths import OutsideError, beneath, component, read_beneath, read_bounded, shown
from lockstep.record import problems
from lockstep.record.errors import UnavailableError
from lockstep.record.events.codec import LATEST
from lockstep.record.events.union import Opened
from lockstep.record.ledger.journal import Journal, newest_step
from lockstep.record.ledger.journal_file import NAME
from lockstep.record.mirror.documents import as_json
from lockstep.record.mirror.run_store import (
    Ended,
    RunInfo,
    RunStore,
    Status,
    StoredRun,
    no_such_run,
    recorded,
)
from lockstep.record.runs.heartbeat import process_tags, same_beat, vanished
from lockstep.spec.locations import RECORD_OFF


def recorded_in_folder(storage: Path, run_id: str) -> StoredRun:
    """The run of this id in its own folder. RecordError where there is none."""
    run = run_in_folder(storage, run_id, "name its folder with record.folder")
    files = [storage / run_id / name for name in ("spec.yaml", "summary.json")]
    try:
        spec, summary = (read_bounded(file, MOST_BYTES).decode() if file.exists() else None for file in files)
    except (OSError, ValueError) as error:
        raise problems.UNREADABLE(run=run_id, file=f"record in {str(storage)!r}", got=error) from error
    return recorded(run_id, run["status"], spec, summary, "", repr(str(storage)))


def run_in_folder(
    storage: Path, run_id: str, advice: str = "name the folder of runs with --storage"
) -> dict[str, Any]:
    """What run.json has of a run. NoSuchRunError where there is no such run, RecordError where the file is lost, or not as it was written."""
    try:
        folder = storage / component(run_id)
    except OutsideError as error:
        raise no_such_run(run_id, repr(str(storage)), advice) from error
    try:
        return _read(folder / "run.json")
    except ValueError as error:
        damage = f"cannot be read ({error})"
    except PermissionError as error:
        raise problems.DENIED(run=run_id, folder=folder, got=error.strerror) from error
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG}:
            raise problems.CANNOT_READ(path=folder, got=error.strerror) from error
        if not is_there(folder / NAME) or not _is_recorded_here(folder):
            raise no_such_run(run_id, repr(str(storage)), advice) from error
        damage = "is missing"
    raise problems.RUN_JSON(run=run_id, folder=folder, got=damage)


def _is_recorded_here(folder: Path) -> bool:
    """Whether the run's spec says that its folder is all of its record: MLflow's runs have one without a run.json.

    One without a spec has never begun.
    """
    try:
        spec = yaml_value(read_bounded(folder / "spec.yaml", MOST_YAML_BYTES).decode())
        return bool(spec["record"]["uri"] == RECORD_OFF)
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError):  # nothing says otherwise
        return True


class _RunDocument(NamedTuple):
    """The fields of a run.json."""

    run_id: str
    name: str
    status: Status
    started: float
    ended: float | None
    params: Mapping[str, str]
    tags: Mapping[str, str]


def _read(path: Path) -> dict[str, Any]:
    """A run.json. ValueError where it is not as it was written."""
    run = json_document(read_bounded(path, MOST_BYTES))
    if not run:
        raise ValueError("it has no run")
    for name, hint in get_type_hints(_RunDocument).items():
        if name not in run or not conforms(run[name], hint) or isinstance(run[name], bool):
            raise ValueError(f"it has no {name}")
    if run["run_id"] != path.parent.name:
        raise ValueError(f"it is that of run {shown(run['run_id'])}")
    for name in ("started", "ended"):
        if run[name] is not None and not 0 <= run[name] <= LATEST:
            raise ValueError(f"it has no {name}: {run[name]} is no time")
    return run


def write_run(folder: Path, name: str, journal: Journal) -> None:
    """Write run.json again as that of a run that has just been opened; a sync adds what the journal has."""
    opened = next((event for event in journal.events if isinstance(event, Opened)), None)
    first = next(journal.steps(), None)
    run = {
        "run_id": folder.name,
        "name": name,
        "started": opened.at if opened else first.wall_clock if first else time.time(),
        "status": "RUNNING",
        "ended": None,
        "params": {},
        "tags": {name: str(value) for name, value in opened.process.items()} if opened else {},
    }
    write_text(folder / "run.json", as_json(run))


def finished_in_folder(storage: Path, identity: str) -> Iterator[StoredRun]:
    """The runs with status FINISHED and this identity, newest first; unreadable ones are skipped."""
    matches = []
    for path in storage.glob("*/run.json"):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            stat = path.stat()
            of_run, started = _finished(path, stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if of_run == identity:
                matches.append((started, path.parent.name))
    for _, run_id in sorted(matches, reverse=True):
        with suppress(RecordError):
            yield recorded_in_folder(storage, run_id)


@lru_cache(maxsize=10_000)
def _finished(path: Path, inode: int, mtime_ns: int, size: int) -> tuple[str | None, float]:
    """The identity of a run with status FINISHED, else None, and when it began. A file is read only once while it is unchanged:
    each trial of a sweep asks for all runs, and a changed file is a new file.
    """
    run = _read(path)
    finished = run["status"] == "FINISHED"
    return (run["tags"].get("lockstep.identity") if finished else None), float(run["started"])


class FolderStore(RunStore):
    """The RunStore of `record.uri: off`: the run's folder has its ledger, its model and its checkpoints in any case."""

    def __init__(self, storage: Path, run_name: str, started_at: float | None = None) -> None:
        self._started_at = started_at or time.time()
        self._storage = storage
        self._name = run_name
        self._folder = storage
        self._run: dict[str, Any] = {}
        self._ended: Ended | None = None
        self._changing = threading.Lock()

    def open(self, run_id: str | None) -> str:
        assigned_id = run_id or uuid.uuid4().hex
        self._folder = self._storage / assigned_id
        if run_id is None:
            self._run = {
                "run_id": assigned_id,
                "name": self._name,
                "started": self._started_at,
                "status": "RUNNING",
                "ended": None,
                "params": {},
                "tags": process_tags(time.time()),  # so a run killed in its first second is known too
            }
        else:
            self._run = run_in_folder(self._storage, run_id)
            status, at = self._run["status"], self._run["ended"]
            self._ended = (
                None
                if status == "RUNNING" or at is None
                else Ended(status, at, self._run["tags"].get("lockstep.error", ""))
            )
        return assigned_id

    def log_params(self, params: Mapping[str, str]) -> None:
        with self._changing:
            existing = self._run["params"]
            changed = {n: [existing[n], v] for n, v in params.items() if existing.get(n, v) != v}
            self._run["params"] = {**params, **existing}
            if changed:
                self._run["tags"]["lockstep.changed"] = json.dumps(changed)
            self._save()

    def set_tags(self, tags: Mapping[str, str]) -> None:
        with self._changing:
            self._run["tags"].update(tags)
            self._save()

    def log_file(self, path: Path, folder: str) -> None:
        target = beneath(self._folder, *filter(None, (folder, path.name)))
        if target == path:
            return
        try:
            with path.open("rb") as original, replacing(target) as file:
                shutil.copyfileobj(original, file)
        except FileNotFoundError as error:
            raise problems.CANNOT_COPY(path=path, target=target, got=error.strerror) from error
        except OSError as error:
            raise problems.CANNOT_COPY(path=path, target=target, got=error.strerror).as_kind(
                UnavailableError
            ) from error

    def ended(self) -> Ended | None:
        return self._ended

    def set_status(self, status: Status, at: float | None = None) -> None:
        with self._changing:
            self._run["status"] = status
            self._run["ended"] = None if status == "RUNNING" else at or time.time()
            self._save()

    def _save(self) -> None:
        try:
            write_text(self._folder / "run.json", as_json(self._run))
        except OSError as error:
            raise problems.CANNOT_WRITE(path=self._folder, got=error.strerror or error).as_kind(
                UnavailableError
            ) from error


class FolderReader:
    """The RunReader of `record.uri: off`."""

    def __init__(self, storage: Path) -> None:
        self._storage = storage
        self.passed_over: list[str] = []

    def runs(self, experiment: str | None, limit: int) -> list[RunInfo]:
        if experiment is not None:
            raise problems.NO_EXPERIMENTS()
        run_infos = []
        for path in self._storage.glob("*/run.json"):
            try:
                run_infos.append(self.run(path.parent.name))
            except RecordError as error:
                self.passed_over.append(str(error))
        return sorted(run_infos, key=lambda run: -run.started)[:limit]

    def run(self, run_id: str) -> RunInfo:
        document = run_in_folder(self._storage, run_id)
        reason = vanished(run_id, document["tags"]) if document["status"] == "RUNNING" else ""
        current = run_in_folder(self._storage, run_id) if reason else document
        if current["status"] != "RUNNING" or not same_beat(document["tags"], current["tags"]):
            document = current  # it has given a sign of life since
        elif reason:
            document |= {"status": "FAILED", "ended": float(document["tags"]["lockstep.heartbeat"])}
            document["tags"] |= {"lockstep.vanished": reason, "lockstep.error": reason}
            with suppress(OSError):  # the run of another user, who will mark it
                write_text(self._storage / run_id / "run.json", as_json(document))
        return self._info(document)

    def _info(self, known: dict[str, Any]) -> RunInfo:
        newest = newest_step(self._storage / known["run_id"])
        return RunInfo(
            run_id=known["run_id"],
            name=known["name"],
            experiment="",
            status=known["status"],
            started=known["started"],
            ended=known["ended"],
            step=newest.step if newest else 0,
            metrics={"train/loss": newest.loss} if newest else {},
            params=known["params"],
            tags=known["tags"],
            url="",
        )

    def text(self, run_id: str, path: str) -> str:
        try:
            return as_text(read_beneath(self._storage / component(run_id), path, MOST_BYTES))
        except (OSError, ValueError) as error:
            raise problems.UNREADABLE(run=run_id, file=shown(path), got=error) from error

    def artifacts(self, run_id: str) -> list[str]:
        folder = self._storage / run_id
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
