"""The memory of a run before it is run: what a worker holds, part by part, measured on one micro-batch of it.

Parameters, gradients, the optimizer's state and a checkpoint are counted. Activations and the temporary tensors of an
update are measured as they come and go (`live_bytes`). The sums of the tree follow from the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import gcd
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]
import torch

from lockstep.checks.fixture import Fixture
from lockstep.checks.live_bytes import peak_of
from lockstep.data.sampler import MicroBatch
from lockstep.errors import JobError, SpecError
from lockstep.job.loading import others_out_of_sight
from lockstep.printing import size_text
from lockstep.reduction_tree import worker_ranges
from lockstep.spec.fields import Spec
from lockstep.training.determinism import determinism
from lockstep.training.failure import as_lockstep_error
from lockstep.training.initial_model import asks_for_shards
from lockstep.training.observe.worker_memory import (
    average_bytes,
    checkpoint_bytes,
    communication_bytes,
    gradient_bytes,
    moving_units,
    nbytes,
    reduction_bytes,
    summed_bytes,
    sums_in_passes,
    tensors_in,
)
from lockstep.training.step.closures import step_once
from lockstep.training.step.host_memory import PORTION_BYTES, may_divide
from lockstep.training.step.norm import workspace_bytes
from lockstep.training.step.phase_step import LossModule
from lockstep.training.step.phases import check_combination, optimizers_of
from lockstep.training.step.sharding import SCALARS, Span, flat, gathering_bytes, spans
from lockstep.training.step.sharding_units import Calls, units_of
from lockstep.training.step.uncut_parameters import NO_UNITS, UnitBytes, unit_bytes

PRECISIONS = ("fp32", "bf16", "fp16")

ROOM = 0.9
"""The share of the memory that is there which a micro-batch may be proposed to fill."""


class ParameterState(NamedTuple):
    """What an optimizer keeps of one parameter, and what decides how a sharded one cuts it."""

    elements: int
    """0 for a parameter that is not trained."""
    width: int
    """Bytes of an element."""
    may_cut: bool
    scalars: int
    """Bytes of state that every span of the parameter has."""
    others: int
    """Bytes of state that has an element for each of the parameter's."""
    on_all: int = 0
    """Bytes of state that every worker keeps, as of a table with sparse gradients."""

    def bytes(self, span: Span) -> int:
        """Bytes of the state of a span."""
        return self.scalars + self.others * (span.stop - span.start) // max(1, self.elements)


@dataclass(frozen=True, slots=True)
class Measured:
    """One micro-batch of `samples`, forward and backward, and an update, in bytes."""

    samples: int
    parameters: int
    buffers: int
    gradients: int
    optimizer: tuple[ParameterState, ...]
    """Of each parameter, in the order of the optimizer's groups."""
    average: int
    checkpoint: int
    workspace: int
    """Where the norm of the gradients is taken."""
    batch: int
    activations: int
    """What forward holds at its peak."""
    computing: int
    """What forward and backward hold at their peak, the gradients included."""
    updating: int
    """What an update makes and lets go of."""
    phases: int = 1
    """Of a step. With several, a worker holds all its micro-batches of the step until the last phase has had them."""
    unit_bytes: UnitBytes = NO_UNITS
    """Parameters that are gathered where they are sharded."""
    units: int = 0
    """Modules that are gathered one at a time."""
    tables: int = 0
    """Parameters with sparse gradients, which every worker has whole."""
    table_rows: int = 0
    """Gradients of theirs."""
    updated_at_once: int = 0
    """Parameters that an update needs at once, at least: the largest one, or all of those that an optimizer of the job's own updates."""
    apart: int = 0
    """Bytes of the gradients that are not of the phase with most of them: sums wait for one phase at a time."""

    @property
    def summed(self) -> int:
        """Bytes of the gradients that are summed at once, at most."""
        return self.gradients - self.apart


