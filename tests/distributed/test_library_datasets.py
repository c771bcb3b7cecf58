"""Training on datasets of other libraries, as `train_data` returns them: G1, and what the identity knows of their rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.runs.run_folder import AttemptOrigin, RunFolder
from lockstep.checkpoint.storage.opening import open_storage
from tests.distributed.pool import Pool
from tests.distributed.training import Document, Trained, train, train_attempt
from tests.library_jobs import write_chunks

RUN = "library"


def document(job: str, processes: int = 0, **params: Any) -> Document:
    """Two epochs of four steps, the last one ragged."""
    return {
        "job": {"use": f"tests.library_jobs:{job}", "params": params},
        "seed": 5,
        "batch": {"global": 120, "micro": 30},
        "data": {"drop_last": False, "loader_processes": processes},
        "length": {"epochs": 2},
        "optimizer": {"lr": 1e-2},
    }


@pytest.fixture(scope="session")
def chunks(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_chunks(tmp_path_factory.mktemp("lit") / "chunks")


@pytest.mark.scenario
def test_a_hub_dataset_with_a_transform_that_draws(pool: Pool, tmp_path: Path) -> None:
    """Stopped and resumed on two workers with loader processes: same bits. The transform, and its draws, are in them."""
    whole = train(document("Hub", transformed=True))
    assert_resumed(pool, tmp_path, whole, "Hub", transformed=True)
    assert whole.weights_digest != train(document("Hub")).weights_digest


@pytest.mark.scenario
def test_chunks_of_litdata_are_read_by_index(pool: Pool, tmp_path: Path, chunks: str) -> None:
    """Stopped and resumed on two workers with loader processes: same bits, those of the same points in a list."""
    whole = train(document("Lit", train=chunks))
    assert_resumed(pool, tmp_path, whole, "Lit", train=chunks)
    assert whole.weights_digest == train(document("Listed")).weights_digest


# litdata maps its chunks for reading only, of which torch warns once in a process
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
@pytest.mark.exact
@pytest.mark.parametrize("job", ["Hub", "Lit"])
def test_bits_do_not_depend_on_workers_or_loader_processes(pool: Pool, chunks: str, job: str) -> None:
    """G1, identity and all, from the first step on."""
    params: dict[str, Any] = {"transformed": True} if job == "Hub" else {"train": chunks}
    whole = train(document(job, **params))
    for workers, processes in [(1, 2), (2, 0), (3, 1)]:
        assert pool.run(workers, train, document(job, processes, **params)) == [whole] * workers


def assert_resumed(pool: Pool, storage: Path, whole: Trained, job: str, **params: Any) -> None:
    """Stopped after three of eight steps, the run goes on with the same bits on two workers with loader processes."""
    kept = {"checkpoint": {"storage": str(storage), "every": None}}
    train_attempt({**document(job, **params), **kept}, RUN, AttemptOrigin(), 3)
    folder = RunFolder.open(open_storage(str(storage)), RUN)
    origin = AttemptOrigin(RUN, folder.claim().number, None)
    resumed = pool.run(2, train_attempt, {**document(job, 1, **params), **kept}, RUN, origin)[0]
    assert (resumed.rows, resumed.weights_digest, resumed.identity) == (
        whole.rows,
        whole.weights_digest,
        whole.identity,
    )
