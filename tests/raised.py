"""Which of the product's problems a block raises: by its code and its facts, whatever words they are told in."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from lockstep.errors import LockstepError, Problem

ErrorT = TypeVar("ErrorT", bound=LockstepError)

Refusal = tuple[Callable[[Path], Any], Problem[Any], dict[str, Any]]
"""A call, given an empty folder, the problem that it raises, and some of its facts."""


def raises(problem: Problem[ErrorT], **facts: object) -> pytest.RaisesExc[ErrorT]:
    """As `pytest.raises`, for an error of this problem with these among its facts; a compiled pattern has to be found in one."""

    def is_told(name: str, wanted: object, error: ErrorT) -> bool:
        told = error.facts.get(name, "")
        return wanted.search(told) is not None if isinstance(wanted, re.Pattern) else str(wanted) == told

    def is_it(error: ErrorT) -> bool:
        assert error.code == problem.code, error
        assert "\n" not in str(error), error
        assert all(is_told(name, wanted, error) for name, wanted in facts.items()), (error.facts, facts)
        return True

    return pytest.raises(problem.error, check=is_it)


def each_refusal(refusals: Sequence[Refusal]) -> pytest.MarkDecorator:
    """Run a test with each of them as its `refusal`."""
    return pytest.mark.parametrize("refusal", refusals, ids=[problem.code for _, problem, _ in refusals])


def check_refusal(refusal: Refusal, folder: Path) -> None:
    """Fail unless the call raises its problem with these facts."""
    call, problem, facts = refusal
    with raises(problem, **facts):
        call(folder)
