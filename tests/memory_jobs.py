"""Jobs whose memory grows, or is more than `lockstep estimate` counts, and a control group to run them in."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep
from lockstep.job.interface import Job, Loss

WIDTH, DEPTH = 256, 4


class Growing(Job):
    """A perceptron whose memory grows from step `after` on: `kept_mb` more in a list each step, and `wide` times the samples in each micro-batch."""

    class Params(lockstep.Params):
        after: int = 3
        kept_mb: int = 0
        wide: int = 0
        pause_s: float = 0.0

    params: Params

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self._kept: list[Tensor] = []

    def model(self) -> nn.Module:
        layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 1))

    def train_data(self) -> Dataset[Any]:
        x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1))
        return TensorDataset(x, x.mean(1, keepdim=True))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        if len(self._kept) >= self.params.after and self.params.wide:
            x = x.repeat(self.params.wide, 1)  # many times the activations that the first micro-batch had
        return Loss((model(x)[: len(y)] - y).square().sum(), len(y))

    def after_step(self, model: nn.Module, step: int) -> None:
        time.sleep(self.params.pause_s)
        self._kept.append(torch.ones(self.params.kept_mb << 18 if step >= self.params.after else 0))


class WideEvaluation(Growing):
    """The same, whose evaluation asks for more memory than there is."""

    def eval_data(self) -> Dataset[Any]:
        return self.train_data()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        if not model.training and len(self._kept) >= self.params.after:
            x = x.repeat(1 << 22, 1)
        return Loss((model(x)[: len(y)] - y).square().sum(), len(y))


@contextmanager
def control_group(limit: int) -> Iterator[Path]:
    """A control group below this process's own, with a limit in bytes. Skips where the machine allows none."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    first = next((path for _, controllers, path in lines if "memory" in controllers.split(",")), None)
    if first is not None:
        parent, name = Path("/sys/fs/cgroup/memory" + first), "memory.limit_in_bytes"
    else:
        parent, name = Path("/sys/fs/cgroup" + next(path for _, c, path in lines if not c)), "memory.max"
    folder = parent / f"lockstep-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
        (folder / name).write_text(str(limit))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield folder
    finally:
        deadline = time.monotonic() + 90
        while (folder / "cgroup.procs").read_text():  # the guardian of a killed run records its end
            assert time.monotonic() < deadline, (folder / "cgroup.procs").read_text()
            time.sleep(0.1)
        folder.rmdir()


def enter(folder: Path) -> None:
    """Put this process into a control group."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))
