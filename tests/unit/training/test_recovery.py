"""Which groups outlive the loss of a member: all but those that docs/attempts.md names under "Where it cannot be done"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.checkpoint.run_folder import AttemptOrigin, Replay
from lockstep.communication.group import Group
from lockstep.job.interface import Job
from lockstep.spec.loading import load_spec
from lockstep.training.recovery import can_recover
from lockstep.training.setup import make_model, make_plan, make_state
from tests.distributed.small_jobs import Plain

PAGE = Path(__file__).parents[3] / "docs" / "attempts.md"
GPU = torch.device("meta")
"""Nothing is computed on it: as on a GPU, a group cannot break off there."""


class Phased(Plain):
    """Two losses, each with an optimizer of its own."""

    def phases(self) -> Mapping[str, lockstep.Phase]:
        return {"first": lockstep.Phase(self.loss, ["0"]), "second": lockstep.Phase(self.loss, ["1"])}


CASES: dict[str, tuple[Mapping[str, Any], type[Job], Group, AttemptOrigin | None]] = {}


def cases() -> Iterator[tuple[str, Any]]:
    cpu, exact = Group(0, 1, torch.device("cpu")), {}
    yield "", (exact, Plain, cpu, AttemptOrigin())
    yield "", (exact, Plain, cpu, None)
    yield "on GPUs", (exact, Plain, Group(0, 1, GPU), AttemptOrigin())
    yield "`optimizer.sharded`", ({"optimizer": {"name": "adamw", "sharded": True}}, Plain, cpu, AttemptOrigin())
    yield "`reduction: native`", ({"reduction": "native"}, Plain, cpu, AttemptOrigin())
    yield "a job with [phases]", (exact, Phased, cpu, AttemptOrigin())
