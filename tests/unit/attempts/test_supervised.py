"""What the supervisor does of a run that trains, where something around it fails."""

from __future__ import annotations

import errno
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.attempts import patience, supervisor, waiting
from lockstep.attempts.attempt_summary import AttemptSummary
from lockstep.attempts.run_end import RunEnd
from lockstep.attempts.supervisor import Supervisor
from lockstep.checkpoint.run_folder import AttemptOrigin
from lockstep.checkpoint.runs import claim
from lockstep.clusters import keeper
from lockstep.driver.run_view import RunView
from lockstep.driver.signals import StopSignal
from lockstep.errors import ClusterError, DeviceError, LockstepError, SilentError, SpecError, StorageError
from lockstep.record.events import Event, Failed
from lockstep.spec.loading import load_spec


class Recording:
    """What is asked of a run, and what is told of it: in its record, and on the noticeboard."""

    run_id = "a" * 32

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.told: list[Event] = []
        self.closed = False
        self.shown: list[str] = []

    def ask_stop(self) -> None:
        self.asked.set()

    def tell(self, *events: Event) -> None:
        assert not self.closed
        self.told += events

    def close(self) -> None:
        self.closed = True

    def ends(self, status: str, _step: int) -> None:
        self.shown.append(status)


class Attempt:
    """Workers that end an attempt, with a checkpoint, once they are asked to."""

    def __init__(self, recording: Recording) -> None:
        self.over = recording.asked
        self.killed = False

    def end(self) -> None:
        self.killed = True


def supervised(recording: Recording) -> Any:
    made: Any = object.__new__(Supervisor)
    made.spec = load_spec({"job": {"use": "a:B"}})
    made.stop = made.progress = SimpleNamespace(say=None)
    made._recording, made._moving, made._saved = recording, None, False
    made._blame = SimpleNamespace(left_out=frozenset())
    asked: Any = recording
    made._end = RunEnd(asked, asked, pytest.fail, verbose=False)
    return made


def test_an_attempt_stays_on_a_node_to_be_left_while_nothing_else_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others may not answer, or be about to go; the control leaves as soon as they have room."""

    def no_room(*_: Any) -> Any:
        raise SpecError("workers.min: got 2 workers of 2 CPU each, but the cluster has 2 CPU, enough for 1")

    recording = Recording()
    run, view = supervised(recording), SimpleNamespace(members={0: SimpleNamespace(node="a")}, error=None)
    monkeypatch.setattr(supervisor, "find_place", no_room)
    run._leave(frozenset({"a"}), view)
    assert not recording.asked.is_set()
    monkeypatch.setattr(supervisor, "find_place", lambda *_: SimpleNamespace(fit=frozenset({"b"})))
    run._leave(frozenset({"a"}), view)
    assert recording.asked.is_set()
    assert run._moving == "a worker on one of its nodes had wrong bits"


def test_a_fault_of_the_drivers_own_costs_no_step_and_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers are asked to stop, which saves; the run is FAILED with the error, and not left as one that trains."""
    recording = Recording()
    run, attempt = supervised(recording), Attempt(recording)
    monkeypatch.setattr(supervisor, "first_place", lambda *_: None)
    monkeypatch.setattr(supervisor, "ClusterWatch", lambda *_: SimpleNamespace(close=lambda: None))
    run._watch_until_over = lambda *_: 1 / 0
    run._attempts = lambda place: run._watch(attempt, place)
    with pytest.raises(ZeroDivisionError):
        run.run()
    assert recording.asked.is_set()
    assert recording.closed
    assert not attempt.killed
    (failed,) = recording.told
    assert isinstance(failed, Failed)
    assert failed.message == "the driver failed: ZeroDivisionError: division by zero"
    assert "_watch_until_over" in failed.details


class GoesOn(Exception):
    """A run has come to its second attempt."""


