"""The curves of a recorded run: the points of its steps, evaluations and observations, as every view shows them, with the names that they have in MLflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.parsing import MOST_YAML_BYTES, yaml_value
from lockstep.paths import read_bounded
from lockstep.record.events.metrics import evaluation_points, observation_points, step_points
from lockstep.record.ledger.journal_file import NAME
from lockstep.record.ledger.live_rows import RowsSoFar
from lockstep.record.ledger.rows import Observation, StepRow
from lockstep.record.ledger.tables import Rows
from lockstep.record.mirror.run_store import RunInfo
from lockstep.record.mirror.stores import find_history, find_observations, find_run
from lockstep.spec.fields import PLACEMENT
from lockstep.spec.messages import shown
from lockstep.views import problems


class Moment(NamedTuple):
    """A row of the ledger as a view shows it: after which step, when (Unix seconds), and a value for each key."""

    step: int
    wall_clock: float
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Curves:
    """The curves of one run. `document` is its spec, without secrets; `failed` is None while the run has not ended."""

    run_id: str
    document: Mapping[str, Any]
    rows: RowsSoFar | Rows
    failed: bool | None
    observations: Sequence[Observation] = ()

    @property
    def name(self) -> str:
        return str(self.document.get("name") or "run")

    @property
    def fields(self) -> dict[str, Any]:
        """The sections of the spec that can change bits."""
        return {name: value for name, value in self.document.items() if name not in PLACEMENT}

    def moments(self) -> Iterator[Moment]:
        """Every row once, in the order of the steps; after a step come its observation and its evaluation. Made anew for each call.

        The moments of a run that has gone on begin with those that it had before.
        """
        scaled, previous = self.document.get("precision") == "fp16", None
        rows = merge(self._steps(), self.observations, self._evaluations(), key=attrgetter("step"))
        for row in rows:
            if isinstance(row, StepRow):
                points, previous = step_points(row, previous, scaled=scaled), row
            elif isinstance(row, Observation):
                points = iter(
                    sorted(observation_points(row))
                )  # a journal and a table have them in orders of their own
            else:
                points = evaluation_points(row)
            yield Moment(row.step, row.wall_clock, {point.key: point.value for point in points})

    def _steps(self) -> Iterator[Any]:
        return self.rows.steps() if isinstance(self.rows, RowsSoFar) else iter(self.rows.steps)

    def _evaluations(self) -> Iterator[Any]:
        return iter(self.rows.evaluations)


def _document(run_id: str, path: Path) -> Mapping[str, Any]:
    """The spec of a run. RecordError where the file is none."""
    try:
        document = yaml_value(read_bounded(path, MOST_YAML_BYTES).decode())
    except ValueError as error:
        document = " ".join(str(error).split())
    if not isinstance(document, dict):
        raise problems.NO_SPEC(run=run_id, file=path, got=shown(document))
    return document


def last_metrics(run: RunInfo) -> Mapping[str, float]:
    """The last values of a run's metrics: those that its store lists, and what else the run's own folder has of evaluations."""
    folder = Path(run.tags.get("lockstep.folder", ""))
    if any(key.startswith("eval/") for key in run.metrics) or not (folder / NAME).is_file():
        return run.metrics
    evaluations = RowsSoFar(folder).evaluations
    return {**run.metrics, **(evaluations[-1].metrics if evaluations else {})}


def curves_of(run_id: str, uri: str, folder: Path) -> Curves:
    """The curves of a run so far, from its own `folder` where that is here, else from the ledger that its store has.

    NoSuchRunError where there is no such run, SpecError where no step of it is recorded.
    """
    try:
        if (folder / NAME).exists():
            document = _document(run_id, folder / "spec.yaml")
            rows = RowsSoFar(folder)
            curves = Curves(run_id, document, rows, rows.failed, rows.observations)
        else:
            run = find_run(uri, run_id, folder.parent)
            observations = find_observations(uri, run_id, folder.parent)
            history = find_history(uri, run_id, folder.parent)
            curves = Curves(run_id, run.spec, history, run.status != "FINISHED", observations)
    except OSError as error:
        raise problems.UNREADABLE(run=run_id, folder=folder, got=error.strerror or error) from error
    if next(curves.moments(), None) is None:
        raise problems.NO_STEP(run=run_id)
    return curves
