"""A run stored in MLflow.

* Nothing is cut: MLflow silently shortens parameters over 6000 characters. So a longer value goes whole to an artifact,
and the parameter names that. The same holds for tags over 8000 characters.
* The artifacts of a SQLite database lie beside it, wherever the run was started.
"""

from __future__ import annotations

import getpass
import json
import os
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from lockstep.record import problems
from lockstep.record.events.metrics import Point
from lockstep.record.mirror.data_sets import DataSet
from lockstep.record.mirror.final_model_files import FinalModel
from lockstep.record.mirror.mlflow.client import connecting, identified, is_database, page_url, translated
from lockstep.record.mirror.mlflow.models import FINAL, STEP, Models, fill_final, is_checkpoint
from lockstep.record.mirror.mlflow.stored_texts import Kind, stored_texts
from lockstep.record.mirror.run_store import Ended, Measured, Sent, Status
from lockstep.record.runs.heartbeat import process_tags

_PER_REQUEST = 100
_CREATION = "lockstep.creation"
"""A tag with a value unique to each creation, by which a run is found whose creation was not confirmed."""
_PAGE = 25_000
"""Points of a metric in one request."""


class MlflowStore:
    """The RunStore of an MLflow tracking server or database.

    `artifacts` is where a new experiment of a database other than SQLite keeps its files; a server decides for itself.
    """

    def __init__(
        self,
        uri: str,
        experiment: str,
        run_name: str,
        artifacts: str | None = None,
        started_at: float | None = None,
    ) -> None:
        self._uri = uri
        self._experiment_name = experiment
        self._run_name = run_name
        self._artifacts = artifacts
        self._start_ms = None if started_at is None else round(started_at * 1000)
        self._client: Any = None
        self._experiment_id = ""
        self._run_id = ""
        self._params: dict[str, str] = {}
        self._ended: Ended | None = None
        self._last_steps: dict[str, int] = {}
        self._creation = uuid.uuid4().hex
        self._tried = False
        """Whether the run may have been created although no answer came."""

    # --- opening ------------------------------------------------------------------------------------------

    def open(self, run_id: str | None) -> str:
        with connecting(self._uri) as (self._client, database):
            if run_id is None:
                artifact_root = f"{database.parent.as_uri()}/mlartifacts" if database else self._artifacts
                self._experiment_id = self._get_or_create_experiment(
                    artifact_root if is_database(self._uri) else None
                )
        if run_id is None:
            self._create()
        else:
            self._reopen(run_id)
        return self._run_id

    def _get_or_create_experiment(self, artifacts: str | None) -> str:
        from mlflow.exceptions import MlflowException

        experiment = self._client.get_experiment_by_name(self._experiment_name)
        if experiment is None:
            try:
                # The tag opens the experiment on its training pages instead of the ones for language models.
                kind = {"mlflow.experimentKind": "custom_model_development"}
                return str(self._client.create_experiment(self._experiment_name, artifacts, tags=kind))
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                experiment = self._client.get_experiment_by_name(
                    self._experiment_name
                )  # another process was faster
        identified(self._uri, experiment.experiment_id)
        if experiment.lifecycle_stage != "active":
            raise problems.EXPERIMENT_DELETED(got=self._experiment_name)
        return str(experiment.experiment_id)

    def _create(self) -> None:
        # The tags of its process tell a run that is killed in its first second from one that lives.
        tags = {
            "mlflow.user": _user(),
            "mlflow.source.type": "LOCAL",
            _CREATION: self._creation,
            **process_tags(time.time()),
        }
        existing = self._created() if self._tried else None
        self._tried = True
        with self._translated():
            run = existing or self._client.create_run(
                self._experiment_id, start_time=self._start_ms, run_name=self._run_name or None, tags=tags
            )
        self._run_id = identified(self._uri, run.info.run_id)

    def _created(self) -> Any:
        """The run that an earlier try created, whose answer was lost."""
        with self._translated():
            runs = self._client.search_runs(
                [self._experiment_id], f"tags.`{_CREATION}` = '{self._creation}'", max_results=1
            )
        return runs[0] if runs else None

    def _reopen(self, run_id: str) -> None:
        with self._translated():
            run = self._client.get_run(run_id)
            identified(self._uri, run.info.run_id)
            if run.info.lifecycle_stage != "active":
                raise problems.RUN_DELETED(run=run_id)
            self._run_id, self._experiment_id = run_id, run.info.experiment_id
            self._params = dict(run.data.params)
            if run.info.status != "RUNNING" and run.info.end_time:
                why = run.data.tags.get("lockstep.error", "")
                self._ended = Ended(run.info.status, run.info.end_time / 1000, why)
            # `data.metrics` has values without steps; the entities behind it have the latest point of each key.
            self._last_steps = {metric.key: metric.step for metric in run.data._metric_objs}

    # --- writing ------------------------------------------------------------------------------------------

    def last_steps(self) -> Mapping[str, int]:
        return self._last_steps

    def recorded_steps(self, key: str) -> Collection[int]:
        steps: set[int] = set()
        token = None
        while True:
            with self._translated():
                page = self._client._tracking_client.store.get_metric_history(
                    self._run_id, key, max_results=_PAGE, page_token=token
                )
            steps.update(metric.step for metric in page)
            token = page.token
            if not token:
                return steps

    def log_metrics(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        with self._translated():
            self._client.log_batch(
                self._run_id, metrics=[Metric(*point) for point in points], synchronous=True
            )

    def log_params(self, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        legal = self._kept_whole("params", params)
        changed = {
            name: [self._params[name], v] for name, v in legal.items() if self._params.get(name, v) != v
        }
        for batch in _batches({name: value for name, value in legal.items() if name not in changed}):
            with self._translated():
                entities = [Param(name, value) for name, value in batch]
                self._client.log_batch(self._run_id, params=entities, synchronous=True)
        if changed:
            self.set_tags({"lockstep.changed": json.dumps(changed)})

    def set_tags(self, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        legal = self._kept_whole("tags", tags)
        for batch in _batches(legal):
            with self._translated():
                entities = [RunTag(name, value) for name, value in batch]
                self._client.log_batch(self._run_id, tags=entities, synchronous=True)

    def log_data(self, data: Sequence[DataSet]) -> None:
        with self._translated():
            self._client.log_inputs(self._run_id, datasets=[_input(data_set) for data_set in data])

    def log_file(self, path: Path, folder: str) -> None:
        with self._translated():
            self._client.log_artifact(self._run_id, str(path), folder or None)

    def log_final_model(self, folder: Path, model: FinalModel, step: int) -> None:
        with self._translated():
            self._models().publish(FINAL, step, {}, fill_final(folder, model))

    def log_checkpoint(
        self, step: int, tags: Mapping[str, str], folder: Path | None, sent: Sent = lambda nbytes: None
    ) -> None:
        with self._translated():
            self._models().publish(f"checkpoint-{step}", step, tags, folder, sent)

    def keep_reference(self, step: int, tags: Mapping[str, str]) -> None:
        with self._translated():
            self._models().publish_reference(f"checkpoint-{step}", step, tags)

    def log_evaluation(self, step: int, evaluation: Sequence[Measured]) -> None:
        with self._translated():
            self._models().measure(step, evaluation)

    def checkpoints(self) -> Mapping[int, bool]:
        with self._translated():
            models = self._models()
            checkpoint_models = [model for model in models.all() if is_checkpoint(model)]
            return {
                int(model.tags[STEP]): model.status == "READY" and models.has_files(model)
                for model in checkpoint_models
            }

    def aliased_steps(self) -> frozenset[int]:
        with self._translated():
            return frozenset(
                int(model.tags[STEP]) for model in self._models().aliased() if is_checkpoint(model)
            )

    def delete_checkpoint(self, step: int) -> None:
        if step not in self.aliased_steps():
            with self._translated():
                self._models().delete(f"checkpoint-{step}")

    def _models(self) -> Models:
        return Models(self._client, self._experiment_id, self._run_id)

    def ended(self) -> Ended | None:
        return self._ended

    def set_status(self, status: Status, at: float | None = None) -> None:
        with self._translated():
            if status == "RUNNING":
                self._client.update_run(self._run_id, status=status)
            else:
                self._client.set_terminated(self._run_id, status, None if at is None else round(at * 1000))

    def url(self) -> str:
        return page_url(self._uri, self._experiment_id, self._run_id)

    def _kept_whole(self, kind: Kind, texts: Mapping[str, str]) -> dict[str, str]:
        """These parameters or tags as MLflow has them; those that it would cut are kept whole in artifacts."""
        stored = stored_texts(kind, texts)
        for text, _, artifact in stored.values():
            if artifact:
                with self._translated():
                    self._client.log_text(self._run_id, text, artifact)
        return {name: value for name, (_, value, _) in stored.items()}

    def _translated(self, *, again: bool = True) -> AbstractContextManager[None]:
        return translated(self._uri, again=again)


def _input(data: DataSet) -> Any:
    """A data set in MLflow's form: its source is the job, and its profile has the whole fingerprint."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source = {"tags": {"mlflow.source.type": "LOCAL", "mlflow.source.name": data.job}}
    profile = {"num_rows": data.samples, "sha256": data.sha256, "fingerprint": data.fingerprint}
    return DatasetInput(
        Dataset(data.name, data.digest, "code", json.dumps(source), profile=json.dumps(profile)),
        [InputTag("mlflow.data.context", data.context)],
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container, a user id may have no name
        return str(os.getuid())


def _batches(values: Mapping[str, str]) -> Iterator[list[tuple[str, str]]]:
    pairs = list(values.items())
    return (pairs[start : start + _PER_REQUEST] for start in range(0, len(pairs), _PER_REQUEST))
