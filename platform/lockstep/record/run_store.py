"""What the recorder asks of a place that keeps runs, and which one a spec names."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

from lockstep.errors import RecordError
from lockstep.record.data_sets import DataSet
from lockstep.record.documents import without_password
from lockstep.record.ledger import History, read_history
from lockstep.record.points import Point
from lockstep.spec import Spec
from lockstep.spec_places import RECORD_OFF

Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]

POINTS_PER_CALL = 1000
"""The most metric points that one call may bring; MLflow refuses more in one request."""


SWEEP_FILE = "sweep.yaml"
"""The document by which the run of a sweep is known."""


class UnavailableError(RecordError):
    """The store does not answer now; the same call may succeed later. Example: the tracking server restarts."""


class RunStore(Protocol):
    """One run in a store. Calls come from one thread, `open` first, and all but `open` may be made twice: the second changes nothing.

    Every call raises UnavailableError where trying again may help and RecordError where it cannot.
    """

    def open(self, run_id: str | None) -> str:
        """Create a run, or reopen the one that is named, as it is; its id."""

    def last_steps(self) -> Mapping[str, int]:
        """The highest step that the opened run already has of each metric key."""

    def log_metrics(self, points: Sequence[Point]) -> None:
        """Add up to POINTS_PER_CALL points."""

    def log_params(self, params: Mapping[str, str]) -> None:
        """Set parameters. One that the run has with another value keeps it; the difference is told in a tag."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set or replace tags."""

    def log_data(self, data: Sequence[DataSet]) -> None:
        """Say which data sets the run uses, where the store has a place for that."""

    def log_file(self, path: Path, folder: str) -> None:
        """Keep a copy of a file under `folder`, or at the top where that is empty."""

    def log_final_model(self, spec: Spec, weights: Path, step: int) -> None:
        """Keep the model that the run ended with in a form that others can load, where the store has one.

        Raises whatever the job's own code raises.
        """

    def log_checkpoint(self, step: int, tags: Mapping[str, str], folder: Path | None) -> None:
        """Keep a checkpoint with a copy of its folder, or by the reference that its tags are where there is none."""

    def aliased_steps(self) -> frozenset[int]:
        """The steps whose checkpoints someone has given an alias in the store's registry of models."""

    def delete_checkpoint(self, step: int) -> None:
        """Delete a checkpoint and its files, unless it has an alias."""

    def set_status(self, status: Status) -> None:
        """End the run, or mark it RUNNING again."""

    def url(self) -> str:
        """A link that lands on the run's page, or nothing where the store has no pages."""


class Recorded(NamedTuple):
    """What a store knows of a run: enough to resume it."""

    run_id: str
    status: Status
    spec: dict[str, Any]
    """The document of its resolved spec."""
    summary: dict[str, Any]
    """What it came to; empty where it has not ended well."""
    url: str


class CheckpointCopy(NamedTuple):
    """A copy of a checkpoint in a store; `download` puts its files into a folder that exists."""

    step: int
    download: Callable[[Path], None]


def find_copies(uri: str, run_id: str) -> list[CheckpointCopy]:
    """The whole copies of a run's checkpoints in the store at `uri`, newest first."""
    from lockstep.record.mlflow_store import checkpoint_copies

    return [] if uri == RECORD_OFF else checkpoint_copies(uri, run_id)


def find_run(uri: str, run_id: str, folder: Path) -> Recorded:
    """The run that the store at `uri` knows by this id; for RECORD_OFF the one in `folder`. RecordError where there is none."""
    from lockstep.record.folder_store import recorded_in_folder
    from lockstep.record.mlflow_store import recorded_in_mlflow

    if uri == RECORD_OFF:
        return recorded_in_folder(folder, run_id)
    return recorded_in_mlflow(uri, run_id)


def find_finished(uri: str, identity: str, folder: Path) -> Recorded | None:
    """The newest finished run of this identity that has a ledger of its own, or None."""
    from lockstep.record.folder_store import finished_in_folder
    from lockstep.record.mlflow_store import finished_in_mlflow

    return finished_in_folder(folder, identity) if uri == RECORD_OFF else finished_in_mlflow(uri, identity)


def find_history(uri: str, run_id: str, folder: Path) -> History:
    """All rows of a finished run, from its folder or else from its store."""
    from lockstep.record.mlflow_store import files_from_mlflow

    here = folder / run_id
    if (here / "ledger.parquet").exists() or uri == RECORD_OFF:
        return read_history(here)
    with tempfile.TemporaryDirectory() as there:
        files_from_mlflow(uri, run_id, ("ledger.parquet", "evaluations.parquet"), Path(there))
        return read_history(Path(there))


def find_sweep(uri: str, run_id: str, folder: Path) -> dict[str, Any] | None:
    """The document of the sweep that has this id, or None where the run is none."""
    import yaml

    from lockstep.record.mlflow_store import files_from_mlflow

    here = folder / run_id / SWEEP_FILE
    if here.exists():
        text = here.read_text(encoding="utf-8")
    elif uri == RECORD_OFF:
        return None
    else:
        with tempfile.TemporaryDirectory() as there:
            if not files_from_mlflow(uri, run_id, (SWEEP_FILE,), Path(there)):
                return None
            text = Path(there, SWEEP_FILE).read_text(encoding="utf-8")
    document: dict[str, Any] = yaml.safe_load(text)
    return document


def recorded(
    run_id: str, status: str, spec: str | None, summary: str | None, url: str, where: str
) -> Recorded:
    """A run out of its files. RecordError where they are not what a run of Lockstep leaves."""
    import yaml

    try:
        document = yaml.safe_load(spec) if spec is not None else None
        found = json.loads(summary) if summary is not None else {}
    except (yaml.YAMLError, ValueError) as error:
        raise RecordError(
            f"run {run_id}: its record in {where} cannot be understood: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(document, dict) or not isinstance(found, dict):
        raise RecordError(f"run {run_id} in {where} has no spec.yaml; wanted a run that Lockstep made")
    known: Status = status if status in get_args(Status) else "RUNNING"  # type: ignore[assignment]
    return Recorded(run_id, known, document, found, url)


def store_for(spec: Spec, started_at: float) -> RunStore:
    """The store that `record.uri` names, not opened yet; a run that it creates began at `started_at` (Unix seconds)."""
    from lockstep.record.folder_store import FolderStore
    from lockstep.record.mlflow_store import MlflowStore

    uri = spec.record.uri
    if uri is None:
        raise RecordError(
            "record.uri: missing; read the spec with load_spec, which fills it in, or set record.uri=off"
        )
    if uri == RECORD_OFF:
        return FolderStore(spec.folder, spec.name, started_at)
    experiment = spec.record.experiment or spec.name or "lockstep"
    return MlflowStore(uri, experiment, spec.name, f"{spec.folder.as_uri()}/mlartifacts", started_at)


def unreachable(uri: str, reason: str) -> str:
    """One line for a store that does not answer."""
    return (
        f"record.uri: {without_password(uri)!r} does not answer ({without_password(reason)}); "
        "start it, name another with --uri, or set record.uri=off"
    )
