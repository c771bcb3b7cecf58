"""What a worker holds, computed from what a micro-batch measures: shares of a sharded state, sums of the tree, what is on its way between workers."""

from __future__ import annotations

from lockstep.checks.estimate_measurement import Measured
from lockstep.reduction_tree import worker_ranges
from lockstep.spec.fields import Spec
from lockstep.training.initial_model import asks_for_shards
from lockstep.training.observe.worker_memory import (
    communication_bytes,
    moving_units,
    reduction_bytes,
    sums_beside_gradients,
)
from lockstep.training.step.host_memory import PORTION_BYTES
from lockstep.training.step.sharding import Span, spans
from lockstep.training.step.span_gathering import gathering_bytes


def optimizer_bytes(spec: Spec, measured: Measured, workers: int) -> int:
    """Bytes of the optimizer's state on the worker that holds most of it; with a mirror, also of the state that it mirrors, and of a copy of both from before the update."""
    if not is_sharded(spec, workers):
        whole = sum(state.scalars + state.others + state.on_all for state in measured.optimizer)
        return 2 * whole if is_mirrored(spec) and spec.sharding.mode == "optimizer" else whole
    bytes_by_worker = [0] * workers
    for span in _spans(measured, workers):
        bytes_by_worker[span.owner] += measured.optimizer[span.parameter].bytes(span)
    on_all = sum(state.on_all for state in measured.optimizer)
    if is_mirrored(spec):
        both = max(own + bytes_by_worker[rank - 1] for rank, own in enumerate(bytes_by_worker))
        return 2 * (both + on_all)
    return max(bytes_by_worker) + on_all


def updating_bytes(spec: Spec, measured: Measured, workers: int) -> int:
    """Bytes that an update allocates and frees: for the worker's own spans, then for the rounds that gather the other workers'."""
    if not is_sharded(spec, workers):
        return measured.updating
    if spec.is_fully_sharded(workers):
        return held_bytes(spec, measured.updating, workers)
    owned = [0] * workers
    for span in _spans(measured, workers):
        owned[span.owner] += (span.stop - span.start) * measured.optimizer[span.parameter].width
    most = max(owned)
    return max(round(measured.updating * most / max(1, sum(owned))), gathering_bytes(most, workers))


def is_mirrored(spec: Spec) -> bool:
    """Whether what each worker alone has of the state is kept by another one too."""
    return spec.sharding.mode != "none" and spec.faults.mirror


def is_sharded(spec: Spec, workers: int) -> bool:
    """Whether workers share the optimizer's state out."""
    return spec.sharding.mode != "none" and workers > 1


def _spans(measured: Measured, workers: int) -> list[Span]:
    lengths, widths, cut, *_ = zip(*measured.optimizer, strict=True)
    return spans(lengths, widths, cut, workers)


def total_bytes(
    spec: Spec, measured: Measured, micro_batches: int, workers: int, *, on_gpu: bool = False
) -> int:
    """The peak of a step on the device: in its backward passes, or in its update. Buffers have a copy that each micro-batch starts from.

    A fully sharded run begins with a whole model, on which the first micro-batch is computed, unless it begins by shards. `on_gpu` is whether
    the device has memory of its own.
    """
    offloaded = on_gpu and is_offloaded(spec, workers)

    def resident(size: int, on_all: int) -> int:
        return on_all if offloaded else with_mirror(spec, size, workers, on_all)

    optimizer = optimizer_bytes(spec, measured, workers)
    if offloaded:
        optimizer = sum(state.on_all for state in measured.optimizer)
    parameters = resident(measured.parameters, measured.tables)
    average = resident(measured.average, min(measured.average, measured.tables))
    standing = parameters + 2 * measured.buffers + optimizer + average + measured.workspace
    if is_mirrored(spec):  # the start of the step
        standing += parameters + measured.buffers + average
    sums = sums_bytes(spec, measured, micro_batches, workers)
    if offloaded:
        sums = measured.table_rows * sums_beside_gradients(micro_batches, workers)
    moving = moving_bytes(spec, measured, micro_batches, workers, on_gpu=on_gpu)
    updating = updating_bytes(spec, measured, workers)
    if is_offloaded(spec, workers):
        updating = copied_bytes(spec, measured, workers)
    batches = measured.batch * batches_held(measured.phases, micro_batches, workers)
    kept = (
        0 if measured.phases == 1 else batches - measured.batch
    )  # through the updates of all phases but the last
    gradients = (
        measured.table_rows
        if offloaded
        else held_bytes(spec, measured.gradients, workers, measured.table_rows)
    )
    computing = measured.computing - measured.gradients + gradients
    in_update = kept + resident(measured.gradients, measured.table_rows) + updating
    if not spec.is_fully_sharded(workers):  # DDP's buckets stay
        in_update += moving
    step = standing + max(moving + sums + batches + computing, in_update)
    start = measured.parameters + 2 * measured.buffers + measured.batch + measured.computing
    by_shards = asks_for_shards(spec, measured.parameters) and not (measured.tables or on_gpu)
    begins_whole = spec.is_fully_sharded(workers) and not by_shards
    return max(step, start if begins_whole else 0)


