"""Compares four records of a run: its journal, its ledger, the history in its newest checkpoint, and its store."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import StorageError
from lockstep.parsing import MOST_BYTES
from lockstep.paths import read_beneath
from lockstep.record.events.metrics import OF_TIME, Point, points_of
from lockstep.record.events.union import Corrupted, Finished, Mended, Opened
from lockstep.record.ledger import tables
from lockstep.record.ledger.journal import Damage, Journal
from lockstep.record.ledger.journal_end import PROCESS, end_of, lost_end, status_of
from lockstep.record.ledger.row_comparison import evaluation_difference, same_row, step_difference
from lockstep.record.ledger.rows import EvaluationRow, Observation, StepRow
from lockstep.record.mirror.projection import Projection
from lockstep.record.mirror.run_files import Content, as_written
from lockstep.record.mirror.seal import SEAL, broken, sealed_files
from lockstep.record.plots import run_plots
from lockstep.record.runs.state_differences import State
from lockstep.spec.fields import Spec

COPIED = ("spec.yaml", "summary.json", "ledger.parquet", "evaluations.parquet")
"""Files of the run's folder that its store has too."""
_TABLES = ("ledger.parquet", "evaluations.parquet", tables.OBSERVATIONS)


class RecordDifference(NamedTuple):
    """One difference, found in the `journal`, the `ledger`, the `checkpoint`, the run's `folder` or the `store`."""

    where: str
    what: str
    mended: bool = False
    lost: bool = False
    """Whether nothing in the folder has the right content: a repair would send what is there, and seal it."""


class InStore(NamedTuple):
    """What a store has of a run; `digests` are sha256 of files, by name."""

    status: str
    points: Mapping[str, Sequence[Point]]
    digests: Mapping[str, str]
    state: State

    @property
    def process(self) -> str | None:
        """The process that recorded the run last."""
        return self.state.tags.get(PROCESS)


def check_journal(
    journal: Journal, history: tables.Rows | None, *, repair: bool
) -> Iterator[RecordDifference]:
    """Compare the journal with the history of a checkpoint; `repair` adds the rows that the journal lacks."""
    rows = history or tables.Rows((), ())
    steps = [row for row in rows.steps if not journal.has_step(row.step)]
    evaluations = [row for row in rows.evaluations if journal.evaluation(row.step) is None]
    if run := journal.other_run():
        yield RecordDifference("journal", f"is that of run {run}", lost=True)
    yield from _differing(journal, rows)
    if repair and (steps or evaluations):
        journal.add([*steps, *evaluations])
    lacking = [f"step {row.step}" for row in steps]
    lacking += [f"the evaluation after step {row.step}" for row in evaluations]
    for item in lacking:
        yield RecordDifference("journal", f"lacks {item}, which the checkpoint has", repair)
    missing = journal.missing_steps() if repair or not steps else range(0)
    if missing:
        yield RecordDifference(
            "journal", f"lacks steps {missing.start} to {missing.stop - 1}; no checkpoint has them"
        )
    damage = journal.damage
    mended = [line for line in damage if repair and _is_back(line, journal, rows)]
    if mended:
        contents = ", ".join(line.content for line in mended)
        journal.add([Mended([line.start for line in mended], f"damaged lines ({contents}), by a check")])
    for line in damage:
        yield RecordDifference(
            "journal", f"a damaged line at byte {line.start}: {line.content}", line in mended
        )


def _is_back(damage: Damage, journal: Journal, history: tables.Rows) -> bool:
    """Whether the rows of a damaged line are in the journal again. Anything else on a line is stored nowhere else."""
    kind, _, number = damage.content.partition(" ")
    if kind == "step" and number:
        return journal.has_step(int(number))
    if kind == "evaluation" and number:
        return journal.evaluation(int(number)) is not None
    if kind in ("step", "evaluation", "unreadable"):
        return bool(history.steps) and history.steps[-1].step >= journal.last_step
    return True


def _differing(journal: Journal, history: tables.Rows) -> Iterator[RecordDifference]:
    for row in history.steps:
        journal_step = journal.step(row.step) if journal.has_step(row.step) else None
        if journal_step is not None and (difference := step_difference(journal_step, row)):
            yield RecordDifference(
                "checkpoint", f"has other bits of step {row.step} than the journal: {difference}"
            )
    for evaluated in history.evaluations:
        journal_evaluation = journal.evaluation(evaluated.step)
        if journal_evaluation is not None and (
            difference := evaluation_difference(journal_evaluation, evaluated)
        ):
            yield RecordDifference(
                "checkpoint",
                f"has another evaluation after step {evaluated.step} than the journal: {difference}",
            )


