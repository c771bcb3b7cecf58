"""The mailbox keeps every event until the recorder has written it, whichever recorder that is."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.attempts.mailbox import (
    LOOK_S,
    STEADY_LOOK_S,
    Mailbox,
    TrainerSlot,
    TrainerSlots,
    look_every_s,
)
from lockstep.errors import ClusterError, DeviceError, JobError, LockstepError, RecordError
from lockstep.record.events.union import Broke, Event, Failed, Finished, Joined, StageEnded, Started, Warned
from lockstep.record.recorder_state import RecorderState
from lockstep.training.elastic.membership import Arrival, Formation, Progress, Refused
from tests.unit.record.rows import step_row

STATE = RecorderState(run_id="abc", pid=1)


def mailbox_with(*events: Event) -> Mailbox:
    mailbox = Mailbox()
    mailbox.begin(1)
    mailbox.tell(1, events)
    return mailbox


def test_an_event_is_given_to_one_recorder_once_and_kept_until_it_is_written() -> None:
    mailbox = mailbox_with(step_row(1), step_row(2))
    first = mailbox.fetch(0, 0, STATE)
    assert (first.events, first.last) == ([step_row(1), step_row(2)], 2)
    assert mailbox.fetch(1, 2, STATE).events == []
    # Another recorder, which has been given nothing: what the one before has not written.
    assert mailbox.fetch(0, 0, STATE).events == [step_row(2)]
    mailbox.fetch(2, 2, STATE)
    assert mailbox.fetch(0, 0, STATE).events == []


def test_the_end_of_a_run_is_kept_for_another_recorder() -> None:
    """It is in the journal before all of it is drawn and sent: whoever takes over has to do that."""
    end = Finished({"step": 1})
    mailbox = mailbox_with(step_row(1))
    mailbox.record([end])
    assert mailbox.fetch(0, 0, STATE).events == [step_row(1), end]
    assert mailbox.fetch(2, 2, STATE).events == []
    assert mailbox.fetch(0, 0, STATE).events == [end]


def test_it_is_closed_for_whoever_has_all_of_it() -> None:
    mailbox = mailbox_with(step_row(1))
    mailbox.record([Failed("why")])
    mailbox.close()
    fetched = mailbox.fetch(0, 0, STATE)
    assert fetched.closed
    assert mailbox.fetch(0, 0, STATE).closed
    assert mailbox_with(step_row(1)).fetch(0, 0, STATE).closed is False


def test_its_recorder_is_called_when_a_run_begins_and_not_at_each_event() -> None:
    """The workers wait for the run's id."""
    called: list[int] = []
    mailbox = mailbox_with()
    mailbox.recorded_by(SimpleNamespace(look=SimpleNamespace(remote=lambda: called.append(1))))
    mailbox.tell(1, [Warned("w")])
    assert called == []
    mailbox.tell(1, [Started({})])
    assert called == [1]
    mailbox.tell(1, [step_row(1)])
    assert called == [1]


def test_how_an_attempt_ended_is_seen_and_not_recorded() -> None:
    """The driver says whether it is the run's end: an attempt that moves ends too."""
    broke = Broke(ClusterError("gone"), "trace")
    mailbox = mailbox_with(Finished({"stopped": True}), broke, StageEnded("arrival", 1.0), Warned("w"))
    view = mailbox.status().view
    assert (view.summary, view.error, view.warnings) == ({"stopped": True}, broke.error, ["w"])
    assert mailbox.fetch(0, 0, STATE).events == [Warned("w")]


def test_what_an_attempt_that_was_given_up_tells_is_recorded_and_not_seen() -> None:
    mailbox = mailbox_with()
    mailbox.begin(2)
    mailbox.tell(1, [step_row(5, attempt=1), Broke(ClusterError("late"), "")])
    assert mailbox.status().view.step is None
    assert mailbox.status().view.error is None
    assert mailbox.fetch(0, 0, STATE).events == [step_row(5, attempt=1)]


def test_workers_are_answered_with_what_is_asked_of_this_attempt() -> None:
    mailbox = mailbox_with()
    mailbox.ask_save()
    mailbox.ask_save()
    mailbox.ask_stop()
    assert mailbox.tell(1, []) == (True, 2, 0)
    mailbox.begin(2)
    assert mailbox.tell(2, []) == (False, 0, 0)


