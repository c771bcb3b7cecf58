"""Who goes on after a loss, and who does not: every case of a rendezvous."""

from __future__ import annotations

from lockstep.training.elastic.membership import (
    Arrival,
    Dismissed,
    Formation,
    Progress,
    Refused,
    RendezvousRounds,
)


def arrival(step: int, port: int = 1) -> Arrival:
    return Arrival(Progress(step, 0), "host", port)


def training(workers: int, fewest: int = 1) -> RendezvousRounds:
    calls = RendezvousRounds(1, workers, fewest)
    for worker in range(workers):
        calls.ready(worker)
    return calls


def test_those_that_are_left_go_on_from_the_least_that_one_has_done() -> None:
    calls = training(3)
    calls.arrive(1, 2, arrival(7, port=22))
    assert calls.called == 1
    assert calls.lose(0)
    assert calls.ask(1, 2) is None  # worker 1 is late, and waited for
    calls.arrive(1, 1, arrival(6, port=11))
    expected = Formation(2, (1, 2), "host", 11, Progress(6, 0))
    assert calls.ask(1, 1) == calls.ask(1, 2) == expected
    assert calls.called is None


def test_a_worker_that_was_taken_for_lost_is_not_let_in() -> None:
    calls = training(3)
    calls.lose(2)
    calls.arrive(1, 0, arrival(4))
    calls.arrive(1, 1, arrival(4))
    calls.arrive(1, 2, arrival(4))
    assert isinstance(calls.ask(1, 0), Formation)
    assert isinstance(calls.ask(1, 2), Refused)


def test_a_worker_that_has_come_and_is_then_lost_is_left_out() -> None:
    calls = training(3)
    calls.lose(0)
    calls.arrive(1, 1, arrival(4))
    calls.lose(1)
    calls.arrive(1, 2, arrival(4, port=33))
    assert calls.ask(1, 2) == Formation(2, (2,), "host", 33, Progress(4, 0))


def test_one_loss_after_another() -> None:
    """The next rendezvous is that of the next attempt; a loss that comes before anyone has left the new group counts in it."""
    calls = training(4)
    calls.lose(3)
    for worker in range(3):
        calls.arrive(1, worker, arrival(4))
    calls.lose(0)
    calls.arrive(2, 1, arrival(4))
    calls.arrive(2, 2, arrival(5))
    assert calls.ask(1, 1) == Formation(2, (0, 1, 2), "host", 1, Progress(4, 0))
    assert calls.ask(2, 1) == Formation(3, (1, 2), "host", 1, Progress(4, 0))


def test_nobody_goes_on_without_a_worker_that_has_ended_by_itself() -> None:
    """With an error of its own: the others have only noticed that it left."""
    calls = training(2)
    calls.arrive(1, 0, arrival(4))
    calls.end(1)
    assert isinstance(calls.ask(1, 0), Refused)
    assert not calls.lose(1)


def test_nobody_goes_on_before_all_train() -> None:
    calls = RendezvousRounds(1, 3)
    calls.ready(0)
    assert not calls.lose(2)
    calls.arrive(1, 0, arrival(0))
    calls.arrive(1, 1, arrival(0))
    assert isinstance(calls.ask(1, 0), Refused)


def test_fewer_than_the_spec_wants_do_not_go_on() -> None:
    calls = training(3, fewest=2)
    assert calls.lose(0)
    assert not calls.lose(1)
    calls.arrive(1, 2, arrival(4))
    assert isinstance(calls.ask(1, 2), Refused)


def test_a_cut_connection_is_mended_once_at_a_step() -> None:
    """All come, nobody is lost: the step is taken again. Where it fails again in the same way, it is not the connection."""
    calls = training(2)
    for attempt in (1, 2):
        for worker in range(2):
            calls.arrive(attempt, worker, arrival(4))
    assert isinstance(calls.ask(1, 0), Formation)
    assert isinstance(calls.ask(2, 0), Refused)

    calls = training(2)
    for attempt in (1, 2):
        for worker in range(2):
            calls.arrive(attempt, worker, arrival(4 + attempt))
    assert isinstance(calls.ask(2, 0), Formation)


def test_a_run_that_has_ended_is_not_gone_on_with() -> None:
    calls = training(2)
    calls.refuse("the run has ended")
    calls.arrive(1, 1, arrival(4))
    assert calls.ask(1, 1) == Refused("the run has ended")
    assert not calls.lose(0)


def joining_worker() -> Arrival:
    return Arrival(None, "elsewhere", 0)


def test_a_joining_worker_is_let_in_where_the_workers_are_asked_to_come() -> None:
    """All come, nobody is lost; who holds the state serves the store. The joining worker counts from then on."""
    calls = training(2)
    calls.enter(2, joining_worker())
    assert calls.ask(None, 2) is None
    assert calls.called is None
    assert calls.plan() == 1
    calls.arrive(1, 1, arrival(7))
    calls.arrive(1, 0, arrival(7, port=5))
    expected = Formation(2, (0, 1, 2), "host", 5, Progress(7, 0))
    assert calls.ask(None, 2) == calls.ask(1, 0) == expected
    assert calls.lose(0)
    calls.arrive(2, 1, arrival(8))
    calls.arrive(2, 2, arrival(8, port=22))
    assert calls.ask(2, 2) == Formation(3, (1, 2), "host", 1, Progress(8, 0))


def test_workers_leave_as_planned_and_are_told_so() -> None:
    calls = training(3)
    assert calls.plan(leaving=(0, 1, 2)) is None  # nobody would stay
    assert calls.plan(leaving=(0,)) == 1
    for worker in range(3):
        calls.arrive(1, worker, arrival(7, port=worker))
    assert calls.ask(1, 0) == Dismissed()
    assert calls.ask(1, 1) == Formation(2, (1, 2), "host", 1, Progress(7, 0))
    calls.end(0)
    assert calls.lose(0)  # its node goes later
    assert calls.able


def test_a_joining_worker_takes_the_place_of_a_lost_worker_in_the_same_roll_call() -> None:
    """With fewer than the spec wants the others could not go on without it."""
    calls = training(2, fewest=2)
    calls.enter(2, joining_worker())
    assert calls.lose(0)
    calls.arrive(1, 1, arrival(7, port=11))
    assert calls.ask(1, 1) == Formation(2, (1, 2), "host", 11, Progress(7, 0))


def test_a_joining_worker_that_is_lost_while_it_waits_costs_nothing() -> None:
    calls = training(2)
    calls.enter(2, joining_worker())
    assert calls.lose(2)
    assert (calls.waiting, calls.called, calls.able) == ((), None, True)


def test_joining_workers_alone_do_not_go_on() -> None:
    """They hold nothing of the run: one that was let in, and whose group lost everyone else before it was handed the state."""
    calls = training(1)
    calls.enter(1, joining_worker())
    assert calls.plan() == 1
    calls.arrive(1, 0, arrival(7))
    assert calls.lose(0)
    calls.arrive(2, 1, joining_worker())
    assert isinstance(calls.ask(2, 1), Refused)


def test_nobody_is_let_in_any_more_once_the_run_has_ended() -> None:
    calls = training(1)
    calls.enter(1, joining_worker())
    calls.refuse("the run has ended")
    assert calls.plan() is None
    assert calls.ask(None, 1) == Refused("the run has ended")
