"""Who is wrong among workers that hold different bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lockstep.communication.group import Group
from lockstep.record.events.union import Corrupted, Witness
from lockstep.training.integrity.agreement import Agreement, outvoted, settled
from lockstep.training.state import Counters


def test_more_than_half_outvote_the_others() -> None:
    assert outvoted([5, 5, 6]) == (2,)
    assert outvoted([5, 6, 6, 6, 7]) == (0, 4)
    assert outvoted([5, 5]) == ()


def test_half_is_no_majority() -> None:
    assert outvoted([5, 6]) == ()
    assert outvoted([5, 5, 6, 6]) == ()
    assert outvoted([5, 6, 7]) == ()


def test_a_doubt_is_settled_by_what_is_found_later() -> None:
    workers = tuple(Witness(rank, "host", rank, "cpu", "", (rank, 1, 2, 3)) for rank in range(2))
    doubt = Corrupted(3, 2, 1, "weights", "", workers, (), "undecided")
    assert settled(doubt, (0, 1, 2, 3)).wrong == (1,)
    assert settled(doubt, (9, 1, 2, 3)).wrong == ()  # nobody had that: it is of something else
    assert settled(doubt, (9, 1, 2, 3)).untrusted_workers == workers


def test_tensors_are_told_by_names_for_people() -> None:
    """Also those that no checkpoint lists, such as buffers that are not persistent."""
    model = nn.Linear(2, 1)
    model.register_buffer("seen", torch.zeros(2), persistent=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    nothing = SimpleNamespace(state_dict=dict)
    state: Any = SimpleNamespace(
        model=model,
        model_state=model.state_dict,
        optimizer=optimizer,
        average_state=lambda: {"weight": model.weight.detach()},
        precision=nothing,
        schedule=nothing,
        counters=Counters(),
    )
    names = Agreement(Group(0, 1, torch.device("cpu")), state).tensor_digests()
    assert list(names) == [
        "weight",
        "bias",
        "momentum_buffer of weight",
        "momentum_buffer of bias",
        "average of weight",
        "buffer seen",
    ]
