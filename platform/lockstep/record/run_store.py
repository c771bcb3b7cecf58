"""What is asked of a place that keeps runs, by the recorder and by those who read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

from lockstep.errors import NoSuchRunError, RecordError
from lockstep.record.data_sets import DataSet
from lockstep.record.final_model import FinalModel
from lockstep.record.points import Point

Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]

POINTS_PER_CALL = 1000
"""The most metric points that one call may bring; MLflow refuses more in one request."""


SWEEP_FILE = "sweep.yaml"
"""The document by which the run of a sweep is known."""


Sent = Callable[[int], None]


class UnavailableError(RecordError):
    """The store does not answer now; the same call may succeed later. Example: the tracking server restarts."""


class DeniedError(UnavailableError):
    """The store, or a proxy before it, lets this process do nothing now. Example: a token was changed (401), a route is missing (404)."""


class RejectedError(RecordError):
    """The store does not take this content, and will not later. Example: a file is larger than a proxy lets through (413)."""


class RunStore(Protocol):
    """One run in a store. `open` comes first. Calls come from several threads, and may be made twice: the second changes nothing.

    Every call raises UnavailableError where trying again may help and RecordError where it cannot.
    """

    def open(self, run_id: str | None) -> str:
        """Create a run, or reopen the one that is named, as it is; its id."""

    def last_steps(self) -> Mapping[str, int]:
        """The highest step that the opened run already has of each metric key."""

    def recorded_steps(self, key: str) -> Collection[int]:
        """All steps that the run has of a metric key."""

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

    def log_final_model(self, folder: Path, model: FinalModel, step: int) -> None:
        """Keep the model that the run ended with, whose graph is in `folder`, where the store has a place for that."""

    def log_checkpoint(
        self, step: int, tags: Mapping[str, str], folder: Path | None, sent: Sent = lambda nbytes: None
    ) -> None:
        """Keep a checkpoint with the files of its folder, or by the reference that its tags are where there is none.

        `sent` is called after each file that was copied, with its size.
        """

    def checkpoints(self) -> Mapping[int, bool]:
        """The steps whose checkpoints the store has something of, and whether that is whole, its files included."""

    def aliased_steps(self) -> frozenset[int]:
        """The steps whose checkpoints someone has given an alias in the store's registry of models."""

    def delete_checkpoint(self, step: int) -> None:
        """Delete a checkpoint and its files, unless it has an alias."""

    def set_status(self, status: Status) -> None:
        """End the run, or mark it RUNNING again."""

    def url(self) -> str:
        """A link that lands on the run's page, or nothing where the store has no pages."""


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
        raise NoSuchRunError(
            f"run {run_id} in {where} has no spec.yaml; either it was ended before it began, and is started anew with its spec, or Lockstep did not make it"
        )
    known: Status = status if status in get_args(Status) else "RUNNING"  # type: ignore[assignment]
    return Recorded(run_id, known, document, found, url)


def no_such_run(run_id: str, where: str, advice: str) -> NoSuchRunError:
    """The error for an id that a store does not have, though it answers."""
    if not re.fullmatch("[0-9a-f]{32}", run_id):
        return NoSuchRunError(
            f"run {run_id or repr(run_id)}: no record of it in {where}; wanted a whole id, 32 hexadecimal digits, as `lockstep runs` lists them"
        )
    return NoSuchRunError(
        f"run {run_id}: no record of it in {where}; `lockstep runs` lists those that it has; {advice}, or its store with --uri"
    )
