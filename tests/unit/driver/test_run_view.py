"""What is seen of an attempt is a fold over its events: a test of it is a list."""

from __future__ import annotations

from pathlib import Path

from lockstep.driver.run_view import RunView
from lockstep.errors import ClusterError, JobError
from lockstep.record.events.union import (
    Alive,
    Broke,
    CheckpointRow,
    Event,
    Finished,
    Joined,
    Printed,
    Restored,
    StageEnded,
    Started,
    Straggling,
    Warned,
)
from tests.unit.record.rows import evaluation_row, step_row


def view_of(*events: Event, attempt: int = 1) -> RunView:
    view = RunView(attempt)
    for event in events:
        view.take(event)
    return view


def test_the_newest_of_everything_is_seen() -> None:
    joined = [Joined(rank, "node", 7 + rank, Path("stacks"), "{}") for rank in (1, 0)]
    view = view_of(
        *joined,
        Started({"plan": {"total_steps": 9}}),
        step_row(1),
        step_row(2),
        evaluation_row(2),
        Straggling("rank 1 is slow"),
        Warned("mind the gap"),
        Finished({"step": 2}, [Path("final")]),
    )
    assert (view.step, view.evaluation, view.total_steps) == (step_row(2), evaluation_row(2), 9)
    assert (view.stragglers, view.warnings) == (["rank 1 is slow"], ["mind the gap"])
    assert sorted(view.members) == [0, 1]
    assert (view.summary, view.files) == ({"step": 2}, [Path("final")])


def test_signs_of_life_count_from_the_first_step_of_the_attempt_on() -> None:
    """Before it anything may take as long as it likes; a row of another attempt is no sign of this one."""
    assert view_of(Alive(), evaluation_row(0), step_row(1, attempt=1), attempt=2).signs_of_life == 0
    assert view_of(Alive(), step_row(1), Alive(), evaluation_row(1), step_row(2)).signs_of_life == 4


def test_a_restored_row_is_shown_and_no_sign_of_life() -> None:
    view = view_of(Restored([step_row(1), step_row(2)], [evaluation_row(2)]))
    assert (view.step, view.evaluation, view.signs_of_life) == (step_row(2), evaluation_row(2), 0)


def test_the_first_time_counts_for_a_stage() -> None:
    view = view_of(StageEnded("checkpoint", 1.0), StageEnded("checkpoint", 2.0), step_row(3))
    assert view.stage_ends == {"checkpoint": 1.0, "first_step": step_row(3).wall_clock}


def test_the_cause_is_told_before_the_loss_of_a_peer() -> None:
    lost, cause = Broke(ClusterError("a peer is gone"), "a"), Broke(JobError("no gradient"), "b")
    assert view_of(lost, cause).error is cause.error
    assert view_of(cause, lost).error is cause.error
    assert view_of(lost, Broke(ClusterError("another"), "c")).details == "a"


def test_another_attempt_begins_without_what_ended_the_one_before() -> None:
    ended = view_of(step_row(4), Warned("once"), Broke(ClusterError("gone"), ""), Straggling("slow"))
    fresh = ended.next(2)
    assert (fresh.attempt, fresh.step, fresh.warnings) == (2, step_row(4), ["once"])
    assert (fresh.error, fresh.signs_of_life, fresh.stragglers) == (None, 0, [])


def test_a_run_has_saved_from_its_first_whole_checkpoint_on() -> None:
    """Until then its workers have made no folder, and another attempt may find none."""
    failed = CheckpointRow(4, None, "a disk is full", 0, 0.0, 0.0, 0.0, 0.0)
    assert not view_of(step_row(4), failed).saved
    saved = view_of(step_row(8), CheckpointRow(8, "runs/1/step-8", None, 9, 0.0, 0.0, 0.0, 0.0), failed)
    assert saved.saved
    assert saved.next(2).saved
    assert saved.gone_on(2, ()).saved


TIMED_OUT = (
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=BROADCAST, NumelIn=131072000, "
    "NumelOut=131072000, Timeout(ms)=900000) ran for 900081 milliseconds before timing out."
)
ENDED = (
    "[PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: NCCL error: remote "
    "process exited or there was a network error, NCCL version 2.27.5"
)


def test_a_worker_that_nccls_watchdog_ended_is_told_as_a_lost_one_in_the_watchdogs_words() -> None:
    """It ends by SIGABRT, of which Ray says only that the process is gone: what the worker printed before tells why."""
    lost = ClusterError("rank 0, 1 of 2 was lost: it was killed from outside or crashed")
    for line in (TIMED_OUT, ENDED):
        printed = f"step 3\n[rank1]:[E1124 20:27:21.426415540 ProcessGroupNCCL.cpp:685] {line}\nmore\n"
        view = view_of(
            step_row(1),
            Printed("attempt-1-rank-1-stderr", printed),
            Printed("attempt-1-rank-0-stderr", f"{ENDED} x"),
        )
        told = view.lost(lost)
        assert type(told) is ClusterError
        assert str(told) == f"{lost}; NCCL's watchdog ended a worker that waited for another: {line}"
    assert view_of(Printed("attempt-1-rank-0-stdout", "the watchdog sleeps")).lost(lost) is lost
    assert view.next(2).watchdog is None