def check_ledger(folder: Path, journal: Journal) -> Iterator[RecordDifference]:
    """Compare the Parquet files of a run that has ended with its journal."""
    if not _ended(journal):
        return
    for read, name, rows in (
        (tables.read_parquet, "ledger.parquet", list(journal.steps())),
        (tables.read_evaluations, "evaluations.parquet", journal.evaluations()),
        (tables.read_observations, tables.OBSERVATIONS, journal.observations()),
    ):
        if rows and (difference := _other_rows(read, folder / name, rows)):
            yield RecordDifference("ledger", f"{name} {difference}")


def _ended(journal: Journal) -> bool:
    return bool(journal.events) and not isinstance(journal.events[-1], Opened)


def _other_rows(
    read: Callable[[Path], Sequence[StepRow | EvaluationRow | Observation]],
    path: Path,
    recorded: Sequence[StepRow | EvaluationRow | Observation],
) -> str:
    """How the rows of a file differ from the journal's (`recorded`), every column bit for bit; empty if they do not."""
    try:
        rows = read(path)
    except StorageError as error:
        return f"cannot be read ({error})"
    if len(rows) != len(recorded):
        return f"has {len(rows)} rows, and the journal {len(recorded)}"
    for row, expected in zip(rows, recorded, strict=True):
        if not same_row(row, expected):
            return f"has another row of step {expected.step} than the journal"
    return ""


def check_store(
    folder: Path, journal: Journal, store: InStore, *, scaled: bool
) -> Iterator[RecordDifference]:
    """Compare a store with the journal and the run's folder."""
    expected: dict[str, dict[int, Point]] = {}
    for point in expected_points(journal, scaled=scaled):
        expected.setdefault(point.key, {})[point.step] = point
    corrupted = [event for event in journal.events if isinstance(event, Corrupted)]
    doubted = {step for event in corrupted for step in range(event.since + 1, event.step + 1)}
    for key in sorted({*expected, *store.points}.difference(OF_TIME)):
        if key in expected or key.startswith(("train/", "eval/")):
            yield from _points(
                key, *_undoubted(key, expected.get(key, {}), store.points.get(key, ()), doubted)
            )
    if _ended(journal):
        yield from _status("store", store.status, store.process, journal)
        for name in COPIED:
            path = folder / name
            if path.exists() and store.digests.get(name) != digest(path):
                content = "another file" if name in store.digests else "no file"
                yield RecordDifference("store", f"has {content} {name}")


def check_folder(
    folder: Path, journal: Journal, store: InStore | None, spec: Spec
) -> Iterator[RecordDifference]:
    """Compare the files of a run's folder with what its log says, and with the status in `store`, the run.json of one that is recorded in its folder alone."""
    for name, content in _documents(spec, folder, journal).items():
        if difference := _other_document(folder, name, as_written(content)):
            yield RecordDifference("folder", f"{name} {difference}")
    end = end_of(journal.events)
    for path in end.files if isinstance(end, Finished) else ():
        if path.suffix == ".safetensors" and (difference := _damaged(path)):
            yield RecordDifference("folder", f"{path.parent.name}/{path.name} {difference}", lost=True)
    if isinstance(end, Finished) and end.status == "FINISHED" and (difference := _no_seal(folder)):
        yield RecordDifference("folder", f"{SEAL} {difference}")
    if store is not None and _ended(journal):
        yield from _status("folder", store.status, store.process, journal)


def check_seal(folder: Path, spec: Spec, journal: Journal) -> Iterator[RecordDifference]:
    """Compare the files of a run's folder with its seal, if it has one: those that nothing else is compared with."""
    try:
        sealed = sealed_files(folder)
    except (OSError, ValueError):
        return  # which is told by itself
    compared = {*_documents(spec, folder, journal), *_TABLES}
    for name, stated, found in broken(folder, sealed):
        if name not in compared:
            how = "was not sealed" if stated is None else f"has {found}, where the seal has {stated}"
            how = "is missing" if found is None else how
            drawn_again = name.startswith(f"{run_plots.FOLDER}/")
            yield RecordDifference("folder", f"{name} {how}", lost=stated is not None and not drawn_again)


