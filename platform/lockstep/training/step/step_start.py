"""The state at the start of a step that changes it more than once, kept until the step is done: the way back for ranks that leave it in the middle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from lockstep.checkpoint.tree import pack
from lockstep.checkpoint.tree_decoder import unpack

if TYPE_CHECKING:
    from lockstep.training.state import TrainState


class StepStart:
    """A copy in the memory of the previous one: fresh memory would cost more than the copy."""

    def __init__(self) -> None:
        self._skeleton: Any = None
        """None where nothing is kept."""
        self._tensors: dict[str, Any] = {}
        self._evaluations: Evaluated | None = None
        self.step: int | None = None
        """How many steps were done at what is kept."""

    def keep(self, state: TrainState) -> None:
        """Copy the state as it is now. What is mirrored keeps its own."""
        packed = pack(state.sections_on_all_ranks())
        tensors: dict[str, Any] = {}
        for name, tensor in packed.tensors.items():
            copy = self._tensors.get(name)
            if not isinstance(tensor, Tensor):  # a shard, which mirrored shards keep
                tensors[name] = tensor
            elif copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                tensors[name] = tensor.detach().clone()
            else:
                tensors[name] = copy.copy_(tensor.detach())
        self._skeleton, self._tensors, self.step = packed.skeleton, tensors, state.counters.step
        self._evaluations = Evaluated.of(state)

    def forget(self) -> None:
        """The step is done: there is no way back."""
        self._skeleton = self.step = None

    def take_back(self, state: TrainState) -> None:
        """Put the state back to what is kept, if anything is. The memory is the state's from then on."""
        if self._skeleton is not None:
            assert self._evaluations is not None
            self._evaluations.put_back(state)  # their shards are in no section
            state.restore_on_all_ranks(unpack(self._skeleton, self._tensors))
            state.lacks_evaluation = False
            self._skeleton, self._tensors, self.step = None, {}, None


class Evaluated(NamedTuple):
    """What evaluations have left by now. A later one puts other objects in the place of these, which are no copies."""

    best: dict[str, Any] | None
    pending: Any

    @classmethod
    def of(cls, state: TrainState) -> Evaluated:
        return cls(state.best.weights, state.pending)

    def put_back(self, state: TrainState) -> None:
        """Have a state's shards of evaluations as they were. All else that an evaluation changes has to be restored as well."""
        state.best.weights, state.pending = self.best, self.pending
