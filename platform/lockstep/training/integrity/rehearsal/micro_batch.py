"""One micro-batch from end to end before a long run: what would fail in an hour fails in the first second."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint.tree import METADATA
from lockstep.job.interface import Loss, Mean, overrides
from lockstep.plan import Plan
from lockstep.randomness import rehearsal_key, seed_all
from lockstep.training import problems
from lockstep.training.failure import job_at
from lockstep.training.integrity import problems as integrity_problems
from lockstep.training.integrity.rehearsal.memory_layout import check_layout, check_listed
from lockstep.training.integrity.rehearsal.object_state import tensor_digest
from lockstep.training.observe.memory_owners import activation_bytes
from lockstep.training.step.buffers import KeptBuffers
from lockstep.training.step.full_sharding import FullSharding, advised
from lockstep.training.step.loss_form import LossForm
from lockstep.training.step.means import check_form, check_parts, number
from lockstep.training.step.parameters import ParameterWatch, missing_gradient, written_parameter
from lockstep.training.step.phase_step import LossModule, ShardedLoss
from lockstep.training.step.precision import Precision
from lockstep.training.step.sparse_gradients import no_rows
from lockstep.training.step.statistics import own_statistics, takes_statistics


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What the first micro-batch showed of a phase."""

    form: LossForm
    digest: str
    """Of the loss, its parts and each gradient."""
    activations_bytes: int
    """What its graph keeps for backward."""


