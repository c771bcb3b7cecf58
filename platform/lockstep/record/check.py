"""Compares four records of a run: its journal, its ledger, the history in its newest checkpoint, and its store."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import StorageError
from lockstep.record import ledger
from lockstep.record.comparison import evaluation_difference, same_row, step_difference
from lockstep.record.events import Corrupted, EvaluationRow, Failed, Finished, Mended, Opened, StepRow
from lockstep.record.journal import Damage, Journal
from lockstep.record.points import Point, points_of
from lockstep.record.replay import last_words

COPIED = ("spec.yaml", "summary.json", "ledger.parquet", "evaluations.parquet")
"""Files of the run's folder that its store has too."""
_LARGEST = 1.7976931348623157e308


class Difference(NamedTuple):
    """One difference, found in the `journal`, the `ledger`, the `checkpoint` or the `store`."""

    where: str
    what: str
    mended: bool = False


class InStore(NamedTuple):
    """What a store has of a run; `digests` are sha256 of files, by name."""

    status: str
    points: Mapping[str, Sequence[Point]]
    digests: Mapping[str, str]


def check_journal(journal: Journal, history: ledger.Rows | None, *, repair: bool) -> Iterator[Difference]:
    """Compare the journal with the history of a checkpoint; `repair` adds the rows that the journal lacks."""
    found = history or ledger.Rows((), ())
    steps = [row for row in found.steps if not journal.has_step(row.step)]
    evaluations = [row for row in found.evaluations if journal.evaluation(row.step) is None]
    yield from _differing(journal, found)
    if repair and (steps or evaluations):
        journal.add([*steps, *evaluations])
    lacking = [f"step {row.step}" for row in steps]
    lacking += [f"the evaluation after step {row.step}" for row in evaluations]
    for what in lacking:
        yield Difference("journal", f"lacks {what}, which the checkpoint has", repair)
    missing = journal.missing_steps() if repair or not steps else range(0)
    if missing:
        yield Difference(
            "journal", f"lacks steps {missing.start} to {missing.stop - 1}; no checkpoint has them"
        )
    damage = journal.damage
    mended = [one for one in damage if repair and _is_back(one, journal, found)]
    if mended:
        held = ", ".join(one.held for one in mended)
        journal.add([Mended([one.start for one in mended], f"damaged lines ({held}), by a check")])
    for one in damage:
        yield Difference("journal", f"a damaged line at byte {one.start}: {one.held}", one in mended)


def _is_back(damage: Damage, journal: Journal, history: ledger.Rows) -> bool:
    """Whether the rows of a damaged line are in the journal again. Anything else on a line is stored nowhere else."""
    kind, _, number = damage.held.partition(" ")
    if kind == "step" and number:
        return journal.has_step(int(number))
    if kind == "evaluation" and number:
        return journal.evaluation(int(number)) is not None
    if kind in ("step", "evaluation", "unreadable"):
        return bool(history.steps) and history.steps[-1].step >= journal.last_step
    return True


def _differing(journal: Journal, history: ledger.Rows) -> Iterator[Difference]:
    for row in history.steps:
        known = journal.step(row.step) if journal.has_step(row.step) else None
        if known is not None and (difference := step_difference(known, row)):
            yield Difference(
                "checkpoint", f"has other bits of step {row.step} than the journal: {difference}"
            )
    for evaluated in history.evaluations:
        before = journal.evaluation(evaluated.step)
        if before is not None and (difference := evaluation_difference(before, evaluated)):
            yield Difference(
                "checkpoint",
                f"has another evaluation after step {evaluated.step} than the journal: {difference}",
            )


def check_ledger(folder: Path, journal: Journal, *, repair: bool) -> Iterator[Difference]:
    """Compare the Parquet files of a run that has ended with its journal; `repair` writes them again."""
    if not _ended(journal):
        return
    steps, path = list(journal.steps()), folder / "ledger.parquet"
    if steps and (what := _other(ledger.read_parquet, path, steps)):
        if repair:
            ledger.write_parquet(steps, path)
        yield Difference("ledger", f"{path.name} {what}", repair)
    evaluations, path = journal.evaluations(), folder / "evaluations.parquet"
    if evaluations and (what := _other(ledger.read_evaluations, path, evaluations)):
        if repair:
            ledger.write_evaluations(evaluations, path)
        yield Difference("ledger", f"{path.name} {what}", repair)