def is_offloaded(spec: Spec, workers: int) -> bool:
    """Whether workers keep their rows in host memory."""
    return spec.is_fully_sharded(workers) and spec.sharding.offload


def host_bytes(spec: Spec, measured: Measured, micro_batches: int, workers: int) -> int:
    """Bytes of what a worker keeps in host memory: its rows of parameters, finished gradients, partial sums, the optimizer's state and the average."""
    if not is_offloaded(spec, workers):
        return 0
    average = measured.average - min(measured.average, measured.tables)
    gradients, summed = (size - measured.table_rows for size in (measured.gradients, measured.summed))
    optimizer = optimizer_bytes(spec, measured, workers) - sum(state.on_all for state in measured.optimizer)
    rows = sum(
        held_bytes(spec, size, workers)
        for size in (measured.parameters - measured.tables, gradients, average)
    )
    return (
        rows + optimizer + held_bytes(spec, summed, workers) * sums_beside_gradients(micro_batches, workers)
    )


def copied_bytes(spec: Spec, measured: Measured, workers: int) -> int:
    """Bytes of the copies on the device with which an update computes: of a portion of the rows, their gradients and their state, and what it allocates for it."""
    rows = held_bytes(spec, measured.parameters - measured.tables, workers)
    portion = max(min(PORTION_BYTES, rows), held_bytes(spec, measured.updated_at_once, workers))
    copied = (
        rows
        + held_bytes(spec, measured.gradients - measured.table_rows, workers)
        + optimizer_bytes(spec, measured, workers)
        + held_bytes(spec, measured.updating, workers)
    )
    return copied * portion // max(1, rows)


def held_bytes(spec: Spec, size: int, workers: int, on_all: int = 0) -> int:
    """The bytes that one worker holds of `size` bytes of parameters, or of a state of parameters; of these, `on_all` bytes are whole on every worker."""
    return on_all - (on_all - size) // workers if spec.is_fully_sharded(workers) else size


def with_mirror(spec: Spec, size: int, workers: int, on_all: int = 0) -> int:
    """`held_bytes`, with what a worker mirrors of another's share."""
    mirrors = spec.is_fully_sharded(workers) and is_mirrored(spec)
    return held_bytes(spec, size, workers, on_all) + (
        held_bytes(spec, size - on_all, workers) if mirrors else 0
    )


def sums_bytes(spec: Spec, measured: Measured, micro_batches: int, workers: int) -> int:
    """Bytes of the tree's sums on the worker that holds the most."""
    if spec.is_fully_sharded(workers):
        return held_bytes(spec, measured.summed, workers, measured.table_rows) * sums_beside_gradients(
            micro_batches, workers
        )
    return reduction_bytes(spec, measured.summed, micro_batches, workers)


def moving_bytes(
    spec: Spec, measured: Measured, micro_batches: int, workers: int, *, on_gpu: bool = False
) -> int:
    """Bytes of what is gathered, sent and received at once."""
    if spec.is_fully_sharded(workers):
        return moving_units(spec.sharding, measured.unit_bytes, micro_batches, workers, on_gpu=on_gpu)
    return communication_bytes(spec, measured.gradients, micro_batches, workers)


def sent_bytes(spec: Spec, measured: Measured, micro_batches: int, workers: int) -> int:
    """What a worker sends in a step where each sends one sum of its gradients; the few numbers beside them, and a first pass over the whole batch, apart."""
    if spec.is_fully_sharded(workers):
        passes = -(-micro_batches // workers)
        gathers = 2 if spec.sharding.reshard_after_forward else 1
        sets = passes * (gathers * (measured.parameters - measured.tables) + measured.gradients)
        if is_mirrored(spec):  # its rows of the finished gradients go to its mirror
            return sets * (workers - 1) // workers + held_bytes(spec, measured.gradients, workers)
    else:
        sets = 2 * measured.gradients + (measured.gradients if is_sharded(spec, workers) else 0)
    return sets * (workers - 1) // workers


def batches_held(phases: int, micro_batches: int, workers: int) -> int:
    """How many micro-batches a worker has in memory at once: with several phases all its own of a step, and a copy of the one at hand."""
    return 1 if phases == 1 else 1 + max(map(len, worker_ranges(micro_batches, workers)))
