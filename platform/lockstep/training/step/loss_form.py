"""What the steps of a run have to know of a loss before the first one begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from lockstep.job.interface import Loss


@dataclass(frozen=True, slots=True)
class LossForm:
    """The form of a phase's loss, as a micro-batch shows it before training. It is the same on all ranks."""

    parts: tuple[str, ...] = ()
    """The names of its parts, in order."""
    terms: tuple[str, ...] = ()
    """The names of its terms, in order."""
    statistics: bool = False
    """Whether it gives statistics for `after_step`."""
    tables: frozenset[str] = frozenset()
    """The parameters whose gradients are sparse."""
    written: frozenset[int] = frozenset()
    """The numbers of the buffers that it writes to."""

    @classmethod
    def of(cls, loss: Loss, gradients: Mapping[str, Tensor], written: frozenset[int]) -> LossForm:
        """The form of a loss that has left these `gradients`, by parameter name, and has `written` to buffers."""
        return cls(
            tuple(loss.parts),
            tuple(loss.terms),
            bool(loss.statistics),
            frozenset(name for name, gradient in gradients.items() if gradient.is_sparse),
            written,
        )
