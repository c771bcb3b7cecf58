"""A worker that cannot reach its run any more ends itself, and one that was only stopped for a while does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from lockstep import running_time
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.communication.credentials import Secret
from lockstep.communication.group import Group
from lockstep.errors import SilentError
from lockstep.record.events.union import tell_nobody
from lockstep.sweeps.trial_rendezvous import trial_rendezvous
from lockstep.training.driver_requests import NoRequests
from lockstep.training.elastic import rendezvous
from lockstep.training.elastic.membership import Answer, Arrival, Formation, Progress
from lockstep.training.elastic.recovery import Seat
from lockstep.training.elastic.rendezvous import RendezvousHandler

SILENT_S = 0.1


class Keeper:
    """The process that keeps the rendezvous, as a worker reaches it: `reached` says whether a call is answered, which takes its time where not."""

    def __init__(self, reached: Iterator[bool]) -> None:
        self._reached = reached
        self.asked = 0

    def ready(self) -> None: ...

    def arrive(self, attempt: int, arrival: Arrival) -> None: ...

    def enter(self, arrival: Arrival) -> None: ...

    def ask(self, attempt: int | None) -> Answer:
        return None

    def called(self) -> int | None:
        self.asked += 1
        if not next(self._reached, True):
            time.sleep(SILENT_S)
            raise SilentError("the run's mailbox did not answer")
        return None


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "LISTEN_S", 0.01)
    monkeypatch.setattr(rendezvous, "CUT_OFF_S", 0.15)


def listen(keeper: Keeper, until: Callable[[], bool], cut_off: threading.Event) -> None:
    """Listen as a worker that trains does, until something has happened."""
    handler = RendezvousHandler(
        1, 0, "127.0.0.1", Secret(bytes(32)), keeper, lambda group, number, seat: seat, cut_off.set
    )
    with handler:
        handler._begin_to_listen()
        limit = time.monotonic() + 20
        while not until():
            assert time.monotonic() < limit
            time.sleep(0.01)


def test_a_worker_that_cannot_reach_its_run_ends_itself() -> None:
    cut_off = threading.Event()
    keeper = Keeper(iter([True, True, *[False] * 100]))
    listen(keeper, cut_off.is_set, cut_off)
    assert keeper.asked == 4  # two were answered, and two were not


@pytest.mark.parametrize("answers", [[False, True] * 5, [True] * 10], ids=["each second one", "all"])
def test_one_answer_that_does_not_come_ends_nobody(answers: list[bool]) -> None:
    """So it is for a process that was stopped: the time of its call is over when it goes on."""
    cut_off = threading.Event()
    keeper = Keeper(iter(answers))
    listen(keeper, lambda: keeper.asked > 10, cut_off)
    assert not cut_off.is_set()


def test_a_worker_of_a_trial_that_cannot_reach_its_sweep_ends_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the same rule as a worker of a run: whoever opens a rendezvous has it."""
    ended, codes = threading.Event(), list[int]()

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    class Recorders(Keeper):
        def end(self) -> None: ...

    monkeypatch.setattr(rendezvous.os, "_exit", end)
    keeper = Recorders(iter([True, *[False] * 100]))
    with trial_rendezvous(keeper, 1, 0, Secret(bytes(32)), no_seat) as handler:  # type: ignore[arg-type]
        handler._begin_to_listen()
        assert ended.wait(20)
    assert codes == [1]
    assert keeper.asked == 3  # one was answered, and two were not


def no_seat(group: Group, origin: AttemptOrigin | None) -> Seat:
    raise AssertionError("no group forms")


def test_a_stop_of_the_worker_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped during a call, which is over when it goes on, and the next one is refused at once."""
    monkeypatch.setattr(running_time, "MOST_S", 0.05)
    wall_s, stopped_s = time.monotonic, 0.0
    monkeypatch.setattr(running_time.time, "monotonic", lambda: wall_s() + stopped_s)

    class Stopped(Keeper):
        def called(self) -> int | None:
            nonlocal stopped_s
            self.asked += 1
            if self.asked in (3, 4):
                stopped_s = 5.0
                raise SilentError("the run's mailbox did not answer")
            return None

    cut_off, keeper = threading.Event(), Stopped(iter(()))
    listen(keeper, lambda: keeper.asked > 10 or cut_off.is_set(), cut_off)
    assert not cut_off.is_set()


class Alone:
    """The process that keeps the rendezvous, which forms a group with a worker that never comes."""

    def ready(self) -> None: ...

    def called(self) -> None: ...

    def enter(self, arrival: Arrival) -> None: ...

    def arrive(self, attempt: int, arrival: Arrival) -> None:
        self.port = arrival.port

    def ask(self, attempt: int | None) -> Formation:
        return Formation((attempt or 0) + 1, (0, 1), "127.0.0.1", self.port, Progress(1, 0))


def test_a_round_that_fails_leaves_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "CONNECT_S", 0.2)
    handler = RendezvousHandler(
        1, 0, "127.0.0.1", Secret(bytes(32)), Alone(), lambda group, attempt, seat: seat
    )
    seat = Seat(Group(0, 1, torch.device("cpu")), tell_nobody, NoRequests(), None)
    before = set(threading.enumerate())
    with pytest.raises(Exception, match="here-"):
        handler.regroup(seat, Progress(1, 0))
    until = time.monotonic() + 10
    while {*threading.enumerate()} - before:
        assert time.monotonic() < until
        time.sleep(0.01)
