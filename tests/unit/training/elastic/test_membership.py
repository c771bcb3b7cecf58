"""Who goes on after a loss, and who does not: every case of a rendezvous."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

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


WORKERS = 4


class Cut(RuleBasedStateMachine):
    """A run whose network is cut wherever it may be: workers that cannot reach the rendezvous do not come, may be taken for lost, and come back late.

    Each believes in the newest group that it was told of. Only a member of the newest group of all may claim the run's checkpoints
    with its first save (`claim` in checkpoint/runs), which ends the claims of all groups before: so it is enough that the groups come one after another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = training(WORKERS)
        self.next = WORKERS
        self.believes: dict[int, int] = dict.fromkeys(range(WORKERS), 1)
        """Of each worker, the attempt that it trains in."""
        self.waits: dict[int, int | None] = {}
        """Of each worker that has left its step, the attempt that it has left; None for one that joins."""
        self.out: set[int] = set()
        """Those that were told to end, or were dismissed."""
        self.lost: set[int] = set()
        self.formed: dict[int, Formation] = {}

    @rule(worker=st.integers(0, WORKERS + 5), step=st.integers(5, 6))
    def leave_step(self, worker: int, step: int) -> None:
        if worker in self.believes and worker not in self.waits and worker not in self.out:
            self.waits[worker] = self.believes[worker]
            self.calls.arrive(self.believes[worker], worker, arrival(step))

    @rule(worker=st.integers(0, WORKERS + 5))
    def taken_for_lost(self, worker: int) -> None:
        """Its process may well live, on the other side of the cut."""
        if worker < self.next:
            self.lost.add(worker)
            self.calls.lose(worker)

    @rule()
    def join(self) -> None:
        if self.next < WORKERS + 6:
            self.waits[self.next] = None
            self.calls.enter(self.next, Arrival(None, "host", 1))
            self.next += 1

    @rule(leaving=st.sets(st.integers(0, WORKERS + 5), max_size=2))
    def plan(self, leaving: set[int]) -> None:
        self.calls.plan(leaving)

    @rule(worker=st.integers(0, WORKERS + 5))
    def ask(self, worker: int) -> None:
        if worker not in self.waits or worker in self.out:
            return
        answer = self.calls.ask(self.waits[worker], worker)
        if isinstance(answer, Formation):
            assert worker in answer.workers
            assert self.formed.setdefault(answer.attempt, answer) == answer, "two groups of one number"
            self.believes[worker] = answer.attempt
            del self.waits[worker]
            self.calls.ready(worker)
        elif answer is not None:
            self.out.add(worker)

    @invariant()
    def no_two_groups_go_on(self) -> None:
        newest = max(self.formed, default=1)
        members = set(self.formed[newest].workers) if newest > 1 else set(range(WORKERS))
        for worker, attempt in self.believes.items():
            assert attempt < newest or worker in members
        numbers = sorted(self.formed)
        for before, after in pairwise(numbers):
            earlier, later = self.formed[before], self.formed[after]
            joined = set(later.workers) - set(earlier.workers)
            # Whoever was left out of a group is in none after it, unless it never was in one.
            if after == before + 1:
                assert all(worker >= WORKERS for worker in joined), joined
        assert self.calls.newest is None or self.calls.newest.attempt >= newest


TestCut = Cut.TestCase
TestCut.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_rendezvous_that_forms_a_group_for_each_side_of_a_cut_is_found() -> None:
    """The control: two keepers of the same run, one on each side, form two groups of one number."""
    sides = training(WORKERS), training(WORKERS)
    for side, (there, gone) in zip(sides, [((0, 1), (2, 3)), ((2, 3), (0, 1))], strict=True):
        for worker in there:
            side.arrive(1, worker, arrival(5))
        for worker in gone:
            side.lose(worker)
    machine = Cut()
    machine.waits = dict.fromkeys(range(WORKERS), 1)
    machine.calls = sides[0]
    machine.ask(0)
    machine.calls = sides[1]
    with pytest.raises(AssertionError, match="two groups of one number"):
        machine.ask(2)


def test_rank_0_of_a_new_group_has_come_with_a_store() -> None:
    """Worker 4 has joined before worker 3, which waits with no store of its own."""
    rounds = RendezvousRounds(1, 3)
    for worker in range(3):
        rounds.ready(worker)
    rounds.enter(4, Arrival(None, "h4", 0))
    rounds.lose(0)
    for worker in (1, 2):
        rounds.arrive(1, worker, Arrival(Progress(5, 0), f"h{worker}", 1000 + worker))
    rounds.enter(3, Arrival(None, "h3", 0))
    for worker in (1, 2):
        rounds.lose(worker)
    rounds.arrive(2, 4, Arrival(Progress(6, 0), "h4", 1004))
    assert rounds.newest == Formation(3, (4, 3), "h4", 1004, Progress(6, 0))
