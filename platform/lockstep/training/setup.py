"""From the spec and the job to everything the loop needs, checked before the first step.

Every rank builds the same from the same seeds; what they must agree on is compared before they train.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.communication.group import Group
from lockstep.data.fork_isolation import set_apart
from lockstep.data.micro_batches import MicroBatches
from lockstep.data.table_pins import Pins
from lockstep.job.inputs.external_facts import possible_causes, told_of_unknown
from lockstep.job.inputs.imports import imports_of_job
from lockstep.job.inputs.variables import reads_of
from lockstep.job.interface import Job
from lockstep.plan import Plan
from lockstep.record.events.union import StageEnded, Tell, Warned
from lockstep.record.ledger.history import History
from lockstep.spec.fields import Spec
from lockstep.training.deferred_dynamo import compiled_functions
from lockstep.training.deferred_model import DeferredModel
from lockstep.training.determinism import check_kept
from lockstep.training.evaluation.evaluation_pass import has_evaluation_loss
from lockstep.training.evaluation.held_out_sets import EvaluationSets
from lockstep.training.identity_inputs import Inputs, continued
from lockstep.training.initial_model import asks_for_shards, make_deferred, make_model
from lockstep.training.initial_state import job_weights_of, make_state
from lockstep.training.integrity.digests import digest_on_first
from lockstep.training.integrity.rehearsal.child_process import NoChildError, can_fork, in_child
from lockstep.training.integrity.rehearsal.micro_batch import Rehearsal
from lockstep.training.integrity.rehearsal.step_rehearsal import StepRehearsal
from lockstep.training.integrity.state_digest import weights_digest
from lockstep.training.job_data import (
    JobData,
    check_rules,
    make_sampler,
    open_agreed,
    warnings_of,
)
from lockstep.training.metric_rules import check_followed, check_metric
from lockstep.training.model_sharding import hold_whole, keep_tables_whole, shard
from lockstep.training.module_modes import learning_in_evaluation_mode
from lockstep.training.planning import make_plan
from lockstep.training.run import Run, watch_bits
from lockstep.training.run_facts import check_agreed, facts_of, leaked_rows, with_compiler
from lockstep.training.start import Start, find_start, restore_on_every_rank, versions_of
from lockstep.training.state import TrainState, tensors
from lockstep.training.step.job_weights import has_eval_weights
from lockstep.training.step.optimizer_step import Stepper
from lockstep.training.step.parameter_order import check_same_order
from lockstep.training.step.parameters import short_parameters
from lockstep.training.step.phase_step import LossModule
from lockstep.training.step.sharding_units import Calls
from lockstep.training.torch_settings import Settings
from lockstep.training.worker_environment import return_freed_memory

T = TypeVar("T")

ORDER_LIMIT_S = 10.0
"""How long an order of the dataset's own may take in a process of its own, where nothing else waits for it."""


Warn = Callable[[str], None]
MakesEvaluation = Callable[[], EvaluationSets | None]


class Opened(NamedTuple):
    """What a run begins with: a checkpoint, if any, and the job's data."""

    start: Start | None
    data: JobData
    pins: Pins


class Built(NamedTuple):
    """The run before its first micro-batch. The parameters of a model that is `deferred` have no memory yet."""

    plan: Plan
    state: TrainState
    batches: MicroBatches
    deferred: DeferredModel | None


class Rehearsed(NamedTuple):
    """What the first micro-batch showed."""

    phases: dict[str, Rehearsal]
    evaluate: EvaluationSets | None
    calls: Calls
    """Of the model's modules; none where the model is not to be sharded."""
    settings: Settings
    """Of the process, as the job left them before it."""

    @property
    def tables(self) -> list[str]:
        """The names of the parameters with sparse gradients."""
        return sorted({name for phase in self.phases.values() for name in phase.form.tables})

    @property
    def activations_bytes(self) -> int:
        return max(phase.activations_bytes for phase in self.phases.values())


class Begun(NamedTuple):
    """The run with the state from which it goes on, restored and shared out."""

    state: TrainState
    facts: dict[str, Any]
    history: History
    start: Start | None
    """Without the state, which has been restored."""


