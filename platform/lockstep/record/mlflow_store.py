"""A run kept in MLflow: the only place that imports it, and only when a run is opened.

* The client is given the run id in every call: no active run, no autologging, nothing global.
* Nothing is cut: MLflow shortens parameters over 6000 characters silently, so a longer value goes whole to an artifact
  and the parameter names that. The same holds for tags over 8000.
* Nothing is written to standard output, and MLflow's and Alembic's loggers are held at WARNING.
* A fresh SQLite database is opened by one process at a time (its first migration does not survive two), and its
  artifacts lie beside it, wherever the run was started.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lockstep.errors import RecordError
from lockstep.record.database_lock import database_lock
from lockstep.record.documents import without_password
from lockstep.record.points import Point, store_key
from lockstep.record.run_store import Recorded, Status, UnavailableError, recorded, unreachable

_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the recorder tries again itself; MLflow's way blocks a call for 246 s
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
}
_LONGEST_PARAM, _LONGEST_TAG, _PER_REQUEST = 6000, 8000, 100
_NAMES_IN_MLFLOW = {
    "lockstep.note": "mlflow.note.content",
    "lockstep.job": "mlflow.source.name",
    "lockstep.git_commit": "mlflow.source.git.commit",
}
"""Tags that MLflow's pages know by a name of their own."""
_REFUSED = frozenset(
    {
        "INVALID_PARAMETER_VALUE",
        "BAD_REQUEST",
        "MALFORMED_REQUEST",
        "INVALID_STATE",
        "NOT_FOUND",
        "ENDPOINT_NOT_FOUND",
        "NOT_IMPLEMENTED",
        "RESOURCE_DOES_NOT_EXIST",
        "RESOURCE_ALREADY_EXISTS",
        "ALREADY_EXISTS",
        "PERMISSION_DENIED",
        "UNAUTHENTICATED",
        "CUSTOMER_UNAUTHORIZED",
        "FEATURE_DISABLED",
    }
)
"""Answers that trying again does not change."""


