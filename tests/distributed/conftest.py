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
