"""What the ranks of a run compare by one digest each."""

from __future__ import annotations

from enum import IntEnum


class Quantity(IntEnum):
    """A part of a rank's state, by its place among the digests that ranks compare."""

    WEIGHTS = 0
    """The model's `state_dict`, buffers included."""
    OPTIMIZER = 1
    AVERAGE = 2
    """The average of the weights, if there is one."""
    OTHER = 3
    """Other buffers, loss scale, schedule and counters."""

    @property
    def label(self) -> str:
        """Its name in messages."""
        return _LABELS[self]


_LABELS = ("weights", "optimizer state", "average of the weights", "other state")
