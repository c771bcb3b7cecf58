"""The memory of a run before it is run: what a worker holds, part by part, measured on one micro-batch of it.

Parameters, gradients, the optimizer's state and a checkpoint are counted. Activations and the temporary tensors of an
update are measured as they come and go (`live_bytes`). The sums of the tree follow from the plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import gcd
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from lockstep.checks.estimate_formulas import (
    held_bytes,
    host_bytes,
    moving_bytes,
    optimizer_bytes,
    sent_bytes,
    sums_bytes,
    total_bytes,
    with_mirror,
)
from lockstep.checks.estimate_measurement import Measured, at, measured, with_units
from lockstep.checks.fixture import Fixture
from lockstep.errors import SpecError
from lockstep.job.loading import others_out_of_sight
from lockstep.printing import size_text
from lockstep.spec.fields import Spec
from lockstep.training.determinism import determinism
from lockstep.training.step.phases import check_combination

PRECISIONS = ("fp32", "bf16", "fp16")

ROOM = 0.9
"""The share of the memory that is there which a micro-batch may be proposed to fill."""


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
    largest_units: int | None
    """With `sharding: full`, how many units like these a model may have on as many such workers; 0 where not even one fits."""
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
    sharded = spec.is_fully_sharded(workers) and full.unit_bytes.largest > 0
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
        largest_units=_most_units(fixture, full, available, on_gpu) if sharded else None,
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


def _most_units(fixture: Fixture, measured: Measured, available: int, on_gpu: bool) -> int:
    """The most units like those of the model with which a worker has room."""

    def fits(units: int) -> bool:
        larger = with_units(measured, units)
        needed = total_bytes(fixture.spec, larger, fixture.plan.micro_batches, fixture.workers, on_gpu=on_gpu)
        return needed <= ROOM * available

    beyond = 1
    while fits(beyond):
        beyond *= 2
    too_many = bisect_left(range(beyond), True, lo=beyond // 2, key=lambda units: not fits(units))
    return max(0, too_many - 1)


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
        *(
            [
                f"{'units':<18}{estimate.units:>12}  gathered one at a time; {estimate.largest_units} like these fit {estimate.workers} such workers"
            ]
            if estimate.units
            else []
        ),
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
