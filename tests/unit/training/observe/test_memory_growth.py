"""Who keeps graphs alive is named; what keeps a constant number of them, and memory that only fills up, is not."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.training.observe import memory_growth
from lockstep.training.observe.memory_growth import Growth, held_bytes

KEPT: list[Tensor] = []


class Retainer:
    """What a job may be."""

    def __init__(self) -> None:
        self.history: Any = []
        self.total: Tensor | float = 0.0
        self.normed = torch.ones(3, requires_grad=True) * 2  # one graph, for as long as it lives


@pytest.fixture
def growing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that grows by a megabyte from look to look: what a small model takes is lost in what a process takes."""
    held = iter(range(100 << 20, 1000 << 20, 1 << 20))
    monkeypatch.setattr(memory_growth, "held_bytes", lambda device: next(held))


@pytest.fixture
def little_else() -> Iterator[None]:
    """What the test session has loaded is not looked through: it is many times what a worker has."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def told(act: Any, looks: int = 12) -> list[str]:
    model, watch = nn.Linear(4, 1), Growth(torch.device("cpu"))
    lines = []
    for look in range(looks):
        for _ in range(5):
            act(model(torch.ones(2, 4)).sum())
        lines.append(watch.look(10 * (look + 1))[1])
    return [line for line in lines if line]


@pytest.mark.usefixtures("growing", "little_else")
def test_an_attribute_that_losses_are_appended_to_is_named() -> None:
    retainer = Retainer()
    (line,) = told(lambda loss: retainer.history.append(loss))
    assert "the list 'history' of an object of class 'Retainer'" in line
    assert "after step 10 and" in line


@pytest.mark.usefixtures("growing", "little_else")
def test_a_deque_and_a_running_total_are_named() -> None:
    retainer = Retainer()
    retainer.history = deque()
    (line,) = told(lambda loss: retainer.history.append(loss))
    assert "the deque 'history' of an object of class 'Retainer'" in line

    def add(loss: Tensor) -> None:
        retainer.total = retainer.total + loss

    retainer.history = None
    (line,) = told(add)
    assert ": 'total' of an object of class 'Retainer' keeps 2 tensors" in line


@pytest.mark.usefixtures("growing")
def test_a_module_variable_is_named() -> None:
    try:
        (line,) = told(KEPT.append)
    finally:
        KEPT.clear()
    assert "the list 'KEPT' of module 'tests.unit.training.observe.test_memory_growth'" in line


@pytest.mark.usefixtures("growing", "little_else")
def test_what_is_detached_and_what_stays_as_it_is_is_not() -> None:
    retainer = Retainer()
    assert told(lambda loss: retainer.history.append(loss.detach())) == []
    assert told(lambda loss: None) == []
    assert retainer.normed.grad_fn is not None


def test_without_growth_no_object_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the same list, where memory falls now and then."""
    held = iter([100, 101, 102, 90] * 4)
    monkeypatch.setattr(memory_growth, "held_bytes", lambda device: next(held) << 20)
    monkeypatch.setattr(memory_growth, "holdings", lambda: pytest.fail("objects were looked at"))
    retainer = Retainer()
    assert told(lambda loss: retainer.history.append(loss)) == []


def test_memory_is_what_this_process_holds() -> None:
    before = held_bytes(torch.device("cpu"))
    block = torch.ones(50 << 20, dtype=torch.uint8)
    assert held_bytes(torch.device("cpu")) - before > 40 << 20
    del block
