"""A forked child leaves alone what it inherits."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.training.integrity.rehearsal.child_process import in_child


class Nothing(lockstep.Job):
    def model(self) -> nn.Module:
        return nn.Identity()

    def train_data(self) -> Any:
        return range(4)

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        raise AssertionError("nobody trains it")


@pytest.fixture
def garbage() -> Iterator[None]:
    """A process group that nothing refers to but itself, not collected yet. Its destructor joins its threads."""
    gc.collect()
    gc.disable()
    cycle: list[Any] = [dist.ProcessGroupGloo(dist.HashStore(), 0, 1)]
    cycle.append(cycle)
    del cycle
    yield
    gc.enable()
    gc.collect()


@pytest.mark.usefixtures("garbage")
def test_a_child_does_not_collect_the_garbage_of_its_parent() -> None:
    def collect() -> str:
        gc.enable()
        gc.collect()
        return "at its end"

    assert in_child(collect, Nothing({}), limit_s=20) == "at its end"


def test_a_child_collects_its_own_garbage() -> None:
    ended = list[str]()

    class Own:
        def __del__(self) -> None:
            ended.append("collected")

    def collect() -> list[str]:
        cycle: list[Any] = [Own()]
        cycle.append(cycle)
        del cycle
        gc.collect()
        return ended

    assert in_child(collect, Nothing({})) == ["collected"]
    assert not ended
    assert gc.isenabled()
