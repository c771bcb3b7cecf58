"""One optimizer step, exactly.

Each micro-batch back-propagates its loss *sum* times a power of two; the gradients are added along the plan's
tree and divided once by the whole batch's weight. The result is the gradient of the weighted mean loss over the
global batch, however ragged the micro-batches and however many the workers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.errors import FailedAt, JobError, LockstepError, NumericsError
from lockstep.failure_kinds import kind_of
from lockstep.job.interface import Job, Loss, Mean
from lockstep.plan import Plan, Position, clip
from lockstep.randomness import seed_all
from lockstep.record.events import Digests
from lockstep.spec.fields import Spec
from lockstep.training.after_step import follow_update, has_after_step
from lockstep.training.agreement import Agreement
from lockstep.training.buffers import StepBuffers
from lockstep.training.exchange import Agreed, Exchange, Totals
from lockstep.training.failure import as_lockstep_error
from lockstep.training.group import Group
from lockstep.training.norm import ELEMENT_BY_ELEMENT, GradientNorm, align_gradients, clip_gradients
from lockstep.training.pace import Stopwatch
from lockstep.training.parameters import ParameterWatch
from lockstep.training.probe import NoProbe, Probe
from lockstep.training.recheck import Recheck
from lockstep.training.reduction import NativeReduction, Reduction, TreeReduction, TreeSum
from lockstep.training.schedule import Rates
from lockstep.training.sharding import ShardedOptimizer
from lockstep.training.state import TrainState, power_of_two
from lockstep.training.step_digests import StepDigests


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step came to, in Python numbers, equal on every rank."""

    loss: float
    weight: float
    parts: dict[str, float]
    lr: float
    grad_norm: float
    clipped_norm: float
    scale: float
    skipped: bool
    stop: bool
    """Whether a rank asked to end the run after this step."""
    save: bool
    """Whether a rank asked to save the state after this step."""
    pace: list[float]
    """What each rank takes for a micro-batch of its own, in seconds."""
    digests: Digests | None = None


class LossModule(nn.Module):
    """What DDP wraps: a module whose forward is the job's loss, so that the job sees its own model.

    A call without a batch gives a loss whose gradient is zero everywhere: the share of a worker that a ragged
    step leaves without a micro-batch, and that of a micro-batch without samples.
    """

    def __init__(self, job: Job, model: nn.Module) -> None:
        super().__init__()
        self.job = job
        self.model = model
        parameters = dict(model.named_parameters())
        self.conditional = list(job.conditional_parameters(model))
        unknown = [name for name in self.conditional if name not in parameters]
        if unknown:
            raise JobError(f"job.conditional_parameters: the model has no parameter {unknown[0]!r}")

    def forward(self, batch: Any) -> Loss:
        if batch is None:
            return Loss(zero_term(p for p in self.model.parameters() if p.requires_grad), 0.0)
        loss = self.job.loss(self.model, batch)
        if not self.conditional:
            return loss
        parameters = dict(self.model.named_parameters())
        return Loss(
            loss.total + zero_term(parameters[name] for name in self.conditional), loss.weight, loss.parts
        )


def zero_term(parameters: Iterator[Tensor]) -> Tensor:
    """Zero, with a gradient of exactly zero for every parameter, even one that holds infinities."""
    return torch.stack([parameter.reshape(-1)[:0].sum().float() for parameter in parameters]).sum()


