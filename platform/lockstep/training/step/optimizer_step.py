"""One optimizer step, exactly: phase by phase, the gradients of its micro-batches (`accumulation`), their agreement, and the update.

Each micro-batch back-propagates its loss *sum* times a power of two. The gradients are added along the plan's
tree and divided once by the whole batch's weight. The result is the gradient of the weighted mean loss over the
global batch, however ragged the micro-batches and however many the workers.

A job may have several phases. Each runs over the step's micro-batches with its own loss and updates its own parameters, and the
next phase sees the result. A job without phases has a single one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lockstep.communication.group import Group
from lockstep.errors import NumericsError
from lockstep.plan import Plan, Position
from lockstep.randomness import seed_all, update_key
from lockstep.record.ledger.rows import StepRow
from lockstep.spec.fields import Spec
from lockstep.training.failure import job_at
from lockstep.training.integrity.agreement import Agreement
from lockstep.training.integrity.probe import NoProbe
from lockstep.training.integrity.step_digests import StepDigests
from lockstep.training.state import TrainState
from lockstep.training.step import problems
from lockstep.training.step.accumulation import Accumulation
from lockstep.training.step.after_step import follow_update, has_after_step
from lockstep.training.step.closures import Closure
from lockstep.training.step.forward_backward import ForwardBackward
from lockstep.training.step.full_sharding import diverged
from lockstep.training.step.loss_form import LossForm
from lockstep.training.step.mirrored_optimizer import MirroredOptimizer
from lockstep.training.step.norm import ELEMENT_BY_ELEMENT, align_gradients, clip_gradients
from lockstep.training.step.phase_step import PhaseStep, copied, each_in_turn
from lockstep.training.step.phases import FrozenRule, all_rest, phases_of
from lockstep.training.step.results import PhaseResult, StepResult, by_phase
from lockstep.training.step.sharding import FullyShardedOptimizer, ShardedOptimizer
from lockstep.training.step.sparse_gradients import numbers_of
from lockstep.training.step.step_exchange import Agreed, Totals
from lockstep.training.step.step_start import Evaluated, StepStart

ELEMENT_OPTIMIZERS = (*ELEMENT_BY_ELEMENT, ShardedOptimizer, FullyShardedOptimizer, MirroredOptimizer)
"""Optimizers that never add up a gradient's elements, and those that share one of them out."""


