"""What a run looks at while it trains: one value for every number of workers, and the run's bits stay as they are (G1)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.distributed.training import Document, Trained, bits, train


def document(**changes: Any) -> Document:
    return {
        "job": {"use": "tests.distributed.small_jobs:Words", "params": {"samples": 40}},
        "batch": {"global": 16, "micro": 2},
        "length": {"epochs": 2},
        "data": {"drop_last": False},
        "clip_norm": 1.0,
        "workers": {"bucket_mb": 0.001},
        "record": {"observe_every": 2, "digest_every": None},
        **changes,
    }


def layers(run: Trained) -> list[tuple[int, Any]]:
    """The deterministic part of the observations, with every bit."""
    return [
        (row.step, bits({name: value for name, value in row.values.items() if name.startswith("layers/")}))
        for row in run.observations
    ]


@pytest.mark.parametrize(
    "workers", [2, pytest.param(3, marks=pytest.mark.exact), pytest.param(4, marks=pytest.mark.exact)]
)
def test_gradient_flow_is_the_same_bits_for_every_number_of_workers(pool: Pool, workers: int) -> None:
    """Ragged and clipped steps among them. A control: DDP's own all-reduce adds in another order, and it shows."""
    (alone,) = pool.run(1, train, document())
    several, *others = pool.run(workers, train, document())
    assert [step for step, _ in layers(alone)] == [1, 2, 4, 6]
    assert all(values for _, values in layers(alone))
    assert layers(several) == layers(alone)
    assert [layers(other) for other in others] == [[]] * (workers - 1)
    native = pool.run(workers, train, document(reduction="native"))[0]
    assert layers(native) != layers(alone)


def test_a_run_that_is_not_watched_has_the_same_bits(pool: Pool) -> None:
    (watched,) = pool.run(1, train, document())
    (alone,) = pool.run(1, train, document(record={"observe_every": None, "digest_every": None}))
    assert alone == watched
    assert alone.observations == ()
