"""The state at the start of a step that changes it more than once, kept until the step is done: the way back for ranks that leave it in the middle."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from lockstep.checkpoint.skeleton import unpack
from lockstep.checkpoint.tree import pack


class Restorable(Protocol):
    """A state as trees of tensors and plain values, by name."""

    def sections(self) -> dict[str, Any]: ...
    def restore(self, sections: dict[str, Any]) -> None: ...


class StepStart:
    """A copy in the memory of the previous one: fresh memory would cost more than the copy."""

    def __init__(self) -> None:
        self._skeleton: Any = None
        """None where nothing is kept."""
        self._tensors: dict[str, Tensor] = {}

    def keep(self, state: Restorable) -> None:
        """Copy the state as it is now."""
        packed = pack(state.sections())
        tensors: dict[str, Tensor] = {}
        for name, tensor in packed.tensors.items():
            assert isinstance(tensor, Tensor)  # a sharded optimizer has one phase
            copy = self._tensors.get(name)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                tensors[name] = tensor.detach().clone()
            else:
                tensors[name] = copy.copy_(tensor.detach())
        self._skeleton, self._tensors = packed.skeleton, tensors

    def forget(self) -> None:
        """The step is done: there is no way back."""
        self._skeleton = None

    def take_back(self, state: Restorable) -> None:
        """Put the state back to what is kept, if anything is. The memory is the state's from then on."""
        if self._skeleton is not None:
            state.restore(unpack(self._skeleton, self._tensors))
            self._skeleton, self._tensors = None, {}