@dataclass(frozen=True, slots=True)
class Estimate:
    """The memory of one worker in bytes. Parts that are not there at one moment make `total_bytes` less than their sum."""

    parameters_bytes: int
    buffers_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    average_bytes: int
    """The moving average of the weights, where `ema` asks for it."""
    activations_bytes: int
    reduction_bytes: int
    """Sums of the tree beside the gradients that are being computed."""
    communication_bytes: int
    """With two workers or more: DDP's buckets and the messages on their way."""
    units: int
    """With `sharding: full`, the modules that are gathered one at a time; else 0."""
    sent_bytes: int
    """What a worker sends in a step, about: gradients, and parameters where they are shared out."""
    checkpoint_bytes: int
    """Tensors of one checkpoint; a save holds as many in host memory, shared out over the workers."""
    total_bytes: int
    host_bytes: int
    """With `sharding.offload` beside a GPU, what of the parts lies in host memory, and so in no total; else 0."""
    available_bytes: int
    """Memory that one worker can have on this machine's device, the other workers of the spec beside it."""
    device: str
    workers: int
    micro_batch: int
    precision: str
    activation_checkpointing: bool
    largest_micro_batch: int | None
    """The largest `batch.micro` that should fit; None where not even one sample does."""
    tokens: int | None
    """The bound of a micro-batch in padded tokens, which then has no largest number of samples that fits."""
    variants: list[dict[str, Any]] = field(default_factory=list)
    """The same run in the other precisions, and with or without activation checkpointing."""

    @property
    def fits(self) -> bool:
        """Whether a worker has room on its device, and beside it."""
        in_host = available_bytes(torch.device("cpu"), self.workers) if self.host_bytes else 0
        return self.total_bytes <= self.available_bytes and self.host_bytes <= in_host

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def estimate(spec: Spec) -> Estimate:
    """Measure one micro-batch of the run in this process, in every precision. Leaves nothing behind. Raises LockstepError."""
    with determinism(spec.determinism, spec.threads), others_out_of_sight():
        fixture = Fixture(spec)
        base = estimated(fixture)
        variants = [_variant(fixture.beside(variant)) for variant in _others(fixture)]
    return Estimate(**{**asdict(base), "variants": variants})


def _others(fixture: Fixture) -> Iterable[Spec]:
    spec = fixture.spec
    named = bool(list(fixture.job.activation_checkpoints(fixture.fresh().model)))
    for checkpointing in (False, True) if named else (False,):
        for precision in PRECISIONS:
            settings = {"precision": precision, "activation_checkpointing": checkpointing}
            if settings != {
                "precision": spec.precision,
                "activation_checkpointing": spec.activation_checkpointing,
            }:
                variant = spec.model_copy(update=settings)
                with suppress(SpecError):  # what the job's phases do not go with is no variant
                    check_combination(fixture.job, variant)
                    yield variant


def _variant(fixture: Fixture) -> dict[str, Any]:
    shown = (
        "precision",
        "activation_checkpointing",
        "activations_bytes",
        "total_bytes",
        "largest_micro_batch",
    )
    values = asdict(estimated(fixture))
    return {name: values[name] for name in shown}


