"""What objects hold is seen by value; what is left behind has a name."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.training.integrity.rehearsal.object_state import Memory


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Owner:
    """An object of a user, with something of every kind."""

    def __init__(self) -> None:
        self.number = 1
        self.names = ["a"]
        self.nested = {"deep": [{"x": torch.zeros(2)}]}
        self.queue = deque([1, 2])
        self.array = np.zeros(3)
        self.tensor = torch.zeros(2)
        self.nan = torch.tensor([float("nan")])
        self.generator = torch.Generator().manual_seed(0)
        self.numpy = np.random.default_rng(0)
        self.legacy = np.random.RandomState(0)
        self.entropy = random.SystemRandom()  # it has no state
        self.slotted = Slotted()
        self.module = nn.Linear(2, 2)
        self.normed = nn.BatchNorm1d(2)
        self.function = counter()

    def written_past_torch(self) -> None:
        self.tensor.data.add_(1)


def counter() -> Any:
    seen = [0]

    def count() -> None:
        seen[0] += 1

    return count


WRITES: dict[str, Any] = {
    "owner.number": lambda o: setattr(o, "number", 2),
    "owner.more": lambda o: setattr(o, "more", None),
    "owner.names": lambda o: o.names.append("b"),
    "owner.nested['deep'][0]['x']": lambda o: o.nested["deep"][0]["x"].add_(1),
    "owner.queue[0]": lambda o: o.queue.rotate(),
    "owner.array": lambda o: o.array.__iadd__(1),
    "owner.tensor": lambda o: o.written_past_torch(),
    "owner.generator": lambda o: torch.rand(1, generator=o.generator),
    "owner.numpy": lambda o: o.numpy.random(),
    "owner.legacy": lambda o: o.legacy.random(),
    "owner.slotted.count": lambda o: setattr(o.slotted, "count", 5),
    "owner.module.bias": lambda o: o.module.bias.data.add_(1),
    "owner.normed.running_mean": lambda o: o.normed(torch.ones(3, 2)),
    "owner.module.extra": lambda o: setattr(o.module, "extra", 3),
    "owner.function.seen[0]": lambda o: o.function(),
}


@pytest.mark.parametrize("place", WRITES)
def test_a_write_is_seen_by_name(place: str) -> None:
    owner = Owner()
    before = Memory({"owner": owner})
    assert Memory({"owner": owner}).changed_since(before) == []
    WRITES[place](owner)
    assert Memory({"owner": owner}).changed_since(before)[0] == place


def test_a_write_to_a_tensor_of_inference_mode_is_seen() -> None:
    """torch counts no writes to it."""
    with torch.inference_mode():
        job = SimpleNamespace(anchors=torch.ones(2), large=torch.ones(1 << 21))
    before = Memory({"job": job})
    with torch.inference_mode():
        job.anchors.add_(1)
    assert Memory({"job": job}).changed_since(before) == ["job.anchors"]


def test_an_equal_value_in_its_place_is_no_change() -> None:
    """A job that leaves its newest batch behind holds the same after the same batch."""
    owner = SimpleNamespace(last=torch.ones(2) * 1)
    before = Memory({"owner": owner})
    owner.last = torch.ones(2) * 1
    assert Memory({"owner": owner}).changed_since(before) == []


def test_what_is_out_of_sight() -> None:
    """As its docstring says: an iterator, a dataset's inside, and a large array that is written past torch."""
    owner = SimpleNamespace(
        iterator=iter(range(9)), data=Data(), large=torch.zeros(1 << 21), counted=torch.zeros(1 << 21)
    )
    before = Memory({"owner": owner})
    next(owner.iterator)
    owner.data.calls += 1
    owner.large.data.add_(1)
    owner.counted.add_(1)
    assert Memory({"owner": owner}).changed_since(before) == ["owner.counted"]


class Data(torch.utils.data.Dataset[int]):
    calls = 0
