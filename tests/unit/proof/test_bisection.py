"""The first of a line of commits that differs, found by halving."""

from __future__ import annotations

import math

import pytest

from lockstep.proof.bisection import first_changed

COMMITS = [f"c{i}" for i in range(30)]


@pytest.mark.parametrize("first", range(30))
def test_the_first_that_differs_is_found_in_few_steps(first: int) -> None:
    asked = list[str]()

    def same(commit: str) -> bool:
        asked.append(commit)
        return COMMITS.index(commit) < first

    assert first_changed(COMMITS, same) == (COMMITS[first], [])
    assert len(asked) <= math.ceil(math.log2(30))
    assert len(asked) == len({*asked})


def test_one_commit_needs_no_question() -> None:
    assert first_changed(["c"], lambda _: pytest.fail("asked")) == ("c", [])


@pytest.mark.parametrize("broken", [range(10, 12), range(3, 9), range(29), range(0)])
def test_those_of_which_nothing_can_be_told_are_passed_over_and_named(broken: range) -> None:
    found = first_changed(COMMITS, lambda c: None if (i := COMMITS.index(c)) in broken else i < 12)
    before = COMMITS.index(found.commit) - len(found.untold)
    assert before <= 12 <= COMMITS.index(found.commit)
    assert [COMMITS.index(commit) for commit in found.untold] == [
        i for i in broken if before <= i < COMMITS.index(found.commit)
    ]
