"""What a worker's state takes, counted in bytes: before a run for its estimate, after it for its record."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.tree import pack
from lockstep.training.sharding import ShardedOptimizer
from lockstep.training.state import TrainState


def used(state: TrainState, peak_by_rank: Sequence[int]) -> str:
    """memory.json: what this rank holds at the end of a run, by the names of an estimate's fields, and every rank's peak."""
    return json.dumps(
        {
            "parameters_bytes": nbytes(state.model.parameters()),
            "buffers_bytes": nbytes(state.model.buffers()),
            "gradients_bytes": gradient_bytes(state.model),
            "optimizer_bytes": optimizer_bytes(state.optimizer),
            "average_bytes": average_bytes(state),
            "checkpoint_bytes": checkpoint_bytes(state),
            "peak_bytes_by_rank": list(peak_by_rank),
        },
        indent=1,
    )


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of some tensors, of memory that several share once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def gradient_bytes(model: torch.nn.Module) -> int:
    """Bytes of the gradients that are there. Those in DDP's buckets are counted by their own size."""
    return sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state; of one that is sharded, of this rank's part."""
    states = optimizer.own_state() if isinstance(optimizer, ShardedOptimizer) else optimizer.state
    return sum(tensor.nbytes for state in states.values() for tensor in tensors_in(state))


def average_bytes(state: TrainState) -> int:
    """Bytes of the moving average of the weights; 0 where there is none."""
    return nbytes(state.average.weights.values()) if state.average is not None else 0


def checkpoint_bytes(state: TrainState) -> int:
    """Bytes of the tensors that a checkpoint of `state` holds."""
    packed = (pack(tree, section) for section, tree in state.sections().items())
    return sum(tensor.nbytes for one in packed for tensor in one.tensors.values())


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a value: in its lists, tuples and mappings."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for inner in value.values() for tensor in tensors_in(inner)]
    if isinstance(value, list | tuple):
        return [tensor for inner in value for tensor in tensors_in(inner)]
    return []
