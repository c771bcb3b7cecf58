"""G3: the gradient of a step is that of the weighted mean over the whole global batch, however ragged.

Thirteen samples make one step of five micro-batches (3, 3, 3, 2, 2 samples). Held against one float64 backward over
all of them at once, every element must agree to BOUND · eps · the largest element of its parameter, eps = 2^-23.

Why that bound: an element is a sum over n samples or tokens of terms about as large as the largest element, each
off by a few roundings of eps/2. Errors of random sign add up like sqrt(n), for 304 tokens to some 9 eps; the bound is
not quite twice that. Measured are 2.3 (samples) and 3.8 (tokens); the mean of the micro-batches' means is off by
four million.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.job.loading import load_job
from lockstep.randomness import model_key, seed_all
from tests.distributed.pool import Pool
from tests.distributed.training import Document, Trained, train

BOUND = 16
EPS = torch.finfo(torch.float32).eps

TOKENS = {"use": "tests.distributed.small_jobs:Words"}
JOBS: dict[str, dict[str, Any]] = {
    "samples": {"use": "tests.distributed.small_jobs:Plain", "params": {"samples": 13}},
    "tokens": TOKENS,
}


def document(job: dict[str, Any]) -> Document:
    return {
        "job": job,
        "seed": 5,
        "length": {"steps": 1},
        "batch": {"global": 15, "micro": 3},
        "data": {"drop_last": False},
        "workers": {"bucket_mb": 0.0005},
    }


def in_float64(use: dict[str, Any]) -> dict[str, torch.Tensor]:
    """One backward of the weighted mean loss over all samples at once, in double precision."""
    job = load_job(use["use"], use.get("params", {}))
    seed_all(model_key(5))
    model = job.model().double()
    data: Any = job.train_data()
    batch = job.collate([data[i] for i in range(13)])
    if not isinstance(batch, torch.Tensor):
        batch = tuple(part.double() if part.is_floating_point() else part for part in batch)
    loss = job.loss(model, batch)
    assert loss.total.dtype == torch.float64
    (loss.total / loss.weight).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def distance(trained: Trained, exact: dict[str, torch.Tensor]) -> float:
    """The largest error of any element, in eps of the largest element of its parameter."""
    assert trained.gradients.keys() == exact.keys()
    return max(
        float((trained.gradients[name].double() - wanted).abs().max() / wanted.abs().max()) / EPS
        for name, wanted in exact.items()
    )


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize("job", JOBS)
def test_gradient_of_a_ragged_step_is_that_of_the_whole_batch(pool: Pool, job: str) -> None:
    """On one, two and three workers, and the same bits on all of them."""
    exact = in_float64(JOBS[job])
    every = [trained for workers in (1, 2, 3) for trained in pool.run(workers, train, document(JOBS[job]))]
    assert distance(every[0], exact) < BOUND
    for trained in every:
        assert all(torch.equal(trained.gradients[name], every[0].gradients[name]) for name in exact)
        assert trained == every[0]


def test_the_mean_of_the_micro_batches_means_is_another_gradient(pool: Pool) -> None:
    mean_of_means, *_ = pool.run(2, train, document({**TOKENS, "params": {"own_mean": True}}))
    assert distance(mean_of_means, in_float64(TOKENS)) > 10_000 * BOUND


@pytest.mark.every(2)
@pytest.mark.parametrize("job", JOBS)
def test_recorded_loss_and_weight_are_those_of_the_whole_batch(pool: Pool, job: str) -> None:
    (row,) = pool.run(3, train, document(JOBS[job]))[0].steps
    use = JOBS[job]
    plain = load_job(use["use"], use.get("params", {}))
    seed_all(model_key(5))
    data: Any = plain.train_data()
    loss = plain.loss(plain.model(), plain.collate([data[i] for i in range(13)]))
    assert row.weight == float(loss.weight)
    # no `==`: one sum over the whole batch in float32 rounds otherwise than the sum of its micro-batches
    assert row.loss == pytest.approx(float(loss.total.detach()) / float(loss.weight), rel=BOUND * EPS)