@pytest.mark.parametrize("case", ["lost", "there", "lost at a resume", "unsaved"])
def test_a_storage_that_is_lost_while_a_run_trains_is_not_begun_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str
) -> None:
    """An unmounted disk leaves an empty folder: the next attempt would train from step 1 into what the mount hides. The controls go on:
    one with its folder, one whose workers make that with their first checkpoint, and have made none yet."""
    recording, lost = Recording(), case.startswith("lost")
    run = supervised(recording)
    run.spec = load_spec({"job": {"use": "a:B"}, "checkpoint": {"storage": str(tmp_path / "runs")}})
    run.stop = SimpleNamespace(wait=lambda _: None, asked=False)
    run.progress = SimpleNamespace(say=lambda _: None)
    run.origin, run.summaries = AttemptOrigin(), []
    if case == "lost at a resume":
        run.origin = claim(run.spec.checkpoint.storage, recording.run_id, None)
    elif case != "unsaved":
        claim(run.spec.checkpoint.storage, recording.run_id, None)
    run._blame = SimpleNamespace(left_out=frozenset(), doubts=())
    run._tell_summaries = lambda: None
    monkeypatch.setattr(supervisor, "next_place", lambda *_: None)
    monkeypatch.setattr(patience, "PAUSES_S", ())

    def attempt(_: Any) -> RunView:
        if run.summaries:
            raise GoesOn
        if lost:
            shutil.rmtree(run.spec.checkpoint.storage)
            Path(run.spec.checkpoint.storage).mkdir()
        run.summaries.append(
            AttemptSummary(run.origin.attempt, 1, 0.0, last_step=0 if run.origin.run_id else 7)
        )
        run._saved = case in ("lost", "there")
        return RunView(run.origin.attempt, error=ClusterError("a worker was lost"), details="its traceback")

    run._attempt = attempt
    if not lost:
        with pytest.raises(GoesOn):
            run._attempts(None)
        assert run.origin.attempt == 2
        assert recording.told == []
        return
    with pytest.raises(StorageError, match=r"nothing is left of run a{32} in .*, though it has trained"):
        run._attempts(None)
    (failed,) = recording.told
    assert isinstance(failed, Failed)
    assert "though it has trained" in failed.message
    assert list(Path(run.spec.checkpoint.storage).iterdir()) == []


