"""The interface for looking at micro-batches while they are computed, such as when a step is taken again to see inside it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn

from lockstep.plan import Position


class Probe(Protocol):
    """Sees each micro-batch of a worker. It changes nothing that is computed, and draws no random numbers."""

    def around(
        self, position: Position, m: int, model: nn.Module, phase: str
    ) -> AbstractContextManager[None]:
        """Entered before micro-batch `m` is computed in a phase of the step, left after its backward. The only phase has no name."""

    def batch(self, position: Position, m: int, batch: Any) -> None:
        """Called with the batch as the job gets it."""

    def loss(self, position: Position, m: int, total: Tensor | float) -> None:
        """Called with the total of the loss."""

    def backward(self, position: Position, m: int) -> None:
        """Called when backward begins."""


class NoProbe:
    """A probe that looks at nothing."""

    def around(
        self, position: Position, m: int, model: nn.Module, phase: str
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def batch(self, position: Position, m: int, batch: Any) -> None: ...

    def loss(self, position: Position, m: int, total: Tensor | float) -> None: ...

    def backward(self, position: Position, m: int) -> None: ...