def prepare(
    spec: Spec,
    job: Job,
    group: Group,
    tell: Tell,
    origin: AttemptOrigin | None = None,
    *,
    joining_worker: bool = False,
    versions: Mapping[str, str] | None = None,
) -> Run:
    """Build the run on this rank, rehearse one micro-batch, check that all ranks built the same, and restore the state.

    A `joining_worker` gets the state from another worker: it reads no checkpoint, keeps the state that a run begins with, and
    is given the `versions` in which the others read tables that change.
    """

    def warn(text: str) -> None:
        tell(Warned(text))

    start = None if joining_worker else find_start(spec, group, origin, warn)
    tell(StageEnded("checkpoint", time.time()))
    set_apart()
    opened = Opened(
        start,
        *open_agreed(job, spec.seed, group, versions_of(start, origin) if versions is None else versions),
    )
    tell(StageEnded("data", time.time()))
    built = build(
        spec, job, group, opened.data, warn, replays=origin is not None and origin.replay is not None
    )
    tell(StageEnded("model", time.time()))
    rehearsed = rehearse(spec, job, group, opened.data, built, warn)
    tell(StageEnded("rehearsal", time.time()))
    begun = begin(spec, job, group, opened, built, rehearsed, warn, origin, joining_worker=joining_worker)
    # What was read of a checkpoint has been restored, and takes as much memory as the state.
    del opened, start
    step = make_stepper(spec, group, built.plan, rehearsed, begun)
    if origin is not None and origin.replay is not None and origin.replay.probe is not None:
        step.compute.probe = origin.replay.probe
    watch_bits(step, spec, built.plan, built.batches, tell, origin)
    if rehearsed.evaluate is not None:
        rehearsed.evaluate.restore_buffers_by(step.compute.buffers.restore)
        rehearsed.evaluate.shard(begun.state.sharding)
    tell(StageEnded("preparation", time.time()))
    return Run(
        spec,
        job,
        built.plan,
        group,
        begun.state,
        step,
        rehearsed.evaluate,
        built.batches,
        begun.facts,
        begun.start,
        begun.history,
        Inputs(spec, job, begun.facts),
        activations_bytes=rehearsed.activations_bytes,
    )


def build(spec: Spec, job: Job, group: Group, data: JobData, warn: Warn, *, replays: bool) -> Built:
    """Make the plan, the model and the state of a run over the job's data."""
    train_data = data.train
    check_rules(spec, data)
    for text in warnings_of(train_data):
        warn(text)
    is_sharded = spec.is_fully_sharded(group.size)
    if is_sharded or spec.mirrors_parameters:
        return_freed_memory()
    if spec.sharding.offload and not is_sharded and not replays:
        warn(
            "sharding.offload: one worker shares nothing out, and has everything on its device; take two workers or more, or leave it out"
        )
    plan = replace(make_plan(spec, job, train_data), in_passes=is_sharded)
    make_sampler(spec, plan, train_data).check_order(partial(_in_another_process, job, group))
    made = make_deferred(spec, job, group) if is_sharded else ""
    deferred = made if isinstance(made, DeferredModel) else None
    model = deferred.model if deferred is not None else make_model(spec, job, group.device, group)
    if made and deferred is None and asks_for_shards(spec, sum(p.nbytes for p in model.parameters())):
        warn(f"sharding: every worker begins with the whole model: {made}")
    for text in (*job._model_warnings, *short_parameters(model), *learning_in_evaluation_mode(model)):
        warn(text)
    evaluates = bool(data.held_out) and has_evaluation_loss(job) and "eval" in data.held_out
    state = make_state(spec, job, plan, model, group.device, evaluates=evaluates, group=group)
    if state.average is not None:
        for text in state.average.told_at_the_start(plan.total_steps):
            warn(text)
    batches = MicroBatches(train_data, job.collate, seed=spec.seed, purpose="data")
    if has_eval_weights(job):
        state.job_weights = job_weights_of(spec, job, plan, state, batches, group)
    return Built(plan, state, batches, deferred)


def rehearse(spec: Spec, job: Job, group: Group, data: JobData, built: Built, warn: Warn) -> Rehearsed:
    """Compute the first micro-batch, and try the rest of the promise in other processes. A deferred model is sharded before. All ranks call it."""
    plan, state, batches, deferred = built
    steps = StepRehearsal(job, spec, plan, state, batches, group.device, warn, group.let_go)

    def evaluation() -> EvaluationSets | None:
        sets = data.held_out
        return EvaluationSets(spec, job, plan, sets, group, state.precision) if sets else None

    settings = Settings(group.device)
    reads_of(job).outside.early = False
    calls = Calls(LossModule)
    with imports_of_job(job), calls.counted() if spec.sharding.mode == "full" else nullcontext():
        phases, evaluate = (
            rehearse_sharded(steps, deferred, group, evaluation)
            if deferred is not None
            else group.together(partial(rehearse_whole, steps, evaluation))
        )
    return Rehearsed(phases, evaluate, calls, settings)


def begin(
    spec: Spec,
    job: Job,
    group: Group,
    opened: Opened,
    built: Built,
    rehearsed: Rehearsed,
    warn: Warn,
    origin: AttemptOrigin | None,
    *,
    joining_worker: bool,
) -> Begun:
    """Make the facts of the run, compare what the ranks must agree on, shard what is not yet sharded, and restore the state. All ranks call it."""
    plan, state = built.plan, built.state
    check_kept(spec.determinism, spec.threads)
    tables = rehearsed.tables
    keep_tables_whole(state, tables)
    rehearsed.settings.put_back()
    facts = make_facts(spec, job, group, opened, built, rehearsed)
    told_of_unknown(facts["environment"], warn)
    start = opened.start
    begins = start is None or start.fork
    if group.rank == 0 and begins and not joining_worker:  # a resumed run has checked before
        facts["leaked_rows"] = leaked_rows(opened.data, spec.seed, warn)
        if spec.determinism == "strict":
            _tell_as_written(warn)
    check_agreed(group, facts["fields"], spec)
    check_same_order(group, state.order)
    if spec.is_fully_sharded(group.size) and state.sharding is None:
        shard(spec, job, state, group, rehearsed.calls, whole=tables)
    elif state.mirrored_shards is not None and state.sharding is None:
        hold_whole(spec, job, state, group, rehearsed.calls, tables)
    if state.sharding is not None:
        for text in state.sharding.told:
            warn(text)
    if start is None:
        return Begun(state, facts, History(), None)
    if not start.fork:
        facts = continued(facts, start.facts, spec, warn)
    fields = facts["fields"] if origin is None or origin.replay is None else None
    hints = possible_causes(facts["environment"])
    history = restore_on_every_rank(start, spec, plan, state, group, fields, warn, hints)
    rehearsed.settings.check("after job.load_state_dict")
    return Begun(state, facts, history, start.without_state())


