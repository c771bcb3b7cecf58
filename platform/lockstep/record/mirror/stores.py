"""Which store a spec or a URI names, and what is found there."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.parsing import MOST_YAML_BYTES, yaml_value
from lockstep.paths import OutsideError, beneath, component, read_bounded
from lockstep.record import problems
from lockstep.record.ledger.rows import Observation
from lockstep.record.ledger.tables import OBSERVATIONS, Rows, read_history, read_observations
from lockstep.record.mirror.run_store import SWEEP_FILE, CheckpointCopy, RunReader, RunStore, StoredRun
from lockstep.spec.fields import Spec
from lockstep.spec.locations import RECORD_OFF
from lockstep.spec.messages import shown


def store_for(spec: Spec, started_at: float) -> RunStore:
    """The store that `record.uri` names, not opened yet; a run that it creates began at `started_at` (Unix seconds)."""
    from lockstep.record.mirror.folder import FolderStore
    from lockstep.record.mirror.mlflow import MlflowStore

    uri = spec.record.uri
    if uri is None:
        raise problems.URI_MISSING()
    if uri == RECORD_OFF:
        return FolderStore(spec.folder, spec.name, started_at)
    experiment = spec.record.experiment or spec.name or "lockstep"
    return MlflowStore(uri, experiment, spec.name, f"{spec.folder.as_uri()}/mlartifacts", started_at)


def warm_up(uri: str | None) -> None:
    """Import what the store at `uri` needs, ahead of its opening: MLflow takes some seconds."""
    if uri is not None and uri != RECORD_OFF:
        from lockstep.record.mirror.mlflow.client import import_store

        import_store(uri)


def find_copies(uri: str, run_id: str) -> list[CheckpointCopy]:
    """The whole copies of a run's checkpoints in the store at `uri`, newest first."""
    from lockstep.record.mirror.mlflow import checkpoint_copies

    return [] if uri == RECORD_OFF else checkpoint_copies(uri, run_id)


def find_run(uri: str, run_id: str, folder: Path) -> StoredRun:
    """The run that the store at `uri` knows by this id; for RECORD_OFF the one in `folder`. RecordError where there is none."""
    from lockstep.record.mirror.folder import recorded_in_folder
    from lockstep.record.mirror.mlflow import recorded_in_mlflow

    if uri == RECORD_OFF:
        return recorded_in_folder(folder, run_id)
    return recorded_in_mlflow(uri, run_id)


def find_finished(uri: str, identity: str, folder: Path) -> Iterator[StoredRun]:
    """The runs that are called finished and of this identity, newest first; what can't be read is passed over."""
    from lockstep.record.mirror.folder import finished_in_folder
    from lockstep.record.mirror.mlflow import finished_in_mlflow

    return finished_in_folder(folder, identity) if uri == RECORD_OFF else finished_in_mlflow(uri, identity)


def find_files(uri: str, run_id: str, names: Sequence[str], folder: Path, target: Path) -> None:
    """Copy the named files and folders of a run, as far as it has them, from its folder or else from its store into `target`."""
    from lockstep.record.mirror.mlflow import files_from_mlflow

    try:
        run = folder / component(run_id)
        local_names = [name for name in names if beneath(run, name).exists()]
    except OutsideError as error:
        raise problems.LEADS_OUT(run=shown(run_id), got=error) from error
    for name in local_names:
        if (run / name).is_dir():
            shutil.copytree(run / name, target / name, symlinks=True)
        else:
            shutil.copyfile(run / name, target / name)
    if not local_names and uri != RECORD_OFF:
        files_from_mlflow(uri, run_id, names, target)


def keep_files(uri: str, run_id: str, files: Sequence[Path], folder: str) -> None:
    """Keep copies of files with a recorded run in the store at `uri`, under `folder`; nothing for RECORD_OFF. Raises RecordError."""
    from lockstep.record.mirror.mlflow import MlflowStore

    if uri == RECORD_OFF:
        return
    store = MlflowStore(uri, "", "")
    store.open(run_id)
    for file in files:
        store.log_file(file, folder)


def find_history(uri: str, run_id: str, folder: Path) -> Rows:
    """All rows of a finished run, from its folder or else from its store."""
    from lockstep.record.mirror.mlflow import files_from_mlflow

    run_folder = folder / run_id
    if (run_folder / "ledger.parquet").exists() or uri == RECORD_OFF:
        return read_history(run_folder)
    with tempfile.TemporaryDirectory() as download:
        files_from_mlflow(uri, run_id, ("ledger.parquet", "evaluations.parquet"), Path(download))
        return read_history(Path(download))


def find_observations(uri: str, run_id: str, folder: Path) -> list[Observation]:
    """The observations of a finished run, from its folder or else from its store; none where it has none."""
    from lockstep.record.mirror.mlflow import files_from_mlflow

    path = folder / run_id / OBSERVATIONS
    if path.exists():
        return read_observations(path)
    if uri == RECORD_OFF or (path.parent / "ledger.parquet").exists():
        return []
    with tempfile.TemporaryDirectory() as download:
        downloaded = files_from_mlflow(uri, run_id, (OBSERVATIONS,), Path(download))
        return read_observations(Path(download, OBSERVATIONS)) if downloaded else []


def find_sweep(uri: str, run_id: str, folder: Path) -> dict[str, Any] | None:
    """The document of the sweep that has this id, or None where the run is none. SpecError where it is damaged."""
    from lockstep.record.mirror.mlflow import files_from_mlflow

    path = folder / run_id / SWEEP_FILE
    if path.exists():
        text = _text(run_id, path)
    elif uri == RECORD_OFF:
        return None
    else:
        with tempfile.TemporaryDirectory() as download:
            if not files_from_mlflow(uri, run_id, (SWEEP_FILE,), Path(download)):
                return None
            text = _text(run_id, Path(download, SWEEP_FILE))
    try:
        document = yaml_value(text)
    except ValueError as error:
        document = " ".join(str(error).split())
    if not isinstance(document, dict) or not isinstance(document.get("spec"), dict):
        raise problems.SWEEP_FILE(run=run_id, file=SWEEP_FILE, got=f"is no sweep: {shown(document)}")
    return document


def _text(run_id: str, path: Path) -> str:
    try:
        return read_bounded(path, MOST_YAML_BYTES).decode()
    except (OSError, ValueError) as error:
        raise problems.SWEEP_FILE(run=run_id, file=SWEEP_FILE, got=f"cannot be read: {error}") from error


def reader(uri: str, storage: Path) -> RunReader:
    """A reader of the store at `uri`, or of the folders below `storage` where that is `off`."""
    if uri == RECORD_OFF:
        from lockstep.record.mirror.folder import FolderReader

        return FolderReader(storage)
    from lockstep.record.mirror.mlflow.reading import MlflowReader

    return MlflowReader(uri)
