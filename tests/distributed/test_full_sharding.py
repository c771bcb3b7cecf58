"""G1 for sharded parameters: the bits, the identity and the checkpoints of a model that every worker holds, on any number of workers."""

from __future__ import annotations

import pytest

from tests.distributed import test_same_bits
from tests.distributed.pool import Pool
from tests.distributed.training import Document, train


def full(document: Document) -> Document:
    return {**document, "sharding": "full"}


def check(pool: Pool, job: str, precision: str, workers: int) -> None:
    """Ragged steps, clipping, a schedule, and a worker that a step leaves without a micro-batch (gpt on four)."""
    wanted = test_same_bits.reference(job, 8, precision)
    found = pool.run(workers, train, full(test_same_bits.document(job, 8, precision)))
    assert found == [wanted] * workers


@pytest.mark.parametrize(("job", "precision", "workers"), [("digits", "fp32", 2), ("gpt", "bf16", 3)])
def test_the_bits_are_those_of_the_whole_model(pool: Pool, job: str, precision: str, workers: int) -> None:
    check(pool, job, precision, workers)
