"""Metric points: what rows become on their way to a store.

The row fixes a point's key, step and timestamp, whenever it is written: sending it
again changes nothing. Keys are legal in MLflow and no two names share one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, assert_never

from lockstep.record.events import union
from lockstep.record.events.union import CheckpointRow, Recorded, Sampled
from lockstep.record.ledger.rows import EvaluationRow, Observation, StepRow

LOSS = "train/loss"
EVERY_STEP = (LOSS, "train/lr", "train/grad_norm", "train/clipped_norm", "perf/step_s", "perf/data_wait_s")
"""The keys that every step has."""


OF_TIME = ("perf/effective_ratio", "perf/lost_worker_hours")
"""The keys of what became of a run's time: a point for each of its ends, by whichever journal had that end."""


def is_of_step(key: str) -> bool:
    """Whether a key is one of a step's, and of no other row."""
    return key.startswith("train/") or key in (*EVERY_STEP, "perf/samples_per_s")


class Point(NamedTuple):
    """One value of one metric. MLflow stores NaN as NaN, infinity as ±1.8e308 and -0.0 as 0.0; the ledger keeps the bits."""

    key: str
    value: float
    timestamp_ms: int
    step: int


def points_of(
    event: Recorded, previous: StepRow | None, *, scaled: bool, started_at: float
) -> Iterator[Point]:
    """The points that an event becomes; `previous` is the previous step's row, `started_at` when the run began (Unix seconds)."""
    match event:
        case StepRow():
            return step_points(event, previous, scaled=scaled)
        case EvaluationRow():
            return evaluation_points(event)
        case Observation():
            return observation_points(event)
        case Sampled():
            return system_points(event, started_at)
        case CheckpointRow():
            return checkpoint_points(event)
        case union.Finished():
            return test_points(event)
        case union.TimeSpent():
            return time_points(event, started_at)
        case union.Started() | union.PeakMemory() | union.AttemptsSummarised():
            return iter(())
        case (
            union.Document() | union.Diagnosed() | union.Alerted() | union.Corrupted() | union.ResumeChecked()
        ):
            return iter(())
        case union.Warned() | union.Straggling() | union.Violated() | union.Failed() | union.TakenOver():
            return iter(())
        case union.InputsFound() | union.Opened() | union.SetAside() | union.Mended() | union.Delivered():
            return iter(())
        case _:
            assert_never(event)


def step_points(row: StepRow, previous: StepRow | None, *, scaled: bool) -> Iterator[Point]:
    """The points of a step; `previous` is the previous step's row, if known, and `scaled` whether a loss scaler runs.

    The fixed names come first: a part with such a name never replaces them.
    """
    values = {
        LOSS: row.loss,
        "train/lr": row.lr,
        "train/grad_norm": row.grad_norm,
        "train/clipped_norm": row.clipped_norm,
        **({"train/scale": row.scale, "train/skipped": float(row.skipped)} if scaled else {}),
        "perf/step_s": row.step_s,
        "perf/data_wait_s": row.data_wait_s,
    }
    consumed_before = (
        0 if row.step == 1 else previous.samples if previous and previous.step == row.step - 1 else None
    )
    if consumed_before is not None and row.step_s > 0:
        values["perf/samples_per_s"] = (row.samples - consumed_before) / row.step_s
    for name, value in row.parts.items():
        values.setdefault(f"train/{name}", value)
    timestamp_ms = int(row.wall_clock * 1000)
    return (Point(store_key(name), value, timestamp_ms, row.step) for name, value in values.items())


def evaluation_points(row: EvaluationRow) -> Iterator[Point]:
    """The points of an evaluation."""
    values = {**row.metrics, "perf/evaluation_s": row.seconds}
    timestamp_ms = int(row.wall_clock * 1000)
    return (Point(store_key(name), value, timestamp_ms, row.step) for name, value in values.items())


def test_points(end: union.Finished) -> Iterator[Point]:
    """The points of the test that a finished run ends with, at the step of the weights that it tested."""
    at = end.summary.get("tested_at") or 0.0
    step = int(end.summary.get("tested_step") or 0)
    for name, value in (end.summary.get("test") or {}).items():
        yield Point(store_key(name), float(value), int(at * 1000), step)


def time_points(spent: union.TimeSpent, started_at: float) -> Iterator[Point]:
    """The points of a run's time, when it ended. Their steps are seconds since the run began, as those of a node's samples: a run that is interrupted again
    before its next step has other values.
    """
    if spent.at >= started_at:
        step = int(spent.at - started_at)
        for key, value in zip(OF_TIME, (spent.effective, spent.lost_worker_h), strict=True):
            yield Point(key, value, int(spent.at * 1000), step)


def observation_points(row: Observation) -> Iterator[Point]:
    """The points of an observation."""
    timestamp_ms = int(row.wall_clock * 1000)
    return (Point(store_key(name), value, timestamp_ms, row.step) for name, value in row.values.items())


def system_points(sample: Sampled, started_at: float) -> Iterator[Point]:
    """The points of a node's sample. Their steps are seconds since the run began; but for those of `time_points` no other metric counts in seconds.

    A sample from before that, while a slow store was opened, has no such step and is left out.
    """
    if sample.at >= started_at:
        for name, value in sample.values.items():
            key = store_key(f"system/{sample.node}/{name}")
            yield Point(key, value, int(sample.at * 1000), int(sample.at - started_at))


def checkpoint_points(row: CheckpointRow) -> Iterator[Point]:
    """The points of a checkpoint; none if it was given up."""
    if row.uri is None:
        return iter(())
    values = {
        "perf/checkpoint_pause_s": row.waited_s + row.copied_s,
        "perf/checkpoint_write_s": row.written_s,
        "perf/checkpoint_bytes": float(row.nbytes),
    }
    timestamp_ms = int(row.wall_clock * 1000)
    return (Point(store_key(name), value, timestamp_ms, row.step) for name, value in values.items())


_ILLEGAL = re.compile(r"[^/\w.\- ]")
_LONGEST = 250


@lru_cache(maxsize=4096)
def store_key(name: str) -> str:
    """`name` as a key that MLflow accepts: each character it refuses becomes its code point between colons.

    `accuracy@5` becomes `accuracy:40:5`. A colon is encoded too, so the name can be recovered. Only if
    the key would exceed MLflow's 250 characters, it ends in a digest of the whole name instead.
    """
    parts = [
        _code(part) if part in {"", ".", ".."} else _ILLEGAL.sub(_coded, part) for part in name.split("/")
    ]
    key = "/".join(parts)
    if key.startswith(".."):
        key = _code(".") + key[1:]
    if len(key) > _LONGEST:
        key = f"{key[: _LONGEST - 18]}:{hashlib.sha256(name.encode()).hexdigest()[:16]}:"
    return key


def _coded(match: re.Match[str]) -> str:
    return _code(match.group())


def _code(characters: str) -> str:
    return "".join(f":{ord(character):x}:" for character in characters) or "::"
