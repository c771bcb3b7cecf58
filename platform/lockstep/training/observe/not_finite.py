"""Where a value stopped being finite: rank 0 looks into the step that has just ended a run, from the state before it.

The step, or the phase, ended before its update, so weights, optimizer and buffers are as they were before it. One micro-batch after another
is computed again until one gives a value that is not finite. The first operator that made one is named, with its module, in a document of
the run. The search takes about `LONGEST_S` at most, and it never replaces the run's own error.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.data.loader import Loader
from lockstep.data.sampler import MicroBatch
from lockstep.errors import LockstepError, NumericsError
from lockstep.randomness import seed_all, step_key
from lockstep.record.events.union import Document, Tell, Warned
from lockstep.training.job_data import make_sampler
from lockstep.training.observe.worker_memory import tensors_in
from lockstep.training.run import Run

NAME = "not-finite.json"
"""The document with what was found."""

LONGEST_S = 20.0
"""Seconds after which no further micro-batch is begun, and no further operator checked."""

_LARGEST_BATCH = 4 << 20
"""Bytes of the largest micro-batch that is kept; of a larger one only the samples are named."""

_ROSE = 10.0
"""If the loss rose to so many times its least value, it has run away: the rate is too high."""


@dataclass(slots=True)
class Found:
    """What was found. `step` counts from 1, `micro_batch` from 0; `brought_by` is one of input, label, weight, precision, rate, or None."""

    step: int
    micro_batch: int | None = None
    samples: list[int] = field(default_factory=list)
    operator: str | None = None
    module: str | None = None
    """The innermost module whose forward or backward it belongs to; None for the loss."""
    phase: str | None = None
    brought_by: str | None = None
    evidence: str = "no micro-batch gives such a value when it is computed again"
    batch: str | None = None
    """The batch's tensors, `batch[0]`, `batch[1]`, …, as a safetensors file in base64; None for a large one."""

    def __str__(self) -> str:
        if self.micro_batch is None:
            return f"step {self.step}: {self.evidence}"
        where = f"module {self.module}" if self.module else "the loss"
        where = "backward" if self.phase == "backward" else f"the forward of {where}"
        source = f"{self.operator} in {where}" if self.operator else "its gradient"
        return f"step {self.step}, micro-batch {self.micro_batch}: the first value that is not finite comes from {source}; {self.evidence}"


@contextmanager
def looked_into(run: Run, tell: Tell, origin: AttemptOrigin | None) -> Iterator[None]:
    """If a step in the block ends the run for a value that is not finite, report what caused it before the error goes on.

    All ranks leave such a step with the same error. They wait until rank 0 has looked, for the end of one ends the others.
    """
    try:
        yield
    except NumericsError as error:
        if error.step is not None and origin is not None and origin.saves:
            _look(run, error, tell)
        raise


def _look(run: Run, error: NumericsError, tell: Tell) -> None:
    try:
        if run.group.rank == 0:
            finding = find(run, error)
            tell(Document(NAME, json.dumps(asdict(finding), indent=1) + "\n"))
            tell(Warned(f"{finding} ({NAME} has the details)"))
    except Exception as failure:  # noqa: BLE001 - the run's own error is the one to report, whatever goes wrong here
        tell(Warned(f"what was not finite could not be looked into: {' '.join(str(failure).split())}"))
    with suppress(RuntimeError, LockstepError):  # a rank was lost meanwhile, and nothing is left to do
        run.group.gather(None)


def find(run: Run, error: NumericsError) -> Found:
    """The first operator of the step that made a value that is not finite, and what caused it."""
    assert error.step is not None
    until, finding = time.monotonic() + LONGEST_S, Found(run.plan.position(error.step).number)
    if run.state.sharding is not None:
        finding.evidence = "with sharding=full no worker has the whole model to compute a micro-batch again; resume it with sharding=none for the operator"
        return finding
    bad_weights = _not_finite(dict(run.state.model.state_dict()))
    for key in _keys(run, error):
        if time.monotonic() > until:
            finding.evidence = f"after {LONGEST_S:g} s no micro-batch with such a value was found"
            break
        batch = next(Loader(run.batches, [key], run.group.device))
        if batch is None:  # data.without leaves it no sample
            continue
        look = _computed(run, error.phase, key, batch, until)
        if not look.bad:
            continue
        finding.micro_batch, finding.samples = key.micro_batch, [int(i) for i in key.ids]
        finding.operator, finding.module, finding.phase = look.operator, look.module, look.phase
        finding.brought_by, finding.evidence = _brought_by(
            run, error.phase, key, batch, look, bad_weights, until
        )
        if error.phase:
            finding.evidence = f"in phase {error.phase!r}; {finding.evidence}"
        finding.batch = _kept(batch)
        break
    return finding


