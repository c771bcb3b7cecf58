"""Each rule names its fault and no other, once; sound rows, and those of a run that was taken up, say nothing."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.record.diagnosis import rules
from lockstep.record.diagnosis.rules import Diagnosis
from lockstep.record.events.union import Recorded
from lockstep.record.ledger.rows import EvaluationRow, Observation, StepRow
from tests.unit.record.rows import evaluation_row, step_row

Curve = Callable[[int], float]
SOUND_RUNS = sorted((Path(__file__).parent / "sound_runs").iterdir())
"""The rows of runs of the shipped jobs, in a format of their own: a new column of the ledger leaves them as they are."""

EPOCH = 200
"""Steps of an epoch here."""


def falling(step: int) -> float:
    return 2.0 * math.exp(-step / 150) + 0.4


def steps(
    count: int = 600, loss: Curve = falling, noise: float = 0.05, seed: int = 1, **columns: Any
) -> list[StepRow]:
    """Steps with a noisy loss; a column may be a function of the step's number."""
    draw = random.Random(seed)
    return [
        step_row(
            step,
            epoch=(step - 1) // EPOCH,
            loss=loss(step) * (1 + noise * draw.gauss(0, 1)),
            **{name: value(step) if callable(value) else value for name, value in columns.items()},
        )
        for step in range(1, count + 1)
    ]


def observed(count: int = 600, **values: float | Curve) -> list[Observation]:
    """Observations each fifty steps, of values whose names have `__` for a slash."""
    return [
        Observation(
            step,
            {
                name.replace("__", "/"): value(step) if callable(value) else value
                for name, value in values.items()
            },
            0.0,
        )
        for step in (1, *range(50, count + 1, 50))
    ]