def _documents(spec: Spec, folder: Path, journal: Journal) -> dict[str, Content]:
    """The documents that a run's folder should have by its journal."""
    projection = Projection(spec, folder, journal)
    projection.fold(journal.events)
    # An end that is no whole one for damage of the journal alone is reported as that.
    final = projection.end.documents if projection.end and projection.lack is None else {}
    return {**projection.documents, **final}


def _status(where: str, status: str, process: str | None, journal: Journal) -> Iterator[RecordDifference]:
    """A wrong status. A right one, of an end that the journal has lost, is reported as a difference of the journal."""
    expected = status_of(journal.events)
    if status != expected and not lost_end(journal.events, status, process):
        yield RecordDifference(where, f"has status {status}, wanted {expected}")


def _other_document(folder: Path, name: str, expected: bytes) -> str:
    """How a file differs from the expected content; empty if it does not."""
    try:
        actual = read_beneath(folder, name, max(MOST_BYTES, len(expected)))
    except FileNotFoundError:
        return "is missing"
    except (OSError, ValueError) as error:
        return f"cannot be read ({error})"
    return "" if actual == expected else "is another one than the journal has"


def _no_seal(folder: Path) -> str:
    """What is wrong with the seal itself; empty if it can be read."""
    try:
        sealed_files(folder)
    except FileNotFoundError:
        return "is missing"
    except (OSError, ValueError) as error:
        return f"cannot be read ({error})"
    return ""


def _damaged(path: Path) -> str:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy"):
            return ""
    except FileNotFoundError:
        return "is missing"
    except (OSError, SafetensorError) as error:
        return f"cannot be read ({error})"


def expected_points(journal: Journal, *, scaled: bool) -> Iterator[Point]:
    """The points that the journal's events become in a store."""
    opened = (event.at for event in journal.events if isinstance(event, Opened))
    started_at = next(opened, math.inf)  # its line is damaged: nothing tells when a sample was taken
    previous: StepRow | None = None
    for row in journal.steps():
        yield from points_of(row, previous, scaled=scaled, started_at=started_at)
        previous = row
    for entry in journal.read(0):
        event = entry.event
        if event is not None and not isinstance(event, StepRow):
            yield from points_of(event, None, scaled=scaled, started_at=started_at)


def _undoubted(
    key: str, expected: Mapping[int, Point], stored: Sequence[Point], doubted: Collection[int]
) -> tuple[Mapping[int, Point], Sequence[Point]]:
    """What to compare where a store has points of corrupted bits: it deletes none, and the right ones follow them.

    In these steps it may have the timing of either.
    """
    if not doubted:
        return expected, stored
    if key.startswith("perf/"):
        undoubted = {step: point for step, point in expected.items() if step not in doubted}
        return undoubted, [point for point in stored if point.step not in doubted]

    def is_right(point: Point) -> bool:
        right = expected.get(point.step)
        return right is None or (point.timestamp_ms, _value(point)) == (right.timestamp_ms, _value(right))

    return expected, [point for point in stored if point.step not in doubted or is_right(point)]


def _points(key: str, expected: Mapping[int, Point], stored: Sequence[Point]) -> Iterator[RecordDifference]:
    steps = [point.step for point in stored]
    lacking = sorted(expected.keys() - set(steps))
    if lacking:
        yield RecordDifference("store", f"lacks {len(lacking)} points of {key}, from step {lacking[0]} on")
    more = sorted(set(steps) - expected.keys())
    if more:
        yield RecordDifference(
            "store", f"has {len(more)} points of {key} more than the journal, from step {more[0]} on"
        )
    if len(steps) != len(set(steps)):
        double = sorted({step for step in steps if steps.count(step) > 1})
        yield RecordDifference("store", f"has step {double[0]} of {key} twice")
    differing = [p.step for p in stored if p.step in expected and _value(p) != _value(expected[p.step])]
    if differing:
        yield RecordDifference("store", f"has another value of {key} at step {differing[0]}")


def _value(point: Point) -> str:
    """A value as MLflow stores it."""
    if math.isnan(point.value):
        return "nan"
    return repr(max(-sys.float_info.max, min(sys.float_info.max, point.value)) + 0.0)


def digest(path: Path) -> str:
    """The sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
