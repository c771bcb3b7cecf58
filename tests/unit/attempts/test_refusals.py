"""What ends an attempt, and what becomes of its mailbox and its recorder, is told as the problem that it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

from lockstep.attempts import mailbox, problems, recording
from lockstep.attempts.mailbox import MailboxRendezvousClient
from lockstep.attempts.placement import WorkerPlacement
from lockstep.attempts.recording import Recording
from lockstep.attempts.worker_group import WorkerGroup
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.clusters.bounded_calls import unanswered
from lockstep.spec.loading import load_spec
from tests.raised import raises


@pytest.mark.parametrize("ranks", [[1], [0, 1]])
def test_an_attempt_that_ends_after_losses_tells_them(ranks: list[int]) -> None:
    spec = load_spec({"job": {"use": "jobs.digits.job:Digits"}, "record": {"uri": "off"}})
    place = WorkerPlacement(2, {"CPU": 1.0}, frozenset(), frozenset())
    group: Any = WorkerGroup(spec, AttemptOrigin(), None, place, {}, "shown")
    group._make_trainer = lambda storage: SimpleNamespace(fit=lambda: None)
    for rank in ranks:
        group.lost[rank] = problems.JOINED_LOST(worker=rank, got="it was killed")
    group._fit()
    assert group.error.code == (problems.JOINED_LOST if len(ranks) == 1 else problems.SEVERAL_LOST).code
    assert str(group.error) == "; ".join(
        f"worker {rank}, which had joined, was lost: it was killed" for rank in ranks
    )


def test_a_run_without_an_id_goes_on_with_no_other_mailbox_or_recorder() -> None:
    """A second one might create the run a second time."""
    recorded: Any = Recording.__new__(Recording)
    recorded.run_id = None
    with raises(problems.MAILBOX_LOST, got="it did not answer for 60 s"):
        recorded.reopen(unanswered("it", 60.0))
    with raises(problems.RECORDER_LOST, got="the recorder did nothing for 60 s"):
        recorded._replace("the recorder did nothing for 60 s")
    recorded.run_id, recorded._recorders = "f00", recording.MOST_RECORDERS
    with raises(problems.RECORDERS_LOST, count=recording.MOST_RECORDERS - 1):
        recorded._replace("the recorder did nothing for 60 s")


def test_a_mailbox_that_cannot_be_reached_is_told_to_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any) -> Any:
        raise ray.exceptions.ActorUnavailableError("cut", b"x" * 16)

    monkeypatch.setattr(mailbox, "answer_of", unreachable)
    called = SimpleNamespace(called=SimpleNamespace(remote=lambda: None))
    with raises(problems.MAILBOX_UNREACHABLE):
        MailboxRendezvousClient(called, 1, 0).called()