class Stepper:
    """Takes the steps of one worker: phase by phase, forward and backward of its micro-batches, then the update."""

    def __init__(
        self,
        spec: Spec,
        plan: Plan,
        group: Group,
        state: TrainState,
        forms: Mapping[str, LossForm],
    ) -> None:
        """`forms` are those of each phase's loss, by phase name; without phases by the empty name."""
        self.spec = spec
        self.plan = plan
        self.group = group
        self.state = state
        self.forms = forms
        self._gathered: Mapping[str, Any] = {}
        """The statistics of the step, of all workers."""
        self.agreement = Agreement(group, state)
        self.digests = StepDigests(spec, group, state, plan.total_steps, self.agreement)
        self.compute = ForwardBackward(spec, plan, group, state, [*forms.values()])
        self.accumulation = Accumulation(self.compute, plan, self.digests, self.agreement)
        buffers = len(self.compute.buffers.buffers)
        self.each_phase = [
            PhaseStep(spec, plan, group, state, phase, forms[phase.name], buffers)
            for phase in phases_of(state.job, state.model)
        ]
        self.updates_by_job = any(phase.updates_by_job for phase in self.each_phase)
        self.hooks = self.updates_by_job or has_after_step(state.job)
        """Whether code of the job runs between the last micro-batch of a step and the next one."""
        self.frozen = FrozenRule(state.job, state.model, spec.seed)
        self._learning(min(state.counters.step + 1, plan.total_steps))
        self._abandoned = False
        self.keeps_start = False
        """Whether the state at the start of a step is kept until it is done, where ranks wait for each other between its changes: in a step of several phases,
        and in an update that evaluates the loss again. If a rank is lost, the others take the whole step again."""
        self._start = StepStart()
        self._evaluated = Evaluated.of(state)
        """What evaluations had left when the newest step was done."""

    def _learning(self, step: int) -> list[PhaseStep]:
        """The phases with something to learn in step number `step`, made ready for it. All ranks call it."""
        frozen = self.frozen(step)
        return [phase for phase in self.each_phase if phase.learn(frozen)]

    def __call__(
        self,
        position: Position,
        batches: Iterator[Any],
        *,
        stop: bool = False,
        save: bool = False,
        regroup: bool = False,
    ) -> StepResult:
        """Train on the global batch at `position`; `batches` gives this worker's micro-batches of it, in order.

        `stop` is this rank's vote to end the run after the step, `save` to save its state then, `regroup` to form another group.
        """
        self.compute.times.begin()
        phases = self._learning(position.number) if self.frozen.there else self.each_phase
        if not phases:
            raise all_rest(position.number)
        scale_down = self.compute.scale_down(position)
        if self.compute.statistics is not None:
            self.compute.statistics.begin(self.compute.places(position))
        self.digests.begin(
            position,
            self.accumulation.recheck.chosen(position)
            if self.accumulation.recheck is not None
            else frozenset(),
        )
        count = len(self.accumulation.turns(position))
        taken: dict[str, PhaseResult] = {}
        self.compute.first_phase = phases[0]
        mirrored = self.state.mirrored is not None
        for phase, phase_batches in zip(phases, each_in_turn(batches, count, len(phases)), strict=True):
            phase.exchange.vote(stop=stop, save=save, regroup=regroup)
            last = phase is phases[-1]
            if self.keeps_start and phase is phases[0] and (not last or phase.closure_calls or mirrored):
                if mirrored:
                    # A rank has its update while another still waits for the gradients that it mirrors: what either would return to is kept until all have it.
                    self.group.meet()
                self._start.keep(self.state)
                if self.state.mirrored_shards is not None:
                    self.state.mirrored_shards.keep(self.state.counters.step)
            taken[phase.name] = self._take(phase, position, phase_batches, scale_down, last=last)
        if not mirrored:  # the digests of its state wait for other ranks when the step is counted: its start is kept until the next one
            self._start.forget()
        result = self._finished(position, phases, taken)
        self._evaluated = Evaluated.of(self.state)
        return result

    def _take(
        self, phase: PhaseStep, position: Position, batches: Iterator[Any], scale_down: float, *, last: bool
    ) -> PhaseResult:
        """Take one phase from its first micro-batch to its update; `last` where it is the last one of the step."""
        again = None
        if (
            phase.closure_calls
        ):  # the micro-batches are kept for further evaluations, which start from the same buffers
            batches_kept = list(islice(batches, len(self.accumulation.turns(position))))
            batches, start = map(copied, batches_kept), self.compute.buffers.values()
            again = partial(self._evaluate_again, phase, position, batches_kept, start, scale_down)
        self.accumulation(phase, position, batches, scale_down)
        self.compute.settings.put_back()
        if self._looks_at_buffers(position):
            self.compute.buffers.check_unseen(f"step {position.number}, rank {self.group.rank}")
        agreed = self._read(phase, position)
        if phase.whole is not None:
            phase.whole.check(agreed.totals)
        if self.accumulation.recheck is not None:
            self.accumulation.recheck.compare(position, self.digests.gradients())
        try:
            self._check(phase, position, agreed.totals)
            if last:
                self.digests.gather(position, self.plan.ranges(self.group.size, position.micro_batches))
            phase.agree_on_unused()
            if self.compute.statistics is not None:
                if phase.whole is not None:
                    self.compute.statistics.note_whole(phase.whole.statistics, phase.phase.loss_label)
                if last:
                    self._gathered = self.compute.statistics.gather(f" (step {position.number})")
            # The last message of the phase, unless its update evaluates the loss again: from here to the next one no rank waits for another, so a lost
            # rank leaves no half-done update.
            self.compute.buffers.end_step(agreed.flagged, resized=agreed.resized)
            self.group.settle()
            self.compute.times.mark("reduction")
            result = self._update(phase, position, agreed, scale_down, again)
            if self.spec.sharding.mode != "none":  # it has waited for what others have computed
                self.group.settle()
            if last:
                self.state.precision.settle()
            self.compute.times.mark("optimizer")
        except NumericsError as error:
            error.step, error.micro_batch = position.step, agreed.totals.first_bad
            error.phase = phase.name
            raise
        if phase.updates_by_job and not last:
            self.compute.buffers.take_over()
        return result

    def _read(self, phase: PhaseStep, position: Position) -> Agreed:
        """What all ranks know after an exchange of this phase. CorruptionError where they have other weights, DriftError where they gather shards in another order."""
        agreed = phase.exchange.read(position.micro_batches)
        if not agreed.same_compared and self.state.sharding is not None:
            raise diverged(f"step {position.number}")
        if not (agreed.same_compared and agreed.balanced):
            self.agreement.check()  # where the digests of all agree, one rank misread its weights for once: nothing is wrong
        return agreed

    def _looks_at_buffers(self, position: Position) -> bool:
        """Whether buffers are compared by value: after 1, 2, 4, 8 … steps and after the last one, at which a worker's own value still shows."""
        n = position.number
        return self.spec.determinism == "strict" and (n & (n - 1) == 0 or n == self.plan.total_steps)

    def _finished(
        self, position: Position, phases: list[PhaseStep], taken: Mapping[str, PhaseResult]
    ) -> StepResult:
        """Count the step, and do what follows its updates."""
        state, first = self.state, next(iter(taken.values()))
        updated = [phase for phase in phases if not taken[phase.name].skipped]
        state.advance(position, skipped=not updated, weight=first.weight)
        for phase in updated:
            with job_at(f"the schedule after step {position.number}"):
                phase.rates.schedule.follow()
        if position.ends_epoch:
            with job_at(f"the schedule after epoch {position.epoch + 1}"):
                state.schedule.epoch_ended()
        if updated:
            if state.mirrored_shards is not None and has_after_step(state.job):
                state.mirrored_shards.note_update()
            follow_update(state, seed=self.spec.seed, device=self.group.device, statistics=self._gathered)
        self._gathered = {}
        if self.hooks and self.spec.determinism == "strict":
            self.compute.settings.check(f"between steps {position.number} and {position.number + 1}")
        if self.updates_by_job:
            self.compute.modules.check(f"after step {position.number}")
            self.compute.buffers.take_over()
            self.compute.modes.note()
        row = StepRow(
            step=position.number,
            epoch=position.epoch,
            samples=state.counters.samples,
            loss=first.loss,
            weight=first.weight,
            parts=first.parts if "" in taken else by_phase(taken, scaled=self.spec.precision == "fp16"),
            lr=first.lr,
            grad_norm=first.grad_norm,
            clipped_norm=first.clipped_norm,
            scale=first.scale,
            skipped=not updated,
            digests=self.digests.taken(position),
        )
        asked = first.agreed
        by_rank = zip(*(result.agreed.pace for result in taken.values()), strict=True)
        return StepResult(row, asked.stop, asked.save, asked.regroup, [sum(seconds) for seconds in by_rank])

    def abandon(self, recorded: int | None = None) -> None:
        """Give up the step under way for good: the state is that after the last step, and another Stepper may take the parameters.

        What this step has changed by now is taken back: by earlier phases, by an update that evaluates the loss again, or by one that gathers weights.
        Any other update is never interrupted, because no rank waits for another in it. After `recorded` steps it is not taken back if that is later.
        """
        if self._abandoned:
            return
        self._abandoned = True
        self.compute.leave_no_trace()
        for phase in self.each_phase:
            phase.abandon()
        if self.state.mirrored_shards is not None and self.state.sharding is not None:
            self.state.sharding.release()
        if recorded is None or self._start.step == recorded:
            self.take_back()

    def take_back(self) -> None:
        """Return to the start of the newest step, if it is kept."""
        self._start.take_back(self.state)

    def take_back_evaluation(self) -> None:
        """Have the shards that evaluations have left as they were when the newest step was done. All else of an evaluation has to be handed over."""
        self._evaluated.put_back(self.state)

    # --- update -------------------------------------------------------------------------------------------

    def _check(self, phase: PhaseStep, position: Position, totals: Totals) -> None:
        within = f" of phase {phase.name!r}" if phase.name else ""
        # A loss that is not finite gives such gradients too, for which the fp16 scaler skips the update.
        if totals.first_bad is not None and self.spec.precision != "fp16":
            raise problems.LOSS_NOT_FINITE(
                step=position.number,
                micro_batch=totals.first_bad,
                phase=within,
                got=totals.loss,
                rate=f"{self._rate(phase):g}",
            )
        if totals.bad_weight is not None:
            m, weight = totals.bad_weight
            raise problems.STEP_WEIGHT(
                label=phase.phase.loss_label, step=position.number, micro_batch=m, got=weight
            )
        if not totals.weight > 0.0 or not math.isfinite(totals.weight):
            raise problems.NO_WEIGHT(
                label=phase.phase.loss_label,
                step=position.number,
                got=totals.weight,
                hint="" if self.spec.data.without is None else " (data.without leaves samples out)",
            )

    def _evaluate_again(
        self,
        phase: PhaseStep,
        position: Position,
        batches: Sequence[Any],
        start: Sequence[Tensor],
        scale_down: float,
        call: int,
    ) -> float:
        """Leave the gradient of the step's mean loss at the present weights in the parameters. Returns the loss. All ranks call it.

        What it writes to buffers is dropped, and nothing of it is recorded: a step has the buffers and digests of its first evaluation.
        """
        end, probe = self.compute.buffers.values(), self.compute.probe
        self.compute.evaluates_again = self.digests.paused = True
        self.compute.probe = NoProbe()
        self.compute.buffers.start_from(start)
        try:
            with torch.enable_grad():
                self.accumulation(phase, position, map(copied, batches), scale_down)
            totals = self._read(phase, position).totals
            phase.agree_on_unused()
        finally:
            self.compute.evaluates_again = self.digests.paused = False
            self.compute.probe = probe
            self.compute.buffers.start_from(end)
        self._take_mean(phase, position, totals, scale_down)
        phase.rest_unused()
        # The generators stand where this rank's last micro-batch has left them.
        seed_all(update_key(self.spec.seed, position.step, phase.phase.key, call), self.group.device)
        return totals.loss / totals.weight

    def _take_mean(self, phase: PhaseStep, position: Position, totals: Totals, scale_down: float) -> float:
        """Make the sums of the gradients those of the mean loss, and clip them. Returns their norm before that."""
        spec, state, optimizer = self.spec, self.state, phase.optimizer
        # Any other optimizer may sum over elements, in an order that depends on where a gradient lies.
        if phase.updates_by_job or type(optimizer) not in ELEMENT_OPTIMIZERS:
            align_gradients(phase.parameters, every=phase.updates_by_job and phase.in_buckets)
        gradients = phase.gradients(self.compute.where_of(phase, position, 0))
        with job_at(f"the update of step {position.number}"):
            state.precision.unscale(optimizer)
        factor = 1.0 / (totals.weight * scale_down)
        rows = [numbers_of(table.grad) for table in phase.tables.parameters if table.grad is not None]
        if factor != 1.0:
            phase.multiply([*gradients, *rows], factor)
        grad_norm = phase.norm(gradients, rows)
        if spec.clip_norm is not None:
            clip_gradients([*gradients, *rows], grad_norm, spec.clip_norm, phase.multiply)
        return grad_norm

    def _update(
        self,
        phase: PhaseStep,
        position: Position,
        agreed: Agreed,
        scale_down: float,
        again: Callable[[int], float] | None = None,
    ) -> PhaseResult:
        """Update from the summed gradients; `again` evaluates the loss anew, for an optimizer that may."""
        spec, state, totals = self.spec, self.state, agreed.totals
        optimizer, scale = phase.optimizer, state.precision.scale
        grad_norm = self._take_mean(phase, position, totals, scale_down)
        if not math.isfinite(grad_norm) and spec.precision != "fp16":
            within = f" of phase {phase.name!r}" if phase.name else ""
            raise problems.NORM_NOT_FINITE(
                step=position.number, phase=within, got=grad_norm, rate=f"{self._rate(phase):g}"
            )
        phase.rest_unused()
        phase.rates.set(state.counters.updates)
        if (
            phase.updates_by_job or again
        ):  # seeding takes 30 us a step, and torch's own optimizers draw nothing
            seed_all(update_key(spec.seed, position.step, phase.phase.key), self.group.device)
        loss, closure = totals.loss / totals.weight, None
        if again is not None:
            closure = Closure(
                optimizer,
                phase.closure_calls,
                loss,
                again,
                phase.parameters,
                self.agreement.digester,
                self.group.device,
            )
        if isinstance(state.mirrored, MirroredOptimizer) and self.keeps_start:
            state.mirrored.keep(state.counters.step)
        if state.mirrored_shards is not None:
            state.mirrored_shards.pass_gradients(optimizer)
        with job_at(f"the update of step {position.number}"):
            skipped = not state.precision.update(optimizer, closure, direct=phase.direct_update)
        parts = {
            name: total / weight if weight else math.nan for name, (total, weight) in totals.parts.items()
        }
        if closure is not None:
            closure.check(self.group.gather(closure.calls))
            parts["closure_calls"] = float(closure.calls)
        clipped = grad_norm * min(1.0, spec.clip_norm / (grad_norm + 1e-6)) if spec.clip_norm else grad_norm
        return PhaseResult(
            agreed=agreed,
            loss=loss,
            weight=totals.weight,
            parts=parts,
            lr=phase.rates.used(),
            grad_norm=grad_norm,
            clipped_norm=clipped,
            scale=scale,
            skipped=skipped,
        )

    def _rate(self, phase: PhaseStep) -> float:
        """The full learning rate of a phase, for messages."""
        return phase.rates.schedule.base[0]
