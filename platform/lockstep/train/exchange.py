"""The one exchange of a step: everything that the ranks must agree on, in one small collective.

It is posted before the last backward of a step and read when that backward is done, so its time is hidden.
Every slot is filled by one rank and zero on the others: the sum is exact for every value, NaN and infinities
included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.job import Loss
from lockstep.train.group import Group


class Totals(NamedTuple):
    """What a step's micro-batches come to, added in index order in float64: the same for every W.

    `loss` and `weight` are totals over the global batch; `parts` are (total, weight) by name.
    `first_bad` is the index of the first micro-batch whose loss is not finite, or None.
    """

    loss: float
    weight: float
    parts: dict[str, tuple[float, float]]
    first_bad: int | None


class Exchange:
    """Collects one row a micro-batch and one flag a buffer, and gives every rank all of them.

    Rows: float64 [M, 2 + 2 * parts]: total and weight of the loss, then of each part.
    """

    def __init__(self, group: Group, micro_batches: int, parts: Sequence[str], flags: int) -> None:
        self.group = group
        self.parts = tuple(parts)
        self.width = 2 + 2 * len(self.parts)
        self.micro_batches = micro_batches
        self.flags = flags
        self._rows: dict[int, Sequence[Tensor | float]] = {}
        self._flagged: Sequence[int] = ()
        self._payload: Tensor | None = None
        self._work: Any = None

    def put(self, m: int, loss: Loss) -> None:
        """Note the totals of micro-batch `m`; on a CUDA device they stay there."""
        row: list[Tensor | float] = [loss.total.detach(), loss.weight]
        for name in self.parts:
            part = loss.parts[name]
            row += (part.total, part.weight)
        self._rows[m] = row

    def flag(self, buffers: Sequence[int]) -> None:
        """Note which buffers the update of this step changed; only the rank of micro-batch 0 does."""
        self._flagged = buffers

    def post(self) -> None:
        """Send it off, without waiting."""
        payload = torch.zeros(self.micro_batches * self.width + self.flags, dtype=torch.float64)
        if self.group.device.type == "cpu":
            for m, row in self._rows.items():
                payload[m * self.width : (m + 1) * self.width] = torch.tensor(
                    [float(v) for v in row], dtype=torch.float64
                )
        else:
            payload = payload.to(self.group.device)
            for m, row in self._rows.items():
                values = [torch.as_tensor(v, device=self.group.device).double().reshape(()) for v in row]
                payload[m * self.width : (m + 1) * self.width] = torch.stack([v.detach() for v in values])
        for b in self._flagged:
            payload[self.micro_batches * self.width + b] = 1.0
        self._rows, self._flagged, self._payload = {}, (), payload
        if self.group.size > 1:
            self._work = dist.all_reduce(payload, group=self.group.channel, async_op=True)

    def read(self, micro_batches: int) -> tuple[Totals, list[int]]:
        """Wait for it. The step's totals over its non-empty micro-batches, and the flagged buffers."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        assert self._payload is not None
        values: list[float] = self._payload.tolist()
        self._payload = None
        used = self.micro_batches * self.width
        flagged = [b for b, value in enumerate(values[used:]) if value]
        return self._totals(values, micro_batches), flagged

    def _totals(self, values: list[float], micro_batches: int) -> Totals:
        rows = [values[m * self.width : (m + 1) * self.width] for m in range(micro_batches)]
        columns = [_sum_in_order(column) for column in zip(*rows, strict=True)]
        bad = next((m for m, row in enumerate(rows) if not _finite(row[0])), None)
        parts = {name: (columns[2 + 2 * i], columns[3 + 2 * i]) for i, name in enumerate(self.parts)}
        return Totals(columns[0], columns[1], parts, bad)


def _sum_in_order(values: Sequence[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total


def _finite(value: float) -> bool:
    return value - value == 0.0
