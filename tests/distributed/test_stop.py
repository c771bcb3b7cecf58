"""A stop is agreed: asked for by any one rank, all ranks end after the same step, with the bits they had there."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool
from tests.distributed.training import Document, Trained, train, train_stopped

SPEC: Document = {
    "job": {
        "use": "tests.distributed.real_jobs:FewDigits",
        "params": {"width": 2, "train_samples": 40, "eval_samples": 9},
    },
    "batch": {"global": 12, "micro": 3},
    "length": {"epochs": 3},
}
STEPS = 9


@pytest.fixture(scope="module")
def whole() -> Trained:
    return train(SPEC)


def check(stopped: Trained, whole: Trained, step: int) -> None:
    assert stopped.summary["stopped"] is (step < STEPS)
    assert stopped.summary["step"] == step
    assert stopped.rows == whole.rows[:step]
    assert stopped.digests == whole.digests[:step]
    assert stopped.weights_digest == whole.digests[step - 1]
    assert stopped.summary["samples"] == 12 * step


@pytest.mark.every(9)
@pytest.mark.thinned(4)
@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_run_ends_after_any_step(whole: Trained, step: int) -> None:
    """The last one included, after which there is nothing left to stop."""
    check(train_stopped(SPEC, 0, step), whole, step)


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("workers", "rank", "step"),
    [
        (2, 0, 1),
        (3, 2, 3),
        *(pytest.param(*each, marks=pytest.mark.exact) for each in [(2, 1, 4), (3, 1, 9), (4, 3, 8)]),
    ],
)
def test_one_ranks_wish_ends_all(pool: Pool, whole: Trained, workers: int, rank: int, step: int) -> None:
    for stopped in pool.run(workers, train_stopped, SPEC, rank, step):
        check(stopped, whole, step)


def test_a_stopped_run_is_not_evaluated(whole: Trained) -> None:
    """Only where its cadence had already asked for it: a notice of the machine's end leaves seconds."""
    assert train_stopped(SPEC, 0, 5).evaluations == whole.evaluations[:1]
