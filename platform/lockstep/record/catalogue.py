"""The runs that a store has, for a person at a terminal. Whatever is RUNNING there and is not, is marked on the way."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from lockstep.errors import RecordError, SpecError
from lockstep.record.documents import as_json
from lockstep.record.files import write_text
from lockstep.record.journal import newest_step
from lockstep.record.liveness import vanished
from lockstep.spec_places import RECORD_OFF


class RunInfo(NamedTuple):
    """A run as its store has it. `step` is the last one that is recorded; times are Unix seconds."""

    run_id: str
    name: str
    experiment: str
    status: str
    started: float
    ended: float | None
    step: int
    metrics: dict[str, float]
    params: dict[str, str]
    tags: dict[str, str]
    url: str


class RunReader(Protocol):
    """A store of runs, to be read. Raises RecordError for what is not there, UnavailableError where it does not answer."""

    def runs(self, experiment: str | None, limit: int) -> list[RunInfo]:
        """The newest runs, newest first."""

    def run(self, run_id: str) -> RunInfo:
        """One run."""

    def artifacts(self, run_id: str) -> list[str]:
        """The paths of all that is kept with a run."""

    def text(self, run_id: str, path: str) -> str:
        """One of them."""


def reader(uri: str, storage: Path) -> RunReader:
    """A reader of the store at `uri`, or of the folders below `storage` where that is `off`."""
    if uri == RECORD_OFF:
        return FolderReader(storage)
    from lockstep.record.mlflow_store.reading import MlflowReader

    return MlflowReader(uri)


class FolderReader:
    """The RunReader of `record.uri: off`."""

    def __init__(self, storage: Path) -> None:
        self._storage = storage

    def runs(self, experiment: str | None, limit: int) -> list[RunInfo]:
        if experiment is not None:
            raise SpecError("experiment: runs that are recorded in folders alone have none; leave it out")
        found = [self.run(path.parent.name) for path in self._storage.glob("*/run.json")]
        return sorted(found, key=lambda run: -run.started)[:limit]

    def run(self, run_id: str) -> RunInfo:
        path = self._storage / run_id / "run.json"
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RecordError(f"run {run_id}: no record of it in {str(self._storage)!r} ({error})") from error
        reason = vanished(known["tags"], time.time()) if known["status"] == "RUNNING" else ""
        if reason:
            known |= {"status": "FAILED", "ended": float(known["tags"]["lockstep.heartbeat"])}
            known["tags"] |= {"lockstep.vanished": reason, "lockstep.error": reason}
            write_text(path, as_json(known))
        return self._info(known)

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
        return (self._storage / run_id / path).read_text(encoding="utf-8")

    def artifacts(self, run_id: str) -> list[str]:
        folder = self._storage / run_id
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
