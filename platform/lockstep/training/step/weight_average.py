"""The weights that are evaluated where those are not the trained ones: an average of them, or what the optimizer itself evaluates with.

What `ema` in the spec asks for begins as the weights after the first update. After each later update, each parameter's average moves
by `1 - decay` of the way to the parameter: `torch._foreach_lerp_`, as in `torch.optim.swa_utils`. Parameters that learn are
averaged; frozen ones and buffers are the model's own.

A schedule-free optimizer (Defazio et al. 2024, "The Road Less Scheduled") has the gradient taken at other weights than those to evaluate, and swaps
them in its `train()` and `eval()`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.training.step import problems
from lockstep.training.step.host_memory import HostMemory


class Average:
    """The average of a model's weights, in memory of its own; empty before the first update."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = model
        self.decay = decay
        self.weights: dict[str, Tensor] = {}
        self.local: Mapping[str, Tensor] = {}
        """This worker's rows of the parameters, by name, where they are sharded."""
        self.host: HostMemory | None = None
        """Where the rows are kept, and their average, if not on the device."""
        self.rows: Container[str] = ()
        """The names of the parameters that are sharded."""
        self.mirrored: Mapping[str, Tensor] = {}
        """The rows of the parameters that it mirrors, by name."""
        self.mirror: dict[str, Tensor] = {}
        """The average of those."""
        self._told = False

    def move(self) -> None:
        """Move the average towards the model's weights. Called once after each update."""
        self.weights = self._moved(self.weights, self._learning())
        self.mirror = self._moved(self.mirror, self._mirrored())

    def _moved(self, average: dict[str, Tensor], learning: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            host, rows = self.host, self.rows if self.host is not None else ()
            if not average:
                return {
                    name: host.in_host(p) if host is not None and name in rows else p.detach().clone()
                    for name, p in learning.items()
                }
            on_device = [name for name in learning if name not in rows]
            if on_device:
                self._lerp([average[name] for name in on_device], [learning[name] for name in on_device])
            if host is not None:
                host.in_turn(
                    [(average[name], learning[name]) for name in learning if name in rows], self._lerp
                )
            return average

    def _lerp(self, average: list[Tensor], learning: list[Tensor]) -> None:
        torch._foreach_lerp_(average, learning, 1.0 - self.decay)

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
        with torch.no_grad():
            for average, learning in ((self.weights, self._learning()), (self.mirror, self._mirrored())):
                for name in names:
                    if name in average:
                        original = learning[name].detach().clone()
                        learning[name].copy_(average[name])
                        average[name].copy_(original)

    def _mirrored(self) -> dict[str, Tensor]:
        return {name: rows for name, rows in self.mirrored.items() if rows.requires_grad}

    def _learning(self) -> dict[str, Tensor]:
        return {name: self.local.get(name, p) for name, p in self.model.named_parameters() if p.requires_grad}

    def state_dict(self) -> dict[str, Any]:
        """The averages by the names of their parameters."""
        return dict(self.weights)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. StorageError where it is the average of another model."""
        learning = self._learning()
        for name in {**learning, **state} if state else {}:
            shapes = [
                tuple(tensors[name].shape) if name in tensors else None for tensors in (state, learning)
            ]
            if shapes[0] != shapes[1]:
                raise problems.AVERAGE_SHAPE(name=name, got=shapes[0], wanted=shapes[1])
        self.weights = {
            name: state[name].detach().to(parameter.device, copy=True)
            for name, parameter in learning.items()
            if state
        }

    def start_left(self, updates: int) -> float:
        """The share of the average that is still its start, the weights after the first update, after so many updates."""
        return float(self.decay ** max(0, updates - 1))

    @property
    def ripe_after(self) -> int:
        """The number of updates after which at most half of the average is still its start."""
        return 1 + math.ceil(math.log(0.5) / math.log(self.decay))

    def told_at_the_start(self, updates: int) -> list[str]:
        """A warning where a run of so many updates ends before the average is one."""
        if self.start_left(updates) <= 0.5:
            return []
        self._told = True
        return [
            f"ema: with {self.decay:g}, {self.start_left(updates):.0%} of the average is still the weights after the first update when the run ends "
            f"after {updates} updates, and it is the average that is evaluated, kept and exported; lower ema to at most "
            f"{_largest_decay(updates):.4g}, or train for at least {self.ripe_after} updates"
        ]

    def told_where_it_decides(self, updates: int, rule: str) -> list[str]:
        """A warning, once, where `rule` judges an average that is not one yet."""
        if self._told or self.start_left(updates) <= 0.5:
            return []
        self._told = True
        return [
            f"ema: {rule} judges the average after {updates} updates, and with {self.decay:g} {self.start_left(updates):.0%} of it is still the weights "
            f"after the first update; lower ema, or evaluate from update {self.ripe_after} on"
        ]


def _largest_decay(updates: int) -> float:
    """The largest decay, of four digits, whose average has left half of its start behind after so many updates."""
    return math.floor(math.pow(0.5, 1 / max(1, updates - 1)) * 1e4) / 1e4


@contextmanager
def shown_by_optimizers(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Have the optimizers with modes of their own in evaluation mode. The weights come back bit for bit, which their `train()` may round."""
    changing = [optimizer for optimizer in optimizers if has_modes(optimizer)]
    if not changing:
        yield
        return
    trained = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    for optimizer in changing:
        optimizer.eval()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for optimizer in changing:
            optimizer.train()  # type: ignore[attr-defined]
        with torch.no_grad():
            for parameter, value in trained:
                parameter.copy_(value)


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has `train()` and `eval()`, as schedule-free ones have."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
