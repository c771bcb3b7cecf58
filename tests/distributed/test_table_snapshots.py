"""Training on a table that goes on changing: a run reads the version that it began with, wherever and whenever it goes on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lockstep.checkpoint.runs.run_folder import AttemptOrigin, RunFolder
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.data import Delta
from lockstep.errors import DataError
from tests import lake
from tests.distributed.pool import Pool
from tests.distributed.training import Document, Trained, train, train_attempt

RUN = "lake"


def write(kind: str, root: Path) -> Path:
    root.mkdir()
    for seed in (1, 2):
        lake.append(kind, root, lake.points(200, seed))
    return root


def document(kind: str, root: Path, processes: int = 0, **params: Any) -> Document:
    """Two epochs of four steps, the last one ragged."""
    return {
        "job": {
            "use": "tests.lake:Lake",
            "params": {
                "kind": kind,
                "train": str(root),
                "evaluation": None,
                "inputs": lake.FEATURES,
                "width": 8,
                **params,
            },
        },
        "seed": 5,
        "batch": {"global": 120, "micro": 30},
        "data": {"drop_last": False, "loader_processes": processes},
        "length": {"epochs": 2},
        "optimizer": {"lr": 1e-2},
    }


@pytest.mark.exact
@pytest.mark.parametrize("kind", lake.FORMATS)
def test_bits_do_not_depend_on_workers_or_loader_processes(pool: Pool, tmp_path: Path, kind: str) -> None:
    """G1, identity and all, from the first step on."""
    root = write(kind, tmp_path / "table")
    whole = train(document(kind, root))
    for workers, processes in [(1, 2), (2, 0), (3, 1)]:
        assert pool.run(workers, train, document(kind, root, processes)) == [whole] * workers


@pytest.mark.scenario
@pytest.mark.thinned(3)
@pytest.mark.parametrize("kind", lake.FORMATS)
def test_a_run_goes_on_with_the_version_that_it_began_with(pool: Pool, tmp_path: Path, kind: str) -> None:
    """G1: stopped amid an epoch and resumed on two workers with loader processes, when the table has got a newer version. A new run takes that one."""
    root = write(kind, tmp_path / "table")
    kept = {"checkpoint": {"storage": str(tmp_path / "runs"), "every": None}}
    whole = train(document(kind, root))
    train_attempt({**document(kind, root), **kept}, RUN, AttemptOrigin(), 3)
    lake.append(kind, root, lake.points(200, 3))
    resumed = pool.run(
        2, train_attempt, {**document(kind, root, 1), **kept}, RUN, taken_up(tmp_path / "runs")
    )[0]
    assert (resumed.rows, resumed.weights_digest, resumed.identity) == (
        whole.rows,
        whole.weights_digest,
        whole.identity,
    )
    newer = train(document(kind, root))
    assert newer.weights_digest != whole.weights_digest
    assert newer.identity != whole.identity


def test_a_resume_whose_version_was_vacuumed_is_refused(tmp_path: Path) -> None:
    from deltalake import DeltaTable, write_deltalake

    root = write("delta", tmp_path / "table")
    spec = {**document("delta", root), "checkpoint": {"storage": str(tmp_path / "runs"), "every": None}}
    train_attempt(spec, RUN, AttemptOrigin(), 3)
    write_deltalake(str(root / "points"), lake.points(200, 3), mode="overwrite")
    DeltaTable(str(root / "points")).vacuum(0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(
        DataError, match=r"^data: version 1 of the Delta table '.*/points' cannot be read: its file "
    ):
        train_attempt(spec, RUN, taken_up(tmp_path / "runs"))


@pytest.mark.scenario
def test_a_run_without_a_checkpoint_starts_over_with_the_version_of_its_record(tmp_path: Path) -> None:
    root = write("delta", tmp_path / "table")
    spec = {**document("delta", root), "checkpoint": {"storage": str(tmp_path / "runs"), "every": None}}
    whole = train(document("delta", root))
    lake.append("delta", root, lake.points(200, 3))
    begun = AttemptOrigin(attempt=2, table_versions={"points": "1"})
    assert train_attempt(spec, RUN, begun).identity == whole.identity
    assert train_attempt(spec, f"{RUN}-2", AttemptOrigin()).identity != whole.identity


@pytest.mark.scenario
def test_ranks_that_find_different_versions_read_that_of_rank_0(pool: Pool, tmp_path: Path) -> None:
    root = write("delta", tmp_path / "table")
    whole = train(document("delta", root))
    assert pool.run(2, train_while_it_changes, document("delta", root), root) == [whole] * 2


def train_while_it_changes(spec: Document, root: Path) -> Trained:
    """Rank 1 looks for the newest version when rank 0 has done so and someone has written another one."""
    import torch.distributed as dist

    rank, newest, done = dist.get_rank(), Delta.newest, root / "rank 0 has looked"

    def at_another_time(self: Delta) -> str:
        if rank == 0:
            version = newest(self)
            done.touch()
            return version
        while not done.exists():
            time.sleep(0.01)
        lake.append("delta", root, lake.points(200, 3))
        return newest(self)

    with mock.patch.object(Delta, "newest", at_another_time):
        return train(spec)


def taken_up(storage: Path) -> AttemptOrigin:
    folder = RunFolder.open(open_storage(str(storage)), RUN)
    return AttemptOrigin(RUN, folder.claim().number, None)