def test_a_worker_that_asks_for_the_run_learns_its_id_or_why_there_is_none() -> None:
    mailbox = mailbox_with()
    assert mailbox.run_id() is None
    refused = RecordError("record.uri: refused")
    mailbox.fetch(0, 0, RecorderState(failure=refused))
    assert mailbox.run_id() is refused
    mailbox.fetch(0, 0, STATE)
    assert mailbox.run_id() == "abc"
    assert mailbox.status().fetches == 2


def joined(rank: int) -> Joined:
    return Joined(rank, f"node-{rank}", 100 + rank, Path("stacks"), "")


def test_workers_that_outlive_another_are_seen_as_the_next_attempt() -> None:
    """By their new ranks; an error that one tells by its number is told by its rank."""
    mailbox = Mailbox()
    mailbox.begin(1, workers=3)
    for worker in range(3):
        mailbox.tell(1, [joined(worker)])
        mailbox.ready(1, worker)
    mailbox.tell(1, [step_row(7)])
    assert mailbox.lose(0)
    for worker in (1, 2):
        mailbox.arrive(1, worker, Arrival(Progress(7, 0), "host", worker))
    status = mailbox.status()
    assert isinstance(mailbox.ask(1, 1), Formation)
    assert status.went_on is not None
    assert (status.went_on.step, status.went_on.workers, status.view.attempt) == (7, 2, 2)
    assert {rank: member.pid for rank, member in status.view.members.items()} == {0: 101, 1: 102}
    assert status.view.signs_of_life > 0  # it may not be silent for as long as a new one
    mailbox.tell(2, [Broke(DeviceError("ECC"), "", rank=2)])
    assert mailbox.status().view.device_ranks == {1}
    mailbox.begin(3, workers=2)
    assert mailbox.status().went_on is None
    assert not mailbox.lose(0)  # nobody trains yet


@pytest.mark.parametrize(("error", "goes_on"), [(DeviceError("ECC"), True), (JobError("no gradient"), False)])
def test_a_worker_whose_device_failed_is_outlived_and_one_with_an_error_of_the_job_is_not(
    error: LockstepError, goes_on: bool
) -> None:
    """What was seen of the attempt that it ended goes on to the driver: who failed there, and where."""
    mailbox = Mailbox()
    mailbox.begin(1, workers=3)
    for worker in range(3):
        mailbox.tell(1, [joined(worker)])
        mailbox.ready(1, worker)
    mailbox.tell(1, [step_row(7), Broke(error, "", rank=1)])
    assert mailbox.lose(1) == goes_on
    for worker in (0, 2):
        mailbox.arrive(1, worker, Arrival(Progress(7, 0), "host", worker))
    went_on = mailbox.status().went_on
    assert (went_on is not None) == goes_on
    if went_on is not None:
        (left,) = went_on.left
        assert left.error is error
        assert left.device_ranks == {1}
        assert {rank: member.pid for rank, member in left.members.items()} == {0: 100, 1: 101, 2: 102}
        assert mailbox.status().view.error is None


def test_what_workers_call_before_their_attempt_is_begun_waits_for_that() -> None:
    """A mailbox that starts late takes the calls of the driver and of workers at once, in any order."""
    mailbox = Mailbox()
    for worker in (0, 1):
        mailbox.tell(1, [joined(worker), Warned(f"of {worker}")])
        mailbox.ready(1, worker)
    mailbox.begin(1, workers=3)
    mailbox.tell(1, [joined(2)])
    mailbox.ready(1, 2)
    status = mailbox.status()
    assert sorted(status.everyone) == sorted(status.view.members) == [0, 1, 2]
    assert status.view.warnings == ["of 0", "of 1"]
    assert mailbox.fetch(0, 0, STATE).events == [Warned("of 0"), Warned("of 1")]
    assert mailbox.lose(2)  # two others train, and go on
    mailbox.tell(2, [Warned("of the next")])  # from here on nothing waits: what is told is recorded
    assert mailbox.fetch(2, 2, STATE).events == [Warned("of the next")]


