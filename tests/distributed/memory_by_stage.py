"""The anonymous memory of a worker by the stage of its life, beyond what the process has before it begins: what a limit on its memory counts."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest import mock

import torch
from torch import nn

import lockstep.training.setup as setup
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.communication.group import Group
from lockstep.job.loading import load_job
from lockstep.record.events.union import Event, StageEnded
from lockstep.record.ledger.rows import StepRow
from lockstep.spec.loading import load_spec
from lockstep.training.driver_requests import NoRequests
from lockstep.training.loop import fit
from lockstep.training.observe.memory_growth import held_bytes
from tests.distributed.small_jobs import Plain
from tests.distributed.training import Document

UNITS, WIDTH = 16, 1024
UNIT = WIDTH * WIDTH * 4
MODEL = UNITS * UNIT
_EVERY_S = 0.002


class Wide(Plain):
    """Units of one size, and activations that are next to nothing."""

    def model(self) -> nn.Module:
        units = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS)]
        return nn.Sequential(nn.ZeroPad1d((0, WIDTH - 8)), *units)


class Stages(NoRequests):
    """The peak of each stage: `start` and `resume` until the first step begins, `step` to the end of it, `save` from there on, with the steps beside it."""

    def __init__(self, first: str) -> None:
        self.stage, self.peaks, self.over = first, dict[str, int](), False
        self._base = held_bytes(torch.device("cpu"))
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while not self.over:
            self.peaks[self.stage] = max(
                self.peaks.get(self.stage, 0), held_bytes(torch.device("cpu")) - self._base
            )
            time.sleep(_EVERY_S)

    def run_id(self) -> str:
        return "run"

    def tell(self, event: Event) -> None:
        match event:
            case StageEnded(stage="preparation"):
                self.stage = "step"
            case StepRow():
                self.stage = "save"


def peaks(document: Document, origin: AttemptOrigin, keeps: bool = False) -> dict[str, float]:
    """The peak of each stage in sets of the parameters. `keeps` is the control: memory that is freed stays with the process."""
    spec, stages = load_spec(document), Stages("start" if origin.attempt == 1 else "resume")
    job, group = load_job(spec.job.use, spec.job.params), Group.join(torch.device("cpu"))
    given: Any = (lambda: None) if keeps else setup.return_freed_memory
    with mock.patch.object(setup, "return_freed_memory", given):
        fit(spec, job, group, stages.tell, stages, origin)
    stages.over = True
    return {stage: peak / MODEL for stage, peak in stages.peaks.items()}


def document(folder: str, **more: Any) -> Document:
    return {
        "job": {"use": f"{__name__}:Wide"},
        "batch": {"global": 8, "micro": 2},
        "length": {"steps": 3},
        "optimizer": {"name": "adamw"},
        "rehearsal": "off",
        "sharding": "full",
        "checkpoint": {"storage": f"{folder}/checkpoints", "every": {"steps": 1}, "keep_every": 1},
        "record": {"folder": f"{folder}/runs"},
        **more,
    }


def by_arithmetic(workers: int) -> dict[str, float]:
    """What docs/models-that-do-not-fit.md says, in sets of the parameters: a share and some units; a save has what the rank writes twice beside it."""
    unit, standing = 1 / UNITS, 4 / workers
    step = standing + 5 * unit
    return {
        "start": 2 / workers + 6 * unit,
        "resume": 3 / workers + 6 * unit,
        "step": step,
        "save": step + 6 / workers,
    }
