"""Gradients that pile up: an optimizer or an `after_step` of the job's own that adds each gradient to those before it.

Updates are taken with one gradient over and over, from the same weights each time. What lies in a `.grad` that such code is to zero by
itself is made NaN before; where a backward or an update then adds to it, it was not zeroed. And a tensor that is the gradient after the
first update, and twice, three times and four times the gradient after the next ones, holds the sum of all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager

import torch
from torch import Tensor

from lockstep.checks.findings import Finding, failed, passed, warned
from lockstep.checks.fixture import Fixture
from lockstep.randomness import seed_all, update_key
from lockstep.training.failure import as_lockstep_error
from lockstep.training.integrity.rehearsal.object_state import HeldTensors
from lockstep.training.state import TrainState
from lockstep.training.step.after_step import call_after_step, has_after_step
from lockstep.training.step.closures import step_once
from lockstep.training.step.phase_step import runs_own_code
from lockstep.training.step.phases import phases_of
from lockstep.training.step.statistics import takes_statistics

NAME = "zero_grad"

UPDATES = 4

CLOSE = 1e-4
"""How far, as a share, a tensor may be from a multiple of another one."""


def zero_grad(fixture: Fixture) -> list[Finding]:
    """Each update sees its own gradient alone. Nothing is looked at where torch's optimizers do all of it."""
    state = fixture.fresh()
    optimizers = [state.optimizer_of(phase.name) for phase in phases_of(state.job, state.model)]
    if not any(map(runs_own_code, optimizers)) and not has_after_step(state.job):
        return [
            passed(
                NAME,
                "gradients are forgotten before each step; neither the optimizer nor after_step is the job's own",
            )
        ]
    key = fixture.step_keys()[0]
    for module in fixture.modules(state.job, state.model):
        fixture.backward(module, state, fixture.fetch(key), key)  # an update may read what the loss makes
    named = state.model.named_parameters()
    tables = {name for name, p in named if p.grad is not None and p.grad.is_sparse}
    finding = _Updates(fixture, state, tables)()
    if finding is not None:
        return [finding]
    return [
        passed(
            NAME,
            f"{UPDATES} updates with one gradient leave no sum of gradients, and add to none that is there",
        )
    ]


class _Updates:
    """Some updates of a state with one gradient, and what they show."""

    def __init__(self, fixture: Fixture, state: TrainState, tables: Set[str]) -> None:
        """`tables` are the parameters whose gradients are sparse."""
        self._fixture, self._state, self._tables = fixture, state, tables
        self._parameters = dict(state.model.named_parameters())
        self._values = {name: p.detach().clone() for name, p in self._parameters.items()}
        generator = torch.Generator().manual_seed(fixture.spec.seed)
        self._gradients = {
            name: torch.randn(p.shape, generator=generator).to(p) for name, p in self._parameters.items()
        }

    def __call__(self) -> Finding | None:
        snapshots: list[Mapping[str, Tensor]] = []
        for update in range(UPDATES):
            stale = self._update(update)
            if stale is not None:
                return stale
            snapshots.append({path: tensor.detach().clone() for path, tensor in self._held_tensors().items()})
        return self._sums(snapshots)

    def _update(self, update: int) -> Finding | None:
        """One update of each phase from the initial weights, and what follows it."""
        state, spec = self._state, self._fixture.spec
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(self._values[name])
        for phase in phases_of(state.job, state.model):
            for name in phase.names:
                gradient = self._gradients[name].clone()
                self._parameters[name].grad = gradient.to_sparse(1) if name in self._tables else gradient
            leaves = {path: tensor for path, tensor in self._leaves().items() if not self._is_own(tensor)}
            with _poisoned(leaves, by_hand=True) as added:
                seed_all(update_key(spec.seed, update, phase.key))
                try:
                    step_once(state.job, state.optimizer_of(phase.name), lambda: torch.zeros(()))
                except (Exception, SystemExit) as error:
                    raise as_lockstep_error(error, "first update", check="optimizer") from error
            if added:
                return _stale(added[0], "the optimizer's step")
        if not has_after_step(state.job) or takes_statistics(state.job):  # which no step has gathered here
            return None
        with _poisoned(self._leaves()) as added:
            call_after_step(state, update + 1, seed=spec.seed, device=None)
        return _stale(added[0], "after_step") if added else None

    def _held_tensors(self) -> dict[str, Tensor]:
        """What the job and its optimizers hold beside the model's parameters."""
        state = self._state
        roots = {"optimizer": state.optimizer, "job": state.job}
        return HeldTensors(roots, apart=self._parameters.values()).tensors

    def _leaves(self) -> dict[str, Tensor]:
        """What may get a gradient: the model's parameters, and those of the job's own."""
        leaves: dict[str, Tensor] = dict(self._parameters)
        return leaves | {
            path: tensor
            for path, tensor in self._held_tensors().items()
            if tensor.is_leaf and tensor.requires_grad
        }

    def _is_own(self, tensor: Tensor) -> bool:
        return any(tensor is parameter for parameter in self._parameters.values())

    def _sums(self, snapshots: Sequence[Mapping[str, Tensor]]) -> Finding | None:
        """A tensor that has become the sum of all gradients."""
        for path, first in snapshots[0].items():
            names = [name for name, gradient in self._gradients.items() if _is_multiple(first, gradient)]
            if not names or not all(
                path in later and _is_times(later[path], i + 2, first)
                for i, later in enumerate(snapshots[1:])
            ):
                continue
            evidence = f"{path} is the sum of all gradients of {names[0]!r} so far: after {UPDATES} updates with one gradient it is {UPDATES} times that"
            if path.startswith("optimizer.state"):
                remedy = "zero it after each update; if the method is dual averaging, this is right"
                return warned(NAME, evidence, remedy)
            return failed(
                NAME,
                evidence,
                "zero it after each update, or let it decay; what a sum is meant for belongs in the optimizer's state",
            )
        return None