def estimated(fixture: Fixture) -> Estimate:
    """The estimate of a fixture's own spec, without variants."""
    spec, plan, device = fixture.spec, fixture.plan, fixture.device
    keys = fixture.step_keys()[:1]
    if plan.by_length is not None:
        first, largest = keys[0], plan.by_length.largest()
        listed = isinstance(first.ids, list)
        keys = [first._replace(ids=ids.tolist() if listed else ids, due=()) for ids in largest]
    key, full = max(((each, measured(fixture, each)) for each in keys), key=lambda pair: pair[1].activations)
    half = (
        measured(fixture, key._replace(ids=key.ids[: len(key.ids) // 2], due=()))
        if len(key.ids) > 1
        else full
    )
    workers, available = fixture.workers, available_bytes(device, fixture.workers)
    largest_micro, on_gpu = None, device.type == "cuda"
    common = gcd(*(each.size for each in plan.sizes))
    for micro in sorted(n for n in range(1, common + 1) if common % n == 0 and plan.tokens is None):
        count = plan.global_batch // micro
        if count < spec.workers.min:
            break
        needed = total_bytes(spec, at(full, half, micro), count, min(workers, count), on_gpu=on_gpu)
        if needed <= ROOM * available:
            largest_micro = micro
    return Estimate(
        parameters_bytes=with_mirror(spec, full.parameters, workers, full.tables),
        buffers_bytes=full.buffers,
        gradients_bytes=held_bytes(spec, full.gradients, workers, full.table_rows),
        optimizer_bytes=optimizer_bytes(spec, full, workers),
        average_bytes=with_mirror(spec, full.average, workers, min(full.average, full.tables)),
        activations_bytes=full.activations,
        reduction_bytes=sums_bytes(spec, full, plan.micro_batches, workers),
        communication_bytes=moving_bytes(spec, full, plan.micro_batches, workers, on_gpu=on_gpu),
        units=full.units if spec.is_fully_sharded(workers) else 0,
        sent_bytes=sent_bytes(spec, full, plan.micro_batches, workers),
        checkpoint_bytes=full.checkpoint,
        total_bytes=total_bytes(spec, full, plan.micro_batches, workers, on_gpu=on_gpu),
        host_bytes=host_bytes(spec, full, plan.micro_batches, workers) if on_gpu else 0,
        available_bytes=available,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        workers=workers,
        micro_batch=plan.micro_batch,
        precision=spec.precision,
        activation_checkpointing=spec.activation_checkpointing,
        largest_micro_batch=largest_micro,
        tokens=plan.tokens,
    )


# --- measuring --------------------------------------------------------------------------------------------


def measured(fixture: Fixture, key: MicroBatch) -> Measured:
    """Forward, backward and two updates with the micro-batch `key`, phase by phase, on a fresh state. What the first pass makes for good is no part of it."""
    state, batch = fixture.fresh(), fixture.fetch(key)
    modules = fixture.modules(state.job, state.model)
    model, optimizers = state.model, list(optimizers_of(state.optimizer).values())
    batch_bytes = nbytes(tensors_in(batch))
    calls = Calls(LossModule)
    try:
        for module in modules:
            with calls.counted():
                fixture.backward(module, state, batch, key)
            batch = fixture.fetch(key) if len(modules) > 1 else batch  # a job may write into it
    except JobError:
        whole = fixture.step_keys()[0]  # a job may need whole micro-batches
        if len(key.ids) in (fixture.plan.micro_batch, len(whole.ids)):
            raise
        return measured(fixture, whole)
    for optimizer in optimizers:
        try:
            step_once(state.job, optimizer, lambda: torch.zeros(()))  # it makes its state
        except (Exception, SystemExit) as error:
            raise as_lockstep_error(error, "first update", check="optimizer") from error
    if state.average is not None:
        state.average.move()
    if len(modules) == 1:
        model.zero_grad(set_to_none=True)
    forward = computing = updating = 0
    for module, optimizer in zip(modules, optimizers, strict=True):
        for parameter in module.parameters_that_learn:
            parameter.grad = None
        others = gradient_bytes(model)
        with peak_of(fixture.device) as peak:
            loss = fixture.forward(module, state, batch, key)
        del loss
        forward = max(forward, peak.bytes)
        batch = fixture.fetch(key) if len(modules) > 1 else batch
        with peak_of(fixture.device) as peak:
            fixture.backward(module, state, batch, key)
        computing = max(computing, others + peak.bytes)
        with peak_of(fixture.device) as peak:
            step_once(state.job, optimizer, lambda: torch.zeros(()))
        updating = max(updating, peak.bytes)
        batch = fixture.fetch(key) if len(modules) > 1 else batch
    units = units_of(model, calls, fixture.spec.sharding.units)
    tables = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and parameter.grad.is_sparse
    }
    return Measured(
        samples=len(key.ids),
        parameters=nbytes(model.parameters()),
        buffers=nbytes(model.buffers()),
        gradients=gradient_bytes(model),
        optimizer=tuple(
            parameter_state
            for optimizer in optimizers
            for parameter_state in states_of(optimizer, tables.values())
        ),
        average=average_bytes(state),
        checkpoint=checkpoint_bytes(state),
        workspace=len(modules) * workspace_bytes(fixture.device),
        batch=batch_bytes,
        activations=forward,
        computing=computing,
        updating=updating,
        phases=len(modules),
        unit_bytes=unit_bytes(model, units, frozenset(tables)),
        units=len(units),
        tables=nbytes(tables.values()),
        updated_at_once=max(
            (_updated_at_once(optimizer, tables.values()) for optimizer in optimizers),
            default=0,
        ),
        table_rows=sum(part.nbytes for table in tables.values() for part in tensors_in(table.grad)),
        apart=gradient_bytes(model) - summed_bytes(state),
    )


def states_of(optimizer: torch.optim.Optimizer, tables: Iterable[torch.Tensor]) -> Iterator[ParameterState]:
    """What an optimizer that has taken a step keeps, parameter by parameter. That of `tables` is whole on every worker."""
    ids = set(map(id, tables))
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        state = optimizer.state.get(parameter, {})
        if id(parameter) in ids:
            on_all = sum(tensor.nbytes for tensor in tensors_in(state))
            yield ParameterState(0, parameter.element_size(), False, 0, 0, on_all)
            continue
        scalars = sum(t.nbytes for name, value in state.items() if name in SCALARS for t in tensors_in(value))
        yield ParameterState(
            parameter.numel() if parameter.requires_grad else 0,
            parameter.element_size(),
            flat(parameter.detach()) is not None,
            scalars,
            sum(tensor.nbytes for tensor in tensors_in(state)) - scalars,
        )


def _updated_at_once(optimizer: torch.optim.Optimizer, tables: Iterable[torch.Tensor]) -> int:
    """Bytes of the parameters but `tables` that an update needs at once, at least."""
    ids = set(map(id, tables))
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    sizes = [parameter.nbytes for parameter in parameters if id(parameter) not in ids]
    return max(sizes, default=0) if may_divide(optimizer) else sum(sizes)


def at(whole: Measured, half: Measured, samples: int) -> Measured:
    """What another number of samples would measure: along the line through the two that were."""
    span = whole.samples - half.samples

    def along(first: int, second: int) -> int:
        slope = (first - second) / span if span else first / whole.samples
        return max(0, round(first + slope * (samples - whole.samples)))

    changed = {
        name: along(getattr(whole, name), getattr(half, name))
        for name in ("batch", "activations", "computing")
    }
    return Measured(**{**asdict(whole), **changed, "samples": samples})


# --- arithmetic -------------------------------------------------------------------------------------------


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
        sums = measured.table_rows * sums_in_passes(micro_batches, workers)
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
    return rows + optimizer + held_bytes(spec, summed, workers) * sums_in_passes(micro_batches, workers)


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
        return held_bytes(spec, measured.summed, workers, measured.table_rows) * sums_in_passes(
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


def available_bytes(device: torch.device, workers: int) -> int:
    """What one of `workers` on this machine can have: of a GPU all of it, of the machine's free memory its share."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().available) // workers


# --- for a person -----------------------------------------------------------------------------------------

_PARTS = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer",
    "average",
    "activations",
    "reduction",
    "communication",
)


def as_text(estimate: Estimate) -> str:
    """The parts, the variants, and the largest micro-batch, as lines."""
    lines = [f"{part:<18}{size_text(getattr(estimate, f'{part}_bytes')):>12}" for part in _PARTS]
    lines += [
        f"{'total':<18}{size_text(estimate.total_bytes):>12}  a worker, at the peak of a step; {size_text(estimate.available_bytes)} for each of "
        f"{estimate.workers} on this machine ({estimate.device})",
        *(
            [
                f"{'host memory':<18}{size_text(estimate.host_bytes):>12}  a worker, of the parts above: its rows, which are on no device"
            ]
            if estimate.host_bytes
            else []
        ),
        f"{'checkpoint':<18}{size_text(estimate.checkpoint_bytes):>12}",
        f"{'sent':<18}{size_text(estimate.sent_bytes):>12}  by a worker in a step, about",
        *([f"{'units':<18}{estimate.units:>12}  gathered one at a time"] if estimate.units else []),
        f"{'largest micro':<18}{estimate.largest_micro_batch or 'none':>12}  now {estimate.micro_batch}; another micro-batch is another run"
        if estimate.tokens is None
        else f"{'tokens':<18}{estimate.tokens:>12}  a micro-batch, the one measured that needs most; another bound is another run",
    ]
    for variant in estimate.variants:
        recomputed = ", activation checkpointing" if variant["activation_checkpointing"] else ""
        lines.append(
            f"{'in ' + variant['precision']:<18}{size_text(variant['total_bytes']):>12}  "
            f"{size_text(variant['activations_bytes'])} of it activations{recomputed}"
        )
    return "\n".join(lines)