def evaluated(losses: Sequence[float], every: int = EPOCH) -> list[EvaluationRow]:
    return [
        evaluation_row((i + 1) * every, loss=loss)._replace(epoch=((i + 1) * every - 1) // EPOCH)
        for i, loss in enumerate(losses)
    ]


def together(*rows: Iterable[Any]) -> list[Recorded]:
    """In the order in which a run tells them."""
    return sorted((row for some in rows for row in some), key=lambda row: row.step)


def usual(count: int = 600, **values: float | Curve) -> list[Observation]:
    """Observations of a sound run."""
    sound: dict[str, float | Curve] = {
        "layers__a__update_ratio": 1e-3,
        "layers__a__silent_units": 0.1,
        "perf__memory__rank_0_mb": lambda step: 800.0 + step % 7,
    }
    return observed(count, **{**sound, **values})


def spiking(step: int) -> float:
    return 9.0 if step == 333 else falling(step)


def stalling(step: int) -> float:
    return 2.0 * math.exp(-step / 20) + 0.4


FAULTS: dict[str, list[Recorded]] = {
    "loss spike": together(steps(loss=spiking), usual()),
    "waits for data": together(steps(data_wait_s=lambda step: 0.008 if step > 200 else 0.001), usual()),
    "loss does not move": together(steps(loss=lambda step: 2.3), usual()),
    "rate too low": together(steps(loss=lambda step: 2.3, lr=1e-9), usual(layers__a__update_ratio=1e-8)),
    "rate too high": together(
        steps(loss=lambda step: 2.0 + step / 100, lr=3.0), usual(layers__a__update_ratio=0.4)
    ),
    "fp16 overflow": together(steps(skipped=lambda step: step > 200 and step % 3 == 0, scale=2.0), usual()),
    "fp16 underflow": together(steps(), usual(fp16__underflow=0.8, fp16__scale=1.0)),
    "precision": together(
        steps(),
        usual(bf16__gradient_difference=lambda step: 0.6 if step > 200 else 0.01, bf16__loss_difference=0.1),
    ),
    "dead units": together(steps(), usual(layers__a__silent_units=lambda step: 0.7 if step > 100 else 0.0)),
    "plateau": together(
        steps(1000, loss=stalling, lr=lambda step: 1e-3 if step <= 400 else 1e-8), usual(1000)
    ),
    "overfitting": together(steps(1600), evaluated([0.9, 0.7, 0.75, 0.8, 0.9, 1.0]), usual(1600)),
    "evaluation differs": together(
        steps(1600),
        evaluated([6.0, 5.5, 5.0, 4.8, 4.7], every=40),
        evaluated([5.2, 6.0, 7.0, 8.0, 9.0], every=320),
        usual(1600),
    ),
    "memory grows": together(steps(1000), usual(1000, perf__memory__rank_0_mb=lambda step: 800.0 + 2 * step)),
}


def test_an_evaluation_that_is_told_late_is_held_against_the_training_loss_of_its_step() -> None:
    """One that a process beside training has made: the loss that training has come to meanwhile says nothing of it."""
    rows = steps(150, loss=lambda step: 6.0 if step <= 40 else 0.2)
    late = [row._replace(step=30, epoch=0) for row in evaluated([6.1])]
    diagnosis = rules.Diagnosis()
    for row in [*rows, *late, *(row._replace(step=35) for row in late)]:
        assert [one.rule for one in diagnosis.take(row)] == []
    assert all(train > 1.0 for _, train in diagnosis._evaluations)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_once_and_nothing_else_is(fault: str) -> None:
    found = rules.of(FAULTS[fault])
    assert [one.rule for one in found] == [fault]
    assert found[0].evidence and found[0].remedy


SOUND: dict[str, list[Recorded]] = {
    "falling": together(steps(2000), evaluated([1.0, 0.7, 0.6, 0.55, 0.56, 0.55]), usual(2000)),
    "noisy": together(steps(2000, noise=0.3), evaluated([1.0, 0.7, 0.6]), usual(2000)),
    "learnt at once": together(
        steps(2000, loss=lambda step: 2.3 if step < 5 else 1e-3, noise=0.5), usual(2000)
    ),
    "a cosine to zero": together(
        steps(2000, lr=lambda step: 5e-4 * (1 + math.cos(math.pi * step / 2000))), usual(2000)
    ),
    "negative": together(
        steps(2000, loss=lambda step: falling(step) - 3), evaluated([-0.5, -0.6]), usual(2000)
    ),
    "a warm-up": together(
        steps(1000, lr=lambda step: 1e-3 * min(1.0, step / 500)),
        usual(1000, layers__a__update_ratio=lambda step: 1e-3 * min(1.0, step / 500)),
    ),
    "not finite for a step": together(
        steps(loss=lambda step: math.nan if step == 300 else falling(step)), usual()
    ),
    "fp16 that finds its scale": together(
        steps(skipped=lambda step: step < 12, scale=2.0), usual(fp16__underflow=0.1)
    ),
    "a cache that fills": together(
        steps(1500), usual(1500, perf__memory__rank_0_mb=lambda step: 800.0 + 3 * min(step, 300))
    ),
    "bf16 that rounds": together(
        steps(),
        usual(
            bf16__gradient_difference=lambda step: 0.7 if step == 300 else 0.05, bf16__loss_difference=0.01
        ),
    ),
    "units that rest at first": together(
        steps(), usual(layers__a__silent_units=lambda step: 0.9 if step < 60 else 0.1)
    ),
    "evaluations that are done": together(
        steps(2000), evaluated([2.2, 0.5, 0.025, 0.027, 0.028, 0.030]), usual(2000)
    ),
    "noise near zero": together(
        steps(2000, loss=lambda step: 2 * math.exp(-step / 100) + (1e-3 if step % 37 else 2e-2)), usual(2000)
    ),
    "short": together(steps(30, loss=lambda step: 2.3), usual(30)),
    "slow data at first": together(steps(data_wait_s=lambda step: 1.0 if step == 1 else 0.001), usual()),
}


@pytest.mark.parametrize("kind", SOUND)
@pytest.mark.parametrize("seed", [1, 2])
def test_sound_rows_say_nothing(kind: str, seed: int) -> None:
    assert rules.of(SOUND[kind]) == []
    again = steps(2000, noise=0.2, seed=seed)
    assert rules.of(again) == []


def test_of_trained_weights_no_progress_is_asked() -> None:
    assert rules.of(FAULTS["loss does not move"], trained=True) == []


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("at", [37, 100, 333, 599])
def test_a_run_that_is_taken_up_says_it_once_and_the_same(fault: str, at: int) -> None:
    """The rows before decide with those behind; what was told before is not told again."""
    rows = FAULTS[fault]
    whole = rules.of(rows)
    before, behind = ([row for row in rows if (row.step <= at) is early] for early in (True, False))  # type: ignore[union-attr]
    first = rules.of(before)
    again = Diagnosis({one.rule for one in first})
    for row in before:
        assert list(again.take(row)) == []
    second = [found for row in behind for found in again.take(row)]
    assert [*first, *second] == whole


def of_a_run(file: Path) -> list[Recorded]:
    """The rows of a run that has ended."""
    found = json.loads(gzip.decompress(file.read_bytes()))
    return together(
        (StepRow(**row) for row in found["steps"]),
        (EvaluationRow(**row) for row in found["evaluations"]),
        (Observation(**row) for row in found["observations"]),
    )


@pytest.mark.parametrize("file", SOUND_RUNS, ids=lambda file: file.name.partition(".")[0])
def test_the_shipped_jobs_say_nothing(file: Path) -> None:
    """What these jobs recorded, with an observation each ten steps; the control is the same rows with a fault in them."""
    rows = of_a_run(file)
    assert rules.of(rows) == []
    at = next(row.step for row in rows if isinstance(row, StepRow) and row.step == 120)
    faulty = [row._replace(loss=50.0) if isinstance(row, StepRow) and row.step == at else row for row in rows]
    assert [found.rule for found in rules.of(faulty)] == ["loss spike"]
