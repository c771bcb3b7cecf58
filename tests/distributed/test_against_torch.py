"""G1 and G3: where torch's own loop is exact, `fit` is that loop, bit for bit, after every single step.

That is so with one micro-batch a worker (M = W = 2), batches of a power of two (dividing by them rounds nothing)
and a job that draws nothing while it trains.
"""

from __future__ import annotations

import pytest

from tests.distributed.by_hand import train_by_hand
from tests.distributed.pool import Pool
from tests.distributed.training import Document, train

PLAIN = {"use": "tests.distributed.small_jobs:Plain"}
JOBS = {
    "a perceptron": {**PLAIN, "params": {"samples": 70, "norm": "none"}},
    "LayerNorm": {**PLAIN, "params": {"samples": 70, "norm": "layer"}},
    "BatchNorm": {**PLAIN, "params": {"samples": 70, "norm": "batch"}},
    "a convolutional net with BatchNorm": {
        "use": "tests.distributed.real_jobs:FewDigits",
        "params": {"width": 4, "dropout": 0.0, "augment": False, "train_samples": 70, "eval_samples": 10},
    },
}


def document(job: str, precision: str = "fp32") -> Document:
    """Eight steps of 16 samples in two epochs; six samples of each are dropped."""
    return {
        "job": JOBS[job],
        "seed": 11,
        "length": {"epochs": 2},
        "batch": {"global": 16, "micro": 8},
        "optimizer": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.05},
        "clip_norm": 1.0,
        "precision": precision,
    }


@pytest.mark.every(8)
@pytest.mark.thinned(7)
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.scenario)])
@pytest.mark.parametrize("job", JOBS)
def test_fit_is_torchs_own_loop_after_every_step(pool: Pool, job: str, precision: str) -> None:
    by_hand, _ = pool.run(2, train_by_hand, document(job, precision))
    trained, _ = pool.run(2, train, document(job, precision))
    assert list(trained.digests) == by_hand
    assert len(by_hand) == len(set(by_hand)) == 8


@pytest.mark.scenario
def test_clipping_took_part(pool: Pool) -> None:
    """The comparison above covers steps that were clipped and steps that were not."""
    rows = [row for job in JOBS for row in pool.run(2, train, document(job))[0].steps]
    assert any(row.grad_norm > 1.0 for row in rows)
    assert any(row.grad_norm < 1.0 for row in rows)


def test_a_loop_that_forgets_set_epoch_parts_in_the_second_epoch(pool: Pool) -> None:
    forgetful, _ = pool.run(2, train_by_hand, document("LayerNorm"), False)
    trained, _ = pool.run(2, train, document("LayerNorm"))
    assert [a == b for a, b in zip(trained.digests, forgetful, strict=True)] == [True] * 4 + [False] * 4
