"""One phase of a worker's steps: from the loss of its micro-batches to the sum of its gradients over all ranks.

Invariants: a backward leaves gradients in the parameters that learn in the phase and in no others, whatever its loss flows
through; the parameters that learn are the same on every rank; and an update leaves alone what no micro-batch of its step used.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.communication.group import Group
from lockstep.data.loader import cloned, map_tensors
from lockstep.errors import LockstepError
from lockstep.job.interface import Job, Loss, overrides
from lockstep.plan import Plan
from lockstep.spec.fields import Spec
from lockstep.training import problems
from lockstep.training.state import TrainState
from lockstep.training.step import problems as step_problems
from lockstep.training.step.after_step import has_after_step
from lockstep.training.step.closures import closure_calls
from lockstep.training.step.compiled import CompiledLoss, CompiledLosses
from lockstep.training.step.complex_as_real import real_view
from lockstep.training.step.direct_update import DirectUpdate
from lockstep.training.step.full_sharding import FullSharding
from lockstep.training.step.joined_optimizer import JoinedOptimizer, members_of
from lockstep.training.step.learning_rate import Rates, hooks_of_job
from lockstep.training.step.loss_form import LossForm
from lockstep.training.step.norm import GradientNorm, multiply_in_place
from lockstep.training.step.parameters import missing_gradient
from lockstep.training.step.phases import ModelPhase, phases_of
from lockstep.training.step.reduction import NativeReduction, Reduction, TreeReduction
from lockstep.training.step.sharded_norm import ShardedNorm
from lockstep.training.step.sharding import ShardedOptimizer
from lockstep.training.step.sparse_gradients import TableSums, declared_tables
from lockstep.training.step.step_exchange import Exchange
from lockstep.training.step.whole_batch import whole_batch


class LossModule(nn.Module):
    """What DDP wraps: a module whose forward is the loss of a phase, so that the job sees its own model.

    Called without a batch, it gives a loss whose gradient is zero everywhere. That is the share of a worker that a ragged
    step leaves without a micro-batch, and of a micro-batch without samples.

    A conditional parameter that a loss does not use gets zeros too, in a backward of its own: each micro-batch has a place for it in the
    sum, and DDP waits for it.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        phase: ModelPhase | None = None,
        compiled: CompiledLosses | None = None,
    ) -> None:
        """`phase` may be left out for a job without phases; the loss runs eager without `compiled`."""
        super().__init__()
        self.job = job
        self.model = model
        self.phase = phases_of(job, model)[0] if phase is None else phase
        # A loss over the whole batch runs eager: it has other shapes in a ragged step, and is computed once.
        of_batch = self.phase.loss if self.phase.embed is None else self.phase.embed
        self._of_batch = of_batch if compiled is None else compiled.of(self.phase.name, of_batch)
        self.settle: Callable[[Any], Loss] | None = None
        """Makes the loss of a micro-batch from what the job returns for it; None where it stands alone."""
        self.settle_on_trial: Callable[[int], Callable[[Any], Loss]] | None = None
        """Of a micro-batch that is computed before training, what `settle` is for it."""
        parameters = dict(model.named_parameters())
        conditional = list(job.conditional_parameters(model))
        unknown = [name for name in conditional if name not in parameters]
        if unknown:
            raise step_problems.NO_SUCH_NAME(
                label="job.conditional_parameters", what="parameter", got=unknown[0], hint=""
            )
        self._conditional = frozenset(conditional)
        self.without_batch = False
        self.of_whole_batch = False
        """Whether it computes what a step computes once, for the whole batch."""
        self.used: set[str] = set()
        """The conditional parameters that a micro-batch has used since this was last cleared."""
        self.tables = declared_tables(model)
        """The parameters whose gradients are sparse, as far as is known."""
        self.learn(self.phase.names)

    def learn(self, names: Sequence[str]) -> None:
        """Set which of the phase's parameters get a gradient from now on."""
        every = dict(self.model.named_parameters())
        self.names = list(names)
        self.parameters_that_learn = [every[name] for name in names]
        self.conditional = {name: every[name] for name in names if name in self._conditional}
        self.apart = len(names) < sum(parameter.requires_grad for parameter in every.values())
        """Whether other parameters require a gradient, which a backward must leave out."""

    def forward(self, batch: Any) -> Loss:
        without = batch is None
        if without is not self.without_batch:  # a module takes a microsecond to set an attribute
            self.without_batch = without
        if without:
            dense = [
                p
                for name, p in zip(self.names, self.parameters_that_learn, strict=True)
                if name not in self.tables
            ]
            return Loss(zero_term(iter(dense)) if dense else torch.zeros((), requires_grad=True), 0.0)
        returned = self._of_batch(self.model, batch)
        if self.settle is None and self.phase.embed is None:
            return returned  # type: ignore[return-value]
        self.of_whole_batch = True
        try:
            return self.phase.loss(self.model, returned) if self.settle is None else self.settle(returned)
        finally:
            self.of_whole_batch = False

    def on_trial(self, m: int, batch: Any) -> Loss:
        """The loss of micro-batch `m` before training."""
        self.settle = None if self.settle_on_trial is None else self.settle_on_trial(m)
        try:
            loss: Loss = self(batch)
            return loss
        finally:
            self.settle = None

    def compiles(self, batch: Any) -> bool:
        """Whether the loss of such a batch runs compiled."""
        return isinstance(self._of_batch, CompiledLoss) and self._of_batch.compiles(batch)

    def backward(self, total: Tensor) -> None:
        """Leave the gradients of `total`, which the newest call has given, in the parameters that learn."""
        earlier = {name: _gradient_version(parameter) for name, parameter in self.conditional.items()}
        compiled = self._of_batch if isinstance(self._of_batch, CompiledLoss) else None
        with nullcontext() if compiled is None else compiled.backward():
            torch.autograd.backward(total, inputs=self.parameters_that_learn if self.apart else None)
        if self.conditional and not self.without_batch:
            used = {name for name, one in self.conditional.items() if _gradient_version(one) != earlier[name]}
            self.used |= used
            left_out = [
                one for name, one in self.conditional.items() if name not in used and name not in self.tables
            ]
            if left_out:
                zero_term(iter(left_out)).backward()  # type: ignore[no-untyped-call]


