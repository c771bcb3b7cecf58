"""What bf16 or fp16 costs a gradient: one micro-batch in the run's own precision and again in fp32, before an update.

Both are computed with the weights and the seed of the step, bypassing DDP. Gradients and buffers are put back, so no bit of the run changes.
Norms are summed over the fixed blocks of `training.step.norm`, so they have the same bits for every number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lockstep.errors import LockstepError
from lockstep.plan import Position
from lockstep.training.integrity.probe import NoProbe
from lockstep.training.step.norm import added
from lockstep.training.step.optimizer_step import Stepper
from lockstep.training.step.phase_step import PhaseStep, copied
from lockstep.training.step.precision import Precision


def is_compared(step: int, every: int) -> bool:
    """Whether the precisions are compared in `step`: in steps `every`, 2 * `every`, 4 * `every`, …"""
    times, remainder = divmod(step, every)
    return remainder == 0 and times & (times - 1) == 0


class BesideFp32(NoProbe):
    """Keeps micro-batch 0 of a step on rank 0, which computes it, and on demand computes it again in both precisions."""

    def __init__(self, step: Stepper) -> None:
        self._step = step
        self._plain = Precision("fp32", step.state.precision.device)
        self._batches: dict[str, Any] = {}
        """Copies, by phase name: a job may write into its batch."""
        self._phase = ""
        self.problem: LockstepError | None = None
        """Why nothing can be compared, such as too little memory for fp32."""

    @contextmanager
    def around(self, position: Position, m: int, model: nn.Module, phase: str) -> Iterator[None]:
        self._phase = phase
        yield

    def batch(self, position: Position, m: int, batch: Any) -> None:
        if m == 0 and batch is not None:
            self._batches[self._phase] = copied(batch)

    def __call__(self, phase: PhaseStep, position: Position) -> dict[str, float]:
        """`<precision>/gradient_difference`: the norm of g - g_fp32 over the norm of g_fp32; `loss_difference` likewise.

        A value that is not finite is left out: other rules deal with those.
        """
        batch = self._batches.pop(phase.name, None)
        if batch is None or self.problem is not None:
            return {}
        precision = self._step.state.precision
        try:
            with torch.enable_grad():
                exact_loss, exact = self._step.accumulation.beside(
                    phase, position, 0, copied(batch), self._plain
                )
                loss, gradients = self._step.accumulation.beside(phase, position, 0, batch, precision)
        except LockstepError as error:
            self.problem = error
            return {}
        exact, gradients = (every[: len(phase.parameters)] for every in (exact, gradients))  # the dense ones
        if not exact:
            return {}
        with torch.no_grad():
            torch._foreach_div_(gradients, precision.scale)
            size = added(phase.norm.squares(exact))
            torch._foreach_sub_(gradients, exact)
            distance = added(phase.norm.squares(gradients))
        name = f"{precision.name}/{phase.name}/" if phase.name else f"{precision.name}/"
        differences = {
            "gradient_difference": distance / size if size else math.nan,
            "loss_difference": abs(loss - exact_loss) / abs(exact_loss) if exact_loss else math.nan,
        }
        return {name + what: value for what, value in differences.items() if math.isfinite(value)}
