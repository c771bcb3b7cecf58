"""The benchmark of a step's costs times functions by their names, which a renaming would leave behind unseen."""

from __future__ import annotations

import pytest

from tests.benchmarks.limit import Limit
from tests.benchmarks.step_costs import OF_LIMIT, OWNERS


@pytest.mark.parametrize("owner", OWNERS)
def test_what_is_timed_is_there(owner: str) -> None:
    assert [name for where, name in OWNERS[owner] if not callable(getattr(where, name, None))] == []


def test_the_limit_has_what_it_is_asked_for() -> None:
    assert all(callable(getattr(Limit, name)) for name in OF_LIMIT.values())
