"""The order in which optimizers hold their parameters: torch saves their state by position, so each position must keep its parameter.

A set of parameters has another order in each process, because it is ordered by their addresses.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lockstep.communication.group import Group
from lockstep.training.step import problems
from lockstep.training.step.phases import Optimizers, optimizers_of

Order = dict[str, list[list[str]]]
"""The names of the parameters of each group, by phase; without phases, by the empty name."""


def order_of(optimizer: Optimizers, model: nn.Module) -> Order:
    """The names of the parameters in the order in which the optimizers hold them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        phase: [
            [names.get(id(parameter), "") for parameter in group["params"]]
            for group in phase_optimizer.param_groups
        ]
        for phase, phase_optimizer in optimizers_of(optimizer).items()
    }


def is_of_model(order: Order, model: nn.Module) -> bool:
    """Whether each group has its parameters in the model's order. A group made from a set could have it only by chance."""
    positions = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    groups = [[positions.get(name, -1) for name in group] for every in order.values() for group in every]
    return all(group == sorted(group) for group in groups)


def check_order(own: Order, there: str, other: Order, elsewhere: str) -> None:
    """JobError for the first place at which two orders have different parameters; `there` and `elsewhere` say whose they are."""
    for (place, name), (_, another) in zip(_places(own), _places(other), strict=False):
        if name != another:
            raise problems.PARAMETER_ORDER(where=place, got=name, here=there, wanted=another, there=elsewhere)


def check_same_order(group: Group, own: Order) -> None:
    """JobError where the ranks hold parameters in different orders. All ranks call it."""
    every = group.gather(own)
    for rank, order in enumerate(every):
        check_order(every[0], "on rank 0", order, f"on rank {rank}")


def _places(order: Order) -> Iterator[tuple[str, str]]:
    for phase, groups in order.items():
        within = f" of phase {phase!r}" if phase else ""
        for i, group in enumerate(groups):
            for k, name in enumerate(group):
                yield f"parameter {k} of group {i}{within}", name
