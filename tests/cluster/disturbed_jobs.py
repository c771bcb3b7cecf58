"""Jobs of several kinds that a test disturbs by params of placement: the identity, and so the bits that are wanted, stay those of the job left alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

import lockstep
from jobs.images.job import Images
from lockstep import Loss, Phase, Placement
from lockstep.hf import CausalLM
from tests.cluster.broken_jobs import _rank
from tests.distributed.test_phases import GanInHalves
from tests.distributed.test_tar_shards import Classes
from tests.fading import Fading

FALLS_AFTER = 4
"""The step after which a worker is killed: one with a checkpoint."""


class Disturbed(lockstep.Job):
    """`fall` names a file: the first worker that is in the second micro-batch of a later step makes it, and is killed there.

    With `skewed`, the loss of every worker but the first is greater by a hundredth from then on, as if it saw its rank.
    """

    steps = calls = 0

    def after_step(self, model: nn.Module, step: int) -> None:
        self.steps, self.calls = step, 0

    def disturbed(self, model: nn.Module, loss: Loss) -> Loss:
        if self.steps < FALLS_AFTER or not model.training:
            return loss
        self.calls += 1
        params: Any = self.params
        if params.fall and self.calls == 2 and not Path(params.fall).exists():
            fall(Path(params.fall))
        if params.skewed and _rank() > 0:
            loss = replace(loss, total=loss.total * (1 + 2**-7))
        return loss


def fall(file: Path) -> None:
    """SIGKILL to this process once the checkpoint is there, unless another one was faster."""
    deadline = time.monotonic() + 60
    while not list(file.parent.glob(f"runs/*/step-{FALLS_AFTER:09}/manifest.json")):
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.01)
    try:
        file.open("x").close()
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


class Language(Disturbed, CausalLM):
    class Params(CausalLM.Params):
        fall: Placement[str] = ""
        skewed: Placement[bool] = False

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return self.disturbed(model, super().loss(model, batch))


class Pictures(Disturbed, Images):
    class Params(Images.Params):
        fall: Placement[str] = ""
        skewed: Placement[bool] = False

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return self.disturbed(model, super().loss(model, batch))


class Shards(Disturbed, Classes):
    class Params(Classes.Params):
        fall: Placement[str] = ""
        skewed: Placement[bool] = False

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return self.disturbed(model, super().loss(model, batch))


class Phases(Disturbed, GanInHalves):
    """Two networks in fp16, of which the judge has an overflow. It is disturbed in its second phase, when the first one has had its update.

    With `forgets`, what the optimizers remember is in no checkpoint.
    """

    class Params(GanInHalves.Params):
        fall: Placement[str] = ""
        skewed: Placement[bool] = False
        forgets: Placement[bool] = False

    params: Params

    def phases(self) -> Sequence[Phase]:
        phases = super().phases()
        return (
            [replace(one, optimizer=partial(Fading, lr=0.1)) for one in phases]
            if self.params.forgets
            else phases
        )

    def made(self, model: nn.Module, batch: Any) -> Loss:
        return self.disturbed(model, super().made(model, batch))
