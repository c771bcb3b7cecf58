"""Expects an error by what it is and says of its case: the words of its line may change."""

from __future__ import annotations

import re
from typing import TypeVar

import pytest

from lockstep.errors import LockstepError, Problem

ErrorT = TypeVar("ErrorT", bound=LockstepError)


def raises(problem: Problem[ErrorT], **facts: object) -> pytest.RaisesExc[ErrorT]:
    """`pytest.raises` of a problem with these facts. A fact is equal to the text of the value, or a pattern that is found in it."""

    def is_problem(error: ErrorT) -> bool:
        return error.code == problem.code and all(
            wanted.search(error.facts[name]) is not None
            if isinstance(wanted, re.Pattern)
            else error.facts[name] == str(wanted)
            for name, wanted in facts.items()
        )

    return pytest.raises(problem.error, check=is_problem)
