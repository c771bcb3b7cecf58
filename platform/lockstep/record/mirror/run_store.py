"""The interface of a place that stores runs, for the recorder and for readers."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

from lockstep.errors import NoSuchRunError
from lockstep.parsing import json_value, yaml_value
from lockstep.record import problems
from lockstep.record.events.metrics import Point
from lockstep.record.mirror.data_sets import DataSet
from lockstep.record.mirror.final_model_files import FinalModel

Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]

POINTS_PER_CALL = 1000
"""The most metric points in one call; MLflow refuses more in one request."""


SWEEP_FILE = "sweep.yaml"
"""The document that marks a run as that of a sweep."""


Sent = Callable[[int], None]


class Ended(NamedTuple):
    """With which status a run has ended, when (Unix seconds), and why if it failed."""

    status: str
    at: float
    error: str


class Measured(NamedTuple):
    """A metric of an evaluation, and the data set that it is of if that is known."""

    point: Point
    data: DataSet | None


class RunStore(Protocol):
    """One run in a store. Call `open` first. Calls come from several threads, and may be repeated: a repetition changes nothing.

    A store that inherits from it keeps nothing of what it does not define: no points, data sets, models, checkpoints or pages. Every call raises UnavailableError if trying again may help, and RecordError if it cannot.
    """

    def open(self, run_id: str | None) -> str:
        """Create a run, or reopen the named one as it is. Returns its id."""

    def last_steps(self) -> Mapping[str, int]:
        """The highest step that the opened run already has of each metric key."""
        return {}

    def recorded_steps(self, key: str) -> Collection[int]:
        """All steps that the run has of a metric key."""
        return ()

    def log_metrics(self, points: Sequence[Point]) -> None:
        """Add up to POINTS_PER_CALL points."""
        return

    def log_params(self, params: Mapping[str, str]) -> None:
        """Set parameters. An existing one with another value keeps it; a tag notes the difference."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set or replace tags."""

    def log_data(self, data: Sequence[DataSet]) -> None:
        """Store which data sets the run uses, if the store has a place for that."""
        return

    def log_file(self, path: Path, folder: str) -> None:
        """Store a copy of a file under `folder`, or at the top if that is empty."""

    def log_final_model(self, folder: Path, model: FinalModel, step: int) -> None:
        """Store the final model of the run, whose graph is in `folder`, if the store has a place for that."""
        return

    def log_checkpoint(
        self, step: int, tags: Mapping[str, str], folder: Path | None, sent: Sent = lambda nbytes: None
    ) -> None:
        """Store a checkpoint with the files of its folder or, without a folder, as the reference in its tags.

        `sent` is called with the size of each file after it was copied.
        """
        return

    def keep_reference(self, step: int, tags: Mapping[str, str]) -> None:
        """Keep only the reference to a checkpoint, whose files are deleted if the store has them. One with an alias keeps them."""
        self.log_checkpoint(step, tags, None)

    def log_evaluation(self, step: int, evaluation: Sequence[Measured]) -> None:
        """Link what the evaluations of a step measured to its checkpoint, if the store has that; the run has these points already."""
        return

    def checkpoints(self) -> Mapping[int, bool]:
        """The steps of whose checkpoints the store has something, and whether it is whole, files included."""
        return {}

    def aliased_steps(self) -> frozenset[int]:
        """The steps whose checkpoints have an alias in the store's model registry."""
        return frozenset()

    def delete_checkpoint(self, step: int) -> None:
        """Delete a checkpoint and its files, unless it has an alias."""
        return

    def ended(self) -> Ended | None:
        """How the run had ended when it was opened; None where it goes on, or its store does not tell when that was."""

    def set_status(self, status: Status, at: float | None = None) -> None:
        """End the run, `at` Unix seconds or else now, or mark it RUNNING again."""

    def url(self) -> str:
        """A link to the run's page; empty if the store has no pages."""
        return ""


class RunInfo(NamedTuple):
    """A run as its store has it. `step` is the last recorded one; times are Unix seconds."""

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
    """A store of runs, for reading. Raises RecordError for what does not exist, UnavailableError where the store does not answer."""

    passed_over: list[str]
    """What `runs` could not read, one line each."""

    def runs(self, experiment: str | None, limit: int) -> list[RunInfo]:
        """The newest runs, newest first."""

    def run(self, run_id: str) -> RunInfo:
        """One run."""

    def artifacts(self, run_id: str) -> list[str]:
        """The paths of all files that are stored with a run."""

    def text(self, run_id: str, path: str) -> str:
        """The text of one of these files, as `files.as_text` has it."""


class StoredRun(NamedTuple):
    """What a store knows of a run: enough to resume it."""

    run_id: str
    status: Status
    spec: dict[str, Any]
    """Its resolved spec, as a document."""
    summary: dict[str, Any]
    """Its summary; empty if it has not ended well."""
    url: str


class CheckpointCopy(NamedTuple):
    """A copy of a checkpoint in a store; `download` puts its files into an existing folder."""

    step: int
    download: Callable[[Path], None]


def recorded(
    run_id: str, status: str, spec: str | None, summary: str | None, url: str, where: str
) -> StoredRun:
    """A run from its files. RecordError where they are not those of a run of Lockstep."""
    try:
        document = yaml_value(spec) if spec is not None else None
        parsed_summary = json_value(summary) if summary is not None else {}
    except ValueError as error:
        raise problems.DAMAGED(
            run=run_id,
            file="record",
            where=where,
            got=f"cannot be understood: {' '.join(str(error).split())}",
        ) from error
    if not isinstance(parsed_summary, dict) or (
        status == "FINISHED" and summary is None and isinstance(document, dict)
    ):
        damage = "is missing" if summary is None else "has no summary"
        raise problems.DAMAGED(run=run_id, file="summary.json", where=where, got=damage)
    if not isinstance(document, dict):
        raise problems.NO_SPEC(run=run_id, where=where)
    known_status: Status = status if status in get_args(Status) else "RUNNING"  # type: ignore[assignment]
    return StoredRun(run_id, known_status, document, parsed_summary, url)


def no_such_run(run_id: str, where: str, advice: str) -> NoSuchRunError:
    """The error for an id that a store does not have, although it answers."""
    if not re.fullmatch("[0-9a-f]{32}", run_id):
        return problems.PART_OF_ID(run=run_id or repr(run_id), where=where)
    return problems.NO_RUN(run=run_id, where=where, advice=advice)
