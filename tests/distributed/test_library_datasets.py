"""Training on datasets of other libraries, as `train_data` returns them: G1, and what the identity knows of their rows."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from lockstep.checkpoint.runs.run_folder import AttemptOrigin, RunFolder
from lockstep.checkpoint.storage.opening import open_storage
from tests.distributed.pool import Pool
from tests.distributed.training import Document, Trained, train, train_attempt

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


@cache
def reference(job: str, **params: Any) -> Trained:
    return train(document(job, **params))


def test_a_hub_dataset_with_a_transform_that_draws(pool: Pool, tmp_path: Path) -> None:
    """Same bits on two workers with loader processes, and stopped and resumed; the transform, and its draws, are in them."""
    whole = reference("Hub", transformed=True)
    assert whole.weights_digest != reference("Hub").weights_digest
    assert pool.run(2, train, document("Hub", processes=1, transformed=True)) == [whole] * 2
    spec = {**document("Hub", transformed=True), "checkpoint": {"storage": str(tmp_path), "every": None}}
    train_attempt(spec, RUN, AttemptOrigin(), 6)
    folder = RunFolder.open(open_storage(str(tmp_path)), RUN)
    resumed = pool.run(2, train_attempt, spec, RUN, AttemptOrigin(RUN, folder.claim().number, None))[0]
    assert (resumed.rows, resumed.weights_digest, resumed.identity) == (
        whole.rows,
        whole.weights_digest,
        whole.identity,
    )
