"""A model whose training state no worker has the memory for: it trains where its parameters are sharded, with the bits of a worker that has enough."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from tests.distributed.pool import Pool
from tests.distributed.small_jobs import Plain
from tests.distributed.training import Document, Trained, train
from tests.forked import Forked
from tests.memory_jobs import control_group, enter

UNITS, WIDTH = 16, 2048
PARAMETERS = UNITS * WIDTH * WIDTH * 4
"""Their bytes: 256 MiB."""
LIMIT = 5 * PARAMETERS // 2
"""Of a process, beyond what it has before it enters its control group. Training takes four sets of the parameters: with gradients, and two of AdamW's."""


class Wide(Plain):
    """Units of one size, and activations that are next to nothing."""

    def model(self) -> nn.Module:
        units = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS)]
        return nn.Sequential(nn.ZeroPad1d((0, WIDTH - 8)), *units)


def document(**more: object) -> Document:
    return {
        "job": {"use": f"{__name__}:Wide"},
        "batch": {"global": 8, "micro": 1},
        "length": {"steps": 2},
        "optimizer": {"name": "adamw"},
        "rehearsal": "off",
        "checkpoint": {"every": None},
        **more,
    }


def train_within(run: Document, groups: list[str]) -> Trained:
    """Train in the control group of this rank."""
    enter(Path(groups[dist.get_rank() if dist.is_initialized() else 0]))
    return train(run)


@pytest.mark.exact
def test_a_state_that_no_worker_can_hold_is_trained_by_four() -> None:
    """Each has a control group of its own, as each would have a device. Alone a worker is killed."""
    with ExitStack() as stack:
        groups = [str(stack.enter_context(control_group(LIMIT))) for _ in range(4)]
        alone = Forked(train_within, document(), groups)
        assert alone.wait(300) == -signal.SIGKILL, alone.communicate()
        pool = Pool(4)
        stack.callback(pool.close)  # before the groups go
        sharded = pool.run(4, train_within, document(sharding="full"), groups)
    assert sharded == [train(document())] * 4
