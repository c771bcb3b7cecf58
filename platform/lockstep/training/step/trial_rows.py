"""A loss over the whole batch, tried before training: one micro-batch has its rows among those of others of the first step, which are constants.

Such a loss compares samples, so of the rows of one micro-batch it may be no loss at all: without a pair to compare, a sample of each class, or a
second row for a variance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.data.order import Ids
from lockstep.job.interface import Loss, Rows
from lockstep.training.step.buffers import KeptBuffers
from lockstep.training.step.phase_step import LossModule


@dataclass(slots=True)
class TrialRows:
    """Rows of the first micro-batches of a step. `places` are those of their samples among the samples of the step."""

    rows: list[Rows]
    places: Sequence[Ids]
    with_others: bool = field(default=False, init=False)

    def settle(self, m: int, module: LossModule) -> Callable[[Any], Loss]:
        """What makes the loss of micro-batch `m` from its rows: with the others' in the order of the epoch."""
        return partial(self._settle, m, module)

    def _settle(self, m: int, module: LossModule, own: Rows) -> Loss:
        if not self.with_others:
            return module.phase.loss(module.model, own)
        each = [own if i == m else rows for i, rows in enumerate(self.rows)]
        if m >= len(each):
            each.append(own)
        return module.phase.loss(module.model, self._joined(each))

    def _joined(self, each: Sequence[Rows]) -> Rows:
        first = each[0]
        if isinstance(first, Mapping):
            return {name: self._in_order([rows[name] for rows in each]) for name in first}  # type: ignore[index]
        return self._in_order(each)  # type: ignore[arg-type]

    def _in_order(self, each: Sequence[Tensor]) -> Tensor:
        joined = torch.cat(list(each))
        places = np.concatenate(self.places[: len(each)])
        if len(places) != len(joined):  # halves of a micro-batch, or one of another step
            return joined
        return joined.index_select(0, torch.from_numpy(np.argsort(places, kind="stable")).to(joined.device))


def among_others(
    module: LossModule, embedded: Callable[[int], Rows], places: Sequence[Ids], *, all_of_them: bool = False
) -> TrialRows | None:
    """Rows among which the loss of `module` can be tried: of as few micro-batches of the step as give its first one a gradient, or of all.

    `embedded` gives the rows of a micro-batch, seeded as in its trial. None where the loss is not one over the whole batch.
    """
    if module.phase.embed is None:
        return None
    trial, count = TrialRows([], places), 1
    buffers = KeptBuffers(module.model)
    try:
        while True:
            wanted = len(places) if all_of_them else min(count, len(places))
            while len(trial.rows) < wanted:
                trial.rows.append(_without_graph(embedded(len(trial.rows))))
                buffers.restore()
            trial.with_others = wanted > 1
            if wanted == len(places) or _has_gradient(trial, module):
                return trial
            buffers.restore()
            count *= 2
    finally:
        buffers.restore()


def _without_graph(rows: Rows) -> Rows:
    """Rows as constants. What the job returned in a wrong form stays as it is, for the trial to refuse."""
    if isinstance(rows, Mapping):
        return {name: row.detach() if isinstance(row, Tensor) else row for name, row in rows.items()}
    return rows.detach() if isinstance(rows, Tensor) else rows


def _has_gradient(trial: TrialRows, module: LossModule) -> bool:
    """Whether the loss is finite among these rows, and the rows of the first micro-batch have a gradient other than zero."""
    first = trial.rows[0]
    named = dict(first) if isinstance(first, Mapping) else {"": first}
    try:
        leaves = {
            name: row.clone().requires_grad_() for name, row in named.items() if row.is_floating_point()
        }
        own: Any = {**named, **leaves} if isinstance(first, Mapping) else leaves.get("", first)
        with torch.enable_grad():
            total = trial.settle(0, module)(own).total
            gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    except Exception:  # noqa: BLE001 - of too few rows a loss may raise whatever it likes; of all of them the trial itself reports it
        return False
    return bool(total.isfinite()) and any(
        gradient is not None and bool(gradient.isfinite().all()) and bool(gradient.any())
        for gradient in gradients
    )