def test_a_joining_worker_is_seen_once_it_is_let_in() -> None:
    """What it tells before is recorded and ends nothing; the workers are asked in the answer to what they tell."""
    mailbox = Mailbox()
    mailbox.begin(1, workers=1)
    mailbox.tell(1, [joined(0)])
    mailbox.ready(1, 0)
    mailbox.enter(1, joined(1), Arrival(None, "host", 0))
    mailbox.tell(0, [Warned("its own")])
    status = mailbox.status()
    assert (status.numbers, status.waiting, list(status.view.members)) == ((0,), (1,), [0])
    assert mailbox.ask_regroup(())
    assert mailbox.tell(1, [step_row(7)]).regroup == 1
    mailbox.arrive(1, 0, Arrival(Progress(7, 0), "host", 5))
    status = mailbox.status()
    assert isinstance(mailbox.ask(None, 1), Formation)
    assert status.went_on is not None
    assert (status.went_on.workers, status.went_on.joined, status.numbers) == (2, 1, (0, 1))
    assert {rank: member.pid for rank, member in status.view.members.items()} == {0: 100, 1: 101}
    mailbox.tell(2, [Broke(DeviceError("ECC"), "", rank=1)])
    assert mailbox.status().view.device_ranks == {1}


def test_a_worker_that_rays_trainer_starts_is_the_first_of_its_rank_or_joins_or_is_not_needed() -> None:
    """Ray's controller starts another worker for each process that ends, whatever the attempt came to."""
    mailbox = Mailbox()
    assert mailbox.take_slot(1, 0, ["of 0"]) is None  # the driver has not begun the attempt
    mailbox.begin(1, workers=2)
    slots = [mailbox.take_slot(1, rank, [f"of {rank}"]) for rank in (0, 1)]
    assert slots == [TrainerSlot(0), TrainerSlot(1)]
    assert mailbox.slots(1).references == {0: ["of 0"], 1: ["of 1"]}  # a loss is noticed from here on
    assert mailbox.take_slot(1, 1, ["of none"]) == TrainerSlot(None)  # not all train yet: nobody goes on
    for worker in (0, 1):
        mailbox.tell(1, [joined(worker)])
        mailbox.ready(1, worker)
    assert mailbox.lose(1)
    assert mailbox.take_slot(1, 1, ["of 2"]) == TrainerSlot(2)
    mailbox.leave_slot(1, 0)
    assert mailbox.slots(1) == TrainerSlots({0: ["of 0"], 1: ["of 1"], 2: ["of 2"]}, frozenset({0}))
    mailbox.tell(1, [Finished({"stopped": False})])
    assert mailbox.take_slot(1, 1, ["of none"]) == TrainerSlot(None)
    mailbox.begin(2, workers=2)
    assert mailbox.take_slot(1, 0, ["of none"]) == TrainerSlot(None)
    assert mailbox.take_slot(2, 0, ["of 0"]) == TrainerSlot(0)
    assert mailbox.slots(1) == TrainerSlots({}, frozenset())
    assert mailbox.slots(2) == TrainerSlots({0: ["of 0"]}, frozenset())


def test_the_first_workers_of_an_attempt_meet_where_its_rank_0_serves() -> None:
    mailbox = Mailbox()
    mailbox.begin(1, workers=2)
    assert mailbox.rendezvous_address(1) is None
    mailbox.meet_at(1, ("host", 7))
    assert mailbox.rendezvous_address(1) == ("host", 7)
    mailbox.begin(2, workers=2)
    assert mailbox.rendezvous_address(2) is mailbox.rendezvous_address(1) is None
    mailbox.meet_at(1, ("host", 8))  # late
    assert mailbox.rendezvous_address(2) is None


def test_workers_do_not_outlive_another_once_the_run_has_ended() -> None:
    mailbox = Mailbox()
    mailbox.begin(1, workers=2)
    for worker in range(2):
        mailbox.ready(1, worker)
    mailbox.tell(1, [Finished({"stopped": False})])
    mailbox.arrive(1, 1, Arrival(Progress(7, 0), "host", 1))
    assert isinstance(mailbox.ask(1, 1), Refused)


def test_a_run_that_goes_on_by_itself_is_looked_at_less_often() -> None:
    now = time.time()
    assert look_every_s(None) == look_every_s(now + 60) == look_every_s(now) == LOOK_S
    assert LOOK_S < look_every_s(now - 5) < STEADY_LOOK_S
    assert look_every_s(now - 60) == STEADY_LOOK_S >= 3 * LOOK_S