def recorded_in_mlflow(uri: str, run_id: str) -> Recorded:
    """The run of this id in an MLflow store. RecordError where there is none, or the store does not answer."""
    return MlflowStore(uri, "", "").recorded(run_id)


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
        self._last_steps: dict[str, int] = {}

    # --- opening ------------------------------------------------------------------------------------------

    def open(self, run_id: str | None) -> str:
        _import_mlflow()
        with database_lock(self._uri) as database, self._translated():
            if _is_database(self._uri):
                _probe(self._uri)
            from mlflow import MlflowClient

            self._client = MlflowClient(tracking_uri=self._uri)
            if run_id is None:
                beside = f"{database.parent.as_uri()}/mlartifacts" if database else self._artifacts
                self._experiment_id = self._get_or_create_experiment(
                    beside if _is_database(self._uri) else None
                )
        if run_id is None:
            self._create()
        else:
            self._reopen(run_id)
        return self._run_id

    def recorded(self, run_id: str) -> Recorded:
        """What the store knows of a run."""
        _import_mlflow()
        shown = without_password(self._uri)
        database = urlsplit(self._uri).path[1:] if self._uri.startswith("sqlite:") else ""
        if database and not Path(database).exists():
            raise RecordError(f"run {run_id}: there is no record at {shown!r}; name its store with --uri")
        with database_lock(self._uri), self._translated():
            if _is_database(self._uri):
                _probe(self._uri)
            from mlflow import MlflowClient

            self._client = MlflowClient(tracking_uri=self._uri)
        with self._translated():
            run = self._client.get_run(run_id)
            self._run_id, self._experiment_id = run_id, run.info.experiment_id
            names = {item.path for item in self._client.list_artifacts(run_id)}
            with tempfile.TemporaryDirectory() as folder:
                spec, summary = (
                    Path(self._client.download_artifacts(run_id, name, folder)).read_text(encoding="utf-8")
                    if name in names
                    else None
                    for name in ("spec.yaml", "summary.json")
                )
        return recorded(run_id, run.info.status, spec, summary, self.url(), repr(shown))

    def _get_or_create_experiment(self, artifacts: str | None) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(self._experiment_name)
        if found is None:
            try:
                # The tag opens the experiment on its training pages instead of the ones for language models.
                kind = {"mlflow.experimentKind": "custom_model_development"}
                return str(self._client.create_experiment(self._experiment_name, artifacts, tags=kind))
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = self._client.get_experiment_by_name(
                    self._experiment_name
                )  # another process was faster
        if found.lifecycle_stage != "active":
            raise RecordError(
                f"record.experiment: {self._experiment_name!r} was deleted in MLflow; restore it or name another"
            )
        return str(found.experiment_id)

    def _create(self) -> None:
        tags = {"mlflow.user": _user(), "mlflow.source.type": "LOCAL"}
        with self._translated(
            again=False
        ):  # a run whose creation was not confirmed may exist: a second try would make two
            run = self._client.create_run(
                self._experiment_id, start_time=self._start_ms, run_name=self._run_name or None, tags=tags
            )
        self._run_id = run.info.run_id

    def _reopen(self, run_id: str) -> None:
        with self._translated():
            run = self._client.get_run(run_id)
            if run.info.lifecycle_stage != "active":
                raise RecordError(f"run {run_id}: was deleted in MLflow; restore it to go on")
            self._run_id, self._experiment_id = run_id, run.info.experiment_id
            self._params = dict(run.data.params)
            # `data.metrics` has values without their steps; the entities behind it are the latest point of each key.
            self._last_steps = {metric.key: metric.step for metric in run.data._metric_objs}
            self._client.update_run(run_id, status="RUNNING")

    # --- writing ------------------------------------------------------------------------------------------

    def last_steps(self) -> Mapping[str, int]:
        return self._last_steps

    def log_metrics(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        with self._translated():
            self._client.log_batch(
                self._run_id, metrics=[Metric(*point) for point in points], synchronous=True
            )

    def log_params(self, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        legal = {
            store_key(name): self._kept_whole("params", name, text, _LONGEST_PARAM)
            for name, text in params.items()
        }
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

        named = {_NAMES_IN_MLFLOW.get(name, name): text for name, text in tags.items()}
        legal = {
            store_key(name): self._kept_whole("tags", name, text, _LONGEST_TAG)
            for name, text in named.items()
        }
        for batch in _batches(legal):
            with self._translated():
                entities = [RunTag(name, value) for name, value in batch]
                self._client.log_batch(self._run_id, tags=entities, synchronous=True)

    def log_file(self, path: Path, folder: str) -> None:
        with self._translated():
            self._client.log_artifact(self._run_id, str(path), folder or None)

    def set_status(self, status: Status) -> None:
        with self._translated():
            if status == "RUNNING":
                self._client.update_run(self._run_id, status=status)
            else:
                self._client.set_terminated(self._run_id, status)

    def url(self) -> str:
        if _is_database(self._uri):
            return ""
        parts = urlsplit(self._uri)
        base = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
        return f"{base}/#/experiments/{self._experiment_id}/runs/{self._run_id}?workflowType=machine_learning"

    def _kept_whole(self, folder: str, name: str, text: str, longest: int) -> str:
        """`text`, or where it is too long the name of the artifact that has it."""
        if len(text) <= longest:
            return text
        digest = hashlib.sha256(text.encode()).hexdigest()
        file = f"{folder}/{store_key(name).replace('/', '.')}-{digest[:12]}.txt"
        with self._translated():
            self._client.log_text(self._run_id, text, file)
        return f"{len(text)} characters, whole in the artifact {file}, sha256 {digest}"

    @contextmanager
    def _translated(self, *, again: bool = True) -> Iterator[None]:
        """MLflow's failures as ours, in one line: UnavailableError where trying again may help."""
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except (MlflowException, SQLAlchemyError, OSError, ImportError) as error:
            if _is_final(error):
                message = f"record.uri: {without_password(self._uri)!r} refuses: {_reason(error)}"
                raise RecordError(message) from error
            raise (UnavailableError if again else RecordError)(
                unreachable(self._uri, _reason(error))
            ) from error


def _import_mlflow() -> None:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import mlflow
    except ModuleNotFoundError as error:
        if error.name != "mlflow":
            raise
        raise RecordError(
            "record.uri: mlflow is not installed; pip install mlflow, or set record.uri=off"
        ) from error
    for logger in (mlflow.__name__, "alembic"):
        logging.getLogger(logger).setLevel(logging.WARNING)


def _is_database(uri: str) -> bool:
    """Whether this process writes to a database itself; a server is asked over http."""
    return urlsplit(uri).scheme.partition("+")[0] in {"sqlite", "postgresql", "mysql", "mssql"}


def _probe(uri: str) -> None:
    """Connect once: MLflow itself would try for a hundred seconds before it says that it cannot."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(uri)
    try:
        sqlalchemy.inspect(engine).get_table_names()
    finally:
        engine.dispose()


def _is_final(error: Exception) -> bool:
    """Whether the same call would fail again: it was refused, or names what is not there."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import OperationalError, SQLAlchemyError

    if isinstance(error, MlflowException):
        return error.error_code in _REFUSED
    if isinstance(error, SQLAlchemyError):
        return not isinstance(error, OperationalError)
    return isinstance(error, FileNotFoundError | PermissionError | ImportError)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user id need not have a name
        return str(os.getuid())


def _batches(values: Mapping[str, str]) -> Iterator[list[tuple[str, str]]]:
    pairs = list(values.items())
    return (pairs[start : start + _PER_REQUEST] for start in range(0, len(pairs), _PER_REQUEST))


def _reason(error: BaseException) -> str:
    """The root of a failure in one line: the system's own words where a long chain ends in them."""
    text = str(error)
    system = re.search(r"\[Errno -?\d+\] ([^\n'\")]+)", text)
    if system:
        return system.group(1)
    lines = text.strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:500] if lines else 'no message'}"
