"""The one exchange of a step: everything that the ranks must agree on, in one small message.

It is closed before the last backward of a step and sent with that backward's first gradients: inside their
message where that is small and sent whole, else in a collective of its own. It is read after that backward,
which hides its time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.communication.group import Group
from lockstep.job.interface import Loss
from lockstep.reduction_tree import Ranges, clip, worker_ranges
from lockstep.training.integrity.checksum import PRIME

_RESIZED = 2.0
"""The flag of a buffer that was written to and has another shape; one that was only written to has 1."""


_ALWAYS = 6
"""The numbers at the end of each message: three wishes, the pace, `compared` and `balance`."""


def message_length(rows: int, parts: int, flags: int) -> int:
    """How many float64 a rank's message has: of each row two totals and two of each part, the flags, and what it always has."""
    return rows * (2 + 2 * parts) + flags + _ALWAYS


class Totals(NamedTuple):
    """The totals of a step's micro-batches, added in index order in float64: the same for every W.

    `loss` and `weight` are totals over the global batch; `parts` are (total, weight) by name.
    `first_bad` is the index of the first micro-batch whose loss is not finite, or None; `bad_weight` index and weight of the
    first one whose weight is not finite or below 0.
    """

    loss: float
    weight: float
    parts: dict[str, tuple[float, float]]
    first_bad: int | None
    bad_weight: tuple[int, float] | None = None


class Agreed(NamedTuple):
    """What all ranks know after the exchange.

    The step's totals; the buffers that were written to, and whether one has another shape now; whether any rank asks to stop, to save or to form another group; and
    each rank's time for a micro-batch, in seconds.
    """

    totals: Totals
    flagged: list[int]
    resized: bool
    stop: bool
    save: bool
    regroup: bool
    pace: list[float]
    same_compared: bool = True
    """Whether every rank closed its message with the same `compared`."""
    balanced: bool = True
    """Whether the `balance` of all ranks adds up to zero."""


