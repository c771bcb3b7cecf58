"""What is planted in the tests' process is executed there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.executed_here import executed_here


@pytest.fixture(autouse=True)
def _executed_here() -> Iterator[None]:
    with executed_here():
        yield
