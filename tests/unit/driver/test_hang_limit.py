"""When an attempt is taken for one that hangs."""

from __future__ import annotations

from lockstep.driver.hang_limit import TIMES_THE_LONGEST, Patience


def test_the_first_step_has_a_limit_of_its_own() -> None:
    patience = Patience(10.0, 60.0)
    assert not any(patience.is_over(0, now) for now in (100.0, 130.0, 160.0))
    assert patience.is_over(0, 160.1)
    assert not patience.begun
    assert patience.bound_s == 60.0


def test_what_came_before_the_first_step_counts_for_nothing_after_it() -> None:
    patience = Patience(10.0, 60.0)
    patience.is_over(0, 100.0)
    assert not patience.is_over(1, 159.0)
    assert patience.begun
    assert patience.bound_s == 10.0
    assert patience.is_over(1, 169.1)


def test_silence_is_over_after_the_floor() -> None:
    patience = Patience(10.0, 60.0)
    assert not patience.is_over(1, 100.0)
    assert not patience.is_over(1, 110.0)
    assert patience.is_over(1, 110.1)


def test_every_sign_of_life_counts() -> None:
    patience = Patience(10.0, 60.0)
    assert not any(patience.is_over(alive, 9.0 * alive) for alive in range(1, 100))


def test_what_was_silent_for_long_once_may_be_so_again() -> None:
    patience = Patience(1.0, 60.0)
    patience.is_over(1, 0.0)
    assert not patience.is_over(1, 0.9)
    assert not patience.is_over(2, 0.9)
    assert patience.bound_s == TIMES_THE_LONGEST * 0.9
    assert not patience.is_over(2, 18.0)
    assert patience.is_over(2, 19.0)
