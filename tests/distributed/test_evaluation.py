"""G2: evaluation counts every sample exactly once, never a padded duplicate, on any number of workers."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool
from tests.distributed.training import Document, train


def document(samples: int, loader_processes: int = 0) -> Document:
    return {
        "job": {"use": "tests.distributed.small_jobs:Numbered", "params": {"eval_samples": samples}},
        "length": {"steps": 1},
        "batch": {"global": 4, "micro": 1} if samples < 8 else {"global": 4 * 4, "micro": 4},
        "data": {"drop_last": False, "loader_processes": loader_processes},
    }


@pytest.mark.every(6)
@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("samples", "workers", "loader_processes"),
    [(1, 3, 0), (2, 3, 2), (7, 4, 0), (29, 3, 2), (32, 3, 0), (29, 1, 0)],
)
def test_every_evaluation_sample_is_counted_once(
    pool: Pool, samples: int, workers: int, loader_processes: int
) -> None:
    for trained in pool.run(workers, train, document(samples, loader_processes)):
        metrics = trained.summary["metrics"]
        seen = [metrics[f"eval/seen {i}"] for i in range(samples)]
        assert seen == [1 / samples] * samples
