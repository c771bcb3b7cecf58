"""Models and checkpoints in MLflow: a two-phase commit, so that every READY model is whole.

A model is announced (PENDING), its files are sent, and only then does it become READY and is linked to the run at its step. A
PENDING model was interrupted: it is sent again under the same name, and the torn one is deleted with its files. To delete a
model, it is first set to FAILED, then its files are deleted, then the model. A model that shall only be a reference becomes READY again
without its files.

If a model's artifacts are in a folder of the file system that its files are on, the files are linked rather than copied, and
made read-only: a write to one would be a write to both. Elsewhere the files that checkpoints share are sent once, to the
run's own artifacts.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.files import NO_LINKS, flush, make_folder
from lockstep.parsing import MOST_BYTES
from lockstep.paths import read_beneath
from lockstep.record.mirror.checkpoint_copies import MANIFEST, SHARED, named_by
from lockstep.record.mirror.final_model_files import EXAMPLE, GRAPH, FinalModel, Values
from lockstep.record.mirror.run_store import POINTS_PER_CALL, Measured, Sent

STEP, RUN = "lockstep.step", "lockstep.run"

FINAL = "final"
"""The name of the model that a finished run has beside its checkpoints."""


class Models:
    """The models of one run. `client` raises MLflow's own errors."""

    def __init__(self, client: Any, experiment_id: str, run_id: str) -> None:
        self._client = client
        self._experiment_id = experiment_id
        self._run_id = run_id

    def publish(
        self,
        name: str,
        step: int,
        tags: Mapping[str, str],
        files: Callable[[str, Path], None] | Path | None,
        sent: Sent = lambda nbytes: None,
    ) -> str:
        """Publish a model of the run. Returns its id. A model of that name that is already READY is kept, with or without files.

        `files` is their folder, or a function that puts them into an empty folder for a model of the given id, or None for a model
        whose tags say where it is. A model without files gets those of a folder, and stays the same model.
        """
        ready, torn = self._known(name)
        for model in torn:
            self._delete(model)
        for model in ready:
            if isinstance(files, Path) and not self.has_files(model):
                self._client.finalize_logged_model(model.model_id, "FAILED")
                self._client.set_logged_model_tags(model.model_id, dict(tags))
                self._send(model, files, sent)
                self._client.finalize_logged_model(model.model_id, "READY")
            return str(model.model_id)
        model = self._announce(name, step, tags)
        model_id = str(model.model_id)
        if isinstance(files, Path):
            self._send(model, files, sent)
        elif files is not None:
            with tempfile.TemporaryDirectory(prefix="lockstep-model-") as folder:
                try:
                    files(model_id, Path(folder))
                except Exception:
                    self._client.delete_logged_model(model_id)  # nothing was sent
                    raise
                self._client.log_model_artifacts(model_id, folder)
        self._commit(model_id, step)
        return model_id

    def publish_reference(self, name: str, step: int, tags: Mapping[str, str]) -> None:
        """Publish a model without files, whose `tags` say where it is. A whole one of that name loses its files, unless it has an alias, and keeps its metrics."""
        ready, _ = self._known(name)
        whole = [model for model in ready if self.has_files(model)]
        aliased = {model.model_id for model in self.aliased()} if whole else ()
        for model in whole:
            if model.model_id in aliased:
                continue
            self._client.finalize_logged_model(model.model_id, "FAILED")
            self._client.set_logged_model_tags(model.model_id, dict(tags))
            files_of(self._client.tracking_uri, model).delete_artifacts()
            self._client.finalize_logged_model(model.model_id, "READY")
        if not whole:
            self.publish(name, step, tags, None)

    def measure(self, step: int, evaluation: Sequence[Measured]) -> None:
        """Give the checkpoint of a step, and the final model if it is of that step, the metrics of an evaluation, each with its data set.

        Metrics that they have change nothing.
        """
        from mlflow.entities import Metric

        final = [model for model in self._known(FINAL)[0] if model.tags[STEP] == str(step)]
        for model in [*self._known(f"checkpoint-{step}")[0], *final]:
            metrics = [
                Metric(
                    *point,
                    model_id=model.model_id,
                    dataset_name=data and data.name,
                    dataset_digest=data and data.digest,
                )
                for point, data in evaluation
            ]
            for start in range(0, len(metrics), POINTS_PER_CALL):
                self._client.log_batch(
                    self._run_id, metrics=metrics[start : start + POINTS_PER_CALL], synchronous=True
                )

    def delete(self, name: str) -> int:
        """Delete the models of that name, files first. Returns how many there were."""
        ready, torn = self._known(name)
        for model in (*ready, *torn):
            self._delete(model)
        return len(ready) + len(torn)

    def ready(self) -> dict[str, str]:
        """The id of every READY model of the run, by name."""
        return {model.name: model.model_id for model in self.ready_models()}

    def ready_models(self) -> list[Any]:
        """Every READY model of the run, as MLflow returns it."""
        return [model for model in self.all() if model.status == "READY"]

    def has_files(self, model: Any) -> bool:
        """Whether a model has files besides its tags."""
        return bool(files_of(self._client.tracking_uri, model).list_artifacts())

    def aliased(self) -> list[Any]:
        """The READY models of the run that have an alias in the registry."""
        named = set()
        for version in self._client.search_model_versions(f"run_id = '{self._run_id}'"):
            # A search does not return aliases.
            if self._client.get_model_version(version.name, version.version).aliases:
                named.add(version.source.removeprefix("models:/"))
        return [model for model in self.ready_models() if model.model_id in named] if named else []

    # --- the two phases -----------------------------------------------------------------------------------

    def _announce(self, name: str, step: int, tags: Mapping[str, str]) -> Any:
        return self._client.create_logged_model(
            experiment_id=self._experiment_id,
            name=name,
            source_run_id=self._run_id,
            tags={**tags, STEP: str(step), RUN: self._run_id},
            model_type="lockstep",
        )

    def _send(self, model: Any, folder: Path, sent: Sent) -> None:
        """Send the files of a folder, the manifest last. Files on a disk of this machine are flushed."""
        from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

        repository = files_of(self._client.tracking_uri, model)
        local_folder = (
            Path(repository.artifact_dir) if isinstance(repository, LocalArtifactRepository) else None
        )
        if local_folder is not None:
            make_folder(local_folder)
        shared = shared_in(folder)
        for file in sorted(folder.iterdir(), key=lambda file: (file.name == MANIFEST, file.name)):
            if local_folder is not None and _linked(file, local_folder):
                continue
            if file.name in shared:
                self._share(file, sent)
                continue
            repository.log_artifact(str(file))
            if local_folder is not None:
                flush(local_folder / file.name)
            sent(file.stat().st_size)
        if local_folder is not None:
            flush(local_folder)

    def _share(self, file: Path, sent: Sent) -> None:
        """Send a file that checkpoints share to the run itself, once: its name contains the hash of its content."""
        from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

        size, repository = file.stat().st_size, self.shared_files()
        if any(
            Path(artifact.path).name == file.name and artifact.file_size == size
            for artifact in repository.list_artifacts(SHARED)
        ):
            return
        repository.log_artifact(str(file), SHARED)
        if isinstance(repository, LocalArtifactRepository):
            folder = Path(repository.artifact_dir, SHARED)
            flush(folder / file.name)
            flush(folder)
        sent(size)

    def shared_files(self) -> Any:
        """MLflow's repository of the run's own files, in which the files that its checkpoints share have a folder."""
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        uri = self._client.get_run(self._run_id).info.artifact_uri
        return get_artifact_repository(uri, tracking_uri=self._client.tracking_uri)

    def _commit(self, model_id: str, step: int) -> None:
        from mlflow.entities import LoggedModelOutput

        self._client.log_outputs(self._run_id, [LoggedModelOutput(model_id, step)])
        self._client.finalize_logged_model(model_id, "READY")

    def _known(self, name: str) -> tuple[list[Any], list[Any]]:
        named = [model for model in self.all(f" AND name = '{name}'") if model.name == name]
        return [m for m in named if m.status == "READY"], [m for m in named if m.status != "READY"]

    def all(self, further: str = "") -> list[Any]:
        """Every model of the run that is not deleted, READY or not; `further` is appended to MLflow's filter."""
        models: list[Any] = []
        token = None
        while True:
            page = self._client.search_logged_models(
                [self._experiment_id],
                filter_string=f"source_run_id = '{self._run_id}'{further}",
                page_token=token,
            )
            models += page
            token = page.token
            if not token:
                return models

    def _delete(self, model: Any) -> None:
        """Delete a model, which is never READY without its files. Files go first: MLflow itself only hides a deleted model."""
        if model.status == "READY":
            self._client.finalize_logged_model(model.model_id, "FAILED")
        files_of(self._client.tracking_uri, model).delete_artifacts()
        self._client.delete_logged_model(model.model_id)