@contextmanager
def _poisoned(leaves: Mapping[str, Tensor], *, by_hand: bool = False) -> Iterator[list[str]]:
    """Gives the paths of the leaves to whose existing gradient a backward of the block added; with `by_hand`, any other addition as well."""
    added: list[str] = []
    versions: dict[str, tuple[Tensor, int]] = {}
    hooks = []
    for path, leaf in leaves.items():
        gradient = leaf.grad
        # Zero is what zero_grad(set_to_none=False) leaves: to add to that is right.
        if gradient is None or not gradient.is_floating_point() or not bool(gradient.any()):
            continue
        with torch.no_grad():
            gradient.fill_(math.nan)
        versions[path] = (gradient, gradient._version)

        def accumulated(tensor: Tensor, path: str = path) -> None:
            if tensor.grad is not None and bool(tensor.grad.isnan().any()):
                added.append(path)

        hooks.append(leaf.register_post_accumulate_grad_hook(accumulated))  # type: ignore[no-untyped-call]
    try:
        yield added
    finally:
        for hook in hooks:
            hook.remove()
    for path, (gradient, version) in versions.items():
        is_kept = leaves[path].grad is gradient and bool(gradient.isnan().any())
        if by_hand and is_kept and gradient._version > version:
            added.append(path)


def _stale(path: str, where: str) -> Finding:
    return failed(
        NAME,
        f"{where} adds to the existing gradient of {path!r}, so each gradient is added to those before it",
        "call zero_grad() before its backward, or set grad to None",
    )


def _is_multiple(tensor: Tensor, gradient: Tensor) -> bool:
    """Whether it is a multiple, other than zero, of a gradient of more than one element."""
    if tensor.shape != gradient.shape or tensor.numel() < 2 or not tensor.is_floating_point():
        return False
    flat, flat_gradient = tensor.double().flatten(), gradient.to(tensor.device).double().flatten()
    factor = float(flat @ flat_gradient / (flat_gradient @ flat_gradient))
    return factor != 0.0 and bool((flat - factor * flat_gradient).norm() <= CLOSE * flat.norm())


def _is_times(tensor: Tensor, times: int, first: Tensor) -> bool:
    if tensor.shape != first.shape:
        return False
    actual, expected = tensor.double(), times * first.double()
    return bool((actual - expected).norm() <= CLOSE * expected.norm())
