"""What the recorders answer the workers of a trial that lose one of theirs, and what Tune is given afterwards."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from lockstep.errors import StorageError
from lockstep.record.events.union import CheckpointRow, Restored
from lockstep.record.ledger.rows import EvaluationRow
from lockstep.sweeps import problems
from lockstep.sweeps.trial_rendezvous import TrialRendezvous, TrialRendezvousClient
from lockstep.sweeps.trial_run import TrialRun
from lockstep.training.elastic.membership import Arrival, Formation, Progress, Refused
from tests.raised import raises


@pytest.fixture
def formed() -> list[Formation]:
    return []


@pytest.fixture
def calls(formed: list[Formation]) -> TrialRendezvous:
    """Three workers that train."""
    calls = TrialRendezvous(4, 3, formed.append)
    for worker in range(3):
        calls.ready(worker)
    return calls


def arrival(port: int) -> Arrival:
    return Arrival(Progress(7, 5), "host", port)


def test_the_others_go_on_without_a_lost_worker(calls: TrialRendezvous, formed: list[Formation]) -> None:
    assert calls.called(0) is None
    assert calls.lose(1)
    assert calls.called(0) == 4
    calls.arrive(0, 4, arrival(10))
    assert calls.ask(0, 4) is None  # worker 2 is waited for
    calls.arrive(2, 4, arrival(12))
    expected = Formation(5, (0, 2), "host", 10, Progress(7, 5))
    assert calls.ask(0, 4) == calls.ask(2, 4) == expected
    assert formed == [expected]
    assert calls.lose(2)  # and again, from the new group
    calls.arrive(0, 5, arrival(20))
    assert calls.ask(0, 5) == Formation(6, (0,), "host", 20, Progress(7, 5))
    assert [formation.attempt for formation in formed] == [5, 6]


def test_nobody_goes_on_without_a_worker_that_has_ended_by_itself(
    calls: TrialRendezvous, formed: list[Formation]
) -> None:
    calls.end(1)
    calls.arrive(0, 4, arrival(10))
    assert isinstance(calls.ask(0, 4), Refused)
    assert not calls.lose(2)
    assert formed == []


def test_a_loss_before_all_train_is_not_outlived() -> None:
    calls = TrialRendezvous(1, 2, lambda _: None)
    calls.ready(1)
    assert not calls.lose(1)


class Unanswering:
    """Recorders whose calls end with an error of Ray's."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.ask_rendezvous = SimpleNamespace(remote=self._fail)

    def _fail(self, *_: object) -> None:
        raise self._error


def test_recorders_that_cannot_be_reached_are_silent_and_lost_ones_want_nothing() -> None:
    """A worker beyond a cut counts the first as silence and ends itself; in the second case the sweep has ended without them."""
    unreachable = ray.exceptions.ActorUnavailableError("the network is cut", b"x" * 16)
    with raises(problems.RECORDERS_UNREACHABLE):
        TrialRendezvousClient(Unanswering(unreachable), "trial", 1, 0).called()
    lost = ray.exceptions.ActorDiedError()
    assert TrialRendezvousClient(Unanswering(lost), "trial", 1, 0).called() is None


class Recorders:
    """Takes what a trial tells, and knows its run."""

    def __init__(self) -> None:
        self.attempts: list[int] = []
        self.events: list[Any] = []
        self.tell = SimpleNamespace(remote=self._take)

    def _take(self, key: str, attempt: int, events: list[Any]) -> None:
        self.attempts.append(attempt)
        self.events += events


def row(step: int) -> EvaluationRow:
    return EvaluationRow(step, 0, {}, 0.1, 1.0)


def saved(step: int, error: str | None = None) -> CheckpointRow:
    return CheckpointRow(step, None if error else f"runs/step-{step}", error, 1, 0.0, 0.0, 0.0, 0.0)


def goes_on(trial: TrialRun, *, ends: bool = False) -> bool:
    """What the gate answers in a group that is whole."""
    return trial.go_on(lambda: None, ends=ends)


def broken_off() -> None:
    raise RuntimeError("connection closed by peer: the group was broken off")


