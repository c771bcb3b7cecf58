"""Training on a table that goes on changing: a run reads the version that it began with, wherever and whenever it goes on."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.runs.run_folder import AttemptOrigin, RunFolder
from lockstep.checkpoint.storage.opening import open_storage
from tests import lake
from tests.distributed.pool import Pool
from tests.distributed.training import Document, Trained, train, train_attempt

RUN = "lake"


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table in each format, of two versions."""
    root = tmp_path_factory.mktemp("lake")
    for kind in lake.FORMATS:
        write(kind, root / kind)
    return root


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


@cache
def reference(kind: str, tables: Path) -> Trained:
    return train(document(kind, tables / kind))


@pytest.mark.parametrize("kind", lake.FORMATS)
def test_bits_do_not_depend_on_workers_or_loader_processes(pool: Pool, tables: Path, kind: str) -> None:
    """G1, identity and all."""
    assert pool.run(2, train, document(kind, tables / kind, processes=1)) == [reference(kind, tables)] * 2


@pytest.mark.parametrize("kind", lake.FORMATS)
def test_a_run_goes_on_with_the_version_that_it_began_with(pool: Pool, tmp_path: Path, kind: str) -> None:
    """G1: stopped amid an epoch and resumed on two workers, when the table has got a newer version; a new run takes the newer one."""
    root = write(kind, tmp_path / "table")
    spec = {**document(kind, root), "checkpoint": {"storage": str(tmp_path / "runs"), "every": None}}
    whole = train(document(kind, root))
    train_attempt(spec, RUN, AttemptOrigin(), 6)
    lake.append(kind, root, lake.points(200, 3))
    resumed = pool.run(2, train_attempt, spec, RUN, taken_up(tmp_path / "runs"))[0]
    assert (resumed.rows, resumed.weights_digest, resumed.identity) == (
        whole.rows,
        whole.weights_digest,
        whole.identity,
    )
    newer = train(document(kind, root))
    assert newer.weights_digest != whole.weights_digest
    assert newer.identity != whole.identity


def taken_up(storage: Path) -> AttemptOrigin:
    folder = RunFolder.open(open_storage(str(storage)), RUN)
    return AttemptOrigin(RUN, folder.claim().number, None)