class Stepper:
    """Takes the steps of one worker: forward and backward of its micro-batches, then the update."""

    def __init__(
        self,
        job: Job,
        spec: Spec,
        plan: Plan,
        group: Group,
        state: TrainState,
        *,
        parts: tuple[str, ...],
        written_buffers: frozenset[int],
    ) -> None:
        self.spec = spec
        self.plan = plan
        self.group = group
        self.state = state
        self.assigned = plan.ranges(group.size)[group.rank]
        self.names = [name for name, p in state.model.named_parameters() if p.requires_grad]
        self.parameters = [p for p in state.model.parameters() if p.requires_grad]
        self.norm = GradientNorm(self.parameters)
        self.buffers = StepBuffers(state.model, group, written_buffers)
        self.exchange = Exchange(group, plan.micro_batches, parts, len(self.buffers.buffers))
        self.watched = ParameterWatch(state.model)
        self.agreement = Agreement(group, state)
        self.digests = StepDigests(spec, group, state, plan.total_steps, self.agreement)
        self.probe: Probe = NoProbe()
        self.recheck: Recheck | None = None
        self.samples: Callable[[Position, int], Iterable[int]] = lambda position, m: ()
        """The ids of a micro-batch's samples."""
        self.updates_by_job = runs_own_code(state.optimizer) or has_after_step(job)
        self.rates = Rates(state.optimizer, state.schedule)
        self.module = LossModule(job, state.model)
        self.reduction: Reduction | None = None
        self.wrapped: nn.Module = self.module
        self.watch = Stopwatch(group.device)
        self._abandoned = False
        self._cuda = group.device if group.device.type == "cuda" else None
        if group.size > 1:
            self.wrapped = self._in_ddp()

    def _in_ddp(self) -> DistributedDataParallel:
        """DDP around the loss; it broadcasts no buffers (`StepBuffers` does) and leaves the sum to the hook."""
        known = inspect.signature(DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        settings: dict[str, Any] = {
            buffers: False,
            "process_group": self.group.channel,  # its own beside the channel's costs gloo a second set of threads
            "bucket_cap_mb": self.spec.workers.bucket_mb,
            "gradient_as_bucket_view": True,
        }
        wrapped = DistributedDataParallel(self.module, **settings)
        kind = TreeReduction if self.spec.reduction == "exact" else NativeReduction
        self.reduction = kind(self.group, self.plan, self.parameters, self.exchange)
        wrapped.register_comm_hook(None, named_hook(self.reduction))
        return wrapped

    def __call__(
        self, position: Position, batches: Iterator[Any], *, stop: bool = False, save: bool = False
    ) -> StepResult:
        """Train on the global batch at `position`; `batches` gives this worker's micro-batches of it, in order.

        `stop` is this rank's vote to end the run after the step, `save` that to save its state then.
        """
        self.exchange.vote(stop=stop, save=save)
        scale_down = self.scale_down(position)
        self._accumulate(position, batches, scale_down)
        agreed = self.exchange.read(position.micro_batches)
        if self.recheck is not None:
            self.recheck(position, self.digests.gradients())
        try:
            self._check(position, agreed.totals)
            self.digests.gather(position, self.plan.ranges(self.group.size))
            # The last message of the step: from here on no rank waits for another, and the state changes.
            self.buffers.end_step(agreed.flagged)
            return self._update(position, agreed, scale_down)
        except NumericsError as error:
            error.step, error.micro_batch = position.step, agreed.totals.first_bad
            raise

    def scale_down(self, position: Position) -> float:
        """The power of two that the losses of a step are multiplied by: one over its weight, as far as that is known before it."""
        exponent = self.state.counters.weight_exponent
        return 2.0 ** -(power_of_two(position.samples) if exponent is None else exponent)

    def abandon(self) -> None:
        """Give up what is under way, for good: the state is that after the last update, and the parameters are free for another Stepper.

        An update itself is not interrupted: no rank waits for another in it.
        """
        if self._abandoned:
            return
        self._abandoned = True
        self.buffers.restore()
        self._forget_gradients()
        if isinstance(self.wrapped, DistributedDataParallel):
            # Its hooks on the parameters go with the reducer, which frames of the error at hand still hold.
            self.wrapped.reducer = self.wrapped.logger = None  # type: ignore[assignment]

    # --- forward and backward -----------------------------------------------------------------------------

    def _accumulate(self, position: Position, batches: Iterator[Any], scale_down: float) -> None:
        """Leave in every `.grad` the tree sum of all micro-batches' gradients, `scale_down` times too large by the weight."""
        assigned = clip(self.assigned, position.micro_batches)
        tree = TreeSum(position.micro_batches)
        self._forget_gradients()
        self.watched.note()
        self.digests.begin(
            position, self.recheck.chosen(position) if self.recheck is not None else frozenset()
        )
        for m in assigned[:-1]:
            with self._no_sync():
                self._compute(position, m, batches, scale_down, last=False)
            if self.spec.reduction == "exact":
                gradients = self._take_gradients(position, m)
                if self.digests.notes:
                    self.digests.next_micro_batch(m)
                    self.digests.note(gradients)
                tree.add(range(m, m + 1), gradients)
                del gradients  # the tree alone holds them while the next micro-batch is computed
        folded, apart = tree.close(assigned[-1]) if assigned else ([], [])
        if self.reduction is not None:
            self.reduction.begin(position, folded, apart)
            self.reduction.observe = self.digests.note if assigned and self.digests.notes else None
        if assigned:
            self.digests.next_micro_batch(assigned[-1])
            self._compute(position, assigned[-1], batches, scale_down, last=True)
        else:
            self._backward_nothing()
        if self.reduction is not None and not self.reduction.finished:
            raise self._without_gradient(position, assigned[-1] if assigned else 0)
        if self.group.size == 1:
            gradients = self._gradients(position, assigned[-1])
            self.digests.note(gradients)
            for total in folded:
                torch._foreach_add_(gradients, total)

    def _compute(
        self, position: Position, m: int, batches: Iterator[Any], scale_down: float, *, last: bool
    ) -> None:
        with self.probe.around(position, m, self.state.model):
            self._backward(position, m, batches, scale_down, last=last)

    def _backward(
        self, position: Position, m: int, batches: Iterator[Any], scale_down: float, *, last: bool
    ) -> None:
        with self.watch:
            batch = next(batches)
            self.probe.batch(position, m, batch)
            loss = self._forward(self.wrapped, position, m, batch)
            self.probe.loss(position, m, loss.total)
        with self._of_job(position, m):
            self.exchange.put(loss)
            if m == 0:
                self.exchange.flag(self.buffers.keep())
            if last:
                self.exchange.close(self.watch.take())
            scaled = self.state.precision.scaled(loss.total * scale_down)
            self.probe.backward(position, m)
            torch.autograd.backward(scaled)
        self.watched.check(self._where(position, m))
        self.buffers.restore()

    def _forward(self, module: nn.Module, position: Position, m: int, batch: Any) -> Loss:
        seed_all(self.spec.seed, "step", position.step, m, cuda=self._cuda)
        with self._of_job(position, m), self.state.precision.autocast():
            loss: Loss = module(batch)
        if batch is None:  # data.without leaves this micro-batch no sample
            loss = replace(loss, parts=dict.fromkeys(self.exchange.parts, Mean(0.0, 0.0)))
        return loss

    def recomputed(self, position: Position, m: int, batch: Any) -> list[Tensor]:
        """The gradients of a micro-batch of this step, computed beside it: those of the step and its buffers stay as they are.

        For before the update, on any rank. It takes the memory of one more set of gradients.
        """
        held = [parameter.grad for parameter in self.parameters]
        self._forget_gradients()
        # Past DDP, which has its gradients by now and expects none.
        loss = self._forward(self.module, position, m, batch)
        with self._of_job(position, m):
            torch.autograd.backward(self.state.precision.scaled(loss.total * self.scale_down(position)))
        self.watched.check(self._where(position, m))
        self.buffers.restore()
        gradients = self._take_gradients(position, m)
        for parameter, gradient in zip(self.parameters, held, strict=True):
            parameter.grad = gradient
        return gradients

    def _backward_nothing(self) -> None:
        loss: Loss = self.wrapped(None)
        self.exchange.close()
        torch.autograd.backward(loss.total)

    def _no_sync(self) -> Any:
        return self.wrapped.no_sync() if isinstance(self.wrapped, DistributedDataParallel) else nullcontext()

    # --- gradients ----------------------------------------------------------------------------------------

    def _forget_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _gradients(self, position: Position, m: int) -> list[Tensor]:
        gradients = [parameter.grad for parameter in self.parameters]
        if any(gradient is None for gradient in gradients):
            raise self._without_gradient(position, m)
        return gradients  # type: ignore[return-value]

    def _take_gradients(self, position: Position, m: int) -> list[Tensor]:
        gradients = self._gradients(position, m)
        self._forget_gradients()
        return gradients

    def _without_gradient(self, position: Position, m: int) -> JobError:
        names = [name for name, p in zip(self.names, self.parameters, strict=True) if p.grad is None]
        return missing_gradient(names, self._where(position, m))

    # --- update -------------------------------------------------------------------------------------------

    def _check(self, position: Position, totals: Totals) -> None:
        if totals.first_bad is not None and self.spec.precision != "fp16":
            raise NumericsError(
                f"the loss of step {position.step + 1}, micro-batch {totals.first_bad} is {totals.loss}; usual causes: a learning "
                f"rate that is too high (optimizer.lr is {self.state.base_rates[0]:g}), a label or an input that is not finite, a division by zero"
            )
        if not totals.weight > 0.0 or not math.isfinite(totals.weight):
            raise JobError(
                f"job.loss: the weights of step {position.step + 1} add up to {totals.weight}, wanted more than 0; "
                f"a step without any weight has no mean{'' if self.spec.data.without is None else ' (data.without leaves samples out)'}"
            )

    def _update(self, position: Position, agreed: Agreed, scale_down: float) -> StepResult:
        spec, state, totals = self.spec, self.state, agreed.totals
        if self.updates_by_job or type(state.optimizer) not in (*ELEMENT_BY_ELEMENT, ShardedOptimizer):
            align_gradients(self.parameters)
        gradients = self._gradients(position, 0)
        state.precision.unscale(state.optimizer)
        factor = 1.0 / (totals.weight * scale_down)
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        grad_norm, scale = self.norm(gradients), state.precision.scale
        if spec.clip_norm is not None:
            clip_gradients(gradients, grad_norm, spec.clip_norm)
        if not math.isfinite(grad_norm) and spec.precision != "fp16":
            raise NumericsError(
                f"the gradient of step {position.step + 1} has the norm {grad_norm} though its loss is finite; "
                f"lower optimizer.lr (now {self.state.base_rates[0]:g}), or look for a square root or a logarithm at zero in the model"
            )
        self.rates.set(state.counters.updates)
        if self.updates_by_job:  # else 30 us a step for nothing
            seed_all(spec.seed, "update", position.step, cuda=self._cuda)
        skipped = not state.precision.update(state.optimizer)
        lr = self.rates.used()
        state.advance(position, skipped=skipped, weight=totals.weight)
        if not skipped:
            follow_update(state, seed=spec.seed, cuda=self._cuda)
        if self.updates_by_job:
            self.buffers.take_over()
        parts = {
            name: total / weight if weight else math.nan for name, (total, weight) in totals.parts.items()
        }
        clipped = grad_norm * min(1.0, spec.clip_norm / (grad_norm + 1e-6)) if spec.clip_norm else grad_norm
        return StepResult(
            loss=totals.loss / totals.weight,
            weight=totals.weight,
            parts=parts,
            lr=lr,
            grad_norm=grad_norm,
            clipped_norm=clipped,
            scale=scale,
            skipped=skipped,
            stop=agreed.stop,
            save=agreed.save,
            pace=agreed.pace,
            digests=self.digests.taken(position),
        )

    @contextmanager
    def _of_job(self, position: Position, m: int) -> Iterator[None]:
        """What the job raises in a micro-batch, or that it ends the process, is told with its place."""
        try:
            yield
        except LockstepError:
            raise
        except (Exception, SystemExit) as error:
            raise self._failed(error, position, m) from error

    def _failed(self, error: BaseException, position: Position, m: int) -> LockstepError:
        """What went wrong in a micro-batch, as it is told, with the place of what another worker may come to as well."""
        known, found = as_lockstep_error(error, self._where(position, m)), kind_of(error)
        if found.kind in ("device", "memory"):
            known.place = FailedAt(found.what, position.number, m, tuple(map(int, self.samples(position, m))))
        return known

    def _where(self, position: Position, m: int) -> str:
        return f"step {position.step + 1}, micro-batch {m}, rank {self.group.rank}"


def runs_own_code(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an update runs code of the job's own, which may draw numbers and write buffers: its class, or a hook."""
    if isinstance(optimizer, ShardedOptimizer):  # it takes none with code of the job's
        return False
    hooks = [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks]
    return bool(hooks) or not type(optimizer).__module__.startswith("torch.optim.")


def named_hook(reduction: Reduction) -> Any:
    """The reduction as DDP wants a hook: a function with a name, whose second parameter is called `bucket`.

    DDP compares annotations with the types themselves, and those of this module are strings: it has none.
    """

    def exact_reduction(state, bucket):  # type: ignore[no-untyped-def]
        return reduction(state, bucket)

    return exact_reduction


def missing_gradient(names: list[str], where: str) -> JobError:
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return JobError(
        f"parameter {names[0]!r}{others} got no gradient ({where}); use it in the loss, set requires_grad to False, "
        "or name it in conditional_parameters if some micro-batches rightly leave it out"
    )