def test_tune_is_given_each_evaluation_once_also_where_workers_go_on_in_memory() -> None:
    """What they report again of the newest row, and an evaluation that they have to make again, is no other result."""
    given: list[int] = []

    def give(evaluation: EvaluationRow) -> None:
        given.append(evaluation.step)
        trial.want()  # Tune wants more at once

    trial = TrialRun(Recorders(), "0", {}, give)
    trial.begin(1)
    trial.want()
    trial.tell(Restored((), (row(2), row(4))))  # a resume
    trial.tell(row(6))
    assert goes_on(trial)
    assert given == [2, 4, 6]
    trial.goes_on(2)
    trial.tell(Restored((), (row(6),)))
    trial.tell(row(6))
    assert goes_on(trial)
    assert given == [2, 4, 6]
    trial.tell(row(8))
    trial.goes_on(3)
    trial.tell(Restored((), (row(8),)))  # not given yet: it waits for the gate
    assert given == [2, 4, 6]
    assert goes_on(trial)
    assert given == [2, 4, 6, 8]


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_evaluation_that_is_told_after_another_waits_until_tune_has_decided_by_that_one(
    goes_on: bool,
) -> None:
    """A delayed evaluation and that of the last weights come after one step. Where Tune ends the trial by the first, the second is none of its rows."""
    given: list[int] = []

    def give(evaluation: EvaluationRow) -> None:
        given.append(evaluation.step)
        (trial.want if goes_on else trial.leave)()

    recorders = Recorders()
    trial = TrialRun(recorders, "0", {}, give)
    sender = trial.begin(1)
    trial.want()
    trial.tell(row(15))
    trial.tell(row(20))
    sender.close()
    assert given == [15]
    assert trial.is_dismissed is not goes_on
    assert [event.step for event in recorders.events] == ([15, 20] if goes_on else [15])


@pytest.mark.parametrize("error", [None, "no room"])
def test_a_population_waits_until_the_checkpoint_is_published_or_given_up(error: str | None) -> None:
    """That of the step which it takes over: another one that is published meanwhile is none."""
    trial = TrialRun(Recorders(), "0", {}, lambda _: None)
    sender, waited = trial.begin(1), list[str]()

    def wait() -> None:
        try:
            trial.wait_for_checkpoint(4)
            waited.append("")
        except StorageError as refused:
            waited.append(refused.facts["got"])

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    for step in (2, 4):
        waiting.join(0.1)
        assert waited == []
        trial.tell(CheckpointRow(step, "uri", error if step == 4 else None, 1, 0.0, 0.0, 0.0, 1.0))
    waiting.join(20)
    assert waited == [error or ""]
    sender.close()


def test_a_broken_group_leaves_the_gate_and_the_next_one_waits_for_the_same_verdict() -> None:
    """Tune may wait for a checkpoint in which the lost worker had a part: only those that go on can save the state again."""
    given: list[int] = []
    trial = TrialRun(Recorders(), "0", {}, lambda evaluation: given.append(evaluation.step))
    trial.begin(1)
    trial.want()
    for attempt in (2, 3):
        trial.tell(row(4))
        with pytest.raises(RuntimeError, match="broken off"):
            trial.go_on(broken_off, ends=False)
        trial.goes_on(attempt)
        trial.tell(Restored((), (row(4),)))
    assert given == [4]
    trial.want()
    assert goes_on(trial)
    assert given == [4]


@pytest.mark.parametrize("broke", [False, True])
def test_a_save_that_a_population_waits_for_comes_with_the_next_group_or_never(broke: bool) -> None:
    trial = TrialRun(Recorders(), "0", {}, lambda evaluation: None)
    trial.begin(1)
    later = threading.Timer(0.1, *((trial.broke, ["rank 1 was lost"]) if broke else (trial.tell, [saved(4)])))
    later.start()
    with raises(problems.UNSAVED, step=4, got="rank 1 was lost") if broke else nullcontext():
        trial.wait_for_checkpoint(4)
    later.join()


def test_the_last_evaluation_comes_with_the_end_of_the_run() -> None:
    """Also where workers go on in memory, or a trial is begun again, after it: Tune would have decided about a trial that was over."""
    given: list[int] = []
    trial = TrialRun(Recorders(), "0", {}, lambda evaluation: given.append(evaluation.step))
    trial.begin(1)
    trial.want()
    trial.tell(Restored((), (row(4), row(8))))
    assert goes_on(trial, ends=True)
    assert given == [4]
    assert trial.pending == row(8)
