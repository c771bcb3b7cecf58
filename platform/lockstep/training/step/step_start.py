"""The state at the start of a step that changes it more than once, kept until the step is done: the way back for ranks that leave it in the middle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lockstep.checkpoint.skeleton import unpack
from lockstep.checkpoint.tree import pack

if TYPE_CHECKING:
    from lockstep.training.state import TrainState


class StepStart:
    """A copy in the memory of the previous one: fresh memory would cost more than the copy."""

    def __init__(self) -> None:
        self._skeleton: Any = None
        """None where nothing is kept."""
        self._tensors: dict[str, Tensor] = {}
        self.step: int | None = None
        """How many steps were done at what is kept."""

    def keep(self, state: TrainState) -> None:
        """Copy the state as it is now. A mirrored optimizer keeps its own."""
        packed = pack(state.sections_on_all_ranks())
        tensors: dict[str, Tensor] = {}
        for name, tensor in packed.tensors.items():
            assert isinstance(tensor, Tensor)
            copy = self._tensors.get(name)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                tensors[name] = tensor.detach().clone()
            else:
                tensors[name] = copy.copy_(tensor.detach())
        self._skeleton, self._tensors, self.step = packed.skeleton, tensors, state.counters.step

    def forget(self) -> None:
        """The step is done: there is no way back."""
        self._skeleton = self.step = None

    def take_back(self, state: TrainState) -> None:
        """Put the state back to what is kept, if anything is. The memory is the state's from then on."""
        if self._skeleton is not None:
            state.restore_on_all_ranks(unpack(self._skeleton, self._tensors))
            self._skeleton, self._tensors, self.step = None, {}, None
