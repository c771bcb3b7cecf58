"""fp32, bf16 and fp16: the one place for autocast and the gradient scaler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from lockstep.training.step import problems
from lockstep.training.step.sharding import FullyShardedOptimizer

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}

SMALLEST_NORMAL = 2.0**-14
"""The smallest normal number of fp16: smaller ones have fewer bits, and below 2**-24 none."""

MOST_SKIPS_IN_A_ROW = 50
"""So many halvings of 2**16 leave no scale at all: the gradients themselves are not finite."""


class _Scaler(GradScaler):
    """torch's, which unscales gradients in host memory on the device: by itself it would read their factor before that has been copied there."""

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        unscale = super()._unscale_grads_
        if not isinstance(optimizer, FullyShardedOptimizer) or optimizer.host is None:
            return unscale(optimizer, inv_scale, found_inf, allow_fp16)
        flags = [found_inf]

        def note(gradients: list[Tensor]) -> None:
            stand_in: Any = SimpleNamespace(param_groups=[{"params": [*map(_with_gradient, gradients)]}])
            flags.extend(unscale(stand_in, inv_scale, found_inf, allow_fp16).values())

        in_host = set(map(id, optimizer.rows))
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        note([parameter.grad for parameter in parameters if id(parameter) not in in_host])
        optimizer.host.in_turn([(p.grad,) for p in parameters if id(p) in in_host], note)
        return {found_inf.device: torch.stack(flags).amax()}


def _with_gradient(gradient: Tensor) -> Tensor:
    """A tensor of next to no memory that has this gradient."""
    tensor = gradient.new_empty(()).expand(gradient.shape)
    tensor.grad = gradient
    return tensor


class Precision:
    """The arithmetic of forward and backward. Only fp16 scales its loss; the scale is always a power of two."""

    def __init__(self, name: Literal["fp32", "bf16", "fp16"], device: torch.device) -> None:
        self.name = name
        self.device = device
        self.scaler = self._new_scaler()
        self.skips_in_a_row = 0
        self.scale = float(self.scaler.get_scale())
        """The factor that the loss is multiplied by; 1 unless fp16. Read once a step: on a CUDA device each look waits."""

    def _new_scaler(self) -> GradScaler:
        scaler = _Scaler(self.device.type, enabled=self.name == "fp16")
        # It creates its scale at the first loss. A worker whose first step is a ragged one that leaves it without a
        # micro-batch would have none.
        if scaler.is_enabled():
            scaler.scale(torch.zeros((), device=self.device))
        return scaler

    def autocast(self) -> AbstractContextManager[None]:
        """The context of one forward pass, a new one each time: weights cast in it are forgotten with it."""
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=_AUTOCAST[self.name])

    def scaled(self, loss: Tensor) -> Tensor:
        return self.scaler.scale(loss) if self.scaler.is_enabled() else loss

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state, and the steps skipped in a row."""
        return {"scaler": self.scaler.state_dict(), "skips_in_a_row": self.skips_in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; ignored unless both are fp16."""
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler = (
                self._new_scaler()
            )  # one that was left in a step has noted optimizers that it has stepped
            self.scaler.load_state_dict(dict(state["scaler"]))
            self.skips_in_a_row = int(state["skips_in_a_row"])
            self.scale = float(self.scaler.get_scale())

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        if self.scaler.is_enabled():
            self.scaler.unscale_(optimizer)
            if isinstance(optimizer, FullyShardedOptimizer):
                optimizer.agree_on_overflow(self.scaler._found_inf_per_device(optimizer).values())

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Tensor] | None = None,
        *,
        direct: Callable[[], None] | None = None,
    ) -> bool:
        """Step an optimizer whose gradients are unscaled. False where the step was skipped because gradients overflowed.

        With fp16 there is no `closure`. `direct` takes the place of its `step`, where that gets none.
        """
        if not self.scaler.is_enabled():
            if closure is None:
                (direct or optimizer.step)()
            else:
                optimizer.step(closure)  # type: ignore[arg-type]
            return True
        if any(bool(found_inf) for found_inf in self.scaler._found_inf_per_device(optimizer).values()):
            return False  # the scaler would step a fused optimizer all the same: it skips by itself, and begins its state
        self.scaler.step(optimizer)
        return True

    def settle(self) -> None:
        """Update the scale after every optimizer of the step was stepped: one that overflowed halves it for all."""
        if not self.scaler.is_enabled():
            return
        previous_scale = self.scale
        self.scaler.update()
        self.scale = float(self.scaler.get_scale())
        self.skips_in_a_row = 0 if self.scale >= previous_scale else self.skips_in_a_row + 1
        if self.skips_in_a_row >= MOST_SKIPS_IN_A_ROW or not self.scale:
            overflowed = (
                f"{self.skips_in_a_row} steps in a row overflowed"
                if self.scale
                else "steps overflowed again and again"
            )
            raise problems.SCALE_FELL(got=overflowed, scale=f"{self.scale:g}")


def underflow(gradients: Sequence[Tensor], scale: float) -> float:
    """The share of nonzero elements that fp16 cannot hold at full precision, at the size that they had in backward: times `scale`.

    On a CUDA device it waits for the gradients, once. Elements that became zero on the way do not count: many gradients are rightly zero.
    """
    sizes = [gradient.abs() for gradient in gradients]
    small = torch.stack([((size > 0) & (size < SMALLEST_NORMAL / scale)).sum() for size in sizes]).sum()
    nonzero = torch.stack([size.count_nonzero() for size in sizes]).sum()
    below, elements = torch.stack([small, nonzero]).tolist()
    return below / elements if elements else 0.0