def _keys(run: Run, error: NumericsError) -> list[MicroBatch]:
    """The micro-batches of the step: the one whose loss was not finite, or all of them."""
    assert error.step is not None
    position = run.plan.position(error.step)
    every = make_sampler(run.spec, run.plan, run.batches.samples, start=error.step)
    keys = list(islice(every, position.micro_batches))
    return keys if error.micro_batch is None else [keys[error.micro_batch]]


class FirstBad(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the first operator whose result is not finite, and its module. It changes nothing that is computed."""

    def __init__(self, until: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bad = False
        self.operator: str | None = None
        self.module: str | None = None
        self.phase: str | None = None
        self._until, self._now, self._modules = until, "forward", list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        looks = not self.bad and ".empty" not in str(func) and time.monotonic() < self._until
        if looks and any(map(_has_bad, tensors_in(output))):
            self.bad, self.phase = True, self._now
            self.operator = str(func).removesuffix(".default")
            self.module = self._modules[-1] if self._modules else None
        return output

    def hooks(self, model: nn.Module) -> Iterator[Any]:
        """Track which module is running."""
        for name, module in model.named_modules():
            place = name or "the model"

            def enter(_module: nn.Module, _inputs: Any, place: str = place) -> None:
                self._modules.append(place)

            def leave(_module: nn.Module, _inputs: Any, _output: Any, place: str = place) -> None:
                if self._modules and self._modules[-1] == place:
                    self._modules.pop()

            yield module.register_forward_pre_hook(enter)
            yield module.register_forward_hook(leave)

    def backward(self) -> None:
        """Note that backward begins, in which no modules are known."""
        self._now, self._modules = "backward", []


def _computed(
    run: Run, phase_name: str, key: MicroBatch, batch: Any, until: float, *, plainly: bool = False
) -> FirstBad:
    """Compute a micro-batch forward and backward, as its step did; `plainly` in fp32 and without the loss scale."""
    state, step = run.state, run.step
    phase = next(phase for phase in step.each_phase if phase.name == phase_name)
    look = FirstBad(until)
    hooks = list(look.hooks(state.model))
    seed_all(step_key(run.spec.seed, key.step, key.micro_batch, phase.phase.key), run.group.device)
    try:
        with look, state.eager():
            with nullcontext() if plainly else state.precision.autocast():
                loss = phase.module(batch)
            look.backward()
            total = loss.total * step.compute.scale_down(run.plan.position(key.step))
            total = total if plainly else state.precision.scaled(total)
            # Not backward(): DDP's hooks on the parameters would wait for the other ranks.
            learning = phase.module.parameters_that_learn
            gradients = torch.autograd.grad(total, learning, allow_unused=True)
        if not look.bad and any(gradient is not None and _has_bad(gradient) for gradient in gradients):
            look.bad = True
    finally:
        for hook in hooks:
            hook.remove()
        step.compute.buffers.restore()
    return look


def _brought_by(
    run: Run, phase_name: str, key: MicroBatch, batch: Any, look: FirstBad, weights: list[str], until: float
) -> tuple[str | None, str]:
    """What caused the value, in one word (or None), and the evidence."""
    if weights:
        return "weight", f"{weights[0]!r} was not finite before the step"
    leaves = {f"batch[{i}]": leaf for i, leaf in enumerate(tensors_in(batch))}
    if bad := _not_finite(leaves):
        what, where = ("input", "the model") if look.module else ("label", "the loss")
        return what, f"{bad[0]} is not finite, and enters through {where}"
    in_fp32 = run.spec.precision != "fp32" and time.monotonic() < until
    if in_fp32 and not _computed(run, phase_name, key, batch, until, plainly=True).bad:
        return (
            "precision",
            f"the same micro-batch is finite in fp32, and was computed in {run.spec.precision}",
        )
    losses = [row.loss for row in run.history.steps if row.loss - row.loss == 0.0]
    if losses and abs(losses[-1]) > _ROSE * max(min(map(abs, losses)), 1e-12):
        rate = run.history.steps[-1].lr
        return (
            "rate",
            f"batch and weights are finite, and the loss had risen from {min(losses):g} to {losses[-1]:g} at a rate of {rate:g}",
        )
    return (
        None,
        "batch and weights are finite: look for a division, a logarithm or a square root at zero there",
    )


def _not_finite(tensors: Mapping[str, Any]) -> list[str]:
    return [name for name, value in tensors.items() if isinstance(value, Tensor) and _has_bad(value)]


def _has_bad(value: Tensor) -> bool:
    if value.is_meta:
        return False
    parts = tensors_in(value.detach())
    return not all(
        bool(part.isfinite().all()) for part in parts if part.is_floating_point() or part.is_complex()
    )


def _kept(batch: Any) -> str | None:
    leaves = {
        f"batch[{i}]": leaf.detach().cpu().contiguous().clone() for i, leaf in enumerate(tensors_in(batch))
    }
    if sum(leaf.nbytes for leaf in leaves.values()) > _LARGEST_BATCH:
        return None
    return base64.b64encode(safetensors.torch.save(leaves)).decode()
