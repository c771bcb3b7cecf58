"""The state of a run before its first step: optimizer, schedule, and the averages beside the weights."""

from __future__ import annotations

from functools import partial

import torch

from lockstep.communication.group import Group
from lockstep.data.micro_batches import MicroBatches
from lockstep.job.inputs.imports import imports_of_job
from lockstep.job.interface import Job
from lockstep.plan import Plan
from lockstep.spec.compiling import CompiledUnits
from lockstep.spec.fields import Spec
from lockstep.training import problems
from lockstep.training.integrity.digests import element_digest
from lockstep.training.job_data import (
    make_sampler,
)
from lockstep.training.planning import updates_of
from lockstep.training.state import TrainState
from lockstep.training.step.closures import check_closures
from lockstep.training.step.compiled import CompiledLosses, check_enabled
from lockstep.training.step.compiled_units import check_units_apart, compile_units
from lockstep.training.step.full_sharding import check_torch
from lockstep.training.step.job_weights import JobWeights
from lockstep.training.step.learning_rate import make_schedule
from lockstep.training.step.mirrored_shards import MirroredShards
from lockstep.training.step.optimizer import make_optimizer
from lockstep.training.step.phases import (
    PhaseOptimizers,
    PhaseSchedules,
    check_combination,
    optimizers_of,
)
from lockstep.training.step.precision import Precision
from lockstep.training.step.sharding import check_threads
from lockstep.training.step.weight_average import Average, has_modes


def make_state(
    spec: Spec,
    job: Job,
    plan: Plan,
    model: torch.nn.Module,
    device: torch.device,
    *,
    evaluates: bool,
    group: Group | None = None,
) -> TrainState:
    """The state of a run before its first step; `evaluates` is whether an evaluation of the job has a loss.

    `group` are the workers that share the state of a sharded optimizer; without it the state is whole.
    """
    check_combination(job, spec)
    if spec.sharding.mode == "full":
        check_torch()
    if spec.sharding.mode != "none" and spec.determinism == "strict":
        check_threads(model, device, spec.threads, spec.sharding.mode)
    average = None if spec.ema is None else Average(model, spec.ema)
    updates = updates_of(plan)
    with imports_of_job(job):
        optimizer = make_optimizer(job, model, spec, group)
        schedules = {
            phase: make_schedule(job, spec.schedule, phase_optimizer, updates, evaluates=evaluates)
            for phase, phase_optimizer in optimizers_of(optimizer).items()
        }
    check_closures(spec, job, list(optimizers_of(optimizer).values()))
    if average is not None and (
        modal := [
            phase_optimizer
            for phase_optimizer in optimizers_of(optimizer).values()
            if has_modes(phase_optimizer)
        ]
    ):
        raise problems.EMA_BESIDE(got=f"{spec.ema:g}", name=type(modal[0]).__name__)
    schedule = (
        PhaseSchedules(schedules)
        if isinstance(optimizer, PhaseOptimizers)
        else next(iter(schedules.values()))
    )
    state = TrainState(
        job,
        model,
        optimizer,
        Precision(spec.precision, device),
        average=average,
        schedule=schedule,
        compiled=_compiled(spec, model, device),
    )
    if group is not None and spec.mirrors_parameters:
        state.mirrored_shards = MirroredShards(state, group, spec.sharding, partial(element_digest, device))
    return state


def _compiled(spec: Spec, model: torch.nn.Module, device: torch.device) -> CompiledLosses | None:
    """What compiles the losses, or the units of the model that the spec names. SpecError where these would be gathered in part, and where torch compiles nothing."""
    if not spec.compile:
        return None
    check_enabled()
    names: list[str] = []
    if isinstance(spec.compile, CompiledUnits):
        names = compile_units(model, spec.compile.units)
        if spec.sharding.mode == "full":
            check_units_apart(model, names, spec.sharding.units)
    return CompiledLosses(spec.determinism, device, spec.precision, len(names))


def job_weights_of(
    spec: Spec, job: Job, plan: Plan, state: TrainState, batches: MicroBatches, group: Group
) -> JobWeights:
    """Enters the job's `eval_weights`. SpecError for settings beside which there is no room for it."""
    if spec.ema is not None:
        raise problems.EVAL_WEIGHTS_BESIDE(field="ema", got=f"{spec.ema:g}", remedy="leave ema out")
    if spec.sharding.mode == "full":
        raise problems.EVAL_WEIGHTS_BESIDE(
            field="sharding", got="'full'", remedy="set sharding=optimizer: it needs whole parameters"
        )
    optimizers = optimizers_of(state.optimizer)
    optimizer = optimizers.get("", optimizers)
    sampler = make_sampler(spec, plan, batches.samples)
    weights = JobWeights(job, state.model, optimizer, batches, sampler, plan, group, spec.seed)
    weights.step = lambda: state.counters.step
    return weights