class Exchange:
    """Collects one row per micro-batch and one flag per buffer, and gives every rank all of them.

    What a rank sends, in float64: a row for each micro-batch of its range, as many as in the longest range (total
    and weight of the loss, then of each part); the flags; its wishes to stop, to save and to regroup; its own pace.
    """

    def __init__(
        self,
        group: Group,
        micro_batches: int,
        parts: Sequence[str],
        flags: int,
        ranges: Ranges | None = None,
    ) -> None:
        """`micro_batches` are those of the largest step. `ranges` gives each rank's in a step of so many, where they are not `worker_ranges`."""
        self.group = group
        self.parts, self.names = tuple(parts), frozenset(parts)
        self.width = 2 + 2 * len(self.parts)
        whole = worker_ranges(micro_batches, group.size) if ranges is None else ranges(micro_batches)
        self.ranges = ranges or (lambda count: tuple(clip(assigned, count) for assigned in whole))
        self.rows = max(map(len, whole))
        self.flags = flags
        self._values: list[Tensor | float] = []
        self._flagged: Sequence[int] = ()
        self._resized: Sequence[int] = ()
        self._votes = (0.0, 0.0, 0.0)
        self._messages: Tensor | None = None
        self._wait: Callable[[], None] | None = None
        """Waits for the messages of all ranks where they travel by themselves; they are in `_apart`, complete once it has returned."""
        self._apart: list[Tensor] = []

    def put(self, loss: Loss) -> None:
        """Note the totals of this rank's next micro-batch; on a CUDA device they stay there, in memory that the job does not write to."""
        self._values += (self._value(loss.total), self._value(loss.weight))
        for name in self.parts:
            part = loss.parts[name]
            self._values += (self._value(part.total), self._value(part.weight))

    def _value(self, value: Tensor | float) -> Tensor | float:
        if not isinstance(value, Tensor):
            return float(value)
        return value.item() if value.device.type == "cpu" else value.detach().clone()

    def flag(self, buffers: Sequence[int], resized: Sequence[int] = ()) -> None:
        """Note which buffers the update of this step changed, and which of them have another shape; only the rank of micro-batch 0 does."""
        self._flagged, self._resized = buffers, resized

    def vote(self, *, stop: bool, save: bool = False, regroup: bool = False) -> None:
        """Note whether this rank asks to end the run after this step, to save its state then, or to form another group."""
        self._votes = float(stop), float(save), float(regroup)

    def close(self, pace: float = 0.0, compared: int | Tensor = 0, balance: int | Tensor = 0) -> None:
        """Build this rank's message from what was noted. `pace` is its time for a micro-batch, in seconds; `compared` and `balance` are whole numbers below 2**53.

        `compared` has to be the same on all ranks, and the sum of all `balance` to be zero modulo `PRIME`.
        """
        device = self.group.device
        length = message_length(self.rows, len(self.parts), self.flags)
        sent = self._values + [0.0] * (length - len(self._values))
        for b in self._flagged:
            sent[self.rows * self.width + b] = 1.0
        for b in self._resized:
            sent[self.rows * self.width + b] = _RESIZED
        sent[-_ALWAYS:] = *self._votes, pace, self._value(compared), self._value(balance)
        self._values, self._flagged, self._resized = [], (), ()
        self._messages = (
            torch.tensor(sent, dtype=torch.float64) if device.type == "cpu" else _on_device(sent, device)
        )

    def send(self) -> None:
        """Send the message in a collective of its own, without waiting."""
        message, rank = self.message, self.group.rank
        lengths = [message.numel()] * self.group.size
        lengths[rank] = 0
        received, self._wait = self.group.swap(message, lengths, message.numel())
        messages = list(torch.split(received, lengths))
        messages[rank] = message
        self._apart = messages

    @property
    def message(self) -> Tensor:
        """The closed message of this rank: float64, of the same length on every rank."""
        assert self._messages is not None
        return self._messages

    def arrived(self, messages: Tensor) -> None:
        """Take the messages of all ranks, one after another, which travelled with something else."""
        self._messages = messages

    def read(self, micro_batches: int) -> Agreed:
        """Wait for the messages; what all ranks now know. `micro_batches` is how many of the step are not empty."""
        if self._wait is not None:
            self._wait()
            self.arrived(torch.cat(self._apart))
            self._wait, self._apart = None, []
        messages: list[list[float]] = self.message.view(self.group.size, -1).tolist()
        self.group.settle()
        self._messages = None
        by_micro_batch = {
            m: message[i * self.width : (i + 1) * self.width]
            for assigned, message in zip(self.ranges(micro_batches), messages, strict=True)
            for i, m in enumerate(assigned)
        }
        rows = [by_micro_batch[m] for m in range(micro_batches)]
        flags = messages[0][self.rows * self.width : -_ALWAYS]  # rank 0 is the one that runs micro-batch 0
        flagged = [b for b, value in enumerate(flags) if value]
        stop, save, regroup = (any(message[i] for message in messages) for i in (-6, -5, -4))
        pace = [message[-3] for message in messages]
        same = len({message[-2] for message in messages}) == 1
        balanced = sum(int(message[-1]) for message in messages) % PRIME == 0
        return Agreed(
            self._totals(rows), flagged, _RESIZED in flags, stop, save, regroup, pace, same, balanced
        )

    def _totals(self, rows: list[list[float]]) -> Totals:
        columns = [_sum_in_order(column) for column in zip(*rows, strict=True)]
        bad = next((m for m, row in enumerate(rows) if not _finite(row[0])), None)
        weights = enumerate(row[1] for row in rows)
        bad_weight = next(((m, weight) for m, weight in weights if not 0.0 <= weight < math.inf), None)
        parts = {name: (columns[2 + 2 * i], columns[3 + 2 * i]) for i, name in enumerate(self.parts)}
        return Totals(columns[0], columns[1], parts, bad, bad_weight)


def _on_device(values: list[Tensor | float], device: torch.device) -> Tensor:
    """A message on the device. Numbers come from pinned memory: a copy from any other waits for all that was launched before it."""
    pinned = device.type == "cuda"
    numbers = [0.0 if isinstance(value, Tensor) else value for value in values]
    message = torch.tensor(numbers, dtype=torch.float64, pin_memory=pinned).to(device, non_blocking=True)
    tensors = {i: value for i, value in enumerate(values) if isinstance(value, Tensor)}
    if tensors:
        places = torch.tensor(list(tensors), pin_memory=pinned).to(device, non_blocking=True)
        losses = torch.stack([value.to(device, torch.float64).reshape(()) for value in tensors.values()])
        message.index_copy_(0, places, losses)
    return message


def _sum_in_order(values: Sequence[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total


def _finite(value: float) -> bool:
    return value - value == 0.0