def rehearse_sharded(
    rehearsal: StepRehearsal, deferred: DeferredModel, group: Group, evaluation: MakesEvaluation
) -> tuple[dict[str, Rehearsal], EvaluationSets | None]:
    """Shard a model whose parameters have no memory yet, which they get unit by unit, and compute the first micro-batch with the shards. All ranks call it."""
    state = rehearsal.state
    # One rank finds them out for all: it computes a forward, and with initial_weights reads them once through.
    on_rank_0 = group.together(lambda: rehearsal.units(deferred) if group.rank == 0 else [])
    units = group.broadcast_object(on_rank_0, 0)
    calls = Calls.of_units(deferred.model.get_submodule(name) for name in units)
    fill = deferred.fill if deferred.weights is None else deferred.fill_blank
    shard(rehearsal.spec, rehearsal.job, state, group, calls, fill)
    assert state.sharding is not None
    if deferred.weights is not None:  # each rank reads its rows alone
        state.sharding.load(deferred.weights)
    shown, evaluate = rehearsal.first_sharded(state.sharding), evaluation()
    if evaluate is None:
        check_followed(state.schedule, ())
    else:
        evaluate.prepare(compares=False)
    return shown, evaluate


def rehearse_whole(
    rehearsal: StepRehearsal, evaluation: MakesEvaluation
) -> tuple[dict[str, Rehearsal], EvaluationSets | None]:
    """Compute the first micro-batch here, and try the rest of the promise in other processes. Returns what it showed, and the evaluation.

    Each rank does so by itself.
    """
    spec, state = rehearsal.spec, rehearsal.state
    rehearsals, evaluate = rehearsal.first(), evaluation()
    if evaluate is not None:
        evaluate.prepare(compares=spec.determinism == "strict" and spec.rehearsal != "off")
    shown = rehearsal.elsewhere(evaluate).evaluation
    if evaluate is None:
        check_followed(state.schedule, ())
    elif shown is not None:
        evaluate.learned(shown)
        check_metric(spec, shown.names)
        check_followed(state.schedule, shown.names)
    return rehearsals, evaluate


def make_facts(
    spec: Spec, job: Job, group: Group, opened: Opened, built: Built, rehearsed: Rehearsed
) -> dict[str, Any]:
    """The facts of the run. Call it before a checkpoint is restored: the identity has the digest of the initial weights."""
    state, start = built.state, opened.start
    sharded = state.sharding is not None
    digest = digest_on_first(group, tensors(state)) if sharded else weights_digest(state.model.state_dict())
    first = " ".join(phase.digest for phase in rehearsed.phases.values())
    facts = facts_of(
        spec,
        job,
        group,
        built.batches,
        built.plan,
        rehearsed.evaluate,
        opened.pins.fields(),
        digest,
        first,
        rehearsed.settings,
        fork=start and start.parent,
        followed=state.schedule.metrics,
    )
    return facts if state.compiled is None else with_compiler(facts, state.compiled)


def make_stepper(spec: Spec, group: Group, plan: Plan, rehearsed: Rehearsed, begun: Begun) -> Stepper:
    """Takes the steps from where the run has `begun`: the buffers that it finds are those of its first step.

    The parts of the model that compute, and the buffers that are written, are those that the rehearsal found.
    """
    forms = {phase: shown.form for phase, shown in rehearsed.phases.items()}
    step = Stepper(spec, plan, group, begun.state, forms)
    step.compute.settings = rehearsed.settings
    return step


def _in_another_process(job: Job, group: Group, function: Callable[[], T]) -> T | None:
    """The value of `function()` in a process of its own; None where there can be none, or it takes long."""
    if not can_fork(group.device):
        return None
    try:
        return in_child(function, job, forked=group.let_go, limit_s=ORDER_LIMIT_S)
    except NoChildError:
        return None


def _tell_as_written(warn: Warn) -> None:
    if names := compiled_functions():
        warn(
            f"the job compiles {', '.join(names)} with torch.compile: determinism strict runs such functions as they are written, since a program would depend on what its "
            "worker has computed before; compile=true compiles the loss with all that it calls, compile=units the blocks of the model"
        )
