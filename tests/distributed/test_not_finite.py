"""G7: where one of several workers meets a value that is not finite, rank 0 tells what brought it, and all end with the run's own error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.communication.group import Group
from lockstep.errors import NumericsError
from lockstep.job.loading import load_job
from lockstep.record.events.union import Document, Event
from lockstep.spec.loading import load_spec
from lockstep.training.driver_requests import NoRequests
from lockstep.training.loop import fit
from lockstep.training.observe.not_finite import NAME
from tests.distributed.pool import Pool
from tests.unit.training.observe.test_not_finite import Plain


class OnRankOne(Plain):
    """A sample of step 3, micro-batch 3."""

    def tensors(self) -> tuple[Tensor, Tensor]:
        x, y = super().tensors()
        x[23] = torch.nan
        return x, y


class Named(NoRequests):
    def run_id(self) -> str:
        return "run"


def ended(document: dict[str, Any]) -> tuple[str, list[Any]]:
    """What ends a run here, and what is told of the value."""
    spec, told = load_spec(document), list[Event]()
    job, group = load_job(spec.job.use, spec.job.params), Group.join(torch.device("cpu"))
    try:
        fit(spec, job, group, told.append, Named(), AttemptOrigin())
    except NumericsError as error:
        texts = [one.text for one in told if isinstance(one, Document) and one.name == NAME]
        return str(error), [json.loads(text) for text in texts]
    return "", []


def test_rank_0_tells_what_another_rank_met(pool: Pool, tmp_path: Path) -> None:
    document = {
        "job": {"use": f"{OnRankOne.__module__}:OnRankOne"},
        "batch": {"global": 8, "micro": 2},
        "data": {"shuffle": "none"},
        "checkpoint": {"storage": str(tmp_path), "every": None},
        "record": {"uri": "off"},
        "rehearsal": "off",
    }
    (error, (found,)), (other, nothing) = pool.run(2, ended, document)
    assert error == other
    assert error.startswith("the loss of step 3, micro-batch 3 is nan")
    assert nothing == []
    assert (found["step"], found["micro_batch"], found["samples"]) == (3, 3, [19, 23])
    assert (found["brought_by"], found["module"]) == ("input", "0")
