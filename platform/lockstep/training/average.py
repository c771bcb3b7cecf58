"""The exponential moving average of the weights: what `ema` in the spec asks for.

It begins as the weights after the first update. After each later update, each parameter's average moves
by `1 - decay` of the way to the parameter: `torch._foreach_lerp_`, as in `torch.optim.swa_utils`. Parameters that learn are
averaged; frozen ones and buffers are the model's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import StorageError


class Average:
    """The average of a model's weights, in memory of its own; empty before the first update."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = model
        self.decay = decay
        self.weights: dict[str, Tensor] = {}

    def move(self) -> None:
        """Move the average towards the model's weights. Called once after each update."""
        learning = self._learning()
        with torch.no_grad():
            if self.weights:
                torch._foreach_lerp_(list(self.weights.values()), list(learning.values()), 1.0 - self.decay)
            else:
                self.weights = {name: parameter.detach().clone() for name, parameter in learning.items()}

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Put the average in the place of the model's weights, which come back bit for bit."""
        names = list(self.weights)
        self._swap(names)
        try:
            yield
        finally:
            self._swap(names[::-1])

    def _swap(self, names: Sequence[str]) -> None:
        """Swap weights and average by value, one parameter at a time: storages keep their owners, and it takes the memory of the largest parameter."""
        learning = self._learning()
        with torch.no_grad():
            for name in names:
                parameter = learning[name]
                own = parameter.detach().clone()
                parameter.copy_(self.weights[name])
                self.weights[name].copy_(own)

    def _learning(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def state_dict(self) -> dict[str, Any]:
        """The averages by the names of their parameters."""
        return dict(self.weights)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. StorageError where it is the average of another model."""
        learning = self._learning()
        for name in {**learning, **state} if state else {}:
            shapes = [tuple(held[name].shape) if name in held else None for held in (state, learning)]
            if shapes[0] != shapes[1]:
                raise StorageError(
                    f"checkpoint: the average of {name!r} has the shape {shapes[0]}, and the parameter {shapes[1]}"
                )
        self.weights = {
            name: state[name].detach().to(parameter.device, copy=True)
            for name, parameter in learning.items()
            if state
        }
