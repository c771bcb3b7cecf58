"""Which of the product's problems a block raises: by its code and its facts, whatever words they are told in."""

from __future__ import annotations

import re
from typing import TypeVar

import pytest

from lockstep.errors import LockstepError, Problem

ErrorT = TypeVar("ErrorT", bound=LockstepError)


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