def check_norms(model: nn.Module, plan: Plan, samples: int, forward: Callable[[], object]) -> None:
    """JobError for a BatchNorm that would have one value a channel in the ragged tail of an epoch. `forward` computes a micro-batch of so many `samples`.

    A picture or a sequence has many values by itself. Nothing is computed where no micro-batch of the run has one sample.
    """
    norms = {name: m for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    if not norms or not plan.smallest_micro_batch == 1 < plan.micro_batch:
        return
    alone: list[str] = []

    def look(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        x = inputs[0] if inputs else None
        if module.training and isinstance(x, Tensor) and x.dim() > 1 and x.numel() <= samples * x.size(1):
            alone.append(name)

    hooks = [module.register_forward_pre_hook(partial(look, name)) for name, module in norms.items()]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    if alone and plan.tokens is not None:
        raise integrity_problems.BATCH_NORM(
            name=alone[0],
            reason=f"batch.tokens = {plan.tokens} leaves a micro-batch with one sample",
            remedy="raise batch.tokens, or use a norm within each sample",
        )
    if alone:
        raise integrity_problems.BATCH_NORM(
            name=alone[0],
            reason=f"the last step of an epoch of {plan.samples} samples has a micro-batch of one sample",
            remedy="set data.drop_last=true or change batch.global",
        )


def check_model(model: nn.Module) -> None:
    """JobError for a model that cannot be exact."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise integrity_problems.NOTHING_LEARNS()
    check_layout(model)
    check_listed(model, "at the start")
    _check_state(model)
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            raise integrity_problems.COMPILED(
                name=name or "the model",
                got="the job itself, with settings that no identity covers",
                remedy="take torch.compile out of the job",
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise integrity_problems.COMPILED(
                name=name or "the model",
                got="torch.jit, which hides its parameters",
                remedy="return the module as it is",
            )
        if isinstance(module, nn.SyncBatchNorm):
            raise integrity_problems.SYNC_BATCH_NORM(name=name)


def _check_state(model: nn.Module) -> None:
    """JobError for a model whose `state_dict` has a name that no file of weights can have.

    Also for one that leaves something out of its `state_dict`, and does not load what it gives: no checkpoint could be resumed.
    """
    with job_at("in state_dict of the model"):
        state = model.state_dict(keep_vars=True)
    if isinstance(state.get(METADATA), Tensor):
        raise integrity_problems.NAME_OF_FORMAT(got=METADATA)
    passed_by = {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if named.keys() <= state.keys() | passed_by or any(map(nn.parameter.is_lazy, named.values())):
        return
    try:
        model.load_state_dict(model.state_dict())
    except (Exception, SystemExit) as error:
        raise integrity_problems.STATE_REFUSED(got=" ".join(str(error).split())) from error


@dataclass(frozen=True, slots=True)
class Computed:
    """One micro-batch, forward and backward: its loss, its results by name, its gradients, and the buffers that it wrote.

    `results` are texts of the loss, its weight, its parts, each gradient and each buffer; equal values have equal texts.
    """

    loss: Loss
    results: dict[str, str]
    gradients: dict[str, Tensor]
    written: frozenset[int]
    statistics: dict[str, Mean | Tensor] = field(default_factory=dict)
    """What it gives for `after_step`."""
    activations_bytes: int = 0
    """What its graph keeps for backward."""

    @property
    def digest(self) -> str:
        """The first 16 hex digits of a sha256 over the results."""
        return hashlib.sha256(json.dumps(self.results, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def rehearsal(self) -> Rehearsal:
        """What the run must know of it."""
        form = LossForm.of(self.loss, self.gradients, self.written)
        return Rehearsal(form, self.digest, self.activations_bytes)

    def first_difference(self, other: Computed) -> str | None:
        """The name of the first result that differs between two computations of one micro-batch."""
        names = {**self.results, **other.results}
        return next((name for name in names if self.results.get(name) != other.results.get(name)), None)


def compute(
    module: LossModule, batch: Any, precision: Precision, *, seed: int, device: torch.device, m: int = 0
) -> Computed:
    """Run one micro-batch forward and backward on the bare model, then put buffers and gradients back.

    Raises JobError where the job itself wrote to a parameter.
    """
    model, where = module.model, f"{'first' if m == 0 else 'second'} micro-batch, before training"
    where += f", phase {module.phase.name!r}" if module.phase.name else ""
    seeded = partial(seed_all, rehearsal_key(seed, *([m] if m else [])), device)
    seeded()
    buffers, parameters = KeptBuffers(model), ParameterWatch(model)
    values = {name: tensor_digest(parameter) for name, parameter in model.named_parameters()}
    try:
        with job_at(where):
            with precision.autocast():
                loss = module.on_trial(m, batch)
            check_loss(loss, precision, first=m == 0, label=module.phase.loss_label, phase=module.phase.name)
            parameters.check(where)
            _check_untouched(model, values, where)
            activations = activation_bytes(loss.total, model, batch) if m == 0 else 0
            module.backward(loss.total)
        parameters.check(where)
        for name, parameter in model.named_parameters():
            if tensor_digest(parameter) != values[name]:
                raise written_parameter(name, where)
        gradients = _gradients(module, where)
        written, results = buffers.written(), _results(loss, gradients, buffers)
        with torch.no_grad(), precision.autocast():
            of_step = partial(_statistics_of, module, batch, buffers, seeded, where)
            statistics = _statistics(module, loss, results, of_step)
        parameters.check(where)
        return Computed(loss, results, gradients, written, statistics, activations)
    finally:
        buffers.restore()
        model.zero_grad(set_to_none=True)


def compute_sharded(
    module: LossModule,
    batch: Any,
    precision: Precision,
    sharding: FullSharding,
    *,
    seed: int,
    device: torch.device,
    m: int = 0,
    keep_gradients: bool = False,
) -> Computed:
    """Run micro-batch 0, or another, as `compute` does, on every worker, where each has its rows of the parameters alone. All ranks call it.

    The results are the same. Of the gradients each rank keeps every W-th element, or none.
    """
    model, where = module.model, f"{'first' if m == 0 else 'second'} micro-batch, before training"
    where += f", phase {module.phase.name!r}" if module.phase.name else ""
    seeded = partial(seed_all, rehearsal_key(seed, *([m] if m else [])), device)
    seeded()
    buffers, digests, parts = KeptBuffers(model), dict[str, str](), dict[str, Tensor]()
    rank, workers = sharding.group.rank, sharding.group.size

    def observe(gradients: Sequence[Tensor], indices: Sequence[int]) -> None:
        for gradient, i in zip(gradients, indices, strict=True):
            digests[module.names[i]] = tensor_digest(gradient)
            if keep_gradients:
                parts[module.names[i]] = gradient.detach().reshape(-1)[rank::workers].clone()

    try:
        module.parameters_that_learn = sharding.as_computed(module.names)
        sharding.begin_step(workers, module.names)
        sharding.begin_pass(range(workers), empty=False, last=True, observe=observe)
        with advised(), job_at(where):
            with precision.autocast():
                loss = ShardedLoss(module, sharding)(batch)
            check_loss(loss, precision, first=m == 0, label=module.phase.loss_label, phase=module.phase.name)
            module.backward(loss.total)
        sharding.end_pass(where)
        written, results = buffers.written(), _results(loss, {}, buffers)
        results |= {f"the gradient of {name!r}": digest for name, digest in digests.items()}
        with torch.no_grad(), precision.autocast():
            of_step = partial(_statistics_of, module, batch, buffers, seeded, where)
            statistics = _statistics(module, loss, results, partial(sharding.computed, of_step))
        return Computed(loss, results, parts, written, statistics)
    finally:
        buffers.restore()
        sharding.reshard()
        sharding.forget_gradients()


def _statistics_of(
    module: LossModule, batch: Any, buffers: KeptBuffers, seeded: Callable[[], None], where: str
) -> Any:
    """What the job's `step_statistics` gives of a micro-batch, from the buffers and with the seeds of its loss."""
    buffers.restore()
    seeded()
    with job_at(where):
        return module.job.step_statistics(module.model, batch)


def _statistics(
    module: LossModule, loss: Loss, results: dict[str, str], of_step: Callable[[], Any]
) -> dict[str, Mean | Tensor]:
    """The statistics of a micro-batch, with its loss and from `of_step`, where the job has such a method; added to its `results`. JobError where nothing takes them."""
    statistics = own_statistics(loss.statistics, module.phase.loss_label)
    if statistics and not takes_statistics(module.job):
        raise integrity_problems.STATISTICS_UNTAKEN(label=module.phase.loss_label, got=next(iter(statistics)))
    if overrides(module.job, "step_statistics"):
        statistics |= own_statistics(of_step(), "job.step_statistics")
    for name, value in statistics.items():
        tensors = (value.total, value.weight) if isinstance(value, Mean) else (value,)
        results[f"the statistic {name!r}"] = " ".join(map(tensor_digest, tensors))  # type: ignore[arg-type]
    return statistics


def _check_untouched(model: nn.Module, before: Container[str], where: str) -> None:
    """JobError for a loss that makes parameters, or that has called backward() itself."""
    for name, parameter in model.named_parameters():
        if name not in before:
            raise integrity_problems.PARAMETER_OF_LOSS(name=name, where=where)
        if parameter.grad is not None:
            raise integrity_problems.BACKWARD_CALLED(where=where, name=name)


def _gradients(module: LossModule, where: str) -> dict[str, Tensor]:
    learning = dict(zip(module.names, module.parameters_that_learn, strict=True))
    for name in module.conditional.keys() & module.tables:
        if (table := learning[name]).grad is None:
            table.grad = no_rows(table)
    missing = [name for name, p in learning.items() if p.grad is None]
    if missing:
        raise missing_gradient(missing, where)
    return {
        name: p.grad.coalesce() if p.grad.is_sparse else p.grad
        for name, p in learning.items()
        if p.grad is not None
    }


def _results(loss: Loss, gradients: dict[str, Tensor], buffers: KeptBuffers) -> dict[str, str]:
    means = {"the loss": Mean(loss.total.detach(), loss.weight)}
    means |= {f"the part {name!r} of the loss": part for name, part in loss.parts.items()}
    return {
        **{what: f"{number(mean.total).hex()} {number(mean.weight).hex()}" for what, mean in means.items()},
        **{f"the gradient of {name!r}": tensor_digest(gradient) for name, gradient in gradients.items()},
        **{f"the buffer {name!r}": tensor_digest(buffer) for name, buffer in buffers.now().items()},
    }


def check_loss(
    loss: object, precision: Precision, *, first: bool, label: str = "job.loss", phase: str = ""
) -> None:
    """Check a job's loss; for the run's `first` micro-batch also that its total is finite. `label` is its name in messages."""
    check_form(loss, label)
    assert isinstance(loss, Loss)
    total = loss.total
    if not total.requires_grad:
        raise problems.TOTAL_DETACHED(label=label)
    weights = {"weight": loss.weight} | {
        f"the weight of term {name!r}": term.weight for name, term in loss.terms.items()
    }
    for what, weight in weights.items():
        if isinstance(weight, Tensor) and weight.requires_grad:
            raise problems.WEIGHT_LEARNS(label=label, what=what)
    value, weight = number(total), number(loss.weight)
    if first and not math.isfinite(value) and precision.name != "fp16":
        raise integrity_problems.FIRST_NOT_FINITE(label=label, got=value)
    if not math.isfinite(weight) or weight < 0:
        raise problems.LOSS_WEIGHT(label=label, got=weight)
    check_parts(label, loss.parts, phase)
