"""The loop: `fit` reads as the run is lived. It runs unchanged in a Ray worker, under torchrun and in one process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any, Protocol

from torch import Tensor

from lockstep.checkpoint.run_folder import Origin
from lockstep.data.loader import Loader
from lockstep.errors import DriftError
from lockstep.job.interface import Job
from lockstep.plan import Position
from lockstep.record.ledger import EvaluationRow, History, StepRow
from lockstep.spec.fields import Spec
from lockstep.training.checkpoints import CheckpointRecord
from lockstep.training.determinism import determinism
from lockstep.training.digest import tensor_digests, weights_digest
from lockstep.training.group import Group
from lockstep.training.pace import Pace
from lockstep.training.setup import Run, prepare
from lockstep.training.state import tensors
from lockstep.training.step import StepResult


class RunRecord(CheckpointRecord, Protocol):
    """Where a run's rows go. Rank 0's leads to the recorder, the other ranks' nowhere; no call but `run_id` waits for a store."""

    def started(self, facts: Mapping[str, Any]) -> None:
        """The run is prepared: its identity and what it runs on."""

    def restored(self, history: History) -> None:
        """The rows up to the checkpoint that this attempt starts from; the record may have them, or more."""

    def step(self, row: StepRow) -> None:
        """One step is done."""

    def evaluation(self, row: EvaluationRow) -> None:
        """One evaluation is done."""

    def straggling(self, text: str) -> None:
        """A rank keeps the others waiting, in so many steps."""

    def finished(self, summary: Mapping[str, Any], weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        """The run is over: its figures, and the weights to keep by name (`final`, `best`)."""

    def stopping(self) -> bool:
        """Whether someone asks the run to end after the next step. Never waits."""


def fit(
    spec: Spec, job: Job, group: Group, record: RunRecord, origin: Origin | None = None
) -> dict[str, Any]:
    """Train one run to its end as one worker of `group`. Returns its summary, the same on every rank.

    `origin` tells which attempt of which run this is; without one nothing is saved and nothing taken up.
    Raises LockstepError with one clear line for whatever the spec, the job or the machine has wrong.
    """
    with determinism(spec.determinism, spec.threads), group.out_of_sight():
        run = prepare(spec, job, group, record, origin)
        record.started(run.facts)
        record.restored(run.history)
        clock, pace = Clock(origin), Pace(group)
        stopped = False

        with run.checkpoints(record, origin) as checkpoints, closing(run.loader()) as batches:
            over = catch_up(run, record)
            for position in run.ahead(over):
                result = run.step(position, batches, stop=record.stopping(), save=checkpoints.wanted())
                note_step(run, record, clock.row(run, position, result, batches))
                for straggler in pace.add(position.step + 1, result.pace):
                    record.straggling(straggler)
                stopped = result.stop and position.step + 1 < run.plan.total_steps
                if stopped:
                    break

                over = evaluation_is_due(run, position) and evaluate(run, position, record)
                if checkpoints.due(position, agreed=result.save):
                    checkpoints.save()
                clock.leave_out()
                if over:
                    break
            checkpoints.finish()

        summary = summarise(run, clock, stopped=stopped, checkpoint=checkpoints.newest)
        record.finished(summary, kept_weights(run))
        return summary


def catch_up(run: Run, record: RunRecord) -> bool:
    """Make the evaluation that an attempt stopped before. Whether the run is over where it is taken up."""
    counters, rule = run.state.counters, run.spec.early_stop
    if counters.step > counters.evaluated:
        last = run.plan.position(counters.step - 1)
        if evaluation_is_due(run, last):
            return evaluate(run, last, record)
    return rule is not None and run.state.best.enough(rule)


def note_step(run: Run, record: RunRecord, row: StepRow) -> None:
    """Put a step into the ledger."""
    run.state.metrics |= {
        "train/loss": row.loss,
        **{f"train/{name}": value for name, value in row.parts.items()},
    }
    if run.group.rank == 0:
        run.history.steps.append(row)
    record.step(row)


def evaluation_is_due(run: Run, position: Position) -> bool:
    """Whether this step ends with an evaluation; the last step of the run always does."""
    if run.evaluate is None:
        return False
    every, done = run.spec.evaluate.every, position.step + 1
    if done == run.plan.total_steps:
        return True
    if every.steps is not None:
        return done % every.steps == 0
    return position.ends_epoch and every.epochs is not None and (position.epoch + 1) % every.epochs == 0


def evaluate(run: Run, position: Position, record: RunRecord) -> bool:
    """Evaluate the model as it stands. Whether the run should end here."""
    assert run.evaluate is not None
    began, step = time.perf_counter(), position.step + 1
    metrics = run.evaluate(run.state.model, record.alive)
    row = EvaluationRow(step, position.epoch, metrics, time.perf_counter() - began, time.time())
    run.state.counters.evaluated = step
    run.state.metrics |= metrics
    if run.group.rank == 0:
        run.history.evaluations.append(row)
    record.evaluation(row)
    rule = run.spec.early_stop
    return rule is not None and run.state.best.judge(rule, metrics[rule.metric], step, run.state.model)


def kept_weights(run: Run) -> Mapping[str, Mapping[str, Tensor]]:
    """The weights of the last step, and the best ones where early stopping kept them."""
    best = run.state.best.weights
    return {"final": tensors(run.state.model)} | ({"best": best} if best is not None else {})


def summarise(run: Run, clock: Clock, *, stopped: bool, checkpoint: str | None) -> dict[str, Any]:
    """The run in figures. Raises DriftError where the ranks' weights are not the same bits."""
    state = run.state
    digest = weights_digest(state.model.state_dict())
    digests = run.group.gather(digest)
    if len(set(digests)) > 1:
        strays = [rank for rank, other in enumerate(digests) if other != digests[0]]
        every = run.group.gather(tensor_digests(state.model.state_dict()))
        first = next(name for name in every[0] if any(other.get(name) != every[0][name] for other in every))
        raise DriftError(
            f"after step {state.counters.step} ranks {strays} hold other weights than rank 0, first in {first!r}; this run is void"
        )
    best = state.best.weights
    return {
        "identity": run.facts["identity"],
        "step": state.counters.step,
        "epoch": state.epoch(run.plan),
        "samples": state.counters.samples,
        "skipped": state.counters.skipped,
        "stopped": stopped,
        "workers": run.group.size,
        "metrics": dict(state.metrics),
        "weights_digest": digest,
        "best_digest": weights_digest(best) if best is not None else None,
        "best_step": state.best.step if best is not None else None,
        "checkpoint": checkpoint,
        **clock.figures(),
    }


class Clock:
    """The timing columns: what a run took, apart from what it computed."""

    def __init__(self, origin: Origin | None = None) -> None:
        self.attempt = 1 if origin is None else origin.attempt
        self.first_step_at: float | None = None
        self._mark = time.perf_counter()
        self._waited_s = 0.0
        self._steps = self._samples = 0
        self._steady_s = self._steady_wait_s = 0.0

    def row(self, run: Run, position: Position, result: StepResult, batches: Loader) -> StepRow:
        """The ledger's row of the step that has just ended."""
        now, wall = time.perf_counter(), time.time()
        step_s, wait_s = now - self._mark, batches.waited_s - self._waited_s
        self._mark, self._waited_s = now, batches.waited_s
        if self.first_step_at is None:
            self.first_step_at = wall
        else:
            self._steps, self._samples = self._steps + 1, self._samples + position.samples
            self._steady_s, self._steady_wait_s = self._steady_s + step_s, self._steady_wait_s + wait_s
        return StepRow(
            step=position.step + 1,
            epoch=position.epoch,
            samples=run.state.counters.samples,
            loss=result.loss,
            weight=result.weight,
            parts=result.parts,
            lr=result.lr,
            grad_norm=result.grad_norm,
            clipped_norm=result.clipped_norm,
            scale=result.scale,
            skipped=result.skipped,
            data_wait_s=wait_s,
            step_s=step_s,
            wall_clock=wall,
            attempt=self.attempt,
        )

    def leave_out(self) -> None:
        """Start the next step's time here: an evaluation or a save is not part of it."""
        self._mark = time.perf_counter()

    def figures(self) -> dict[str, float | None]:
        """Rates over all steps but the first, which pays for warming up."""
        seconds = self._steady_s
        return {
            "first_step_at": self.first_step_at,
            "steps_per_s": self._steps / seconds if seconds else None,
            "samples_per_s": self._samples / seconds if seconds else None,
            "data_wait_share": self._steady_wait_s / seconds if seconds else None,
        }
