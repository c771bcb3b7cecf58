"""Reads runs from an MLflow store, and corrects the status of runs whose process has gone."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.errors import RecordError
from lockstep.files import as_text
from lockstep.parsing import MOST_BYTES
from lockstep.paths import beneath, read_beneath, read_bounded, shown
from lockstep.record import problems
from lockstep.record.events.metrics import Point
from lockstep.record.mirror.checkpoint_copies import MANIFEST, SHARED, named_by
from lockstep.record.mirror.documents import Verdict, note
from lockstep.record.mirror.mlflow.client import connecting, identified, page_url, translated
from lockstep.record.mirror.mlflow.models import STEP, Models, files_of, is_checkpoint
from lockstep.record.mirror.run_store import CheckpointCopy, RunInfo, StoredRun, no_such_run, recorded
from lockstep.record.mirror.store_uri import database_path
from lockstep.record.redaction import without_uri_secrets
from lockstep.record.runs.heartbeat import same_beat, vanished
from lockstep.record.runs.record_differences import InStore, digest
from lockstep.record.runs.state_differences import State

_MOST_FINISHED = 10
"""The most runs of one identity that are looked at: there are more if one was planted, or stands in for another."""


def recorded_in_mlflow(uri: str, run_id: str) -> StoredRun:
    """The run of this id in an MLflow store. RecordError where there is none, or the store does not answer."""
    _require_store(uri, f"run {run_id}")
    with connecting(uri) as (client, _):
        run = _run(client, uri, run_id)
        names = {item.path for item in client.list_artifacts(run_id)}
        with tempfile.TemporaryDirectory() as folder:
            spec, summary = (
                _text(run_id, Path(client.download_artifacts(run_id, name, folder)))
                if name in names
                else None
                for name in ("spec.yaml", "summary.json")
            )
    url = page_url(uri, run.info.experiment_id, run_id)
    return recorded(run_id, run.info.status, spec, summary, url, repr(without_uri_secrets(uri)))


def _text(run_id: str, path: Path) -> str:
    """A downloaded text. RecordError for one that is too large."""
    try:
        return as_text(read_bounded(path, MOST_BYTES))
    except ValueError as error:
        raise problems.UNREADABLE(run=run_id, file=shown(path.name), got=error) from error


def _run(client: Any, uri: str, run_id: str) -> Any:
    """MLflow's run of this id. NoSuchRunError where the store has none."""
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code not in {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}:
            raise
        raise no_such_run(run_id, repr(without_uri_secrets(uri)), "give another id") from error
    identified(uri, run.info.run_id)
    return run


def _require_store(uri: str, subject: str) -> None:
    """RecordError where the store would be a new file, which MLflow would create under any name."""
    database = database_path(uri) if uri.startswith("sqlite:") else ""
    if database and not Path(database).exists():
        raise problems.NO_STORE(what=subject, uri=without_uri_secrets(uri))


def files_from_mlflow(uri: str, run_id: str, names: Sequence[str], folder: Path) -> list[str]:
    """Download the named files that the run has into `folder`. Returns their names."""
    _require_store(uri, f"run {run_id}")
    with connecting(uri) as (client, _):
        stored = {item.path for item in client.list_artifacts(run_id)}
        available = [name for name in names if name in stored]
        for name in available:
            client.download_artifacts(run_id, name, str(folder))
    return available


def in_mlflow(uri: str, run_id: str, names: Sequence[str]) -> InStore:
    """What an MLflow store has of a run: its status, every point of every metric, its parameters and tags, and the digests of the named files."""
    _require_store(uri, f"run {run_id}")
    with connecting(uri) as (client, _):
        run = _run(client, uri, run_id)
        points = {
            key: [Point(key, m.value, m.timestamp, m.step) for m in client.get_metric_history(run_id, key)]
            for key in run.data.metrics
        }
    with tempfile.TemporaryDirectory() as folder:
        downloaded = files_from_mlflow(uri, run_id, names, Path(folder))
        digests = {name: digest(Path(folder, name)) for name in downloaded}
    state = State(dict(run.data.params), dict(run.data.tags))
    return InStore(run.info.status, points, digests, state)


def finished_in_mlflow(uri: str, identity: str) -> Iterator[StoredRun]:
    """The runs with status FINISHED and this identity, in any experiment, newest first; at most ten, unreadable ones skipped."""
    with connecting(uri) as (client, _):
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        runs = client.search_runs(
            experiments,
            f"tags.`lockstep.identity` = '{identity}' and attributes.status = 'FINISHED'",
            max_results=_MOST_FINISHED,
            order_by=["attributes.start_time DESC"],
        )
    for run in runs:
        with suppress(RecordError):
            yield recorded_in_mlflow(uri, run.info.run_id)


def checkpoint_copies(uri: str, run_id: str) -> list[CheckpointCopy]:
    """The READY copies of a run's checkpoints in an MLflow store that have files, newest first."""
    with connecting(uri) as (client, _):
        experiment = client.get_run(run_id).info.experiment_id
        models = Models(client, experiment, run_id)
        copies = [
            CheckpointCopy(int(model.tags[STEP]), partial(_download, uri, models, model))
            for model in models.ready_models()
            if is_checkpoint(model) and models.has_files(model)
        ]
    return sorted(copies, key=lambda copy: -copy.step)


