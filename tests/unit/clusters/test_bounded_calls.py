"""What is waited for has a limit, and is named when the limit is reached."""

from __future__ import annotations

import threading
import time

import pytest

from lockstep.clusters import problems
from lockstep.clusters.bounded_calls import within
from lockstep.errors import SpecError
from tests.raised import raises


def test_what_a_call_returns_or_raises_is_the_callers() -> None:
    assert within(10.0, "it", lambda: 7) == 7
    assert within(10.0, "it", lambda: None) is None

    def raises() -> int:
        raise SpecError("why")

    with pytest.raises(SpecError, match="why"):
        within(10.0, "it", raises)


def test_a_call_that_does_not_return_is_named_and_left_alone() -> None:
    over = threading.Event()
    began = time.monotonic()
    with raises(problems.UNANSWERED, whose="http://head:8265", seconds=0):
        within(0.2, "http://head:8265", over.wait)
    assert time.monotonic() - began < 10
    over.set()
