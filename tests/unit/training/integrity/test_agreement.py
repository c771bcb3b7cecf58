"""Who is wrong among workers that hold different bits."""

from __future__ import annotations

from lockstep.record.events.union import Corrupted, Witness
from lockstep.training.integrity.agreement import outvoted, settled


def test_more_than_half_outvote_the_others() -> None:
    assert outvoted([5, 5, 6]) == (2,)
    assert outvoted([5, 6, 6, 6, 7]) == (0, 4)
    assert outvoted([5, 5]) == ()


def test_half_is_no_majority() -> None:
    assert outvoted([5, 6]) == ()
    assert outvoted([5, 5, 6, 6]) == ()
    assert outvoted([5, 6, 7]) == ()


def test_a_doubt_is_settled_by_what_is_found_later() -> None:
    workers = tuple(Witness(rank, "host", rank, "cpu", "", (rank, 1, 2, 3)) for rank in range(2))
    doubt = Corrupted(3, 2, 1, "weights", "", workers, (), "undecided")
    assert settled(doubt, (0, 1, 2, 3)).wrong == (1,)
    assert settled(doubt, (9, 1, 2, 3)).wrong == ()  # nobody had that: it is of something else
    assert settled(doubt, (9, 1, 2, 3)).untrusted_workers == workers
