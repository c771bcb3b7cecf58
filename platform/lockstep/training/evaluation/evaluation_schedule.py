"""The evaluations of a run: when one begins, which process computes it, and at which step it decides.

An evaluation of the weights after step s decides at a step that the plan and the spec alone fix: at s itself, or `evaluate.delay` steps later, or where
another one is due, whichever comes first. Training waits there for its metrics. So early stopping, schedules that follow a metric and the checkpoint
that is kept as the best are the same whichever process evaluates, and however long it takes.

Invariants:

- One evaluation is pending at most: the next one begins when it has decided.
- The state has what a pending evaluation needs, so a checkpoint has it too, and so has each worker that goes on after a loss.
- The last evaluation of a run is of its final weights, and made by the workers: nothing goes on beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple

from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.errors import nearest
from lockstep.job.identity import forked_step
from lockstep.plan import Position
from lockstep.record.events.union import Alive, Document, Tell, Warned
from lockstep.record.ledger.rows import EvaluationRow
from lockstep.training import problems
from lockstep.training.auxiliary_state import beside_weights
from lockstep.training.evaluation.evaluator_messages import Measured
from lockstep.training.evaluation.evaluator_process import Evaluator
from lockstep.training.failure import job_at
from lockstep.training.metric_rules import check_followed
from lockstep.training.run import Run
from lockstep.training.state import Best, Pending, tensors
from lockstep.training.step.buffers import KeptBuffers
from lockstep.training.swapped_weights import weights_shown


class Evaluated(NamedTuple):
    """What followed a step: whether an evaluation has decided, and whether the run should end here."""

    decided: bool
    over: bool


class Evaluations:
    """The evaluations of one group of workers. A context manager, which ends the process that evaluates beside them."""

    def __init__(self, run: Run, tell: Tell, origin: AttemptOrigin | None) -> None:
        self._run, self._tell = run, tell
        self._delay = run.spec.evaluate.delay
        self._replays = origin is not None and origin.replay is not None
        """Whether these are another run's steps again: they may end before an evaluation decides, and its row is wanted all the same."""
        self._beside = (
            run.spec.evaluate.beside and bool(self._delay) and run.evaluate is not None and not self._replays
        )
        self.evaluator = Evaluator(run, tell) if self._beside and run.group.rank == 0 else None
        self._measured: Measured | None = None
        """What the pending evaluation gave, where the workers have made it as it began."""

    def catch_up(self) -> bool:
        """Go on from the current state: begin the pending evaluation again, and do what the previous attempt did not get to. Returns whether the run is already over."""
        run, pending = self._run, self._run.state.pending
        if pending is not None:
            if pending.step == run.state.counters.step:  # a checkpoint of this step has its weights once
                self._begin(pending.epoch, pending.labels)
            else:
                self._hand_out(pending)
        if run.state.counters.step > 0:
            self.after(run.plan.position(run.state.counters.step - 1))
        return self._is_over()

    def after(self, position: Position) -> Evaluated:
        """Called after each step: have the pending evaluation decide if that is due, and begin another one if that is due. All ranks call it."""
        run, state = self._run, self._run.state
        if run.evaluate is None:
            return Evaluated(False, False)
        if self.evaluator is not None:
            self.evaluator.look()
        due, pending, decided = run.evaluate.due(position), state.pending, False
        if pending is not None and self._decides(pending, position, due):
            self._decide_on(pending)
            decided = True
        is_last = position.number == run.plan.total_steps
        # Before a run ends by an earlier evaluation its final weights are evaluated, and count as well.
        ends = bool(self._delay) and self._is_over()
        labels = [*run.evaluate.evaluated] if ends else due
        if labels and state.evaluation_begun < position.number:
            if is_last or ends or not self._delay:
                self._make(position, labels)
                decided = True
            else:
                self._begin(position.epoch, labels)
        return Evaluated(decided, decided and self._is_over())

    def _decides(self, pending: Pending, position: Position, due: Sequence[str]) -> bool:
        """Whether an evaluation decides after this step."""
        since = position.number - pending.step
        return since > 0 and (bool(due) or (self._delay != "next" and since >= self._delay))

    def _is_over(self) -> bool:
        rule = self._run.spec.early_stop
        return rule is not None and self._run.state.best.enough(rule)

    # --- who evaluates ----------------------------------------------------------------------------------------

    def _make(self, position: Position, labels: Sequence[str]) -> None:
        """Evaluate the current model here, which decides at once."""
        run = self._run
        with run.state.averaged():
            measured = self._computed(labels, own_buffers=run.state.job_weights is not None)
            best = self._judged(  # the weights are copied while they are shown
                measured.metrics,
                labels,
                position.number,
                tensors(run.state),
                lambda: beside_weights(run.state.model, run.job, run.state.settings.changed),
            )
        run.step.agreement.check()  # before it is reported: a reported evaluation is of bits that all ranks have
        self._decide(measured, labels, position.number, position.epoch, best)

    def _begin(self, epoch: int, labels: Sequence[str]) -> None:
        """Begin to evaluate the current model, which decides later."""
        run = self._run
        self._measured = None
        with run.state.averaged():
            if not self._beside:
                self._measured = self._computed(labels, own_buffers=run.state.job_weights is not None)
            pending = Pending.of(run.state, epoch, labels)
        run.step.agreement.check()
        run.state.pending = pending
        if self._measured is not None and self._replays:
            self._report(self._measured, pending.step, epoch)
        if self.evaluator is not None:
            self.evaluator.begin(pending)

    def _hand_out(self, pending: Pending) -> None:
        """Begin an evaluation of earlier weights again."""
        self._measured = None
        if self.evaluator is not None:
            self.evaluator.begin(pending)

    def _decide_on(self, pending: Pending) -> None:
        """Have an earlier evaluation decide, once its metrics are there."""
        run, measured = self._run, self._measured
        is_told = measured is not None and self._replays
        if measured is None and self._beside:
            answered = self.evaluator.answer(self._wait_on) if self.evaluator is not None else None
            without_figures = answered and replace(answered, figures={})
            shared: Measured | None = run.group.broadcast_object(without_figures, 0)
            measured = answered or shared
        assert pending.weights is not None
        if measured is None:
            with weights_shown(run.state, pending.weights, pending.beside):
                measured = self._computed(pending.labels, own_buffers=True)
            run.step.compute.buffers.restore()
        best = self._judged(
            measured.metrics, pending.labels, pending.step, pending.weights, lambda: pending.beside
        )
        # As in `_make`, from here on no rank waits for another.
        self._measured = run.state.pending = None
        self._decide(measured, pending.labels, pending.step, pending.epoch, best, is_told=is_told)

    def _wait_on(self) -> None:
        """Called now and then while training waits for the other process. RuntimeError where the group is broken off."""
        self._tell(Alive())
        self._run.group.waits.look()

    def _computed(self, labels: Sequence[str], *, own_buffers: bool) -> Measured:
        """The metrics of the model as it stands, which may have `own_buffers`: others than the step."""
        run = self._run
        assert run.evaluate is not None
        began = time.perf_counter()
        if own_buffers:
            run.evaluate.restore_buffers_by(KeptBuffers(run.state.model).restore)
        try:
            metrics = run.evaluate(run.state.model, labels, lambda: self._tell(Alive()))
        finally:
            run.evaluate.restore_buffers_by(run.step.compute.buffers.restore)
        return Measured(metrics, dict(run.evaluate.figures), time.perf_counter() - began, time.time())

    # --- what follows -----------------------------------------------------------------------------------------

    def _judged(
        self,
        metrics: Mapping[str, float],
        labels: Sequence[str],
        step: int,
        weights: Mapping[str, Any],
        beside: Callable[[], dict[str, Any]],
    ) -> Best:
        """The best evaluation so far, this one included."""
        run, rule = self._run, self._run.spec.early_stop
        best = replace(run.state.best)
        assert run.evaluate is not None
        if rule is not None and run.evaluate.is_of(rule.metric, labels):
            best.judge(rule, _named(metrics, rule.metric), step, weights, beside)
        return best

    def _decide(
        self,
        measured: Measured,
        labels: Sequence[str],
        step: int,
        epoch: int,
        best: Best,
        *,
        is_told: bool = False,
    ) -> None:
        """Take in what an evaluation of the weights after `step` has given."""
        # No rank waits for another here. So when one is lost, the others have either the whole evaluation, or make it again.
        run, state, metrics = self._run, self._run.state, dict(measured.metrics)
        assert run.evaluate is not None
        state.best = best
        self._tell_unripe_average()
        if all(run.evaluate.is_of(name, labels) for name in state.schedule.metrics):
            check_followed(state.schedule, metrics)  # a metric of the whole set may be known only now
        with job_at(f"the schedule after the evaluation of step {step}"):
            state.schedule.evaluated(metrics)
        state.counters.evaluated = step
        state.metrics |= metrics
        if not is_told:
            self._report(measured, step, epoch)

    def _report(self, measured: Measured, step: int, epoch: int) -> None:
        """Tell an evaluation, with the step of its weights. One of the run that was forked is none of this run's."""
        run = self._run
        if step <= forked_step(run.facts["fields"]):
            return
        row = EvaluationRow(step, epoch, dict(measured.metrics), measured.seconds, measured.at)
        run.history.add_evaluation(row)
        self._tell(row)
        for name, text in measured.figures.items():
            self._tell(Document(f"evaluations/step-{step:09}/{name}", text))

    def _tell_unripe_average(self) -> None:
        """Warn, once, where an evaluation decides what is kept and the average that it judges is not one yet."""
        run = self._run
        rules = {"early_stop": run.spec.early_stop, "checkpoint.keep_best": run.spec.checkpoint.keep_best}
        rule = next((name for name, value in rules.items() if value is not None), None)
        if rule is not None and run.state.average is not None:
            for text in run.state.average.told_where_it_decides(run.state.counters.updates, rule):
                self._tell(Warned(text))

    # --- as a context manager ---------------------------------------------------------------------------------

    def __enter__(self) -> Evaluations:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.evaluator is not None:
            self.evaluator.close()


def _named(metrics: Mapping[str, float], name: str) -> float:
    """The metric of the evaluation that a rule uses. SpecError where there is none of that name."""
    if name not in metrics:
        raise problems.NO_METRIC(field="early_stop.metric", got=name, hint=nearest(name, metrics))
    return metrics[name]
