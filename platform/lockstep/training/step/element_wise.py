"""Which optimizers update each element by that element's own numbers, so that the workers may share a parameter out and get the bits of the whole.

Those of torch that a spec can name do. A job's own says so, by an attribute `elementwise = True` of its class or of itself, and is tried: on a
few hundred numbers, whole, in two parts and, where parts are rows of numbers, in other dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.training.failure import job_at
from lockstep.training.step import problems
from lockstep.training.step.closures import needs_closure
from lockstep.training.step.joined_optimizer import members_of
from lockstep.training.step.norm import ELEMENT_BY_ELEMENT
from lockstep.training.step.parameters import noted_on
from lockstep.training.step.sharding import SCALARS, over
from lockstep.training.step.span_gathering import UNIT
from lockstep.training.step.weight_average import has_modes

_STEPS, _ELEMENTS = 4, 4 * UNIT
_FEW = 16
"""Elements for each parameter where all are tried."""
_SHAPES = (4, UNIT), (2, 2, 2, UNIT // 2)
"""Of a matrix and of a kernel with so many elements."""
_OF_TORCH = ("param_groups", "state", "defaults")


def check_shardable(optimizer: torch.optim.Optimizer, *, by_rows: bool) -> None:
    """SpecError for an optimizer whose updates may depend on more than an element's own numbers. `SparseAdam` may be one of several: every worker updates tables whole.

    `by_rows`: whether parts have the dimensions of their parameters, of which they have some rows; else they are rows of numbers.
    """
    name = " and ".join(type(member).__name__ for member in members_of(optimizer))
    for member in members_of(optimizer):
        _check_member(member, name, by_rows)


def _check_member(optimizer: torch.optim.Optimizer, name: str, by_rows: bool) -> None:
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
    if replaced := next((name for name in vars(optimizer) if _is_method_of_class(optimizer, name)), ""):
        raise problems.NO_PARTS(
            name=name,
            got=f"has a {replaced} of its own in place of its class's, which would go on with whole parameters",
            remedy="make it a method of a subclass, or ",
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
        _try(optimizer, name, by_rows)


def _is_method_of_class(optimizer: torch.optim.Optimizer, name: str) -> bool:
    """Whether an attribute of the optimizer itself takes the place of a method that jobs know."""
    return not name.startswith("_") and callable(getattr(type(optimizer), name, None))


def _holding(optimizer: torch.optim.Optimizer) -> str:
    """The attribute in which an optimizer has tensors, what `id` says of its parameters, or another optimizer beside its groups and its state; empty where there is none."""
    own = {name: value for name, value in vars(optimizer).items() if name not in _OF_TORCH}
    ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

    def is_one(leaf: Any) -> bool:
        return isinstance(leaf, Tensor | torch.optim.Optimizer) or (isinstance(leaf, int) and leaf in ids)

    return next((name for name, value in own.items() if any(map(is_one, _leaves(value)))), "")


def _leaves(value: Any) -> list[Any]:
    """The leaves of a value, with the keys of mappings and what is in sets."""
    leaves = [*value, *tree_leaves(list(value.values()))] if isinstance(value, dict) else tree_leaves(value)
    return [each for leaf in leaves for each in (leaf if isinstance(leaf, set | frozenset) else [leaf])]


_Piece = tuple[int, int]
"""Where what stands for a parameter begins and ends in the row of numbers."""


def _try(optimizer: torch.optim.Optimizer, name: str, by_rows: bool) -> None:
    """SpecError where an optimizer that says it is elementwise is not, on a row of numbers."""
    counts = [len(group["params"]) for group in optimizer.param_groups]

    def first(start: int, stop: int) -> list[list[_Piece]]:
        """In each group a piece of the row for the first parameter, and none of it for the others, as where other workers have them."""
        return [[(start, stop), *[(stop, stop)] * (count - 1)][:count] for count in counts]

    each = [[(_FEW * i, _FEW * (i + 1)) for i in range(count)] for count in counts]
    some = [[(start, stop if i % 2 else start) for i, (start, stop) in enumerate(pieces)] for pieces in each]
    with torch.random.fork_rng(), job_at(f"while {name} was tried on a few numbers"):
        whole = _updated(optimizer, first(0, _ELEMENTS))
        parts = [_updated(optimizer, first(*piece)) for piece in ((0, UNIT), (UNIT, _ELEMENTS))]
        shaped = [] if by_rows else [_updated(optimizer, first(0, _ELEMENTS), shape) for shape in _SHAPES]
        together, apart = _updated(optimizer, each), _updated(optimizer, some)
    in_parts = [torch.cat(rows) for rows in zip(*(part.values for part in parts), strict=True)]
    if whole.changed:
        raise problems.NO_PARTS(
            name=name,
            got=f"changes {whole.changed} in its updates, beside the state of its parameters: no worker would know of what another one changes",
            remedy="keep it in the state, or ",
        )
    if not _equal(whole.values, in_parts):
        raise problems.PARTS_DIFFER(name=name, got="updates a row of numbers otherwise")
    if not all(_equal(whole.values, other.values) for other in shaped):
        raise problems.NO_PARTS(
            name=name,
            got="updates a matrix otherwise than a row of the same numbers, and parts are rows",
            remedy="decide by parameter groups and not by dimensions, set sharding=full, or ",
        )
    present = zip(together.values, apart.values, strict=True)
    if not all(torch.equal(*values) for values in present if values[1].numel()):
        raise problems.NO_PARTS(
            name=name,
            got="updates a parameter otherwise where others of its group have no elements, as on a worker that does not update those",
            remedy="compute with each parameter alone, or ",
        )
    for key, value in whole.states[0].items():
        if isinstance(value, Tensor) and value.shape != (_ELEMENTS,) and key not in SCALARS:
            raise problems.NO_PARTS(
                name=name,
                got=f"keeps {key!r} of the shape {tuple(value.shape)} for a parameter of {_ELEMENTS} elements, wanted one number for each element, or a plain number",
                remedy="",
            )
        if isinstance(value, Tensor) and value.shape == (_ELEMENTS,):
            rows = [part.states[0][key] for part in parts]
            if not torch.equal(value, torch.cat(rows)):
                raise problems.PARTS_DIFFER(name=name, got=f"keeps another {key!r}")


def _equal(values: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(*each) for each in zip(values, others, strict=True))


class _Tried(NamedTuple):
    """What some steps on a row of numbers came to."""

    values: list[Tensor]
    """For each parameter, in one dimension."""
    states: list[dict[str, Any]]
    changed: str


def _updated(
    optimizer: torch.optim.Optimizer,
    pieces_by_group: Sequence[Sequence[_Piece]],
    shape: Sequence[int] = (-1,),
) -> _Tried:
    """What steps come to on pieces of a row of numbers in the place of parameters; each piece with elements has the `shape`."""
    torch.manual_seed(1)
    row = torch.randn(_ELEMENTS + _FEW * max(len(pieces) for pieces in pieces_by_group))
    gradients = torch.randn(_STEPS, len(row))

    def cut(whole: Tensor, piece: _Piece) -> Tensor:
        elements = whole[slice(*piece)]
        return elements.view(shape) if elements.numel() else elements

    groups = [
        {
            **{name: _copied(value) for name, value in group.items() if name != "params"},
            "params": [nn.Parameter(cut(row, piece).clone()) for piece in pieces],
        }
        for group, pieces in zip(optimizer.param_groups, pieces_by_group, strict=True)
    ]
    every = [parameter for group in groups for parameter in group["params"]]
    pieces = [piece for of_group in pieces_by_group for piece in of_group]
    originals = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter, original in zip(every, originals, strict=True):
        vars(parameter).update(noted_on(original))
    tried = over(optimizer, groups)
    before = _numbers(tried)

    def evaluate(step: int) -> Tensor:
        for parameter, piece in zip(every, pieces, strict=True):
            parameter.grad = cut(gradients[step], piece) + 0.1 * parameter.detach()
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
    states = [dict(tried.state.get(parameter, {})) for parameter in every]
    return _Tried([parameter.detach().view(-1) for parameter in every], states, changed)


def _copied(value: Any) -> Any:
    """A value of a group, in which an update changes no tensor of the optimizer's."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The numbers and texts in its groups, and in its own attributes, each as a text that tells values apart."""
    own = {
        name: value
        for name, value in vars(optimizer).items()
        if not name.startswith("_") and name not in _OF_TORCH
    }
    every: dict[str, list[Any]] = {name: [value] for name, value in own.items() if not callable(value)}
    for group in optimizer.param_groups:
        for name in group.keys() - {"params"}:
            every.setdefault(name, []).append(group[name])
    return {name: repr([_number(leaf) for leaf in tree_leaves(values)]) for name, values in every.items()}


def _number(leaf: Any) -> Any:
    """A leaf of a value by its content; of an object that has none of these kinds nothing is known but its type."""
    if isinstance(leaf, Tensor | np.ndarray | np.generic):
        return leaf.tolist()
    return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf).__qualname__