def _gradient_version(parameter: Tensor) -> tuple[int, int] | None:
    """Changes with each backward that gives the parameter a gradient, also where that adds to an earlier micro-batch's, as with `reduction: native`."""
    return None if parameter.grad is None else (id(parameter.grad), parameter.grad._version)


def zero_term(parameters: Iterator[Tensor]) -> Tensor:
    """A zero whose gradient is exactly zero for every parameter, even one that holds infinities."""
    return torch.stack([real_view(parameter).reshape(-1)[:0].sum().float() for parameter in parameters]).sum()


class ShardedLoss:
    """A loss whose parameters are sharded: FSDP gathers them as it computes."""

    def __init__(self, loss: LossModule, sharding: FullSharding) -> None:
        self._loss, self._sharding = loss, sharding

    def __call__(self, batch: Any) -> Loss:
        def compute() -> tuple[Tensor, Loss]:
            loss = self._loss(batch)
            return loss.total, loss

        # Backward has to begin with the tensor that FSDP hands out.
        loss: Loss
        total, loss = self._sharding.computed(compute)
        return replace(loss, total=total)


class PhaseStep:
    """One phase of a worker's steps: its loss, its parameters, and how gradients and totals reach the other ranks."""

    norm: GradientNorm

    def __init__(
        self,
        spec: Spec,
        plan: Plan,
        group: Group,
        state: TrainState,
        phase: ModelPhase,
        form: LossForm,
        buffers: int,
    ) -> None:
        """`form` is that of its loss, `buffers` the number of the model's buffers. Nothing learns before `learn` is called."""
        job = state.job
        self._spec, self._plan, self._group = spec, plan, group
        self.sharding = state.sharding
        self.phase, self.name = phase, phase.name
        self.optimizer = state.optimizer_of(phase.name)
        self.rates = Rates(self.optimizer, state.schedule_of(phase.name))
        named_by_spec = phase.optimizer is None and not overrides(job, "optimizer")
        self.direct_update = DirectUpdate(self.optimizer) if named_by_spec else None
        self.updates_by_job = runs_own_code(self.optimizer) or has_after_step(job)
        self.closure_calls = closure_calls(job, self.optimizer)
        """How often its optimizer may evaluate the loss again in one update."""
        ranges = partial(plan.ranges, group.size)
        self.exchange = Exchange(group, plan.micro_batches, form.parts, buffers, ranges)
        self.module = LossModule(job, state.model, phase, state.compiled)
        self.module.tables = form.tables
        self.whole = whole_batch(job, phase, group, plan, form.parts, form.terms)
        """What its losses take from the whole batch, in a first pass over it; None where each is known by itself."""
        self._every = phase.parameters(state.model)
        self._learning: list[str] = []
        self.names: list[str] = []
        """Of the parameters that learn and have dense gradients."""
        self.parameters: list[nn.Parameter] = []
        self.tables = TableSums({}, group, plan)
        """The parameters that learn and have sparse ones."""
        self.reduction: Reduction | None = None
        self.wrapped: Callable[[Any], Loss] = self.module
        self._unused: list[str] = []

    def learn(self, frozen: frozenset[str]) -> bool:
        """Set what learns from now on: all of the phase's parameters but the `frozen` ones. False where none is left.

        All ranks call it alike, between two steps.
        """
        learning = [name for name in self.phase.names if name not in frozen]
        if learning != self._learning:
            self.abandon()
            self.module.learn(learning)
            self._learning = learning
            every = dict(zip(learning, self.module.parameters_that_learn, strict=True))
            tables = {name: parameter for name, parameter in every.items() if name in self.module.tables}
            self.tables = TableSums(tables, self._group, self._plan)
            self.names = names = [name for name in learning if name not in tables]
            self.parameters = [every[name] for name in names]
            if learning and self.sharding is not None:
                self.module.parameters_that_learn = self.sharding.as_computed(learning)
                self.parameters = [self.sharding.local[name] for name in names]
                self.norm = (
                    ShardedNorm(names, self.parameters, self.sharding.shards, self._group, self.sharding.host)
                    if names
                    else GradientNorm([], device=self._group.device)
                )
                self.wrapped = ShardedLoss(self.module, self.sharding)
            elif learning:
                self.norm = GradientNorm(self.parameters, device=self._group.device)
                if self._group.size > 1 and names:
                    self.wrapped = self._in_ddp()
        return bool(learning)

    @property
    def unreduced(self) -> Callable[[Any], Loss]:
        """Computes a loss whose gradient stays here: without DDP. Sharded parameters are gathered for it, on all ranks."""
        return self.module if self.sharding is None else self.wrapped

    def at_hand(self) -> dict[str, Tensor]:
        """The parameters that learn and have their values now, by name."""
        if self.sharding is None:
            return dict(zip(self._learning, self.module.parameters_that_learn, strict=True))
        return self.sharding.at_hand(self.names)

    @property
    def digested_as(self) -> list[str]:
        """The names of the parameters that learn, as digests of gradients have them."""
        names = [*self.names, *self.tables.names]
        return [f"{self.name}: {name}" for name in names] if self.name else names

    @property
    def in_buckets(self) -> bool:
        """Whether gradients lie in buckets of DDP, which the next step fills again."""
        return isinstance(self.wrapped, DistributedDataParallel)

    def _in_ddp(self) -> DistributedDataParallel:
        """Wrap the loss in DDP. It broadcasts no buffers (`StepBuffers` does) and leaves the sum to the hook."""
        options = inspect.signature(DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers"
        settings: dict[str, Any] = {
            buffers: False,
            "process_group": self._group.channel,  # a group of its own would cost gloo a second set of threads
            "bucket_cap_mb": self._spec.workers.bucket_mb,
            "gradient_as_bucket_view": True,
        }
        # Set anew each time: what an earlier DDP ignored may learn now.
        vars(self.module)["_ddp_params_and_buffers_to_ignore"] = list(self._passed_by())
        wrapped = DistributedDataParallel(self.module, **settings)
        kind = TreeReduction if self._spec.reduction == "exact" else NativeReduction
        self.reduction = kind(self._group, self._plan, self.parameters, self.exchange)
        wrapped.register_comm_hook(None, named_hook(self.reduction))
        return wrapped

    def _passed_by(self) -> Iterator[str]:
        """All names that DDP must ignore: of parameters for whose gradients it would wait, and of buffers, some types of which gloo cannot send."""
        yield from (name for name, _ in self.module.named_buffers(remove_duplicate=False))
        if not self.module.apart and not self.tables.names:
            return
        parameter_ids = set(map(id, self.parameters))
        named = self.module.named_parameters(remove_duplicate=False)
        yield from (name for name, parameter in named if id(parameter) not in parameter_ids)

    def abandon(self) -> None:
        """Give up what is under way and free the parameters."""
        self.forget_gradients()
        if isinstance(self.wrapped, DistributedDataParallel):
            # Its hooks on the parameters end with the reducer, and a traceback may still hold the wrapper: so drop the reducer itself.
            self.wrapped.reducer = self.wrapped.logger = None  # type: ignore[assignment]
        self.wrapped, self.reduction = self.module, None

    # --- gradients ----------------------------------------------------------------------------------------

    def forget_gradients(self) -> None:
        """Set every gradient to None, also of parameters that rest: an update skips a parameter without one."""
        if self.sharding is not None:
            self.sharding.forget_gradients()
        for parameter in self._every:
            parameter.grad = None

    def gradients(self, where: str) -> list[Tensor]:
        """The gradients of the parameters that learn, in the order of `names`. JobError where one is missing."""
        gradients = [parameter.grad for parameter in self.parameters]
        if any(gradient is None for gradient in gradients):
            raise self.without_gradient(where)
        if sparse := [name for name, one in zip(self.names, gradients, strict=True) if one.is_sparse]:  # type: ignore[union-attr]
            raise problems.SPARSE_LATER(name=sparse[0], where=where)
        return gradients  # type: ignore[return-value]

    def multiply(self, gradients: Sequence[Tensor], factor: float) -> None:
        """Multiply gradients by a number, of which the first are those of the parameters that learn. Those in host memory are multiplied on the device."""
        host = None if self.sharding is None else self.sharding.host
        if host is None:
            multiply_in_place(gradients, factor)
            return
        assert self.sharding is not None
        in_host = [name in self.sharding.shards for name in self.names]
        host.in_turn(
            [(gradient,) for gradient, is_there in zip(gradients, in_host, strict=False) if is_there],
            lambda portion: multiply_in_place(portion, factor),
        )
        on_device = [gradient for gradient, is_there in zip_longest(gradients, in_host) if not is_there]
        if on_device:
            multiply_in_place(on_device, factor)

    def table_gradients(self, where: str) -> list[Tensor]:
        """The gradients that a micro-batch has left in the tables, which have none afterwards. JobError where one is missing."""
        may_rest = self.tables.names if self.module.without_batch else self.module.conditional
        gradients, missing = self.tables.take(where, may_rest)
        if missing:
            raise missing_gradient(missing, where)
        return gradients

    def rest_unused(self) -> None:
        """Have the update skip the conditional parameters that no micro-batch of the step used, as one with DDP's `find_unused_parameters` does."""
        for name in self._unused:
            self.module.conditional[name].grad = None

    def agree_on_unused(self) -> None:
        """Find what no rank has used in this step. All ranks call it, before the last message of the phase."""
        if self.module.conditional:
            used = set[str]().union(*self._group.gather(self.module.used))
            self._unused = [name for name in self.module.conditional if name not in used]

    def without_gradient(self, where: str) -> LockstepError:
        """The error for a step in which gradients are missing."""
        names = [name for name, p in zip(self.names, self.parameters, strict=True) if p.grad is None]
        if not names:
            return step_problems.SUMMED_ALONE(where=where)
        return missing_gradient(names, where)


def each_in_turn(batches: Iterator[Any], count: int, phases: int) -> Iterator[Iterator[Any]]:
    """For each phase the same next `count` batches, in memory of its own: a job may write into its batch.

    They are fetched while the first phase takes them, and held until the last phase is done.
    """
    if phases == 1:
        yield batches
        return
    originals: list[Any] = []

    def fetched() -> Iterator[Any]:
        for batch in islice(batches, count):
            originals.append(batch)
            yield copied(batch)

    yield fetched()
    for _ in range(phases - 2):
        yield map(copied, originals)
    yield iter(originals)


def copied(batch: Any) -> Any:
    """A copy of a batch; tensors keep their strides."""
    return map_tensors(batch, cloned, copy.deepcopy)


def runs_own_code(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an update runs code of the job's own, which may draw numbers and write buffers: its class, or a hook."""
    if isinstance(optimizer, ShardedOptimizer):  # it accepts none with hooks
        return any(not type(member).__module__.startswith("torch.optim.") for member in members_of(optimizer))
    of_job = bool(hooks_of_job(optimizer))
    if isinstance(optimizer, JoinedOptimizer):
        return of_job or any(map(runs_own_code, optimizer.members))
    return of_job or not type(optimizer).__module__.startswith("torch.optim.")


def named_hook(reduction: Reduction) -> Any:
    """The reduction as a hook in the form that DDP demands: a named function whose second parameter is called `bucket`.

    It has no annotations: DDP compares them with the types themselves, and in this module they are strings.
    """

    def exact_reduction(state, bucket):  # type: ignore[no-untyped-def]
        return reduction(state, bucket)

    return exact_reduction
