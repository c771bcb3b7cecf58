"""The gradient of a step, summed over its micro-batches along the plan's tree, whatever the workers share out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lockstep.job.interface import Loss
from lockstep.plan import Plan, Position
from lockstep.randomness import seed_all, whole_batch_key
from lockstep.training.failure import job_at
from lockstep.training.integrity.agreement import Agreement
from lockstep.training.integrity.digests import Summed
from lockstep.training.integrity.recheck import Recheck
from lockstep.training.integrity.step_digests import StepDigests
from lockstep.training.step.forward_backward import ForwardBackward
from lockstep.training.step.full_sharding import FullSharding, advised
from lockstep.training.step.phase_step import PhaseStep, each_in_turn
from lockstep.training.step.precision import Precision
from lockstep.training.step.reduction import TreeSum, add_in_place
from lockstep.training.step.sparse_gradients import no_rows
from lockstep.training.step.whole_batch import TermWeights, WholeBatch


class Accumulation:
    """Leaves in the parameters of a phase the sum of its micro-batches' gradients."""

    def __init__(
        self, compute: ForwardBackward, plan: Plan, digests: StepDigests, agreement: Agreement
    ) -> None:
        self.compute, self.plan, self.digests, self._agreement = compute, plan, digests, agreement
        self.spec, self.group, self.state = compute.spec, compute.group, compute.state
        self.recheck: Recheck | None = None
        """Computes micro-batches of other workers again, where that is asked for."""

    def assigned(self, position: Position) -> range:
        """The micro-batches of a step that are this worker's."""
        return self.plan.ranges(self.group.size, position.micro_batches)[self.group.rank]

    def turns(self, position: Position) -> list[_Turn]:
        """What this worker computes in a step, in order.

        Where the parameters are sharded all workers compute together: one that has no micro-batch in a pass computes the pass's first one,
        which does not count, and one without samples is computed with the samples of another.
        """
        if self.state.sharding is None:
            return [_Turn(m) for m in self.assigned(position)]
        rank, turns = self.group.rank, []
        for together in self.plan.passes(position, self.assigned(position)):
            m = together[rank] if rank < len(together) else together[0]
            empty = self.spec.data.without is not None and not len(tuple(self.compute.samples(position, m)))
            turns.append(_Turn(m, rank < len(together), empty))
        return turns

    def __call__(
        self, phase: PhaseStep, position: Position, batches: Iterator[Any], scale_down: float
    ) -> None:
        """Leave in every `.grad` the tree sum of all micro-batches' gradients: the gradient of the loss sum, times `scale_down`."""
        phase.forget_gradients()
        phase.module.used.clear()
        self.compute.parameters.note()  # the update since the last step wrote to parameters rightly
        sharding = self.state.sharding
        if sharding is not None:
            sharding.begin_step(position.micro_batches, phase.names)
        if phase.whole is not None:
            batches = self._first_pass(phase, phase.whole, position, batches, scale_down)
        if self.recheck is not None and not self.compute.evaluates_again:
            self.recheck.compute(position)
        if sharding is not None:
            self._accumulate_in_passes(sharding, phase, position, batches, scale_down)
            return
        assigned = self.assigned(position)
        tree, names = TreeSum(position.micro_batches), phase.digested_as
        phase.tables.begin(position.micro_batches)
        for m in assigned[:-1]:
            with self._no_sync(phase), self._probed(phase, position, m):
                self.compute.backward(phase, position, m, batches, scale_down, last=False)
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
            with self._probed(phase, position, assigned[-1]):
                self.compute.backward(phase, position, assigned[-1], batches, scale_down, last=True)
        else:
            self._backward_nothing(phase)
        if reduction is not None and not reduction.finished:
            raise phase.without_gradient(
                self.compute.where_of(phase, position, assigned[-1] if assigned else 0)
            )
        if reduction is None and self.group.size > 1:  # nothing that learns is dense
            phase.exchange.send()
        if self.group.size == 1:
            gradients = phase.gradients(self.compute.where_of(phase, position, assigned[-1]))
            self._note(phase, gradients)
            for total in folded if gradients else ():
                add_in_place(gradients, total)
        if assigned:
            self._add_tables(phase, position, assigned[-1])
        phase.tables.finish()

    def _add_tables(self, phase: PhaseStep, position: Position, m: int) -> None:
        """Add the gradients that micro-batch `m` has left in the tables to those before it."""
        if phase.tables.names:
            gradients = phase.table_gradients(self.compute.where_of(phase, position, m))
            self._note(phase, gradients, first=len(phase.names))
            phase.tables.add(m, gradients)

    def _note(self, phase: PhaseStep, gradients: list[Tensor], *, first: int = 0) -> None:
        """Note gradients of the current micro-batch for its digest: those of the parameters from number `first` on."""
        if self.digests.notes:
            self.digests.note(gradients, range(first, first + len(gradients)))

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
        turns = self.turns(position)
        both = each_in_turn(batches, len(turns), 2)
        n = position.number
        is_looked_at = self.group.device.type == "cpu" or n & (n - 1) == 0
        whole.begin(
            self.compute.places(position), compares=is_looked_at and self.spec.determinism == "strict"
        )
        for turn, batch in zip(turns, next(both), strict=True):
            if turn.counts and (batch is None or turn.empty):
                whole.take_none()
            if isinstance(whole, TermWeights) and whole.weights is not None:
                if turn.counts and batch is not None and not turn.empty:
                    with self.compute.of_job(phase, position, turn.m):
                        whole.take(whole.weights(batch))
            elif batch is not None:
                self.compute.forward(
                    phase, phase.unreduced, position, turn.m, batch, counts=turn.counts and not turn.empty
                )
                self.compute.let_go()
                self.compute.parameters.check(self.compute.where_of(phase, position, turn.m))
                self.compute.leave_no_trace()
        whole.gather()
        where = f"step {position.number}, the loss of the whole batch, rank {self.group.rank}"
        seed_all(whole_batch_key(self.spec.seed, position.step, phase.phase.key), self.group.device)
        with job_at(where):
            close = partial(whole.close, self.state.model, phase.at_hand, self.state.precision, scale_down)
            self.compute.with_parameters(close)
            self.compute.let_go()
        self.compute.parameters.check(where)
        self.compute.whole_batch_buffers = self.compute.buffers.written_now()
        self.compute.leave_no_trace()
        self.compute.times.mark("forward")
        return next(both)

    def _accumulate_in_passes(
        self,
        sharding: FullSharding,
        phase: PhaseStep,
        position: Position,
        batches: Iterator[Any],
        scale_down: float,
    ) -> None:
        """What a call does where the parameters are sharded: leaves in `phase.parameters` this worker's rows of the sums."""
        passes = self.plan.passes(position, self.assigned(position))
        phase.tables.begin(position.micro_batches)
        for together, (m, counts, empty) in zip(passes, self.turns(position), strict=True):
            if counts:
                self.digests.next_micro_batch(m, phase.digested_as)
            observe = self.digests.note if counts and self.digests.notes else None
            sharding.begin_pass(together, empty=empty, last=together is passes[-1], observe=observe)
            with advised():
                self.compute.backward(
                    phase, position, m, batches, scale_down, last=False, counts=counts, empty=empty
                )
            sharding.end_pass(self.compute.where_of(phase, position, m))
            self._add_tables_of_pass(phase, position, m, together, counts=counts, empty=empty)
        phase.tables.leave_sum()
        self.compute.close(phase, self.compute.watch.take())
        phase.exchange.send()

    def _add_tables_of_pass(
        self, phase: PhaseStep, position: Position, m: int, together: range, *, counts: bool, empty: bool
    ) -> None:
        """Add the gradients that the ranks' micro-batches of a pass have left in the tables, which every rank has whole."""
        if phase.tables.names:
            gradients = phase.table_gradients(self.compute.where_of(phase, position, m))
            if empty:
                gradients = [no_rows(table) for table in phase.tables.parameters]
            if counts:
                self._note(phase, gradients, first=len(phase.names))
            phase.tables.add_pass(together, gradients)

    def recomputed(self, phase: PhaseStep, position: Position, m: int, batch: Any) -> list[Summed]:
        """What the gradient of a micro-batch of this step adds to its digest, computed as by `beside`. Where parameters are sharded all ranks call it."""
        summed: list[Summed] = []

        def note(gradients: Sequence[Tensor], indices: Sequence[int]) -> None:
            digester, names = self._agreement.digester, phase.digested_as
            summed.extend(digester.summed(names[i], one) for one, i in zip(gradients, indices, strict=True))

        sharding, precision = self.state.sharding, self.state.precision
        if sharding is None:
            _, gradients = self.beside(phase, position, m, batch, precision)
            note(gradients, range(len(gradients)))
            return summed
        where, order = self.compute.where_of(phase, position, m), sharding.order
        sharding.begin_step(self.group.size, phase.names)
        sharding.begin_pass(range(self.group.size), empty=False, last=True, observe=note)
        with advised():
            loss = self.compute.forward(phase, phase.wrapped, position, m, batch, precision)
            with self.compute.of_job(phase, position, m):
                phase.module.backward(precision.scaled(loss.total * self.compute.scale_down(position)))
        tables = phase.table_gradients(where)
        note(tables, range(len(phase.names), len(phase.names) + len(tables)))
        sharding.end_pass(where)
        sharding.forget_gradients()
        self.compute.parameters.check(where)
        self.compute.leave_no_trace()
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
            loss = self.compute.forward(phase, phase.module, position, m, batch, precision)
            with self.compute.of_job(phase, position, m):
                phase.module.backward(precision.scaled(loss.total * self.compute.scale_down(position)))
            self.compute.parameters.check(self.compute.where_of(phase, position, m))
            tables = phase.table_gradients(self.compute.where_of(phase, position, m))
            return float(loss.total.detach()), [*self._take_gradients(phase, position, m), *tables]
        finally:
            self.compute.leave_no_trace()
            for parameter, gradient in zip(parameters, saved_gradients, strict=True):
                parameter.grad = gradient

    def _backward_nothing(self, phase: PhaseStep) -> None:
        # DDP's buckets need every rank, also one that a ragged step leaves without a micro-batch.
        loss: Loss = phase.wrapped(None)
        self.compute.close(phase)
        phase.module.backward(loss.total)

    def _probed(self, phase: PhaseStep, position: Position, m: int) -> AbstractContextManager[None]:
        return self.compute.probe.around(position, m, self.state.model, phase.name)

    def _no_sync(self, phase: PhaseStep) -> Any:
        wrapped = phase.wrapped
        return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else nullcontext()

    def _take_gradients(self, phase: PhaseStep, position: Position, m: int) -> list[Tensor]:
        gradients = phase.gradients(self.compute.where_of(phase, position, m))
        phase.forget_gradients()
        return gradients


class _Turn(NamedTuple):
    """Micro-batch `m` as a worker computes it: whether it `counts` or is another worker's, and whether it is `empty`, computed with samples of another one."""

    m: int
    counts: bool = True
    empty: bool = False
