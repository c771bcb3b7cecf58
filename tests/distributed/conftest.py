"""One pool of processes for all tests here: a process costs some seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four processes that form groups of one to four."""
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def wide_pool() -> Iterator[Pool]:
    """Eight processes, as many as a step of most tests has micro-batches: for those alone that need more than four."""
    pool = Pool(8)
    yield pool
    pool.close()
