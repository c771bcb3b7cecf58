"""What is planted in the tests' process is executed there; `test_judge` and `test_forgeries` have the process that users have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.executed_here import executed_here

APART = ("test_judge", "test_forgeries", "test_sandbox")


@pytest.fixture(autouse=True)
def _executed_here(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.module.__name__.rpartition(".")[2] in APART:
        yield
        return
    with executed_here():
        yield
