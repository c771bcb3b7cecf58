"""How many bytes a worker's state takes: before a run for its estimate, after it for its record."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.tree import pack
from lockstep.data.contents import PARTS
from lockstep.plan import Plan
from lockstep.reduction_tree import nodes, worker_ranges
from lockstep.spec.fields import Spec
from lockstep.spec.sharding import Sharding
from lockstep.training.state import TrainState
from lockstep.training.step.mirrored_optimizer import MirroredOptimizer
from lockstep.training.step.phases import Optimizers, optimizers_of, phases_of
from lockstep.training.step.sharding import FullyShardedOptimizer, ShardedOptimizer
from lockstep.training.step.uncut_parameters import UnitBytes

BUCKETS_MOVING = 2
"""Buckets that are in flight at once: the one that leaves, and the one before it."""


UNIT_COPIES = 3
"""Copies of a unit that are there at once while its gradients are reduced, its parameters let go of: the gradients (FSDP keeps the last of them until they are
sent), what is sent of them, and what is received."""

GLOO_THREADS = 2
"""Collectives that gloo runs at a time, each gathering into memory of its own first. NCCL gathers in place."""


def used(spec: Spec, plan: Plan, workers: int, state: TrainState, peak_by_rank: Sequence[int]) -> str:
    """The text of memory.json: what this rank holds at the end of a run, under the names of an estimate's fields, and every rank's peak.

    The tree's sums and the messages are gone by then: they are computed from the plan, as in the estimate.
    """
    sharding, count = state.sharding, plan.micro_batches
    if sharding is None:
        parameters: Iterable[Tensor] = state.model.parameters()
        gradients, summed = gradient_bytes(state.model), summed_bytes(state)
        reduction = reduction_bytes(spec, summed, count, workers)
        communication = communication_bytes(spec, gradients, count, workers)
    else:
        parameters = [*sharding.local.values(), *sharding.mirrors.values()]
        gradients = _bytes_of_gradients(sharding.local.values())
        reduction = gradients * sums_beside_gradients(count, workers)
        on_gpu = sharding.group.device.type == "cuda"
        communication = moving_units(spec.sharding, sharding.unit_bytes, count, workers, on_gpu=on_gpu)
    return json.dumps(
        {
            "parameters_bytes": nbytes(parameters),
            "buffers_bytes": nbytes(state.model.buffers()),
            "gradients_bytes": gradients,
            "optimizer_bytes": optimizer_bytes(state.optimizer) + bytes_before(state),
            "average_bytes": average_bytes(state),
            "reduction_bytes": reduction,
            "communication_bytes": communication,
            "checkpoint_bytes": checkpoint_bytes(state),
            "peak_bytes_by_rank": list(peak_by_rank),
        },
        indent=1,
    )


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of some tensors; memory that several share counts once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def gradient_bytes(model: torch.nn.Module) -> int:
    """Bytes of the gradients that exist. Those in DDP's buckets count by their own size, sparse ones by their rows."""
    return _bytes_of_gradients(model.parameters())


def _bytes_of_gradients(parameters: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for parameter in parameters for tensor in tensors_in(parameter.grad))


def summed_bytes(state: TrainState) -> int:
    """Bytes of the gradients that are summed at once: those that exist of the phase that has the most."""
    return max(
        _bytes_of_gradients(phase.parameters(state.model)) for phase in phases_of(state.job, state.model)
    )


def optimizer_bytes(optimizer: Optimizers) -> int:
    """Bytes of the optimizer's state, over all phases; for a sharded one, of this rank's part, and of what it keeps for the loss of another."""
    mirrored = sum(
        one.bytes_of_mirrors
        for one in optimizers_of(optimizer).values()
        if isinstance(one, MirroredOptimizer | FullyShardedOptimizer)
    )
    states = [
        state
        for phase_optimizer in optimizers_of(optimizer).values()
        for state in (
            phase_optimizer.own_state()
            if isinstance(phase_optimizer, ShardedOptimizer)
            else phase_optimizer.state
        ).values()
    ]
    return mirrored + sum(tensor.nbytes for tensor in tensors_in(states))


