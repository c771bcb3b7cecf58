"""Rows that lie in host memory: whatever is computed with them is computed on the device, with copies of some of them at a time.

So no bit depends on where they lie. A processor rounds otherwise than a GPU wherever that multiplies and adds in one operation, as in an optimizer's update: a
worker that computed with its rows where they lie would train another run. Where the device is the processor itself, the copies are made all the same: such a run
goes the way of one on a GPU, and saves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lockstep.training.step.joined_optimizer import members_of
from lockstep.training.step.norm import ELEMENT_BY_ELEMENT
from lockstep.training.step.sharding import SCALARS, counts_on_device

PORTION_BYTES = 64 << 20
"""Bytes of rows that are copied to the device at a time. A tensor is not divided: a larger one is copied by itself."""

T = TypeVar("T")


class HostMemory:
    """Host memory beside a device; page-locked beside a GPU, which then reads it without the processor."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_pinned = device.type == "cuda"

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of any content in host memory."""
        return torch.empty(shape, dtype=dtype, pin_memory=self.is_pinned)

    def in_host(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor in host memory."""
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor.detach())

    def on_device(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor on the device."""
        return tensor.detach().to(self.device, non_blocking=self.is_pinned, copy=True)

    def in_turn(self, rows: Sequence[tuple[Tensor, ...]], compute: Callable[..., object]) -> None:
        """Compute with tensors in host memory, a portion at a time. `compute` gets a list of copies for each place in the tuples; it changes the first ones, which are kept."""
        for portion in portions(rows, lambda tensors: tensors[0].nbytes):
            copies = [tuple(map(self.on_device, tensors)) for tensors in portion]
            compute(*map(list, zip(*copies, strict=True)))
            for tensors, (changed, *_) in zip(portion, copies, strict=True):
                tensors[0].detach().copy_(changed)

    def update(self, optimizer: torch.optim.Optimizer, rows: Sequence[nn.Parameter]) -> None:
        """One update by an optimizer that has `rows`, in host memory, among its parameters, and their state.

        torch's own optimizers update a portion at a time. One of the job's own may count its calls: it gets all rows at once.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = {parameter: parameter.grad for parameter in parameters}
        learning = [parameter for parameter in rows if gradients[parameter] is not None]
        for parameter in rows:
            parameter.grad = None
        each = [[*rows]]
        if may_divide(optimizer):
            each = [*portions(learning, lambda parameter: parameter.nbytes)] or [[]]
        try:
            # The first portion has what lies on the device beside it, which then has no gradient any more.
            for portion in each:
                with self._moved(optimizer, {parameter: gradients[parameter] for parameter in portion}):
                    optimizer.step()
                for parameter in parameters:
                    parameter.grad = None
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient

    @contextmanager
    def _moved(
        self, optimizer: torch.optim.Optimizer, gradients: dict[nn.Parameter, Tensor | None]
    ) -> Iterator[None]:
        """Have some parameters, with these gradients, and their state on the device in the block, and what it makes of them in host memory afterwards."""
        places = {parameter: parameter.data for parameter in gradients}
        states = {parameter: dict(optimizer.state.get(parameter, {})) for parameter in gradients}
        on_device = _counting_on_device(optimizer)
        for parameter, gradient in gradients.items():
            parameter.data = self.on_device(parameter)
            parameter.grad = None if gradient is None else self.on_device(gradient)
            for name, value in states[parameter].items():
                if _is_rows(name, value, parameter in on_device):
                    optimizer.state[parameter][name] = self.on_device(value)
        try:
            yield
        finally:
            for parameter, place in places.items():
                place.copy_(parameter.data)
                parameter.grad = None
                parameter.data = place
                for name, value in optimizer.state.get(parameter, {}).items():
                    if _is_rows(name, value, parameter in on_device):
                        earlier = states[parameter].get(name)
                        optimizer.state[parameter][name] = (
                            self.in_host(value) if earlier is None else earlier.copy_(value)
                        )


def may_divide(optimizer: torch.optim.Optimizer) -> bool:
    """Whether one update may be made by several calls, each of some of the parameters."""
    return all(type(member) in ELEMENT_BY_ELEMENT for member in members_of(optimizer))


def portions(values: Sequence[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """The values in order, so many at a time that they have `PORTION_BYTES` at most, or are one."""
    portion: list[T] = []
    total = 0
    for value in values:
        if portion and total + size(value) > PORTION_BYTES:
            yield portion
            portion, total = [], 0
        portion.append(value)
        total += size(value)
    if portion:
        yield portion


def _counting_on_device(optimizer: torch.optim.Optimizer) -> set[nn.Parameter]:
    """The parameters whose numbers of updates are read on the device."""
    groups = [group for group in optimizer.param_groups if counts_on_device(group)]
    return {parameter for group in groups for parameter in group["params"]}


def _is_rows(name: str, value: Any, counts: bool) -> bool:
    """Whether a value of a parameter's state is needed on the device: its rows, and its number of updates where that is read there."""
    return isinstance(value, Tensor) and (counts or name not in SCALARS)
