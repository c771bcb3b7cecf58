"""The update of a small model by AdamW or Adam as a spec names them: the operations of torch's `step`, of all parameters at once where they can be.

`step` opens a range for the profiler, calls hooks, looks for accelerators, and computes one parameter after another: of a small model it takes four times as
long as torch's fused kernel, which has other bits. Here the moments of all parameters lie one after another in one tensor, of which the optimizer's state has views.
Each operation is on single elements. So the bits are those of `step` if torch's kernels compute an element at the end of a tensor as they do one in its middle, which
is tried once in each process. Whatever is out of the ordinary is left to `step`, and so is the first update, which begins the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.training.step.learning_rate import hooks_of_job

MOST_ELEMENTS = 1 << 18
"""A larger model would leave the processor's cache between two operations, and has more to compute than to call."""

_OUT_OF_THE_ORDINARY = ("amsgrad", "capturable", "differentiable", "foreach", "fused", "maximize")
"""Settings of a group with which torch takes another path."""

_EXACT = (torch.float32, torch.float64)
"""In shorter types torch's kernels round at other places."""

_ONE = torch.tensor(1.0)

_profiles = getattr(torch.autograd, "_profiler_enabled", lambda: True)
_hooks_of_all = [
    getattr(import_module("torch.optim.optimizer"), f"_global_optimizer_{when}_hooks", True)
    for when in ("pre", "post")
]
"""Whether a profiler runs, and the hooks on every optimizer. With a torch that has no such names each update is left to `step`."""


class DirectUpdate:
    """Updates of one optimizer, with the bits of its `step` in parameters, gradients and state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._first = self._second = self._work = torch.empty(0)
        """The moments of all parameters, and room for as much again."""
        self._first_views = self._second_views = self._work_views = list[Tensor]()
        """The same by parameter. The state has those of the moments."""

    def __call__(self) -> None:
        optimizer = self._optimizer
        if _is_ordinary(optimizer):
            states = [optimizer.state.get(p, {}) for p in optimizer.param_groups[0]["params"]]
            if all(states) and len({state["step"].item() for state in states}) == 1:  # none was passed by
                self.take(states)
                return
        optimizer.step()

    @torch.no_grad()
    def take(self, states: Sequence[dict[str, Any]]) -> None:
        """Update without `step`; `states` are those of the parameters."""
        moments = [state[name] for name in ("exp_avg", "exp_avg_sq") for state in states]
        views = [*self._first_views, *self._second_views]
        if len(moments) != len(views) or not all(map(is_, moments, views)):
            self._lay_out(states)  # it is the first one, or a state was loaded
        self._compute(self._optimizer.param_groups[0], [state["step"] for state in states])

    def _lay_out(self, states: Sequence[dict[str, Any]]) -> None:
        """Put the moments one after another, and views of them into the state."""
        shapes = [state["exp_avg"].shape for state in states]
        self._first, self._second = (
            torch.cat([state[name].reshape(-1) for state in states]) for name in ("exp_avg", "exp_avg_sq")
        )
        self._work = torch.empty_like(self._first)
        sizes = [shape.numel() for shape in shapes]
        self._first_views, self._second_views, self._work_views = (
            [part.view(shape) for part, shape in zip(torch.split(row, sizes), shapes, strict=True)]
            for row in (self._first, self._second, self._work)
        )
        for state, first, second in zip(states, self._first_views, self._second_views, strict=True):
            state["exp_avg"], state["exp_avg_sq"] = first, second

    def _compute(self, group: Mapping[str, Any], steps: list[Tensor]) -> None:
        """Torch's `_single_tensor_adam`, operation by operation."""
        parameters, work, rate = group["params"], self._work, group["lr"]
        beta1, beta2 = group["betas"]
        torch._foreach_add_(steps, _ONE)
        step = steps[0].item()
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        torch._foreach_copy_(self._work_views, [parameter.grad for parameter in parameters])
        self._first.lerp_(work, 1 - beta1)
        self._second.mul_(beta2).addcmul_(work, work, value=1 - beta2)
        torch.sqrt(self._second, out=work).div_((1 - beta2**step) ** 0.5).add_(group["eps"])
        torch._foreach_addcdiv_(parameters, self._first_views, self._work_views, -(rate / (1 - beta1**step)))


def _is_ordinary(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an update, but for the first one, can be taken without `step`, and nothing would notice."""
    kind, group = type(optimizer), optimizer.param_groups[0]
    parameters: list[Tensor] = group["params"]
    return (
        (kind is torch.optim.AdamW or (kind is torch.optim.Adam and not group["weight_decay"]))
        and len(optimizer.param_groups) == 1
        and not any(map(group.get, _OUT_OF_THE_ORDINARY))
        and isinstance(group["lr"], float)
        and "step" not in vars(optimizer)  # a scheduler of torch's counts the calls
        and not any(_hooks_of_all)
        and not hooks_of_job(optimizer)
        and not _profiles()
        and all(map(_is_plain, parameters))
        and len({parameter.dtype for parameter in parameters}) == 1
        and sum(map(Tensor.numel, parameters)) <= MOST_ELEMENTS
        and _agrees_with_torch(kind, parameters[0].dtype)
    )


def _is_plain(parameter: Tensor) -> bool:
    return (
        type(parameter) is nn.Parameter
        and parameter.is_cpu
        and parameter.dtype in _EXACT
        and parameter.is_contiguous()
        and parameter.grad is not None
    )


@cache
def _agrees_with_torch(kind: type[torch.optim.Optimizer], dtype: torch.dtype) -> bool:
    """Whether updates here have the bits of `step`, of tensors that end anywhere in a vector. It takes milliseconds, once in a process."""
    generator = torch.Generator().manual_seed(1)

    def numbers() -> list[Tensor]:
        return [torch.randn(length, dtype=dtype, generator=generator) for length in range(1, 36)]

    rows, make = numbers(), kind
    stepped, direct = ([nn.Parameter(row.clone()) for row in rows] for _ in range(2))
    reference, optimizer = make(stepped, lr=0.1), make(direct, lr=0.1)  # type: ignore[call-arg]
    update = DirectUpdate(optimizer)
    for i in range(4):
        for parameter, copy, gradient in zip(stepped, direct, numbers(), strict=True):
            parameter.grad, copy.grad = gradient, gradient.clone()
        reference.step()
        if i == 0:
            optimizer.step()
        else:
            update.take([optimizer.state[copy] for copy in direct])
    return all(
        torch.equal(parameter, copy)
        and all(
            torch.equal(value, optimizer.state[copy][name])
            for name, value in reference.state[parameter].items()
        )
        for parameter, copy in zip(stepped, direct, strict=True)
    )
