"""Compares two executions of one step, or of one evaluation, bit for bit."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

from lockstep.record.events.union import Digests, EvaluationRow, StepRow
from lockstep.record.ledger.tables import DETERMINISTIC


class Differing(NamedTuple):
    """One quantity whose bits differ between two executions of a step; None where one of them lacks it."""

    quantity: str
    before: Any
    after: Any
    micro_batch: int | None = None

    def __str__(self) -> str:
        where = "" if self.micro_batch is None else f" of micro-batch {self.micro_batch}"
        return f"{self.quantity}{where} {shown(self.before)} → {shown(self.after)}"


def differing(before: StepRow, after: StepRow) -> Iterator[Differing]:
    """The deterministic columns that differ, in the order in which a step computes them: gradients first, state last.

    Digests are compared where both have them. Gradients' are not if only one has them, as `reduction: native` has none.
    """
    old, new = before.digests, after.digests
    if old is not None and new is not None:
        yield from _differing_gradients(old, new)
    for name in DETERMINISTIC:
        if name != "digests":
            yield from _differing(name, getattr(before, name), getattr(after, name))
    if old is not None and new is not None:
        yield from _differing("weights_digest", Digest(old.weights), Digest(new.weights))
        yield from _differing("optimizer_digest", Digest(old.optimizer), Digest(new.optimizer))
        yield from _differing("ema_digest", _digest(old.average), _digest(new.average))


def differing_evaluation(before: EvaluationRow, after: EvaluationRow) -> Iterator[Differing]:
    """The metrics that differ, and the epoch."""
    yield from _differing("epoch", before.epoch, after.epoch)
    yield from _differing("", before.metrics, after.metrics)


def step_difference(before: StepRow, after: StepRow) -> str:
    """How two executions of a step differ, as `loss 0.5 → 0.25`; empty where all bits are equal."""
    return ", ".join(map(str, differing(before, after)))


def evaluation_difference(before: EvaluationRow, after: EvaluationRow) -> str:
    """The metrics that differ, as text; empty where all bits are equal."""
    return ", ".join(map(str, differing_evaluation(before, after)))


def same_row(one: StepRow | EvaluationRow, other: StepRow | EvaluationRow) -> bool:
    """Whether all columns of two rows are equal, bit for bit."""
    return not any(
        difference for pair in zip(one, other, strict=True) for difference in _differing("", *pair)
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


def _differing_gradients(before: Digests, after: Digests) -> Iterator[Differing]:
    if before.gradients is None or after.gradients is None:
        return
    for m, (digest_before, digest_after) in enumerate(zip_longest(before.gradients, after.gradients)):
        if digest_before != digest_after:
            yield Differing("gradient_digest", _digest(digest_before), _digest(digest_after), m)


def _differing(name: str, before: Any, after: Any) -> Iterator[Differing]:
    if isinstance(before, Mapping):
        for key in sorted({*before, *after}):
            yield from _differing(key, before.get(key), after.get(key))
    elif _bits(before) != _bits(after):
        yield Differing(name, before, after)


def _bits(value: Any) -> Any:
    return struct.pack(">d", value) if isinstance(value, float) else value
