"""Which parameters of a model stay whole on every worker where the others are sharded, because a cut would change their bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from lockstep.communication.group import Group
from lockstep.tensor_bytes import is_row_major
from lockstep.training.step.parameters import SHORT
from lockstep.training.step.shards import element_ranges
from lockstep.training.step.span_gathering import UNIT


def uncut(model: nn.Module, units: Sequence[nn.Module], group: Group, fused: bool) -> frozenset[str]:
    """The parameters that FSDP cannot cut, or whose update would have other bits where they are cut.

    These are scalars, parameters with hooks, without elements or in another memory order than their shape's (kernels go by the stride of a dimension of one element as well), those that several units share, complex ones, in a unit
    with several types all but those of its most common one, and those for which torch rounds the end of a tensor otherwise (short types, and fused kernels on a
    CPU), where a cut is at no multiple of `UNIT` elements.
    """
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[str, set[int]] = {}
    for number, unit in enumerate(units):
        for parameter in unit.parameters():
            owners.setdefault(named[id(parameter)], set()).add(number)
    for name in outside(model, units, named):
        owners.setdefault(name, set()).add(-1)
    parameters, by_owner = dict(model.named_parameters()), dict[int, list[str]]()
    result = set[str]()
    for name, parameter in parameters.items():
        cut_elsewhere = fused and group.device.type == "cpu"
        plain = parameter.dim() > 0 and parameter.numel() > 0 and is_row_major(parameter)
        plain &= not (parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
        if (
            not plain
            or parameter.is_complex()
            or len(owners[name]) > 1
            or (
                (parameter.dtype in SHORT or cut_elsewhere)
                and any(
                    elements.start % UNIT
                    for elements in element_ranges(parameter.shape, group.size)
                    if elements
                )
            )
        ):
            result.add(name)
        elif parameter.requires_grad:
            by_owner.setdefault(next(iter(owners[name])), []).append(name)
    for names in by_owner.values():
        sizes: dict[torch.dtype, int] = {}
        for name in names:
            sizes[parameters[name].dtype] = sizes.get(parameters[name].dtype, 0) + parameters[name].numel()
        most = max(sizes, key=lambda dtype: sizes[dtype])
        result |= {name for name in names if parameters[name].dtype != most}
    return frozenset(result)


class UnitBytes(NamedTuple):
    """Bytes of the parameters that are sharded."""

    every: int
    largest: int
    """Those of the largest unit."""
    outside: int
    """Those in no unit, which are gathered for a whole micro-batch."""


NO_UNITS = UnitBytes(every=0, largest=0, outside=0)


def unit_bytes(
    model: nn.Module, units: Sequence[nn.Module], whole: frozenset[str] = frozenset()
) -> UnitBytes:
    """The sizes of a model's units, without the parameters that stay `whole`."""
    uncut = {id(parameter) for name, parameter in model.named_parameters() if name in whole}
    sizes = [sum(p.nbytes for p in unit.parameters() if id(p) not in uncut) for unit in units]
    every = sum(p.nbytes for p in model.parameters() if id(p) not in uncut)
    return UnitBytes(every, max(sizes, default=0), max(0, every - sum(sizes)))


def outside(model: nn.Module, units: Sequence[nn.Module], named: Mapping[int, str]) -> Iterator[str]:
    """The parameters that a module outside of all units holds."""
    inside = {id(module) for unit in units for module in unit.modules()}
    for module in model.modules():
        if id(module) not in inside:
            yield from (named[id(parameter)] for parameter in module.parameters(recurse=False))
