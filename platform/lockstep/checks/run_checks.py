"""Checks of the run as a whole: its promise, its evaluation, its resume, and the places that it writes to."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.runs.run_checkpoints import claim
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.checks.findings import Finding, advised, failed, passed, warned
from lockstep.checks.fixture import Fixture
from lockstep.checks.start_checks import check_storage
from lockstep.checks.tracking_store import database_opens
from lockstep.job.loading import load_job
from lockstep.record.events.union import Event
from lockstep.record.ledger.rows import StepRow
from lockstep.record.mirror.store_uri import database_path
from lockstep.record.mirror.stores import reader
from lockstep.record.redaction import without_uri_secrets
from lockstep.spec.fields import Cadence, Checkpoint, Length, Record, Spec
from lockstep.spec.locations import RECORD_OFF
from lockstep.training.driver_requests import NoRequests
from lockstep.training.evaluation.held_out_sets import EvaluationSets
from lockstep.training.integrity.rehearsal.step_rehearsal import StepRehearsal
from lockstep.training.loop import fit
from lockstep.training.metric_rules import check_metric
from lockstep.training.planning import updates_of
from lockstep.training.step.phases import optimizers_of

_RUN_ID = "0" * 32


VANISHED = 1e-4
"""A factor of the learning rate below which a step changes next to nothing."""


PULLED = 1.0
"""The sum of rate times weight decay over a run from which on it is told: what the loss does not hold shrinks to exp(-1) of its size."""

_NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,  # batch norms and instance norms
)


def optimizer(fixture: Fixture) -> list[Finding]:
    """What the optimizer holds, and how far weight decay pulls the parameters of norms to zero over the run."""
    state = fixture.fresh()
    every = optimizers_of(state.optimizer)
    groups = state.optimizer.param_groups
    trainable = sum(p.numel() for group in groups for p in group["params"] if p.requires_grad)
    pulled, name = max(
        _pull_on_norms(fixture, state.model, phase_optimizer) for phase_optimizer in every.values()
    )
    if pulled > PULLED:
        return [
            warned(
                "optimizer",
                f"weight decay acts on parameters of norms as well, such as {name!r}: over the run it shrinks them to exp(-{pulled:.2g}) of their "
                "size, unless the loss counteracts it",
                "give the parameters of norms a group of their own with weight_decay=0 in job.optimizer, or lower optimizer.weight_decay",
            )
        ]
    in_groups = f"in {len(groups)} group{'s' if len(groups) != 1 else ''}"
    if len(every) > 1:
        kinds = ", ".join(
            f"{type(phase_optimizer).__name__} in phase {phase!r}" for phase, phase_optimizer in every.items()
        )
        return [passed("optimizer", f"{kinds} hold {trainable:,} trainable numbers, {in_groups}")]
    kind = type(state.optimizer).__name__
    return [passed("optimizer", f"{kind} holds each of {trainable:,} trainable numbers once, {in_groups}")]


def _pull_on_norms(fixture: Fixture, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, str]:
    """The greatest sum over the run of rate times weight decay on a parameter of a norm, and the parameter's name."""
    of_norms = {
        id(p): f"{name}.{parameter_name}".lstrip(".")
        for name, module in model.named_modules()
        if isinstance(module, _NORMS)
        for parameter_name, p in module.named_parameters(recurse=False)
    }
    steps = updates_of(fixture.plan)
    rates: tuple[float, ...] = (1.0,)
    if fixture.job.schedule(optimizer, steps) is None:
        rates = tuple(fixture.spec.schedule.factor(steps * i // 100, steps) for i in range(100))
    greatest = (0.0, "")
    for group in optimizer.param_groups:
        # Adam adds the decay to the gradient, which it then divides by its size: how far that pulls is not known.
        if not (group.get("decoupled_weight_decay") or isinstance(optimizer, torch.optim.SGD)):
            continue
        pull = steps * group["lr"] * group["weight_decay"] * sum(rates) / len(rates)
        first = next((of_norms[id(p)] for p in group["params"] if id(p) in of_norms), "")
        greatest = max(greatest, (float(pull) if first else 0.0, first))
    return greatest


def schedule(fixture: Fixture) -> list[Finding]:
    """The factor of the learning rate along the run: it must arrive, and must not vanish long before the end."""
    rule, steps = fixture.spec.schedule, updates_of(fixture.plan)
    optimizer = next(iter(optimizers_of(fixture.fresh().optimizer).values()))
    if fixture.job.schedule(optimizer, steps) is not None:
        return [passed("schedule", "the job's own; the run records the rate of each step")]
    factors = [rule.factor(steps * i // 100, steps) for i in range(100)]
    if rule.warmup >= steps:
        return [
            warned(
                "schedule",
                f"schedule.warmup_steps = {rule.warmup} and the run has {steps} steps: the rate never arrives at optimizer.lr",
                "lower schedule.warmup_steps, or train longer",
            )
        ]
    vanished = [factor < VANISHED for factor in factors[50:]]
    if all(vanished):
        return [
            warned(
                "schedule",
                f"for the second half of the {steps} steps the rate is below {VANISHED:g} of optimizer.lr: nothing is learnt there",
                "train less long, or raise schedule.every, schedule.gamma or schedule.final",
            )
        ]
    return [
        passed(
            "schedule",
            f"{rule.name}: the rate goes from {factors[0]:.3g} of optimizer.lr by {max(factors):.3g} to {factors[-1]:.3g}",
        )
    ]


def same_bits(fixture: Fixture) -> list[Finding]:
    """The rehearsal that begins every run, as far as it can go: a micro-batch gives the same bits whatever ran before it."""
    spec = fixture.spec
    if spec.determinism != "strict":
        return [passed("same bits", "not compared: determinism is fast, which promises none")]
    warnings: list[str] = []
    thorough = spec.model_copy(update={"rehearsal": "full"})
    state = fixture.fresh()
    rehearsal = StepRehearsal(
        state.job,
        thorough,
        fixture.plan,
        state,
        fixture.batches,
        fixture.device,
        warnings.append,
    )
    rehearsal.first()
    rehearsal.elsewhere(None)
    if warnings:
        return [advised("same bits", text) for text in warnings]
    return [
        passed(
            "same bits",
            "the first micro-batch repeats, after another one and in halves; so does the first update",
        )
    ]


def evaluation(fixture: Fixture) -> list[Finding]:
    """The first evaluation micro-batch, again after the last one, in the same bits; and the metrics that the spec asks for."""
    if not fixture.opened.held_out:
        return [passed("evaluation", "the job has no evaluation data")]
    spec, state = fixture.spec, fixture.fresh()
    held_out = fixture.opened.held_out
    evaluate = EvaluationSets(spec, fixture.job, fixture.plan, held_out, fixture.group, state.precision, 0)
    strict = spec.determinism == "strict"
    warnings: list[str] = []
    rehearsal = StepRehearsal(
        fixture.job, spec, fixture.plan, state, fixture.batches, fixture.device, warnings.append
    )
    evaluate.prepare(compares=strict)
    shown = rehearsal.elsewhere(evaluate, steps=False).evaluation
    names = shown and shown.names
    check_metric(spec, names)
    repeated = "; the first micro-batch repeats after the last one" if strict else ""
    evidence = (
        ", ".join(names)
        if names is not None
        else "metrics of the whole set are known after a run's first evaluation"
    )
    return [
        *[advised("evaluation", text) for text in warnings],
        passed("evaluation", f"{evidence}{repeated}"),
    ]


# --- resume -----------------------------------------------------------------------------------------------


class _Named(NoRequests):
    """A run whose id is known from the start."""

    def run_id(self) -> str:
        return _RUN_ID


def resume(fixture: Fixture) -> list[Finding]:
    """Three steps in one go, and two, a checkpoint, and the third of a new process's state: the same weights."""
    with tempfile.TemporaryDirectory(prefix="lockstep-check-") as folder:
        spec = _short(fixture.spec, folder)
        uninterrupted, rows = _fitted(fixture, spec, AttemptOrigin())
        resumed, again = _fitted(fixture, spec, claim(folder, _RUN_ID, 2))
        size = sum(path.stat().st_size for path in Path(folder).rglob("step-*2/*"))
    if resumed["weights_digest"] == uninterrupted["weights_digest"] and rows[-1].loss == again[-1].loss:
        return [
            passed(
                "resume",
                f"step 3 after loading step 2's checkpoint ({size:,} bytes) has the same bits as without",
            )
        ]
    if fixture.spec.determinism != "strict":
        return [
            passed(
                "resume",
                "step 3 after loading step 2's checkpoint has other bits, as determinism=fast allows",
            )
        ]
    return [
        failed(
            "resume",
            f"step 3 after loading step 2's checkpoint has other weights than without (its loss is {again[-1].loss!r}, and was {rows[-1].loss!r})",
            "keep what changes in training in the model, in the optimizer's state, or in job.state_dict()",
        )
    ]


def _short(spec: Spec, folder: str) -> Spec:
    """Three steps of the run with a checkpoint after the second, all in `folder`."""
    return spec.model_copy(
        update={
            "length": Length(steps=3),
            "checkpoint": Checkpoint(storage=folder, every=Cadence(steps=2), keep_last=3),
            "record": Record(uri=RECORD_OFF, folder=folder),
            "early_stop": None,
            "rehearsal": "off",
            "data": spec.data.model_copy(update={"loader_processes": 0}),
        }
    )


def _fitted(fixture: Fixture, spec: Spec, origin: AttemptOrigin) -> tuple[dict[str, Any], list[StepRow]]:
    rows: list[StepRow] = []

    def tell(event: Event) -> None:
        if isinstance(event, StepRow):
            rows.append(event)

    job = load_job(spec.job.use, spec.job.params)
    job.eval_data = lambda: None  # type: ignore[method-assign]  # an evaluation of everything would take long
    summary = fit(spec, job, fixture.group, tell, _Named(), origin)
    assert summary is not None and rows, "nothing asks it to end before its last step"
    return summary, rows


# --- where it writes --------------------------------------------------------------------------------------


def storage(fixture: Fixture) -> list[Finding]:
    """Write and remove a file where checkpoints and the record go."""
    check_storage(fixture.spec)
    return [
        passed(
            "storage",
            f"can be written: {', '.join(dict.fromkeys((fixture.spec.checkpoint.storage, str(fixture.spec.folder))))}",
        )
    ]


def record(fixture: Fixture) -> list[Finding]:
    """The tracking store answers, or its database can be made or opened. Nothing is made."""
    return [passed("record", record_answers(fixture.spec))]


def record_answers(spec: Spec) -> str:
    """What was found of the tracking store. RecordError where a run could not be recorded there."""
    uri = spec.record.uri or RECORD_OFF
    if uri == RECORD_OFF:
        return "record.uri is off: runs are recorded in folders alone"
    if uri.startswith("sqlite"):
        return database_opens(Path(database_path(uri)))
    runs = reader(uri, spec.folder).runs(None, 1)
    return f"{without_uri_secrets(uri)} answers" + (f"; its newest run is {runs[0].run_id}" if runs else "")
