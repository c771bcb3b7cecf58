"""All that can be known before a long run: one check after another, each told as it comes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from lockstep.checks import data_checks, model_checks, run_checks
from lockstep.checks.estimate import estimated
from lockstep.checks.findings import Finding, Report, failed, failure_of, passed
from lockstep.checks.first_step import FirstStep, PhaseSeen, labels_of, walk
from lockstep.checks.fixture import Fixture
from lockstep.checks.learning import FASTER, Learning, learn
from lockstep.checks.missing_zero_grad import zero_grad
from lockstep.errors import LockstepError, SpecError
from lockstep.job.loading import others_out_of_sight
from lockstep.printing import size_text
from lockstep.spec.fields import Spec
from lockstep.training.determinism import determinism


class Examination:
    """A fixture with what several checks look at, computed when the first of them asks."""

    def __init__(self, spec: Spec) -> None:
        self.fixture = Fixture(spec)

    @cached_property
    def first(self) -> FirstStep:
        return walk(self.fixture)

    @cached_property
    def learning(self) -> Learning:
        return learn(self.fixture, self.first)

    def loss(self) -> list[Finding]:
        """The first step's micro-batches from end to end."""
        first, plan = self.first, self.fixture.plan
        count, means = plan.position(0).micro_batches, _by_phase(first)
        return [
            passed(
                "loss",
                f"{count} micro-batches of {'' if plan.tokens is None else 'at most '}{plan.micro_batch} forward and backward, those of {self.fixture.workers} "
                f"{'worker' if self.fixture.workers == 1 else 'workers'}; the mean loss is {means}",
            )
        ]

    def labels(self) -> list[Finding]:
        held_out = labels_of(self.fixture, None)
        return self._of_each_phase(
            lambda name, phase: model_checks.labels(phase, labels_of(self.fixture, name), held_out)
        )

    def chance(self) -> list[Finding]:
        return self._of_each_phase(lambda name, phase: model_checks.chance(self.fixture, phase))

    def _of_each_phase(self, look: Callable[[str, PhaseSeen], list[Finding]]) -> list[Finding]:
        """What a look finds in each phase, with its name; one pass where it finds nothing in any."""
        findings: list[Finding] = []
        for name, phase in self.first.phases.items():
            of = f"phase {name!r}: " if name else ""
            findings += [replace(finding, evidence=of + finding.evidence) for finding in look(name, phase)]
        return [finding for finding in findings if finding.result != "pass"] or findings[:1]

    def memory(self) -> list[Finding]:
        """What a worker needs beside what it can have."""
        estimate = estimated(self.fixture)
        evidence = (
            f"a worker needs {size_text(estimate.total_bytes)} at the peak of a step, {size_text(estimate.activations_bytes)} of it activations; there "
            f"are {size_text(estimate.available_bytes)} for each of {estimate.workers} on this machine ({estimate.device})"
        )
        if estimate.fits:
            return [passed("memory", evidence)]
        largest = estimate.largest_micro_batch
        remedy = (
            "lower batch.tokens"
            if estimate.tokens is not None
            else f"set batch.micro={largest}"
            if largest
            else "set activation_checkpointing=true, or use a smaller model"
        )
        return [failed("memory", evidence, f"{remedy}; lockstep estimate shows the parts")]

    def overfit(self) -> list[Finding]:
        learning = self.learning
        judged = len(learning.phases) == 1 and not learning.broke and not learning.moving
        if judged and learning.followed and not learning.fall >= model_checks.MOVED:
            still = learn(self.fixture, self.first, after_step=False)
            if still.fall >= model_checks.MOVED and not still.broke:
                return model_checks.overfit_without_after_step(learning, still)
        slow = judged and abs(learning.fall) < model_checks.MOVED
        faster = learn(self.fixture, self.first, FASTER) if slow else None
        return model_checks.overfit(learning, faster, self.fixture.spec.clip_norm)


class Check(NamedTuple):
    """A check, and those without whose pass it has nothing to look at."""

    name: str
    look: Callable[[Examination], list[Finding]]
    needs: tuple[str, ...] = ()


CHECKS: Sequence[Check] = (
    Check("storage", lambda exam: run_checks.storage(exam.fixture)),
    Check("record", lambda exam: run_checks.record(exam.fixture)),
    Check("shards", lambda exam: data_checks.shards(exam.fixture)),
    Check("data", lambda exam: data_checks.data(exam.fixture), ("shards",)),
    Check("leakage", lambda exam: data_checks.leakage(exam.fixture), ("data",)),
    Check("model", lambda exam: model_checks.model(exam.fixture), ("data",)),
    Check("optimizer", lambda exam: run_checks.optimizer(exam.fixture), ("model",)),
    Check("schedule", lambda exam: run_checks.schedule(exam.fixture), ("optimizer",)),
    Check("loss", Examination.loss, ("data", "model", "optimizer")),
    Check("modes", lambda exam: model_checks.modes(exam.first), ("loss",)),
    Check("labels", Examination.labels, ("loss",)),
    Check("chance", Examination.chance, ("labels",)),
    Check("zero_grad", lambda exam: zero_grad(exam.fixture), ("loss",)),
    Check("same bits", lambda exam: run_checks.same_bits(exam.fixture), ("loss", "modes", "zero_grad")),
    Check("evaluation", lambda exam: run_checks.evaluation(exam.fixture), ("loss", "modes", "same bits")),
    Check("gradients", lambda exam: model_checks.gradients(exam.first, exam.learning), ("loss", "same bits")),
    Check("overfit", Examination.overfit, ("loss", "same bits", "gradients")),
    Check("resume", lambda exam: run_checks.resume(exam.fixture), ("loss", "same bits", "evaluation")),
    Check("loader", lambda exam: data_checks.loader(exam.fixture), ("loss",)),
    Check("memory", Examination.memory, ("loss", "same bits", "gradients")),
)


def check(spec: Spec, say: Callable[[Finding], None] = lambda finding: None) -> Report:
    """Check a run in this process, whatever it will be run on; `say` hears of each finding at once.

    Raises SpecError where the spec itself is wrong. All else that is wrong is a failure in the report. Nothing is left behind.
    """
    findings: list[Finding] = []
    not_reached: list[str] = []
    exam = Examination(spec)
    with determinism(spec.determinism, spec.threads), others_out_of_sight():
        for entry in CHECKS:
            lost = {finding.name for finding in findings if finding.result == "failure"} | set(not_reached)
            if lost & set(entry.needs):
                not_reached.append(entry.name)
                continue
            for finding in _looked(entry, exam):
                findings.append(finding)
                say(finding)
    return Report(findings, not_reached)


def _by_phase(first: FirstStep) -> str:
    return ", ".join(
        f"{phase.loss:.4g}{f' in phase {name!r}' if name else ''}" for name, phase in first.phases.items()
    )


def _looked(check: Check, exam: Examination) -> list[Finding]:
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's own: what matters is a finding
            return check.look(exam)
    except SpecError:
        raise
    except LockstepError as error:
        return [failure_of(check.name, error)]