def bytes_before(state: TrainState) -> int:
    """Bytes of the optimizer's state that mirrored shards keep of the start of a step."""
    return 0 if state.mirrored_shards is None else state.mirrored_shards.optimizer_bytes_before


def average_bytes(state: TrainState) -> int:
    """Bytes of the moving average of the weights, and of those that this rank mirrors; 0 where there is none."""
    average = state.average
    return 0 if average is None else nbytes([*average.weights.values(), *average.mirror.values()])


def checkpoint_bytes(state: TrainState) -> int:
    """Bytes of the tensors that a checkpoint of `state` holds."""
    packed = (pack(tree, section) for section, tree in state.sections().items())
    return sum(tensor.nbytes for part in packed for tensor in part.tensors.values())


def moving_units(
    sharding: Sharding, units: UnitBytes, micro_batches: int, workers: int, *, on_gpu: bool
) -> int:
    """Bytes of what is there of whole parameters and their gradients at once, beside a worker's rows: while a backward reduces a unit, and gathers others ahead."""
    in_other_units = units.every - units.outside - units.largest
    ahead = (
        min(sharding.prefetch * units.largest, in_other_units)
        if sharding.reshard_after_forward
        else in_other_units
    )
    moving = ahead + UNIT_COPIES * units.largest + units.largest // workers
    if sharding.reshard_after_forward and not on_gpu:
        moving += min(ahead, GLOO_THREADS * units.largest)
    if micro_batches <= workers:  # no gradients yet of this unit and those ahead, nor sums in their place
        moving -= (ahead + units.largest) // workers
    gathered = 2 * units.outside  # and its gradients, to the end of the backward, which reduces them last
    return max(gathered + moving, UNIT_COPIES * units.outside)


def sums_held(assigned: range, leaves: int) -> int:
    """The most sets of gradients that a worker's part of the tree holds while it computes another micro-batch."""
    return max((len(nodes(range(assigned.start, m), leaves)) for m in assigned), default=0)


def sums_in_passes(micro_batches: int, workers: int) -> int:
    """The most partial sums of its rows that a worker keeps between two passes of a step."""
    ends = range(workers, micro_batches, workers)
    return max((len(nodes(range(end), micro_batches)) for end in ends), default=0)


def sums_beside_gradients(micro_batches: int, workers: int) -> int:
    """As `sums_in_passes`, but for one: it becomes the gradient, unit by unit, and never lies beside it."""
    return max(0, sums_in_passes(micro_batches, workers) - 1)


def reduction_bytes(spec: Spec, gradients: int, micro_batches: int, workers: int) -> int:
    """Bytes of the tree's sums on the worker that holds the most; `gradients` is the size of one set in bytes."""
    if spec.reduction != "exact":
        return 0
    ranges = worker_ranges(micro_batches, workers)
    return gradients * max(sums_held(worker_range, micro_batches) for worker_range in ranges)


def communication_bytes(spec: Spec, gradients: int, micro_batches: int, workers: int) -> int:
    """Bytes of DDP's buckets, which exist beside the gradients of all but the last micro-batch, and of the messages of two of them."""
    if workers == 1:
        return 0
    sums = max(
        len(nodes(worker_range, micro_batches)) for worker_range in worker_ranges(micro_batches, workers)
    )
    bucket = min(gradients, int(spec.workers.bucket_mb * 2**20))
    return gradients + BUCKETS_MOVING * 2 * bucket * (sums if spec.reduction == "exact" else 1)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a value: in its lists, tuples and mappings. Of a sparse or a nested one, those that it is made of."""
    if isinstance(value, Tensor):
        if value.is_nested:
            return list(value.unbind())
        return [getattr(value, part)() for part in PARTS.get(value.layout, ())] or [value]
    if isinstance(value, Mapping):
        return [tensor for inner in value.values() for tensor in tensors_in(inner)]
    if isinstance(value, list | tuple):
        return [tensor for inner in value for tensor in tensors_in(inner)]
    return []
