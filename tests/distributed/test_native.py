"""`reduction: native`, DDP's own all-reduce: the same mean, and the same bits only for the same workers."""

from __future__ import annotations

import pytest

from lockstep.errors import JobError
from tests.distributed.pool import Pool
from tests.distributed.training import Document, Trained, train


def document(reduction: str, *, micro: int, samples: int = 40) -> Document:
    return {
        "job": {"use": "tests.distributed.small_jobs:Words", "params": {"samples": samples}},
        "batch": {"global": 16, "micro": micro},
        "length": {"epochs": 2},
        "data": {"drop_last": False},
        "clip_norm": 1.0,
        "reduction": reduction,
        "workers": {"bucket_mb": 0.001},
        "record": {"digest_every": None},  # native sums keep no micro-batch's gradient apart, exact ones do
    }


def trained(pool: Pool, workers: int, reduction: str, micro: int) -> Trained:
    first, *others = pool.run(workers, train, document(reduction, micro=micro))
    assert others == [first] * (workers - 1)
    return first


@pytest.mark.every(2)
@pytest.mark.parametrize("workers", [1, 2])
def test_one_micro_batch_a_worker_is_exact_up_to_two(pool: Pool, workers: int) -> None:
    """There is one order only in which to add one or two gradients."""
    native, exact = (trained(pool, workers, kind, 16 // workers) for kind in ("native", "exact"))
    assert native.digests == exact.digests
    assert native.rows == exact.rows
    assert native.identity != exact.identity


@pytest.mark.scenario
def test_native_repeats_itself_on_the_same_workers(pool: Pool) -> None:
    assert trained(pool, 3, "native", 2) == trained(pool, 3, "native", 2)


@pytest.mark.scenario
def test_native_gives_other_bits_on_other_workers(pool: Pool) -> None:
    """Which is why the number of workers is a part of its identity, and of no other run's."""
    runs = [trained(pool, workers, "native", 2) for workers in (1, 2, 3)]
    assert len({run.weights_digest for run in runs}) == 3
    assert len({run.identity for run in runs}) == 3


@pytest.mark.thinned(3)
@pytest.mark.every(4)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_native_has_the_same_mean(pool: Pool, workers: int) -> None:
    """G3 up to rounding, in ragged steps as well. Two epochs of six steps: the differences have hardly grown."""
    # no `==`: native adds the same terms in another order, and promises the mean only up to rounding
    native, exact = (trained(pool, workers, kind, 2) for kind in ("native", "exact"))
    assert [row.weight for row in native.steps] == [row.weight for row in exact.steps]
    assert [row.loss for row in native.steps] == pytest.approx([row.loss for row in exact.steps], rel=1e-5)
    assert [row.grad_norm for row in native.steps] == pytest.approx(
        [row.grad_norm for row in exact.steps], rel=1e-4
    )


def test_a_parameter_without_gradient_is_named(pool: Pool) -> None:
    branching = {
        "job": {"use": "tests.distributed.small_jobs:Branching", "params": {"first": 24}},
        "batch": {"global": 8, "micro": 4},
        "data": {"shuffle": "none"},
        "reduction": "native",
    }
    with pytest.raises(
        JobError, match=r"^parameters 'second.weight', 'second.bias' got no gradient \(step 4"
    ):
        pool.run(2, train, branching)


@pytest.mark.scenario
def test_a_conditional_parameter_that_only_an_earlier_micro_batch_of_a_worker_used(pool: Pool) -> None:
    """Its sum is that of the micro-batches that used it, and the step ends: DDP waits for each parameter in a worker's last one."""
    branching = {
        "job": {"use": "tests.distributed.small_jobs:Branching", "params": {"first": 26, "declared": True}},
        "batch": {"global": 8, "micro": 2},
        "data": {"shuffle": "none"},
        "length": {"steps": 6},
        "record": {"digest_every": None},
    }
    runs = [pool.run(2, train, {**branching, "reduction": kind})[0] for kind in ("native", "exact")]
    # no `==`: see above
    native, exact = ([row.grad_norm for row in run.steps] for run in runs)
    assert native == pytest.approx(exact, rel=1e-4)
