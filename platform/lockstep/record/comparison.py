"""Two executions of one step, or of one evaluation, compared bit for bit."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.record.events import EvaluationRow, StepRow
from lockstep.record.ledger import DETERMINISTIC


def step_difference(before: StepRow, after: StepRow) -> str:
    """The deterministic columns that differ, as `loss 0.5 → 0.25`; nothing where all bits are equal."""
    pairs = ((name, getattr(before, name), getattr(after, name)) for name in DETERMINISTIC)
    return ", ".join(text for name, one, other in pairs for text in _differences(name, one, other))


def evaluation_difference(before: EvaluationRow, after: EvaluationRow) -> str:
    """The metrics that differ; nothing where all bits are equal."""
    return ", ".join(_differences("", before.metrics, after.metrics))


def same_row(one: StepRow | EvaluationRow, other: StepRow | EvaluationRow) -> bool:
    """Whether all columns of two rows are equal, bit for bit."""
    return not any(text for pair in zip(one, other, strict=True) for text in _differences("", *pair))


def _differences(name: str, before: Any, after: Any) -> Iterator[str]:
    if isinstance(before, Mapping):
        for key in sorted({*before, *after}):
            yield from _differences(key, before.get(key), after.get(key))
    elif _bits(before) != _bits(after):
        yield f"{name} {before!r} → {after!r}"


def _bits(value: Any) -> Any:
    return struct.pack(">d", value) if isinstance(value, float) else value
