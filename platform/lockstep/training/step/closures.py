"""Optimizers that evaluate the loss again within an update: how often they may, and the closure that they call.

Each call computes the gradient of the step's global batch at the weights as they are then: with the same random numbers, from the buffers of the step's
start, summed along the tree. So all ranks get the same bits, and an optimizer that decides by them decides alike on every rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.job.interface import Job
from lockstep.spec.fields import Spec
from lockstep.training.integrity.digests import Digester
from lockstep.training.step import problems
from lockstep.training.step.sharding import ShardedOptimizer

LINE_SEARCH = 26
"""The most evaluations of torch's line search, beyond `max_eval`: it looks at that bound between two searches alone."""


def kind_of_optimizer(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Its class; of one that is shared out, that of the job's."""
    return optimizer.kind if isinstance(optimizer, ShardedOptimizer) else type(optimizer)


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an update cannot be made without a closure."""
    closure = inspect.signature(kind_of_optimizer(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def closure_calls(job: Job, optimizer: torch.optim.Optimizer) -> int:
    """How often an update may call its closure at most; 0 for one that gets none. JobError where it needs one, and the job does not say how often."""
    if isinstance(optimizer, torch.optim.LBFGS):
        return int(optimizer.param_groups[0]["max_eval"]) + LINE_SEARCH
    kind = kind_of_optimizer(optimizer)
    if kind.__module__.startswith("torch.optim."):
        return 0
    if needs_closure(optimizer) and not job.closure_calls:
        raise problems.CLOSURE_CALLS(name=kind.__name__)
    return job.closure_calls if "closure" in inspect.signature(kind.step).parameters else 0


def check_closures(spec: Spec, job: Job, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """SpecError for settings under which no optimizer can evaluate the loss again."""
    for optimizer in optimizers:
        if closure_calls(job, optimizer) and spec.sharding.mode != "none" and spec.faults.mirror:
            raise problems.MIRROR(
                reason=f"{kind_of_optimizer(optimizer).__name__} evaluates the loss again within an update, which would be evaluated for the mirror too"
            )
        if closure_calls(job, optimizer) and spec.sharding.offload:
            raise problems.CLOSURE_OFFLOAD(name=kind_of_optimizer(optimizer).__name__)
        if closure_calls(job, optimizer) and spec.precision == "fp16":
            raise problems.CLOSURE_FP16(name=kind_of_optimizer(optimizer).__name__)


class Closure:
    """What an optimizer calls for the loss, with a new gradient in the parameters: the mean over the global batch, in float64.

    The first call of an optimizer that needs a closure comes before it has changed a weight, so the gradient of the step is there already. `again`
    computes one anew; `parameters` are those that learn.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        most: int,
        loss: float,
        again: Callable[[int], float],
        parameters: Sequence[Tensor],
        digester: Digester,
        device: torch.device,
    ) -> None:
        self._name, self._most, self._again, self._device = (
            kind_of_optimizer(optimizer).__name__,
            most,
            again,
            device,
        )
        self._group = optimizer.group if isinstance(optimizer, ShardedOptimizer) else None
        self.calls = 0
        self._loss: float | None = loss if needs_closure(optimizer) else None
        self._parameters = parameters
        self._digester = digester
        self._start = 0 if self._loss is None else self._digest()

    def __call__(self) -> Tensor:
        self.calls += 1
        if self.calls > self._most:
            raise problems.CLOSURE_OFTEN(name=self._name, wanted=self._most)
        known, self._loss = self._loss, None
        if known is not None:  # the ranks have other parts, and evaluate the loss together
            changed = self._digest() != self._start
            if changed if self._group is None else any(self._group.gather(changed)):
                known = None
        if known is None:
            known = self._again(self.calls)
        return torch.tensor(known, dtype=torch.float64, device=self._device)

    def _digest(self) -> int:
        """Of what the parameters are now: their versions do not count what is written through `.data`."""
        values = {f"{i}": parameter.detach() for i, parameter in enumerate(self._parameters)}
        return self._digester.digest(values)

    def check(self, every: Sequence[int]) -> None:
        """DriftError where the ranks have called it a different number of times, `every` by rank."""
        if len(set(every)) > 1:
            raise problems.CLOSURE_DIFFERS(name=self._name, got=", ".join(map(str, every)))


def step_once(job: Job, optimizer: torch.optim.Optimizer, again: Callable[[], Tensor]) -> None:
    """Make an update on trial; `again` is the closure of an optimizer that gets one."""
    if closure_calls(job, optimizer):
        optimizer.step(again)  # type: ignore[arg-type]
    else:
        optimizer.step()
