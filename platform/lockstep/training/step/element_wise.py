"""Which optimizers update each element by that element's own numbers, so that the workers may share a parameter out and get the bits of the whole.

Those of torch that a spec can name do. A job's own says so, by an attribute `elementwise = True` of its class or of itself, and is tried: on a
few hundred numbers, whole and in two parts.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lockstep.training.failure import job_at
from lockstep.training.step import problems
from lockstep.training.step.closures import needs_closure
from lockstep.training.step.joined_optimizer import members_of
from lockstep.training.step.norm import ELEMENT_BY_ELEMENT
from lockstep.training.step.sharding import SCALARS, over
from lockstep.training.step.span_gathering import UNIT
from lockstep.training.step.weight_average import has_modes

_STEPS, _ELEMENTS = 4, 4 * UNIT
_OF_TORCH = ("param_groups", "state", "defaults")


def check_shardable(optimizer: torch.optim.Optimizer) -> None:
    """SpecError for an optimizer whose updates may depend on more than an element's own numbers. `SparseAdam` may be one of several: every worker updates tables whole."""
    name = " and ".join(type(member).__name__ for member in members_of(optimizer))
    for member in members_of(optimizer):
        _check_member(member, name)


def _check_member(optimizer: torch.optim.Optimizer, name: str) -> None:
    """As `check_shardable`, of one of the optimizers of that `name`."""
    kind = type(optimizer)
    element_wise = kind in ELEMENT_BY_ELEMENT or getattr(optimizer, "elementwise", False)
    if not element_wise and kind is not torch.optim.SparseAdam:
        supported = ", ".join(sorted(optimizer_class.__name__ for optimizer_class in ELEMENT_BY_ELEMENT))
        why = (
            "it searches along a line, by dot products over all parameters, which the workers would add up in another order"
            if isinstance(optimizer, torch.optim.LBFGS)
            else "parts of a parameter get the bits of the whole only if each element is updated by its own numbers; if this one does so, say elementwise = True in its class"
        )
        raise problems.NOT_ELEMENT_WISE(got=name, wanted=supported, reason=why)
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise problems.NO_PARTS(
            name=name,
            got="has hooks, which would see a part of the parameters and of the state",
            remedy="take the hooks out, or ",
        )
    if optimizer.state:
        raise problems.NO_PARTS(
            name=name, got="comes with state, wanted one that has taken no step", remedy=""
        )
    if kind not in (*ELEMENT_BY_ELEMENT, torch.optim.SparseAdam):
        if has_modes(optimizer):
            raise problems.NO_PARTS(
                name=name,
                got="has weights of its own to evaluate (train() and eval()), which it would swap in parts of the parameters",
                remedy="",
            )
        if held := _holding(optimizer):
            raise problems.NO_PARTS(
                name=name,
                got=f"has parameters, or an optimizer over them, in its attribute {held!r}, which would go on with whole ones",
                remedy="let it take them from its param_groups and keep what it needs in its state, or ",
            )
        _try(optimizer, name)


def _holding(optimizer: torch.optim.Optimizer) -> str:
    """The attribute in which an optimizer has tensors or another optimizer beside its groups and its state; empty where there is none."""
    own = {name: value for name, value in vars(optimizer).items() if name not in _OF_TORCH}
    return next(
        (
            name
            for name, value in own.items()
            if any(isinstance(leaf, Tensor | torch.optim.Optimizer) for leaf in tree_leaves(value))
        ),
        "",
    )


def _try(optimizer: torch.optim.Optimizer, name: str) -> None:
    """SpecError where an optimizer that says it is elementwise is not, on a row of numbers."""
    with torch.random.fork_rng(), job_at(f"while {name} was tried on a few numbers"):
        whole, parts = _updated(optimizer, [_ELEMENTS]), _updated(optimizer, [UNIT, _ELEMENTS - UNIT])
    if whole.changed:
        raise problems.NO_PARTS(
            name=name,
            got=f"changes {whole.changed} in its updates, beside the state of its parameters: no worker would know of what another one changes",
            remedy="keep it in the state, or ",
        )
    if not torch.equal(whole.values, parts.values):
        raise problems.PARTS_DIFFER(name=name, got="updates a row of numbers otherwise")
    for key, value in whole.state.items():
        if isinstance(value, Tensor) and value.shape != (_ELEMENTS,) and key not in SCALARS:
            raise problems.NO_PARTS(
                name=name,
                got=f"keeps {key!r} of the shape {tuple(value.shape)} for a parameter of {_ELEMENTS} elements, wanted one number for each element, or a plain number",
                remedy="",
            )
        if isinstance(value, Tensor) and value.shape == (_ELEMENTS,):
            rows = [state[key] for state in parts.states]
            if not torch.equal(value, torch.cat(rows)):
                raise problems.PARTS_DIFFER(name=name, got=f"keeps another {key!r}")


class _Tried:
    """What some steps on a row of numbers came to."""

    def __init__(self, values: Tensor, states: list[dict[str, Any]], changed: str) -> None:
        self.values, self.states, self.changed = values, states, changed
        self.state = states[0]


def _updated(optimizer: torch.optim.Optimizer, lengths: list[int]) -> _Tried:
    torch.manual_seed(1)
    row = torch.randn(_ELEMENTS)
    parameters = [nn.Parameter(part.clone()) for part in torch.split(row, lengths)]
    gradients = torch.randn(_STEPS, _ELEMENTS)
    settings = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    tried = over(optimizer, [{**copy.deepcopy(settings), "params": parameters}])
    before = _numbers(tried)

    def evaluate(step: int) -> Tensor:
        for parameter, gradient in zip(parameters, torch.split(gradients[step], lengths), strict=True):
            parameter.grad = gradient + 0.1 * parameter.detach()
        return torch.ones((), dtype=torch.float64)

    drawn = torch.get_rng_state()
    for step in range(_STEPS):
        evaluate(step)
        if needs_closure(tried):
            tried.step(partial(evaluate, step))  # type: ignore[arg-type]
        else:
            tried.step()
    after = _numbers(tried)
    changed = next((name for name in after if before.get(name) != after[name]), "")
    if not torch.equal(drawn, torch.get_rng_state()):
        changed = "the generator of random numbers"
    values = torch.cat([parameter.detach() for parameter in parameters])
    return _Tried(values, [dict(tried.state.get(parameter, {})) for parameter in parameters], changed)


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The numbers and texts in its group, and in its own attributes, each as a text that tells values apart."""
    own = {
        name: value
        for name, value in vars(optimizer).items()
        if not name.startswith("_") and name not in _OF_TORCH
    }
    group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    return {
        name: repr([_number(leaf) for leaf in tree_leaves(value)])
        for name, value in {**own, **group}.items()
        if not callable(value)
    }


def _number(leaf: Any) -> Any:
    """A leaf of a value by its content; of an object that has none of these kinds nothing is known but its type."""
    if isinstance(leaf, Tensor):
        return leaf.tolist()
    return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf).__qualname__
