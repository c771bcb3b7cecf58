"""What a step and each of its phases came to, in Python numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lockstep.record.ledger.rows import StepRow
from lockstep.training.step.step_exchange import Agreed


class StepResult(NamedTuple):
    """What a step came to, equal on every rank."""

    row: StepRow
    """The ledger's row of it, without its times, which the loop's clock knows.

    With phases, loss, weight, rate and norms are those of the first phase that took part; `parts` has those of each phase by its name.
    """
    stop: bool
    """Whether a rank asked to end the run after this step."""
    save: bool
    """Whether a rank asked to save the state after this step."""
    regroup: bool
    """Whether a rank asked to form another group after this step."""
    pace: list[float]
    """Each rank's time for a micro-batch of its own, in seconds."""


class PhaseResult(NamedTuple):
    """The result of one phase of a step, and what its ranks agreed on."""

    agreed: Agreed
    loss: float
    weight: float
    parts: dict[str, float]
    lr: float
    grad_norm: float
    clipped_norm: float
    scale: float
    skipped: bool

    def columns(self, *, scaled: bool) -> dict[str, float]:
        """The ledger's columns of a named phase; `scaled` where a loss scaler may skip it."""
        base = {"loss": self.loss, "lr": self.lr, "grad_norm": self.grad_norm}
        skipped = {"skipped": float(self.skipped)} if scaled else {}
        return {**base, "clipped_norm": self.clipped_norm, **skipped, **self.parts}


def by_phase(taken: Mapping[str, PhaseResult], *, scaled: bool) -> dict[str, float]:
    """The results of each phase as parts of the step, such as `discriminator/loss`."""
    return {
        f"{name}/{column}": value
        for name, result in taken.items()
        for column, value in result.columns(scaled=scaled).items()
    }
