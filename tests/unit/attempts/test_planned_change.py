"""A change of workers waits until all joining workers are ready, is asked for once an attempt, and is given up where it cannot be done."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.attempts import planned_change, worker_group
from lockstep.attempts.joining_workers import JoiningWorkers
from lockstep.attempts.mailbox import RunStatus
from lockstep.attempts.planned_change import Members, PlannedChange
from lockstep.attempts.worker_group import WorkerGroup
from lockstep.driver.run_view import RunView
from lockstep.record.recorder_state import RecorderState
from lockstep.training.elastic.membership import Arrival, Formation, Progress, RendezvousRounds


def status(attempt: int, numbers: tuple[int, ...], waiting: tuple[int, ...] = ()) -> RunStatus:
    return RunStatus(RunView(attempt), RecorderState(), 1, numbers=numbers, waiting=waiting)


class Around:
    """What a change has around it: the joining workers' failures, and what was asked of the workers."""

    def __init__(self, *, able: bool = True) -> None:
        self.failed: dict[int, str] = {}
        self.asked: list[tuple[int, ...]] = []
        self.able = able

    def ask_regroup(self, leaving: tuple[int, ...]) -> bool:
        self.asked.append(leaving)
        return self.able

    def change(self, joining: tuple[int, ...], leaving: tuple[int, ...] = ()) -> PlannedChange:
        attempt: Any = SimpleNamespace(joining_workers=SimpleNamespace(failed=self.failed))
        recording: Any = self
        return PlannedChange("why", Members(joining, leaving), attempt, recording)


def test_the_workers_are_asked_once_all_joining_workers_are_ready() -> None:
    around = Around()
    change = around.change((2, 3), leaving=(0,))
    assert change.look(status(1, (0, 1), waiting=(2,))) is None
    assert around.asked == []
    for _ in range(3):
        assert change.look(status(1, (0, 1), waiting=(2, 3))) is None
    assert around.asked == [(0,)]
    assert not change.is_done(status(1, (0, 1), waiting=(2, 3)))
    assert change.is_done(status(2, (1, 2, 3)))


def test_a_loss_meanwhile_has_them_asked_again() -> None:
    """It was another attempt's: the joining workers were let in by the loss's rendezvous, and who is to leave has not left."""
    around = Around()
    change = around.change((2,), leaving=(0,))
    change.look(status(1, (0, 1), waiting=(2,)))
    assert change.look(status(2, (0, 2))) is None
    assert around.asked == [(0,), (0,)]
    assert not change.is_done(status(2, (0, 2)))


def test_a_joining_worker_that_fails_ends_the_change() -> None:
    around = Around()
    change = around.change((2,))
    around.failed[2] = "no such file"
    assert change.look(status(1, (0, 1))) == "worker 2 could not join: no such file"


def test_a_joining_worker_that_is_not_ready_in_time_ends_the_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_change, "READY_S", -1.0)
    told = Around().change((2,)).look(status(1, (0, 1)))
    assert told is not None
    assert "were not ready within" in told


def test_workers_that_cannot_regroup_end_the_change() -> None:
    change = Around(able=False).change((), leaving=(0,))
    assert change.look(status(1, (0, 1))) == "the workers cannot form another group"


def test_a_joining_worker_that_is_given_up_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had come to a rendezvous; a loss just then would have it in the group of those that go on."""
    calls = RendezvousRounds(1, 2)
    for worker in (0, 1):
        calls.ready(worker)
    calls.enter(2, Arrival(Progress(0, 0), "host", 1))
    attempt: Any = object.__new__(WorkerGroup)
    attempt.joining_workers, attempt._inside = JoiningWorkers({}, lambda *_: None), frozenset({0, 1})
    attempt._mailbox = SimpleNamespace(lose=SimpleNamespace(remote=calls.lose))
    monkeypatch.setattr(worker_group, "answer_of", lambda answer, *_: answer)
    recording: Any = None
    PlannedChange("why", Members((2,), ()), attempt, recording).give_up(status(1, (0, 1), waiting=(2,)))
    calls.lose(1)
    calls.arrive(1, 0, Arrival(Progress(4, 0), "host", 1))
    formation = calls.ask(1, 0)
    assert isinstance(formation, Formation)
    assert formation.workers == (0,)
