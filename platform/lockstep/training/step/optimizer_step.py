"""One optimizer step, exactly.

Each micro-batch back-propagates its loss *sum* times a power of two. The gradients are added along the plan's
tree and divided once by the whole batch's weight. The result is the gradient of the weighted mean loss over the
global batch, however ragged the micro-batches and however many the workers.

A job may have several phases. Each runs over the step's micro-batches with its own loss and updates its own parameters, and the
next phase sees the result. A job without phases has a single one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lockstep.communication.group import Group
from lockstep.data.order import Ids
from lockstep.errors import FailedAt, LockstepError, NumericsError
from lockstep.failure_kinds import kind_of
from lockstep.job.interface import Job, Loss, Mean, overrides
from lockstep.plan import Plan, Position
from lockstep.randomness import seed_all, step_key, update_key, whole_batch_key
from lockstep.record.events.union import StepRow
from lockstep.spec.fields import Spec
from lockstep.training.failure import as_lockstep_error, job_at
from lockstep.training.integrity.agreement import Agreement
from lockstep.training.integrity.digests import Summed
from lockstep.training.integrity.probe import NoProbe, Probe
from lockstep.training.integrity.sdc_check import Recheck
from lockstep.training.integrity.step_digests import StepDigests
from lockstep.training.modes import Modes
from lockstep.training.observe.rank_speed import Stopwatch
from lockstep.training.observe.step_times import StepTimes
from lockstep.training.settings import Settings
from lockstep.training.state import TrainState, power_of_two
from lockstep.training.step import problems
from lockstep.training.step.after_step import follow_update, has_after_step
from lockstep.training.step.buffers import StepBuffers
from lockstep.training.step.closures import Closure
from lockstep.training.step.exchange import Agreed, Totals
from lockstep.training.step.full_sharding import FullSharding, advised, diverged
from lockstep.training.step.means import check_form, check_same_parts, has_form
from lockstep.training.step.mirrored_optimizer import MirroredOptimizer
from lockstep.training.step.norm import ELEMENT_BY_ELEMENT, align_gradients, clip_gradients
from lockstep.training.step.parameters import ModuleWatch, ParameterWatch
from lockstep.training.step.phase_step import PhaseStep, copied, each_in_turn
from lockstep.training.step.phases import FrozenRule, all_rest, phases_of
from lockstep.training.step.precision import Precision
from lockstep.training.step.reduction import TreeSum, add_in_place
from lockstep.training.step.results import PhaseResult, StepResult, by_phase
from lockstep.training.step.sharding import FullyShardedOptimizer, ShardedOptimizer
from lockstep.training.step.sparse_gradients import no_rows, numbers_of
from lockstep.training.step.statistics import StepStatistics
from lockstep.training.step.step_start import Evaluated, StepStart
from lockstep.training.step.whole_batch import TermWeights, WholeBatch

ELEMENT_OPTIMIZERS = (*ELEMENT_BY_ELEMENT, ShardedOptimizer, FullyShardedOptimizer, MirroredOptimizer)
"""Optimizers that never add up a gradient's elements, and those that share one of them out."""