def _download(uri: str, models: Models, model: Any, folder: Path) -> None:
    """Put the files of a checkpoint into an existing folder, with the shared ones that only the run has.

    The manifest comes first. Only if its hash is that of its content are the files that it names asked for, and no others, whatever
    the store lists. Whoever reads the checkpoint is told what is missing or wrong.
    """
    with (
        translated(uri),
        tempfile.TemporaryDirectory(dir=folder) as download,
    ):  # on its disk, and left with it
        files = files_of(uri, model)
        listed = {item.path for item in files.list_artifacts()}
        if MANIFEST not in listed:
            return
        Path(files.download_artifacts(MANIFEST, download)).replace(beneath(folder, MANIFEST))
        try:
            names = named_by(read_beneath(folder, MANIFEST, MOST_BYTES))
        except ValueError:
            return
        for name in {*names.files, *names.shared} & listed:
            Path(files.download_artifacts(name, download)).replace(beneath(folder, name))
        if missing := set(names.shared) - listed:
            shared = models.shared_files()
            for path in {item.path for item in shared.list_artifacts(SHARED)} & {
                f"{SHARED}/{name}" for name in missing
            }:
                Path(shared.download_artifacts(path, download)).replace(beneath(folder, Path(path).name))


_OURS = "tags.`lockstep.heartbeat` != ''"


class MlflowReader:
    """The RunReader of an MLflow tracking server or database."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self.passed_over: list[str] = []
        _require_store(uri, "record.uri")
        with connecting(uri) as (self._client, _):
            self._experiments = {e.experiment_id: e.name for e in self._client.search_experiments()}

    def runs(self, experiment: str | None, limit: int) -> list[RunInfo]:
        chosen = [key for key, name in self._experiments.items() if experiment in (None, name)]
        if experiment is None and not chosen:
            self._check_is_mlflow()
            return []  # of a user who may see none
        if not chosen:
            available = ", ".join(sorted(self._experiments.values()))
            raise problems.NO_EXPERIMENT(got=experiment, wanted=available)
        with translated(self._uri):
            results = self._client.search_runs(
                chosen, filter_string=_OURS, max_results=limit, order_by=["attributes.start_time DESC"]
            )
        return [self._info(run) for run in results]

    def _check_is_mlflow(self) -> None:
        """RecordError for whoever answers `{}` to everything, which is no list of experiments but an empty one."""
        from mlflow.exceptions import MlflowException

        with translated(self._uri):
            try:
                first = self._client.get_experiment("0")
            except MlflowException as error:
                if error.error_code not in {"PERMISSION_DENIED", "RESOURCE_DOES_NOT_EXIST"}:
                    raise
                return
            identified(self._uri, first.experiment_id)

    def run(self, run_id: str) -> RunInfo:
        with translated(self._uri):
            return self._info(_run(self._client, self._uri, run_id))

    def artifacts(self, run_id: str) -> list[str]:
        with translated(self._uri):
            return list(self._below(run_id, None))

    def text(self, run_id: str, path: str) -> str:
        with translated(self._uri), tempfile.TemporaryDirectory() as folder:
            return _text(run_id, Path(self._client.download_artifacts(run_id, path, folder)))

    def _below(self, run_id: str, folder: str | None) -> Iterator[str]:
        for file in self._client.list_artifacts(run_id, folder):
            if file.is_dir:
                yield from self._below(run_id, file.path)
            else:
                yield file.path

    def _info(self, run: Any) -> RunInfo:
        reason = vanished(run.info.run_id, run.data.tags) if run.info.status == "RUNNING" else ""
        if not reason:
            return self._as_it_is(run)
        with translated(self._uri):
            current = self._client.get_run(run.info.run_id)
        if current.info.status != "RUNNING" or not same_beat(run.data.tags, current.data.tags):
            return self._as_it_is(current)  # it has given a sign of life since it was read
        ended, epitaph = int(float(current.data.tags["lockstep.heartbeat"])), _epitaph(reason)
        with suppress(RecordError), translated(self._uri):  # the run of another user, who will mark it
            for name, text in epitaph.items():
                self._client.set_tag(current.info.run_id, name, text)
            self._client.set_terminated(current.info.run_id, "FAILED", 1000 * ended)
        info = self._as_it_is(current)
        return info._replace(status="FAILED", ended=float(ended), tags={**info.tags, **epitaph})

    def _as_it_is(self, run: Any) -> RunInfo:
        steps = {metric.key: metric.step for metric in run.data._metric_objs}
        return RunInfo(
            run_id=run.info.run_id,
            name=run.info.run_name or "",
            experiment=self._experiments.get(run.info.experiment_id, run.info.experiment_id),
            status=run.info.status,
            started=run.info.start_time / 1000,
            ended=run.info.end_time / 1000 if run.info.end_time and run.info.status != "RUNNING" else None,
            step=steps.get("train/loss", 0),
            metrics={name: _as_recorded(value) for name, value in run.data.metrics.items()},
            params=dict(run.data.params),
            tags=dict(run.data.tags),
            url=page_url(self._uri, run.info.experiment_id, run.info.run_id),
        )


def _epitaph(reason: str) -> Mapping[str, str]:
    return {
        "lockstep.vanished": reason,
        "lockstep.error": reason,
        "mlflow.note.content": note(Verdict("FAILED", f": {reason}"), {}),
    }


def _as_recorded(value: float) -> float:
    """A value of a metric as the run told it: MLflow keeps the largest number in the place of infinity."""
    return math.copysign(math.inf, value) if abs(value) == sys.float_info.max else value
