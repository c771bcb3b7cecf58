"""Compares two executions of one step, or of one evaluation, bit for bit."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

from lockstep.record.ledger.rows import Digests, EvaluationRow, Observation, StepRow
from lockstep.record.ledger.tables import DETERMINISTIC


class Differing(NamedTuple):
    """One quantity whose bits differ between two executions of a step; None where one of them lacks it."""

    quantity: str
    first: Any
    second: Any
    micro_batch: int | None = None

    def __str__(self) -> str:
        where = "" if self.micro_batch is None else f" of micro-batch {self.micro_batch}"
        return f"{self.quantity}{where} {shown(self.first)} → {shown(self.second)}"


def differing(first: StepRow, second: StepRow) -> Iterator[Differing]:
    """The deterministic columns that differ, in the order in which a step computes them: gradients first, state last.

    Digests are compared where both have them. Gradients' are not if only one has them, as `reduction: native` has none.
    """
    old, new = first.digests, second.digests
    if old is not None and new is not None:
        yield from _differing_gradients(old, new)
    for name in DETERMINISTIC:
        if name != "digests":
            yield from _differing(name, getattr(first, name), getattr(second, name))
    if old is not None and new is not None:
        yield from _differing("weights_digest", Digest(old.weights), Digest(new.weights))
        yield from _differing("optimizer_digest", Digest(old.optimizer), Digest(new.optimizer))
        yield from _differing("ema_digest", _digest(old.average), _digest(new.average))


def differing_evaluation(first: EvaluationRow, second: EvaluationRow) -> Iterator[Differing]:
    """The metrics that differ, and the epoch."""
    yield from _differing("epoch", first.epoch, second.epoch)
    yield from _differing("", first.metrics, second.metrics)


def differing_rows(
    first: StepRow | EvaluationRow | None, second: StepRow | EvaluationRow | None
) -> Iterator[Differing]:
    """In what two rows of a step, or two evaluations, differ; one that only one side has differs as a whole."""
    if isinstance(first, StepRow) and isinstance(second, StepRow):
        yield from differing(first, second)
    elif isinstance(first, EvaluationRow) and isinstance(second, EvaluationRow):
        yield from differing_evaluation(first, second)
    elif first is not None or second is not None:
        kind = "evaluation" if isinstance(first or second, EvaluationRow) else "row"
        yield Differing(kind, None if first is None else "there", None if second is None else "there")


def step_difference(first: StepRow, second: StepRow) -> str:
    """How two executions of a step differ, as `loss 0.5 → 0.25`; empty where all bits are equal."""
    return ", ".join(map(str, differing(first, second)))


def evaluation_difference(first: EvaluationRow, second: EvaluationRow) -> str:
    """The metrics that differ, as text; empty where all bits are equal."""
    return ", ".join(map(str, differing_evaluation(first, second)))


def same_row(
    first: StepRow | EvaluationRow | Observation, second: StepRow | EvaluationRow | Observation
) -> bool:
    """Whether all columns of two rows are equal, bit for bit."""
    return not any(
        difference for pair in zip(first, second, strict=True) for difference in _differing("", *pair)
    )


class Digest(int):
    """A digest, shown as 16 hexadecimal digits."""

    def __repr__(self) -> str:
        return f"{int(self):016x}"


def shown(value: Any) -> str:
    """A value of a row as text that keeps all of its bits."""
    return repr(value)


def _digest(value: int | None) -> Digest | None:
    return None if value is None else Digest(value)


def _differing_gradients(first: Digests, second: Digests) -> Iterator[Differing]:
    if first.gradients is None or second.gradients is None:
        return
    for m, (first_digest, second_digest) in enumerate(zip_longest(first.gradients, second.gradients)):
        if first_digest != second_digest:
            yield Differing("gradient_digest", _digest(first_digest), _digest(second_digest), m)


def _differing(name: str, first: Any, second: Any) -> Iterator[Differing]:
    if isinstance(first, Mapping):
        for key in sorted({*first, *second}):
            yield from _differing(key, first.get(key), second.get(key))
    elif _bits(first) != _bits(second):
        yield Differing(name, first, second)


def _bits(value: Any) -> Any:
    return struct.pack(">d", value) if isinstance(value, float) else value