def _ended(journal: Journal) -> bool:
    return bool(journal.events) and not isinstance(journal.events[-1], Opened)


def _other(
    read: Callable[[Path], Sequence[StepRow | EvaluationRow]],
    path: Path,
    wanted: Sequence[StepRow | EvaluationRow],
) -> str:
    """How the rows of a file differ from the wanted ones, every column bit for bit; empty if they do not."""
    try:
        found = read(path)
    except StorageError as error:
        return f"cannot be read ({error})"
    if len(found) != len(wanted):
        return f"has {len(found)} rows, and the journal {len(wanted)}"
    for one, other in zip(found, wanted, strict=True):
        if not same_row(one, other):
            return f"has another row of step {other.step} than the journal"
    return ""


def check_store(folder: Path, journal: Journal, store: InStore, *, scaled: bool) -> Iterator[Difference]:
    """Compare a store with the journal and the run's folder."""
    wanted: dict[str, dict[int, Point]] = {}
    for point in expected_points(journal, scaled=scaled):
        wanted.setdefault(point.key, {})[point.step] = point
    corrupted = [event for event in journal.events if isinstance(event, Corrupted)]
    doubted = {step for event in corrupted for step in range(event.since + 1, event.step + 1)}
    for key in sorted({*wanted, *store.points}):
        if key in wanted or key.startswith(("train/", "eval/")):
            yield from _points(key, *_undoubted(key, wanted.get(key, {}), store.points.get(key, ()), doubted))
    if _ended(journal):
        status = _status(journal)
        if store.status != status:
            yield Difference("store", f"has status {store.status}, wanted {status}")
        for name in COPIED:
            path = folder / name
            if path.exists() and store.digests.get(name) != digest(path):
                what = "another file" if name in store.digests else "no file"
                yield Difference("store", f"has {what} {name}")


def expected_points(journal: Journal, *, scaled: bool) -> Iterator[Point]:
    """The points that the journal's events become in a store."""
    started_at = next(event.at for event in journal.events if isinstance(event, Opened))
    before: StepRow | None = None
    for row in journal.steps():
        yield from points_of(row, before, scaled=scaled, started_at=started_at)
        before = row
    for entry in journal.read(0):
        event = entry.event
        if event is not None and not isinstance(event, StepRow):
            yield from points_of(event, None, scaled=scaled, started_at=started_at)


def _undoubted(
    key: str, wanted: Mapping[int, Point], found: Sequence[Point], doubted: Collection[int]
) -> tuple[Mapping[int, Point], Sequence[Point]]:
    """What to compare where a store has points of corrupted bits: it deletes none, and the right ones follow them.

    In these steps it may have the timing of either.
    """
    if not doubted:
        return wanted, found
    if key.startswith("perf/"):
        left = {step: point for step, point in wanted.items() if step not in doubted}
        return left, [point for point in found if point.step not in doubted]

    def is_right(point: Point) -> bool:
        right = wanted.get(point.step)
        return right is None or (point.timestamp_ms, _value(point)) == (right.timestamp_ms, _value(right))

    return wanted, [point for point in found if point.step not in doubted or is_right(point)]


def _points(key: str, wanted: Mapping[int, Point], found: Sequence[Point]) -> Iterator[Difference]:
    steps = [point.step for point in found]
    lacking = sorted(wanted.keys() - set(steps))
    if lacking:
        yield Difference("store", f"lacks {len(lacking)} points of {key}, from step {lacking[0]} on")
    more = sorted(set(steps) - wanted.keys())
    if more:
        yield Difference(
            "store", f"has {len(more)} points of {key} more than the journal, from step {more[0]} on"
        )
    if len(steps) != len(set(steps)):
        double = sorted({step for step in steps if steps.count(step) > 1})
        yield Difference("store", f"has step {double[0]} of {key} twice")
    other = [p.step for p in found if p.step in wanted and _value(p) != _value(wanted[p.step])]
    if other:
        yield Difference("store", f"has another value of {key} at step {other[0]}")


def _value(point: Point) -> str:
    """A value as MLflow stores it."""
    if math.isnan(point.value):
        return "nan"
    return repr(max(-_LARGEST, min(_LARGEST, point.value)) + 0.0)


def _status(journal: Journal) -> str:
    end = last_words(journal.events)[-1]
    match end:
        case Finished() | Failed():
            return end.status
    return "RUNNING"  # a newer attempt has the run


def digest(path: Path) -> str:
    """The sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
