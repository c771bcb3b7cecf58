"""Rows to record in the tests."""

from __future__ import annotations

from typing import Any

from lockstep.record.events.union import Corrupted, Witness
from lockstep.record.ledger.rows import EvaluationRow, StepRow


def step_row(step: int, **changes: Any) -> StepRow:
    """A plausible step whose values need all of their bits."""
    row = StepRow(
        step=step,
        epoch=step // 10,
        samples=64 * step,
        loss=1 / (step + 2),
        weight=64.0,
        parts={"entropy": step / 7},
        lr=1e-3 / 3,
        grad_norm=step**0.5,
        clipped_norm=min(1.0, step**0.5),
        scale=1.0,
        skipped=False,
        data_wait_s=0.001,
        step_s=0.01,
        wall_clock=1_700_000_000.123 + step,
        attempt=1,
    )
    return row._replace(**changes)


def evaluation_row(step: int, **metrics: float) -> EvaluationRow:
    """An evaluation of the given metrics, without their prefix."""
    named = {f"eval/{name}": value for name, value in (metrics or {"loss": 1 / (step + 1)}).items()}
    return EvaluationRow(step, step // 10, named, seconds=0.5, wall_clock=1_700_000_000.5 + step)


def corrupted(step: int, since: int) -> Corrupted:
    """Rank 1 of attempt 1 was found to have wrong weights."""
    workers = tuple(Witness(rank, "host", rank, "cpu", "", (rank,)) for rank in range(3))
    return Corrupted(step, since, 1, "weights", "fc.weight", workers, (1,), "majority")