def is_checkpoint(model: Any) -> bool:
    return bool(model.name.startswith("checkpoint-"))


def shared_in(folder: Path) -> set[str]:
    """The names of the files that a checkpoint in a folder shares with others; empty if the folder is that of another model."""
    try:
        return set(named_by(read_beneath(folder, MANIFEST, MOST_BYTES)).shared)
    except (OSError, ValueError):
        return set()


def files_of(uri: str, model: Any) -> Any:
    """MLflow's repository of a model's files."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    return get_artifact_repository(model.artifact_location, tracking_uri=uri)


def _linked(file: Path, folder: Path) -> bool:
    """Give a file a second name in `folder`, and make it read-only. False where that is impossible and it must be copied."""
    mode, linked = file.lstat().st_mode, folder / file.name
    if not stat.S_ISREG(mode):
        return False
    try:
        os.link(file, linked)
        linked.chmod(stat.S_IMODE(mode) & 0o444)
    except OSError as error:
        linked.unlink(missing_ok=True)
        if error.errno not in NO_LINKS:
            raise
        return False
    return True


def fill_final(folder: Path, model: FinalModel) -> Callable[[str, Path], None]:
    """Returns what writes the run's final model, whose graph is in `folder`, in the format of MLflow's PyTorch flavor.

    It does not import torch, which would cost the end of a run seconds only to copy a file.
    """
    return lambda model_id, target: _write(folder, model, model_id, target)


def _write(folder: Path, model: FinalModel, model_id: str, target: Path) -> None:
    import mlflow.pyfunc
    import numpy
    from mlflow.models import Model, ModelSignature
    from mlflow.types import Schema, TensorSpec

    def schema(values: Values | None) -> Any:
        assert values is not None
        return Schema([TensorSpec(numpy.dtype(values.dtype), tuple(values.shape))])

    graph = folder / GRAPH.parent
    described = Model(model_id=model_id)
    described.add_flavor("pytorch", model_data=f"data/{graph.name}", pytorch_version=model.torch, code=None)
    mlflow.pyfunc.save_model(
        target,
        loader_module="mlflow.pytorch",
        data_path=graph,
        mlflow_model=described,
        model_config={"device": None},
        input_example=numpy.load(folder / EXAMPLE),
        signature=ModelSignature(schema(model.input), schema(model.output)),
        pip_requirements=[f"torch=={model.torch.partition('+')[0]}", f"numpy=={model.numpy}"],
    )
