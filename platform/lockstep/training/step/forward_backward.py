"""Forward and backward of a step's micro-batches: each has the bits that it has on any other worker, and leaves nothing that the next one could see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.communication.group import Group
from lockstep.data.order import Ids
from lockstep.errors import FailedAt, LockstepError
from lockstep.failure_kinds import kind_of
from lockstep.job.interface import Loss, Mean, overrides
from lockstep.plan import Plan, Position
from lockstep.randomness import seed_all, step_key
from lockstep.spec.fields import Spec
from lockstep.training.failure import as_lockstep_error
from lockstep.training.integrity.checksum import checksum
from lockstep.training.integrity.probe import NoProbe, Probe
from lockstep.training.module_modes import Modes
from lockstep.training.observe.rank_speed import Stopwatch
from lockstep.training.observe.step_times import StepTimes
from lockstep.training.state import TrainState, power_of_two
from lockstep.training.step import problems
from lockstep.training.step.buffers import StepBuffers
from lockstep.training.step.full_sharding import advised
from lockstep.training.step.loss_form import LossForm
from lockstep.training.step.means import check_form, check_same_parts, has_form
from lockstep.training.step.parameters import ModuleWatch, ParameterWatch
from lockstep.training.step.phase_step import PhaseStep
from lockstep.training.step.phases import sharded_of
from lockstep.training.step.precision import Precision
from lockstep.training.step.statistics import StepStatistics
from lockstep.training.torch_settings import Settings


class ForwardBackward:
    """Computes the micro-batches of one worker."""

    def __init__(
        self,
        spec: Spec,
        plan: Plan,
        group: Group,
        state: TrainState,
        forms: Sequence[LossForm],
    ) -> None:
        """`forms` are those of the phases' losses."""
        self.spec, self.group, self.state = spec, group, state
        self.statistics: StepStatistics | None = None
        """Those of the step under way; None where the job gives none."""
        self._computes_statistics = overrides(state.job, "step_statistics")
        if self._computes_statistics or any(form.statistics for form in forms):
            self.statistics = StepStatistics(group, plan, "the statistics of the step")
        self.first_phase: PhaseStep | None = None
        """The first phase of the step under way."""
        self.evaluates_again = False
        """Whether an optimizer evaluates the loss again within its update."""
        written = frozenset[int]().union(*(form.written for form in forms))
        self.buffers = StepBuffers(state.model, group, written)
        self.whole_batch_buffers: dict[int, Tensor] = {}
        """The buffers that the loss of the whole batch has written, which go with micro-batch 0's."""
        self.parameters = ParameterWatch(state.model)
        self.modules = ModuleWatch(state.model)
        self.modes = Modes(state.model)
        self.settings = Settings(group.device)
        self.probe: Probe = NoProbe()
        self.samples: Callable[[Position, int], Iterable[int]] = lambda position, m: ()
        """The ids of a micro-batch's samples."""
        self.places: Callable[[Position], Sequence[Ids]] = lambda position: [
            np.arange(m, position.samples, position.full) for m in range(position.micro_batches)
        ]
        """For each micro-batch of a step, the places of its samples among those of the step; a run's sampler knows better."""
        self.watch = Stopwatch(group.device)
        self.times = StepTimes(group.device)

    def scale_down(self, position: Position) -> float:
        """The power of two that a step's losses are multiplied by, which rounds nothing: about one over the weight of the step before.

        This step's own weight is known only after its last forward; in the first step the number of samples stands in for it.
        """
        exponent = self.state.counters.weight_exponent
        return 2.0 ** -(power_of_two(position.samples) if exponent is None else exponent)

    def forward(
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
        """The loss of a micro-batch, computed by `module`, in the state's precision or another; `counts` is whether a loss over the whole batch may compare it."""
        # Whatever a micro-batch before it, or its own fetch, has set: each is computed alike.
        self.settings.put_back()
        # Keyed by the micro-batch: whichever worker runs it draws the same numbers.
        seed_all(step_key(self.spec.seed, position.step, m, phase.phase.key), self.group.device)
        if phase.whole is not None:
            where = f" ({self.where_of(phase, position, m)})"
            phase.module.settle = phase.whole.settle(m, where, again=precision is None, counts=counts)
        with self.of_job(phase, position, m), (precision or self.state.precision).autocast():
            try:
                loss = module(batch)
            finally:  # whoever else computes a micro-batch, as after a loss that is not finite, computes it alone
                if phase.whole is not None:
                    phase.module.settle = None
            if batch is not None and not has_form(loss, phase.exchange.names):
                label, where = phase.phase.loss_label, f" ({self.where_of(phase, position, m)})"
                check_form(loss, label, where)
                check_same_parts(loss, phase.exchange.parts, label, where)
        if batch is None:  # data.without leaves this micro-batch no sample
            loss = replace(loss, parts=dict.fromkeys(phase.exchange.parts, Mean(0.0, 0.0)))
        return loss

    def backward(
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
                self.buffers.put(self.whole_batch_buffers)
            loss = self.forward(phase, phase.wrapped, position, m, batch, counts=counts and not empty)
            self.probe.loss(position, m, loss.total)
        self.times.mark("forward")
        with self.of_job(phase, position, m):
            if counts:
                phase.exchange.put(_without_samples(loss) if empty else loss)
            if m == 0 and counts:
                kept = self.buffers.keep_start(self.whole_batch_buffers) if empty else self.buffers.keep()
                phase.exchange.flag(kept, self.buffers.resized())
            if last:
                self.close(phase, self.watch.take())
            scaled = self.state.precision.scaled(loss.total * scale_down)
            self.probe.backward(position, m)
            phase.module.backward(scaled)
            if m == 0 and counts and not empty:
                self.buffers.keep_late()
        self.times.mark("backward")
        self.parameters.check(self.where_of(phase, position, m))
        self.modules.check(self.where_of(phase, position, m))
        self.leave_no_trace()
        if batch is not None and not self.evaluates_again:
            self._note_statistics(phase, position, m, batch, loss, counts=counts and not empty)

    def close(self, phase: PhaseStep, pace: float = 0.0) -> None:
        """Close the message of this rank to the others, before its last backward; `pace` is its time for a micro-batch, in seconds.

        Where the workers share the optimizer out, the weights are compared in each step that its update overwrites with what their owners send:
        a bit of them that has flipped would be the same everywhere by the time of the next digests, or gone, and what was computed with it would stay.
        What has a mirror is compared with it: the rows of weights that are sharded, and what a sharded optimizer has made of them in the update before.
        """
        balance = 0 if self.state.mirrored is None else self.state.mirrored.balance()
        if self.state.sharding is not None:
            phase.exchange.close(pace, self.state.sharding.order, balance)
            return
        sharded = sharded_of(self.state.optimizer).values() if self.group.size > 1 else ()
        overwritten = [parameter for optimizer in sharded for parameter in optimizer.overwritten]
        phase.exchange.close(pace, checksum(overwritten) if overwritten else 0, balance)

    def _note_statistics(
        self, phase: PhaseStep, position: Position, m: int, batch: Any, loss: Loss, *, counts: bool
    ) -> None:
        """Note what a micro-batch that `counts` gives for `after_step`: with its loss, and in the first phase of a step by a method of its own."""
        label = phase.phase.loss_label
        if self.statistics is None:
            if loss.statistics:
                raise problems.STATISTICS_LATE(label=label, where=self.where_of(phase, position, m))
            return
        if counts:
            self.statistics.note(m, loss.statistics, label)
        if not self._computes_statistics or phase is not self.first_phase:
            return
        self.settings.put_back()
        seed_all(step_key(self.spec.seed, position.step, m, phase.phase.key), self.group.device)
        given: list[Any] = []
        with self.of_job(phase, position, m), torch.no_grad(), self.state.precision.autocast():
            self.with_parameters(
                lambda: given.append(self.state.job.step_statistics(self.state.model, batch))
            )
        self.let_go()
        if counts:
            self.statistics.note(m, given[0], "job.step_statistics")
        self.parameters.check(self.where_of(phase, position, m))
        self.leave_no_trace()

    def leave_no_trace(self) -> None:
        """Have the next micro-batch begin with the step's buffers and in training mode, whatever this one has left."""
        self.buffers.restore()
        self.modes.restore()

    def with_parameters(self, compute: Callable[[], None]) -> None:
        """Compute something of the model's outside of the losses. All ranks do where the parameters are sharded."""
        if self.state.sharding is None:
            compute()
            return
        with advised():
            self.state.sharding.computed(compute)

    def let_go(self) -> None:
        """After a forward without a backward: have sharded parameters as they are between two micro-batches."""
        if self.state.sharding is not None:
            self.state.sharding.reshard()

    @contextmanager
    def of_job(self, phase: PhaseStep, position: Position, m: int) -> Iterator[None]:
        """Report what the job raises in a micro-batch, or a sys.exit(), with its place."""
        try:
            yield
        except LockstepError:
            raise
        except (Exception, SystemExit) as error:
            raise self._failed(error, phase, position, m) from error

    def _failed(self, error: BaseException, phase: PhaseStep, position: Position, m: int) -> LockstepError:
        """The error for a failed micro-batch, with the place if another worker could fail there too."""
        lockstep_error = as_lockstep_error(error, self.where_of(phase, position, m))
        failure = kind_of(error)
        if failure.kind in ("device", "memory"):
            lockstep_error.failed_at = FailedAt(
                failure.description, position.number, m, tuple(map(int, self.samples(position, m)))
            )
        return lockstep_error

    def where_of(self, phase: PhaseStep, position: Position, m: int) -> str:
        """A micro-batch of this worker's, for messages."""
        within = f", phase {phase.name!r}" if phase.name else ""
        return f"step {position.number}, micro-batch {m}, rank {self.group.rank}{within}"


def _without_samples(loss: Loss) -> Loss:
    """The loss of a micro-batch without samples, with the parts of another one."""
    parts = dict.fromkeys(loss.parts, Mean(0.0, 0.0))
    return replace(loss, total=torch.zeros_like(loss.total), weight=0.0, parts=parts)