class Stepper:
    """Takes the steps of one worker: phase by phase, forward and backward of its micro-batches, then the update."""

    def __init__(
        self,
        job: Job,
        spec: Spec,
        plan: Plan,
        group: Group,
        state: TrainState,
        *,
        parts: Mapping[str, tuple[str, ...]],
        terms: Mapping[str, tuple[str, ...]] | None = None,
        tables: Mapping[str, frozenset[str]] | None = None,
        statistics: bool = False,
        written_buffers: frozenset[int],
    ) -> None:
        """`parts` and `terms` are the names of those of each phase's loss, by phase name; without phases by the empty name.

        `tables` are the parameters of each phase whose gradients are sparse. `statistics` is whether the losses give some.
        """
        self.spec = spec
        self.plan = plan
        self.group = group
        self.state = state
        self.parts, self.terms, self.loss_statistics = parts, terms or {}, statistics
        self.tables = tables or {}
        self.statistics: StepStatistics | None = None
        """Those of the step under way; None where the job gives none."""
        self._computes_statistics = overrides(job, "step_statistics")
        if statistics or self._computes_statistics:
            self.statistics = StepStatistics(group, plan, "the statistics of the step")
        self._gathered: Mapping[str, Any] = {}
        self._first: PhaseStep | None = None
        """The first phase of the step under way."""
        self._evaluates_again = False
        """Whether an optimizer evaluates the loss again within its update."""
        self.buffers = StepBuffers(state.model, group, written_buffers)
        self.watched = ParameterWatch(state.model)
        self.modules = ModuleWatch(state.model)
        self.modes = Modes(state.model)
        self._of_whole: dict[int, Tensor] = {}
        """The buffers that the loss of the whole batch has written, which go with micro-batch 0's."""
        self.agreement = Agreement(group, state)
        self.digests = StepDigests(spec, group, state, plan.total_steps, self.agreement)
        self.probe: Probe = NoProbe()
        self.settings = Settings(group.device)
        self.recheck: Recheck | None = None
        self.samples: Callable[[Position, int], Iterable[int]] = lambda position, m: ()
        """The ids of a micro-batch's samples."""
        self.places: Callable[[Position], Sequence[Ids]] = lambda position: [
            np.arange(m, position.samples, position.full) for m in range(position.micro_batches)
        ]
        """For each micro-batch of a step, the places of its samples among those of the step; a run's sampler knows better."""
        buffers = len(self.buffers.buffers)
        self.each_phase = [
            PhaseStep(
                job,
                spec,
                plan,
                group,
                state,
                phase,
                parts=parts[phase.name],
                terms=self.terms.get(phase.name, ()),
                tables=self.tables.get(phase.name, frozenset()),
                buffers=buffers,
            )
            for phase in phases_of(job, state.model)
        ]
        self.updates_by_job = any(phase.updates_by_job for phase in self.each_phase)
        self.hooks = self.updates_by_job or has_after_step(job)
        """Whether code of the job runs between the last micro-batch of a step and the next one."""
        self.frozen = FrozenRule(job, state.model, spec.seed)
        self._learning(min(state.counters.step + 1, plan.total_steps))
        self.watch = Stopwatch(group.device)
        self.times = StepTimes(group.device)
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
        self.times.begin()
        phases = self._learning(position.number) if self.frozen.there else self.each_phase
        if not phases:
            raise all_rest(position.number)
        scale_down = self.scale_down(position)
        if self.statistics is not None:
            self.statistics.begin(self.places(position))
        self.digests.begin(
            position, self.recheck.chosen(position) if self.recheck is not None else frozenset()
        )
        count = len(self._turns(position))
        taken: dict[str, PhaseResult] = {}
        self._first = phases[0]
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
            batches_kept = list(islice(batches, len(self._turns(position))))
            batches, start = map(copied, batches_kept), self.buffers.values()
            again = partial(self._evaluate_again, phase, position, batches_kept, start, scale_down)
        self._accumulate(phase, position, batches, scale_down)
        self.settings.put_back()
        if self._looks_at_buffers(position):
            self.buffers.check_unseen(f"step {position.number}, rank {self.group.rank}")
        agreed = phase.exchange.read(position.micro_batches)
        if not agreed.same_order:
            raise diverged(f"step {position.number}")
        if phase.whole is not None:
            phase.whole.check(agreed.totals)
        if self.recheck is not None:
            self.recheck.compare(position, self.digests.gradients())
        try:
            self._check(phase, position, agreed.totals)
            if last:
                self.digests.gather(position, self.plan.ranges(self.group.size, position.micro_batches))
            phase.agree_on_unused()
            if self.statistics is not None:
                if phase.whole is not None:
                    self.statistics.note_whole(phase.whole.statistics, phase.phase.loss_label)
                if last:
                    self._gathered = self.statistics.gather(f" (step {position.number})")
            # The last message of the phase, unless its update evaluates the loss again: from here to the next one no rank waits for another, so a lost
            # rank leaves no half-done update.
            self.buffers.end_step(agreed.flagged, resized=agreed.resized)
            self.times.mark("reduction")
            result = self._update(phase, position, agreed, scale_down, again)
            if last:
                self.state.precision.settle()
            self.times.mark("optimizer")
        except NumericsError as error:
            error.step, error.micro_batch = position.step, agreed.totals.first_bad
            error.phase = phase.name
            raise
        if phase.updates_by_job and not last:
            self.buffers.take_over()
        return result

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
            follow_update(state, seed=self.spec.seed, device=self.group.device, statistics=self._gathered)
        self._gathered = {}
        if self.hooks and self.spec.determinism == "strict":
            self.settings.check(f"between steps {position.number} and {position.number + 1}")
        if self.updates_by_job:
            self.modules.check(f"after step {position.number}")
            self.buffers.take_over()
            self.modes.note()
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

    def scale_down(self, position: Position) -> float:
        """The power of two that a step's losses are multiplied by, which rounds nothing: about one over the weight of the step before.

        This step's own weight is known only after its last forward; in the first step the number of samples stands in for it.
        """
        exponent = self.state.counters.weight_exponent
        return 2.0 ** -(power_of_two(position.samples) if exponent is None else exponent)

    def abandon(self, recorded: int | None = None) -> None:
        """Give up the step under way for good: the state is that after the last step, and another Stepper may take the parameters.

        What this step has changed by now is taken back: by earlier phases, by an update that evaluates the loss again, or by one that gathers weights.
        Any other update is never interrupted, because no rank waits for another in it. After `recorded` steps it is not taken back if that is later.
        """
        if self._abandoned:
            return
        self._abandoned = True
        self._leave_no_trace()
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

    # --- forward and backward -----------------------------------------------------------------------------

    def assigned(self, position: Position) -> range:
        """The micro-batches of a step that are this worker's."""
        return self.plan.ranges(self.group.size, position.micro_batches)[self.group.rank]

    def _accumulate(
        self, phase: PhaseStep, position: Position, batches: Iterator[Any], scale_down: float
    ) -> None:
        """Leave in every `.grad` the tree sum of all micro-batches' gradients: the gradient of the loss sum, times `scale_down`."""
        phase.forget_gradients()
        phase.module.used.clear()
        self.watched.note()  # the update since the last step wrote to parameters rightly
        sharding = self.state.sharding
        if sharding is not None:
            sharding.begin_step(position.micro_batches, phase.names)
        if phase.whole is not None:
            batches = self._first_pass(phase, phase.whole, position, batches, scale_down)
        if self.recheck is not None and not self._evaluates_again:
            self.recheck.compute(position)
        if sharding is not None:
            self._accumulate_in_passes(sharding, phase, position, batches, scale_down)
            return
        assigned = self.assigned(position)
        tree, names = TreeSum(position.micro_batches), phase.digested_as
        phase.tables.begin(position.micro_batches)
        for m in assigned[:-1]:
            with self._no_sync(phase):
                self._compute(phase, position, m, batches, scale_down, last=False)
            if self.digests.notes:
                self.digests.next_micro_batch(m, names)
            self._add_tables(phase, position, m)
            if self.spec.reduction == "exact":
                gradients = self._take_gradients(phase, position, m)
                self._note(phase, gradients)
                tree.add(range(m, m + 1), gradients)
                del gradients  # only the tree may hold them while the next micro-batch is computed
        # Before the last backward: the hook adds its gradients to these sums, bucket by bucket.
        folded, unfolded = tree.close(assigned[-1]) if assigned else ([], [])
        reduction = phase.reduction
        if reduction is not None:
            reduction.begin(position, folded, unfolded)
            reduction.observe = self.digests.note if assigned and self.digests.notes else None
        if assigned:
            self.digests.next_micro_batch(assigned[-1], names)
            self._compute(phase, position, assigned[-1], batches, scale_down, last=True)
        else:
            self._backward_nothing(phase)
        if reduction is not None and not reduction.finished:
            raise phase.without_gradient(self._where(phase, position, assigned[-1] if assigned else 0))
        if reduction is None and self.group.size > 1:  # nothing that learns is dense
            phase.exchange.send()
        if self.group.size == 1:
            gradients = phase.gradients(self._where(phase, position, assigned[-1]))
            self._note(phase, gradients)
            for total in folded if gradients else ():
                add_in_place(gradients, total)
        if assigned:
            self._add_tables(phase, position, assigned[-1])
        phase.tables.finish()

    def _add_tables(self, phase: PhaseStep, position: Position, m: int) -> None:
        """Add the gradients that micro-batch `m` has left in the tables to those before it."""
        if phase.tables.names:
            gradients = phase.table_gradients(self._where(phase, position, m))
            self._note(phase, gradients, first=len(phase.names))
            phase.tables.add(m, gradients)

    def _note(self, phase: PhaseStep, gradients: list[Tensor], *, first: int = 0) -> None:
        """Note gradients of the current micro-batch for its digest: those of the parameters from number `first` on."""
        if self.digests.notes:
            self.digests.note(gradients, range(first, first + len(gradients)))

    def _turns(self, position: Position) -> list[_Turn]:
        """What this worker computes in a step, in order.

        Where the parameters are sharded all workers compute together: one that has no micro-batch in a pass computes the pass's first one,
        which does not count, and one without samples is computed with the samples of another.
        """
        if self.state.sharding is None:
            return [_Turn(m) for m in self.assigned(position)]
        rank, turns = self.group.rank, []
        for together in self.plan.passes(position, self.assigned(position)):
            m = together[rank] if rank < len(together) else together[0]
            empty = self.spec.data.without is not None and not len(tuple(self.samples(position, m)))
            turns.append(_Turn(m, rank < len(together), empty))
        return turns

    def _with_parameters(self, compute: Callable[[], None]) -> None:
        """Compute something of the model's outside of the losses. All ranks do where the parameters are sharded."""
        if self.state.sharding is None:
            compute()
            return
        with advised():
            self.state.sharding.computed(compute)

    def _let_go(self) -> None:
        """After a forward without a backward: have sharded parameters as they are between two micro-batches."""
        if self.state.sharding is not None:
            self.state.sharding.reshard()

    def _first_pass(
        self,
        phase: PhaseStep,
        whole: WholeBatch,
        position: Position,
        batches: Iterator[Any],
        scale_down: float,
    ) -> Iterator[Any]:
        """Learn what the losses of the step take from all of its micro-batches. Returns this worker's micro-batches for the second pass.

        Its draws are those of the second pass, and it leaves nothing: buffers get their values there, once.
        """
        turns = self._turns(position)
        both = each_in_turn(batches, len(turns), 2)
        n = position.number
        is_looked_at = self.group.device.type == "cpu" or n & (n - 1) == 0
        whole.begin(self.places(position), compares=is_looked_at and self.spec.determinism == "strict")
        for turn, batch in zip(turns, next(both), strict=True):
            if turn.counts and (batch is None or turn.empty):
                whole.take_none()
            if isinstance(whole, TermWeights) and whole.weights is not None:
                if turn.counts and batch is not None and not turn.empty:
                    with self._of_job(phase, position, turn.m):
                        whole.take(whole.weights(batch))
            elif batch is not None:
                self._forward(
                    phase, phase.unreduced, position, turn.m, batch, counts=turn.counts and not turn.empty
                )
                self._let_go()
                self.watched.check(self._where(phase, position, turn.m))
                self._leave_no_trace()
        whole.gather()
        where = f"step {position.number}, the loss of the whole batch, rank {self.group.rank}"
        seed_all(whole_batch_key(self.spec.seed, position.step, phase.phase.key), self.group.device)
        with job_at(where):
            close = partial(whole.close, self.state.model, phase.at_hand, self.state.precision, scale_down)
            self._with_parameters(close)
            self._let_go()
        self.watched.check(where)
        self._of_whole = self.buffers.written_now()
        self._leave_no_trace()
        self.times.mark("forward")
        return next(both)

    def _accumulate_in_passes(
        self,
        sharding: FullSharding,
        phase: PhaseStep,
        position: Position,
        batches: Iterator[Any],
        scale_down: float,
    ) -> None:
        """`_accumulate` where the parameters are sharded: leaves in `phase.parameters` this worker's rows of the sums."""
        passes = self.plan.passes(position, self.assigned(position))
        phase.tables.begin(position.micro_batches)
        for together, (m, counts, empty) in zip(passes, self._turns(position), strict=True):
            if counts:
                self.digests.next_micro_batch(m, phase.digested_as)
            observe = self.digests.note if counts and self.digests.notes else None
            sharding.begin_pass(together, empty=empty, last=together is passes[-1], observe=observe)
            with advised():
                self._backward(
                    phase, position, m, batches, scale_down, last=False, counts=counts, empty=empty
                )
            sharding.end_pass(self._where(phase, position, m))
            self._add_tables_of_pass(phase, position, m, together, counts=counts, empty=empty)
        phase.tables.leave_sum()
        phase.exchange.close(self.watch.take(), sharding.order)
        phase.exchange.send()

    def _add_tables_of_pass(
        self, phase: PhaseStep, position: Position, m: int, together: range, *, counts: bool, empty: bool
    ) -> None:
        """Add the gradients that the ranks' micro-batches of a pass have left in the tables, which every rank has whole."""
        if phase.tables.names:
            gradients = phase.table_gradients(self._where(phase, position, m))
            if empty:
                gradients = [no_rows(table) for table in phase.tables.parameters]
            if counts:
                self._note(phase, gradients, first=len(phase.names))
            phase.tables.add_pass(together, gradients)

    def _compute(
        self,
        phase: PhaseStep,
        position: Position,
        m: int,
        batches: Iterator[Any],
        scale_down: float,
        *,
        last: bool,
    ) -> None:
        with self.probe.around(position, m, self.state.model, phase.name):
            self._backward(phase, position, m, batches, scale_down, last=last)

    def _backward(
        self,
        phase: PhaseStep,
        position: Position,
        m: int,
        batches: Iterator[Any],
        scale_down: float,
        *,
        last: bool,
        counts: bool = True,
        empty: bool = False,
    ) -> None:
        """Forward and backward of a micro-batch. Where it `counts`, its totals go to the other ranks; those of an `empty` one are zero."""
        self.times.mark("reduction")
        with self.watch:
            batch = next(batches)
            self.probe.batch(position, m, batch)
            if m == 0 and phase.whole is not None:
                self.buffers.put(self._of_whole)
            loss = self._forward(phase, phase.wrapped, position, m, batch, counts=counts and not empty)
            self.probe.loss(position, m, loss.total)
        self.times.mark("forward")
        with self._of_job(phase, position, m):
            if counts:
                phase.exchange.put(_without_samples(loss) if empty else loss)
            if m == 0 and counts:
                phase.exchange.flag(self.buffers.keep(), self.buffers.resized())
            if last:
                phase.exchange.close(self.watch.take())
            scaled = self.state.precision.scaled(loss.total * scale_down)
            self.probe.backward(position, m)
            phase.module.backward(scaled)
            if m == 0 and counts:
                self.buffers.keep_late()
        self.times.mark("backward")
        self.watched.check(self._where(phase, position, m))
        self.modules.check(self._where(phase, position, m))
        self._leave_no_trace()
        if batch is not None and not self._evaluates_again:
            self._note_statistics(phase, position, m, batch, loss, counts=counts and not empty)

    def _note_statistics(
        self, phase: PhaseStep, position: Position, m: int, batch: Any, loss: Loss, *, counts: bool
    ) -> None:
        """Note what a micro-batch that `counts` gives for `after_step`: with its loss, and in the first phase of a step by a method of its own."""
        label = phase.phase.loss_label
        if self.statistics is None:
            if loss.statistics:
                raise problems.STATISTICS_LATE(label=label, where=self._where(phase, position, m))
            return
        if counts:
            self.statistics.note(m, loss.statistics, label)
        if not self._computes_statistics or phase is not self._first:
            return
        self.settings.put_back()
        seed_all(step_key(self.spec.seed, position.step, m, phase.phase.key), self.group.device)
        given: list[Any] = []
        with self._of_job(phase, position, m), torch.no_grad(), self.state.precision.autocast():
            self._with_parameters(
                lambda: given.append(self.state.job.step_statistics(self.state.model, batch))
            )
        self._let_go()
        if counts:
            self.statistics.note(m, given[0], "job.step_statistics")
        self.watched.check(self._where(phase, position, m))
        self._leave_no_trace()

    def _leave_no_trace(self) -> None:
        """Have the next micro-batch begin with the step's buffers and in training mode, whatever this one has left."""
        self.buffers.restore()
        self.modes.restore()

    def _forward(
        self,
        phase: PhaseStep,
        module: Callable[[Any], Loss],
        position: Position,
        m: int,
        batch: Any,
        precision: Precision | None = None,
        *,
        counts: bool = True,
    ) -> Loss:
        # Whatever a micro-batch before it, or its own fetch, has set: each is computed alike.
        self.settings.put_back()
        # Keyed by the micro-batch: whichever worker runs it draws the same numbers.
        seed_all(step_key(self.spec.seed, position.step, m, phase.phase.key), self.group.device)
        if phase.whole is not None:
            where = f" ({self._where(phase, position, m)})"
            phase.module.settle = phase.whole.settle(m, where, again=precision is None, counts=counts)
        with self._of_job(phase, position, m), (precision or self.state.precision).autocast():
            try:
                loss = module(batch)
            finally:  # whoever else computes a micro-batch, as after a loss that is not finite, computes it alone
                if phase.whole is not None:
                    phase.module.settle = None
            if batch is not None and not has_form(loss, phase.exchange.names):
                label, where = phase.phase.loss_label, f" ({self._where(phase, position, m)})"
                check_form(loss, label, where)
                check_same_parts(loss, phase.exchange.parts, label, where)
        if batch is None:  # data.without leaves this micro-batch no sample
            loss = replace(loss, parts=dict.fromkeys(phase.exchange.parts, Mean(0.0, 0.0)))
        return loss

    def recomputed(self, position: Position, m: int, batch: Any) -> list[Summed]:
        """What the gradient of a micro-batch of this step adds to its digest, computed as by `beside`. Where parameters are sharded all ranks call it."""
        (phase,) = self.each_phase
        summed: list[Summed] = []

        def note(gradients: Sequence[Tensor], indices: Sequence[int]) -> None:
            digester, names = self.agreement.digester, phase.digested_as
            summed.extend(digester.summed(names[i], one) for one, i in zip(gradients, indices, strict=True))

        sharding, precision = self.state.sharding, self.state.precision
        if sharding is None:
            _, gradients = self.beside(phase, position, m, batch, precision)
            note(gradients, range(len(gradients)))
            return summed
        where, order = self._where(phase, position, m), sharding.order
        sharding.begin_step(self.group.size, phase.names)
        sharding.begin_pass(range(self.group.size), empty=False, last=True, observe=note)
        with advised():
            loss = self._forward(phase, phase.wrapped, position, m, batch, precision)
            with self._of_job(phase, position, m):
                phase.module.backward(precision.scaled(loss.total * self.scale_down(position)))
        tables = phase.table_gradients(where)
        note(tables, range(len(phase.names), len(phase.names) + len(tables)))
        sharding.end_pass(where)
        sharding.forget_gradients()
        self.watched.check(where)
        self._leave_no_trace()
        sharding.begin_step(position.micro_batches, phase.names)
        sharding.order = order
        return summed

    def beside(
        self, phase: PhaseStep, position: Position, m: int, batch: Any, precision: Precision
    ) -> tuple[float, list[Tensor]]:
        """Loss and gradients of a micro-batch of this step, computed apart from it: the step's own gradients and buffers stay as they are.

        Call it before the update, on any rank. It needs the memory of one more set of gradients.
        """
        parameters = [*phase.parameters, *phase.tables.parameters]
        saved_gradients = [parameter.grad for parameter in parameters]
        phase.forget_gradients()
        try:
            # Bypass DDP, which expects gradients only in its own backward.
            loss = self._forward(phase, phase.module, position, m, batch, precision)
            with self._of_job(phase, position, m):
                phase.module.backward(precision.scaled(loss.total * self.scale_down(position)))
            self.watched.check(self._where(phase, position, m))
            tables = phase.table_gradients(self._where(phase, position, m))
            return float(loss.total.detach()), [*self._take_gradients(phase, position, m), *tables]
        finally:
            self._leave_no_trace()
            for parameter, gradient in zip(parameters, saved_gradients, strict=True):
                parameter.grad = gradient

    def _backward_nothing(self, phase: PhaseStep) -> None:
        # DDP's buckets need every rank, also one that a ragged step leaves without a micro-batch.
        loss: Loss = phase.wrapped(None)
        phase.exchange.close()
        phase.module.backward(loss.total)

    def _no_sync(self, phase: PhaseStep) -> Any:
        wrapped = phase.wrapped
        return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else nullcontext()

    def _take_gradients(self, phase: PhaseStep, position: Position, m: int) -> list[Tensor]:
        gradients = phase.gradients(self._where(phase, position, m))
        phase.forget_gradients()
        return gradients

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
        end, probe = self.buffers.values(), self.probe
        self._evaluates_again = self.digests.paused = True
        self.probe = NoProbe()
        self.buffers.start_from(start)
        try:
            with torch.enable_grad():
                self._accumulate(phase, position, map(copied, batches), scale_down)
            totals = phase.exchange.read(position.micro_batches).totals
            phase.agree_on_unused()
        finally:
            self._evaluates_again = self.digests.paused = False
            self.probe = probe
            self.buffers.start_from(end)
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
            align_gradients(phase.parameters)
        gradients = phase.gradients(self._where(phase, position, 0))
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
                optimizer, phase.closure_calls, loss, again, phase.parameters, self.group.device
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

    @contextmanager
    def _of_job(self, phase: PhaseStep, position: Position, m: int) -> Iterator[None]:
        """Report what the job raises in a micro-batch, or a sys.exit(), with its place."""
        try:
            yield
        except LockstepError:
            raise
        except (Exception, SystemExit) as error:
            raise self._failed(error, phase, position, m) from error

    def _failed(self, error: BaseException, phase: PhaseStep, position: Position, m: int) -> LockstepError:
        """The error for a failed micro-batch, with the place if another worker could fail there too."""
        lockstep_error = as_lockstep_error(error, self._where(phase, position, m))
        failure = kind_of(error)
        if failure.kind in ("device", "memory"):
            lockstep_error.failed_at = FailedAt(
                failure.description, position.number, m, tuple(map(int, self.samples(position, m)))
            )
        return lockstep_error

    def _where(self, phase: PhaseStep, position: Position, m: int) -> str:
        within = f", phase {phase.name!r}" if phase.name else ""
        return f"step {position.number}, micro-batch {m}, rank {self.group.rank}{within}"


class _Turn(NamedTuple):
    """Micro-batch `m` as a worker computes it: whether it `counts` or is another worker's, and whether it is `empty`, computed with samples of another one."""

    m: int
    counts: bool = True
    empty: bool = False


def _without_samples(loss: Loss) -> Loss:
    """The loss of a micro-batch without samples, with the parts of another one."""
    parts = dict.fromkeys(loss.parts, Mean(0.0, 0.0))
    return replace(loss, total=torch.zeros_like(loss.total), weight=0.0, parts=parts)