@pytest.mark.parametrize("where", ["room", "storage", "workers"])
def test_what_ends_a_run_beside_its_attempts_is_recorded(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """No room within the time for it, a storage that refuses, workers that Ray does not end: told once, in the words that a person is shown."""
    recording = Recording()
    run = supervised(recording)
    run.stop = SimpleNamespace(wait=lambda _: None, asked=False)
    run.progress = SimpleNamespace(say=lambda _: None)
    run.summaries = [AttemptSummary(1, 2, 0.0, last_step=7)]
    run._tell_summaries = lambda: None
    error = StorageError("no") if where == "storage" else ClusterError("no")

    def refused(*_: Any) -> Any:
        raise error

    def attempt(_: Any) -> RunView:
        if where == "workers":
            raise error
        return RunView(1, error=ClusterError("a worker was lost"), details="its traceback")

    run._attempt, run._saved_step = attempt, refused if where == "storage" else lambda: 5
    monkeypatch.setattr(supervisor, "first_place", lambda *_: None)
    monkeypatch.setattr(supervisor, "next_place", refused)
    with pytest.raises(type(error), match=r"^no; run a{32}"):
        run.run()
    (failed,) = recording.told
    assert isinstance(failed, Failed)
    assert failed.message == "no"
    assert recording.closed


@pytest.mark.parametrize("where", ["after a loss", "at the wait for workers", "at the wait for storage"])
def test_a_signal_ends_a_run_that_would_go_on(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """It is KILLED with the signal's exit code, which no keeper starts again, and says neither that a worker is replaced nor how long nobody waited."""
    recording = Recording()
    run, stop = supervised(recording), StopSignal()
    run.stop, run.progress = stop, SimpleNamespace(say=lambda _: None)
    run.summaries = [AttemptSummary(1, 2, 0.0, last_step=7), AttemptSummary(2, 2, 0.0)]
    run._tell_summaries, run._saved_step = lambda: None, lambda: 5

    def attempt(_: Any) -> RunView:
        if where == "after a loss":
            stop.ask()
        return RunView(2, error=ClusterError("rank 0 of 2 was lost: gone"), details="its traceback")

    def no_room(*_: Any) -> Any:
        stop.ask()
        raise SpecError("workers.min: got 2 workers of 1 CPU each, but the cluster has 1 CPU, enough for 1")

    def no_answer(*_: Any, **__: Any) -> Any:
        stop.ask()
        raise StorageError("checkpoint: Stale file handle") from OSError(errno.ESTALE, "Stale file handle")

    run._attempt = attempt
    monkeypatch.setattr(supervisor, "first_place", lambda *_: None)
    if where == "at the wait for storage":
        run.origin = AttemptOrigin()
        monkeypatch.setattr(supervisor, "next_place", lambda *_: None)
        monkeypatch.setattr(supervisor, "claim", no_answer)
    monkeypatch.setattr(waiting, "find_place", no_room)
    monkeypatch.setattr(waiting, "most_resources", list)
    monkeypatch.setattr(waiting, "RoomRequest", NoRequest)
    monkeypatch.setattr(keeper, "first_job", lambda: "first")
    monkeypatch.setattr(
        keeper, "_start_keeper", lambda *_: SimpleNamespace(ready=SimpleNamespace(remote=str))
    )
    monkeypatch.setattr(keeper, "in_background", lambda *_, **__: None)
    with pytest.raises(LockstepError) as raised, keeper.kept(3, str):
        run.run()
    (failed,) = recording.told
    assert isinstance(failed, Failed)
    assert failed.status == "KILLED"
    assert recording.shown == ["KILLED"]
    assert raised.value.exit_code == 143
    told = {
        "after a loss": "rank 0 of 2 was lost: gone (attempt 2; a signal ends the run)",
        "at the wait for workers": "enough for 1; a signal ended the wait for workers after 0 s",
        "at the wait for storage": "checkpoint: Stale file handle",
    }[where]
    assert failed.message.endswith(told)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (None, "no rank made progress"),
        (ClusterError("rank 1: the other workers cannot be reached"), "no rank made progress"),
        (DeviceError("rank 1: a GPU is gone"), "rank 1: a GPU is gone"),
    ],
)
def test_a_hung_attempt_is_told_as_one_whatever_its_end_breaks(
    monkeypatch: pytest.MonkeyPatch, told: LockstepError | None, why: str
) -> None:
    """Its workers are killed node by node: those that are killed last see the others go. What broke a rank by itself is the cause."""
    status = SimpleNamespace(view=RunView(1, error=told))
    recording: Any = SimpleNamespace(
        mailbox=None, run_id=None, begin=lambda *_, **__: None, status=lambda: status
    )
    run = supervised(recording)
    run.origin, run.environment, run.summaries = AttemptOrigin(), {}, []
    run._shown_as, run._source = "shown", None
    run._standbys = SimpleNamespace(first=lambda place: place)
    run._blame = SimpleNamespace(end=lambda *_: None)
    run._look = lambda *_: None
    monkeypatch.setattr(
        supervisor,
        "WorkerGroup",
        lambda *_: SimpleNamespace(error=None, stage_ends=SimpleNamespace(at={})),
    )

    def ended_as_hung(group: Any, _: Any) -> None:
        group.error = SilentError("no rank made progress for 300 s, so the attempt was ended")

    run._watch = ended_as_hung
    assert str(run._attempt(SimpleNamespace(workers=2)).error).startswith(why)


class NoRequest:
    """Nothing is asked of the cluster."""

    def want(self, *_: Any, **__: Any) -> None: ...

    def release(self) -> None: ...
