"""Whom a run lets in while it trains, and what its checkpoints hold after its workers have changed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset, TensorDataset

from lockstep.checkpoint.runs.run_folder import AttemptOrigin, RunFolder
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.training.elastic import problems
from tests import lake
from tests.distributed.small_jobs import Plain, points
from tests.distributed.survivors import Change, JoiningWorker, Outlived, outlive
from tests.distributed.test_survivors import DIGITS, check, repeated, undisturbed
from tests.distributed.training import Document, train, train_attempt
from tests.raised import raises


class Placed(Plain):
    """One of its samples depends on a variable that it says is a place."""

    placement_variables = ("WHERE_DATA_IS",)

    def train_data(self) -> Dataset[Any]:
        x, y = points(self.params.samples)
        x[-1] += len(os.environ.get("WHERE_DATA_IS", ""))
        return TensorDataset(x, y)


JOB = """
import torch
from torch import nn
import lockstep

class Job(lockstep.Job):
    def model(self):
        return nn.Linear(4, 1)
    def train_data(self):
        return torch.utils.data.TensorDataset(torch.ones(16, 4))
    def loss(self, model, batch):
        return lockstep.Loss(model(batch[0]).square().sum(), len(batch[0]))
"""

SMALL: Document = {"batch": {"global": 8, "micro": 2}, "length": {"steps": 4}}
PLACED: Document = SMALL | {"job": {"use": "tests.distributed.test_joining:Placed"}}
WRITTEN: Document = SMALL | {"job": {"use": "joining_job:Job"}}


@pytest.mark.thinned(3)
@pytest.mark.scenario
@pytest.mark.parametrize("differs", ["data", "code", "processor"])
def test_a_joining_worker_that_would_compute_other_bits_is_not_let_in(differs: str, tmp_path: Path) -> None:
    """G1: it has another file of the job, another sample, or another processor. All ranks end before the next step, with what differs."""
    for folder, text in (("first", JOB), ("other", JOB.replace("square", "abs"))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "joining_job.py").write_text(text)
    document, joining_worker, name = {
        "code": (WRITTEN, JoiningWorker(str(tmp_path / "other")), r"job\.source"),
        "data": (PLACED, JoiningWorker(environment={"WHERE_DATA_IS": "elsewhere"}), r"data\.train\.\w+"),
        "processor": (PLACED, JoiningWorker(probe="0123456789abcdef"), "numerics_probe"),
    }[differs]
    with raises(problems.OTHER_WORKER, rank=1, got=re.compile(f"^{name}$")):
        outlive(
            document,
            1,
            [],
            [Change(2, joining=1)],
            path=str(tmp_path / "first"),
            joining_worker=joining_worker,
        )


@pytest.mark.scenario
def test_a_joining_worker_that_computes_the_same_bits_is_let_in() -> None:
    """The control: where the data lies is no part of it."""
    check(outlive(PLACED, 1, [], [Change(2, joining=1)]), train(PLACED), [0, 1])


@pytest.mark.scenario
@pytest.mark.parametrize("versions", [{"points": "0"}, {}], ids=["that of the others", "the newest"])
def test_a_joining_worker_reads_the_version_of_a_table_that_the_others_read(
    tmp_path: Path, versions: dict[str, str]
) -> None:
    """It is let in, though the table has a newer one, and the others take no step again; with that one it would not be."""
    for seed in (1, 2):
        lake.append("delta", tmp_path, lake.points(40, seed))
    params = {"train": str(tmp_path), "evaluation": None, "inputs": lake.FEATURES, "width": 8}
    job = {"use": "tests.lake:Lake", "params": params}
    document = SMALL | {"job": job, "checkpoint": {"storage": str(tmp_path / "runs"), "every": None}}

    def joined() -> Outlived:
        joining_worker = JoiningWorker(table_versions=versions)
        first = {"points": "0"}
        return outlive(
            document,
            1,
            [],
            [Change(2, joining=1)],
            run_id="run",
            joining_worker=joining_worker,
            table_versions=first,
        )

    if versions:
        outlived = joined()
        check(outlived, train_attempt(document, "alone", AttemptOrigin(table_versions=versions)), [0, 1])
        assert repeated(outlived) == []
    else:
        with raises(problems.OTHER_WORKER, got=re.compile("^data")):
            joined()


@pytest.mark.scenario
@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ([Change(3, joining=1), Change(5, leaving=(0, 1))], [2]),
        ([Change(3, leaving=(0,))], [1]),
        ([Change(3, joining=1)], [0, 1, 2]),
    ],
    ids=["all are replaced", "leaving", "joining"],
)
def test_checkpoints_after_a_change_have_every_row_and_evaluation(
    changes: list[Change], left: list[int], tmp_path: Path
) -> None:
    """G4: they tell of the evaluation before the change too, when a resume tells the record of what was lost with all workers.
    A joining worker that is left alone writes rows of steps that it has not seen."""
    document = DIGITS | {"checkpoint": {"storage": str(tmp_path), "every": {"steps": 4}, "keep_last": 9}}
    whole = undisturbed()
    assert [step for step, *_ in whole.evaluations] == [3, 6, 9]
    outlived = outlive(document, 2, [], changes, run_id="run")
    check(outlived, whole, left)
    folder = RunFolder.open(open_storage(str(tmp_path)), "run")
    taken_up = train_attempt(document, "run", AttemptOrigin("run", folder.claim().number, 8))
    assert taken_up.evaluations == whole.evaluations
    assert taken_up.rows == whole.rows
