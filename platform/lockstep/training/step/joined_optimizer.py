"""Several optimizers of one loss as one: each has parameters of its own, and all update in one step.

torch has optimizers for some parameters alone, such as `SparseAdam` for the tables of `nn.Embedding(sparse=True)`: a loop has another one for the
rest, and calls both. Groups and state are those of the members themselves, in one list and one mapping, so what sets a rate or loads a state
does so in the member.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class JoinedOptimizer(torch.optim.Optimizer):
    """Stands for its members: the groups of one after those of another. ValueError where two hold one parameter."""

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        # Schedulers ask here whether there is a momentum: what all members have.
        shared = set.intersection(*(set(member.defaults) for member in members))
        defaults = {name: value for name, value in members[0].defaults.items() if name in shared}
        super().__init__([group for member in members for group in member.param_groups], defaults)
        for member in members:
            self.state.update(member.state)
            member.state = self.state
        self.members = tuple(members)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update by each member in turn."""
        for member in self.members:
            member.step()


def members_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that one stands for, as that of sharded state does; itself where it stands for no others."""
    if isinstance(optimizer, JoinedOptimizer):
        return optimizer.members
    members: tuple[torch.optim.Optimizer, ...] = getattr(optimizer, "joined_members", (optimizer,))
    return members


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The hyperparameters that each group has now, without what a scheduler has added."""
    return [
        {name: group[name] for name in member.defaults}
        for member in members_of(optimizer)
        for group in member.param_groups
    ]
