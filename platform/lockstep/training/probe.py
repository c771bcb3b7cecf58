"""Looking at micro-batches while they are computed, for whoever takes a step again to see inside it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn

from lockstep.plan import Position


class Probe(Protocol):
    """Is shown each micro-batch of a worker. It changes nothing that is computed, and draws nothing."""

    def around(
        self, position: Position, m: int, model: nn.Module, phase: str
    ) -> AbstractContextManager[None]:
        """Entered before micro-batch `m` is computed in a phase of the step, left after its backward. The only phase has no name."""

    def batch(self, position: Position, m: int, batch: Any) -> None:
        """The micro-batch, as it is given to the job."""

    def loss(self, position: Position, m: int, total: Tensor | float) -> None:
        """Its loss."""

    def backward(self, position: Position, m: int) -> None:
        """Backward begins."""


class NoProbe:
    """Nobody looks."""

    def around(
        self, position: Position, m: int, model: nn.Module, phase: str
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def batch(self, position: Position, m: int, batch: Any) -> None: ...

    def loss(self, position: Position, m: int, total: Tensor | float) -> None: ...

    def backward(self, position: Position, m: int) -> None: ...
