"""A run under its supervisor, from attempt to attempt: what each ended with decides what follows."""

from __future__ import annotations

import errno
import json
import re
import shutil
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from lockstep.attempts import first_placement, storage_retries, supervisor
from lockstep.attempts.mailbox import Mailbox, RunStatus
from lockstep.attempts.placement import WorkerPlacement
from lockstep.attempts.planned_change import Members
from lockstep.attempts.problems import NO_FIRST_STEP, NO_PROGRESS, REPEATED, TOO_SMALL, WAIT_SIGNALLED
from lockstep.attempts.resizing import Advice
from lockstep.checkpoint import problems as checkpoint_problems
from lockstep.checkpoint.runs.run_checkpoints import claim, steps_of
from lockstep.checkpoint.runs.run_folder import AttemptOrigin, RunFolder
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.checks.machine_health import Health, judged
from lockstep.clusters import driver_restarter
from lockstep.data.table_pins import FIELD
from lockstep.errors import (
    ClusterError,
    DeviceError,
    FailedAt,
    JobError,
    LockstepError,
    SilentError,
    SpecError,
    StorageError,
)
from lockstep.record.events.union import (
    Alerted,
    Alive,
    Broke,
    Document,
    Failed,
    Finished,
    Joined,
    Started,
    Straggling,
    TimeSpent,
    Warned,
)
from lockstep.record.ledger.goodput import spent_text
from lockstep.record.problems import NOT_RECORDED
from tests.raised import raises
from tests.unit.attempts.supervised import RUN_ID, Script, Supervised, Workers
from tests.unit.checks.test_machine_health import SOUND
from tests.unit.record.rows import corrupted, step_row


def trains(*steps: int, save: int | None = None, ends: LockstepError | str | None = "lost") -> Script:
    """Workers that take these steps, save after them, and are lost, break with an error, or (None) come to the run's end."""

    def script(workers: Workers) -> Generator[None]:
        for step in steps:
            workers.step(step)
            yield
        if save is not None:
            workers.save(save)
        if ends is None:
            workers.finish(steps[-1])
        elif isinstance(ends, LockstepError):
            workers.break_with(ends)
        else:
            workers.lose()

    return script


def test_a_run_that_lost_its_workers_goes_on_from_its_checkpoint_to_its_end(tmp_path: Path) -> None:
    """Two attempts: the second has the next number and the run's id, and the account tells where each began and what was repeated."""
    run = Supervised(tmp_path, [trains(1, 2, 3, save=2), trains(3, 4, ends=None)])
    result = run.run()
    assert (result.run_id, result.status, result.step, result.attempts) == (RUN_ID, "FINISHED", 4, 2)
    assert [(one.origin.run_id, one.origin.attempt) for one in run.workers] == [(None, 1), (RUN_ID, 2)]
    first, second = run.recording.summaries
    assert (first["from_step"], first["last_step"], first["repeated"]) == (0, 3, 0)
    assert first["why"] == "rank 0 of 1 was lost: it was killed"
    assert (second["from_step"], second["last_step"], second["repeated"], second["why"]) == (
        2,
        4,
        1,
        "finished",
    )
    assert second["lost_s"] is not None
    assert first["began"] <= first["ended"] <= second["began"] <= second["ended"] <= time.time()
    assert run.told.lines[0].startswith("attempt 1 ended: rank 0 of 1 was lost: it was killed; ")
    assert run.stop.pauses == [0.0]
    assert run.told.shown == [("RUNNING", RUN_ID, 1), ("FINISHED", 4)]
    assert isinstance(run.recording.told[-1], Finished)
    assert run.recording.closed


def test_what_the_recorder_finds_as_it_closes_is_told_of_a_run_that_ended_well(tmp_path: Path) -> None:
    """The last rows may be those that diverge or contradict; and only the end tells what the interruptions cost."""
    run = Supervised(tmp_path, [trains(1, ends=None)])
    spent = TimeSpent(2.0, 2.0, 1.0, 0.0, 1, 0.5, 0.25)
    run.recording.at_the_end = {
        "diagnosed": ("it diverges",), "violation": "a row differs", "time_spent": spent
    }  # fmt: skip
    assert run.run().warnings == ["it diverges", "a row differs"]
    assert run.told.lines == ["warning: it diverges", "warning: a row differs", spent_text(spent)]


def test_a_run_without_interruptions_tells_nothing_of_its_time(tmp_path: Path) -> None:
    run = Supervised(tmp_path, [trains(1, ends=None)])
    run.recording.at_the_end = {"time_spent": TimeSpent(2.0, 2.0, 1.0, 0.0, 0, 0.0, 0.0)}
    run.run()
    assert run.told.lines == []


def test_a_run_that_ended_well_and_is_not_recorded_fails_with_what_was_not(tmp_path: Path) -> None:
    """Its workers have come to the end, as the run registry shows; the command that started it must not end as if the record were whole."""
    run = Supervised(tmp_path, [trains(1, ends=None)])
    run.recording.refusal = NOT_RECORDED(got="413", what="metrics of step 1", remedy="send it later")
    with raises(NOT_RECORDED, what="metrics of step 1"):
        run.run()
    assert run.told.shown[-1] == ("FINISHED", 1)


def test_the_next_attempt_reads_the_versions_of_tables_that_the_first_one_found(tmp_path: Path) -> None:
    """Though it saved nothing that could tell them, and the mailbox that was told them is lost."""

    def told_versions(workers: Workers) -> Generator[None]:
        workers.tell(Started({"fields": {f"{FIELD}points": "3"}}))
        yield from trains(1)(workers)

    def in_another_mailbox(workers: Workers) -> Generator[None]:
        run.recording.mailbox = Mailbox()
        yield
        workers.lose()

    run = Supervised(tmp_path, [told_versions, in_another_mailbox, trains(1, ends=None)])
    run.run()
    assert [dict(workers.origin.table_versions) for workers in run.workers] == [{}, *[{"points": "3"}] * 2]


def test_a_run_that_moves_outlives_any_number_of_losses_and_one_that_does_not_is_given_up(
    tmp_path: Path,
) -> None:
    """What counts is whether a checkpoint came between: six losses with one each are none too many, the second without is."""
    faults = {"faults": {"max_worker_failures": 1}}
    scripts = [trains(step, save=step) for step in range(1, 7)]
    run = Supervised(tmp_path / "moves", [*scripts, trains(7, ends=None)], faults)
    assert run.run().attempts == 7
    assert run.stop.pauses == [0.0] * 6

    stuck = Supervised(tmp_path / "stuck", [trains(1, save=1), trains(2), trains(2)], faults)
    with pytest.raises(
        ClusterError,
        match=r"killed \(attempt 2; 2 attempts in a row ended without a new checkpoint",
    ):
        stuck.run()
    assert [workers.origin.attempt for workers in stuck.workers] == [1, 2]


@pytest.mark.parametrize("named", [True, False])
def test_the_loss_of_a_process_is_told_rather_than_what_another_one_met_of_it(
    tmp_path: Path, named: bool
) -> None:
    """Where Ray does not know whose process has ended, the consequence is all that can be told."""
    met = "the other workers cannot be reached (rank 0): RuntimeError: Connection closed by peer"

    def storm(workers: Workers) -> Generator[None]:
        yield
        workers.break_with(ClusterError(met))
        workers.lose("rank 1 of 2 was lost: it was killed")
        workers.names_lost = named

    run = Supervised(tmp_path, [storm, trains(1, ends=None)])
    run.run()
    assert run.recording.summaries[0]["why"] == ("rank 1 of 2 was lost: it was killed" if named else met)


def test_attempts_are_counted_though_none_has_saved(tmp_path: Path) -> None:
    """The first one's workers may still live: what they publish is to be told from what the second does."""
    run = Supervised(tmp_path, [trains(1), trains(1, ends=None)])
    run.run()
    assert [workers.origin.attempt for workers in run.workers] == [1, 2]


def test_a_job_that_has_trained_and_is_then_refused_is_tried_once_more(tmp_path: Path) -> None:
    """A bit that flips in the rehearsal of a later attempt looks like a mistake of the job."""
    refused = JobError("job.loss: returned None")
    run = Supervised(tmp_path, [trains(1, save=1), trains(ends=refused), trains(2, ends=None)])
    assert run.run().attempts == 3
    twice = Supervised(tmp_path / "twice", [trains(1, save=1), *[trains(ends=refused)] * 3])
    with pytest.raises(JobError, match=r"returned None \(attempt 3; it would end in the same way again\)"):
        twice.run()


@pytest.mark.parametrize(
    "scripts",
    [
        [trains(ends=JobError("job.loss: returned None"))],
        [trains(1, 2, save=2, ends=JobError("job.loss: returned None"))],
        [trains(1, save=1), trains(2, save=2, ends=JobError("job.loss: returned None"))],
    ],
    ids=["at once", "in training", "in training after a loss"],
)
def test_an_error_of_the_jobs_own_ends_the_run(tmp_path: Path, scripts: list[Script]) -> None:
    """Another attempt would come to it again: the run is FAILED with the job's traceback, and no worker starts once more."""
    run = Supervised(tmp_path, [*scripts, *[trains(3, ends=None)] * 2])
    with pytest.raises(JobError, match=r"^job\.loss: returned None"):
        run.run()
    assert len(run.workers) == len(scripts)
    failed = run.recording.told[-1]
    assert isinstance(failed, Failed)
    assert (failed.status, failed.details) == ("FAILED", "its traceback")
    assert run.told.shown[-1] == ("FAILED", 0)


def test_room_is_asked_for_no_longer_than_an_attempt_lasts(tmp_path: Path) -> None:
    """However it ends: the autoscaler would keep nodes for a request that nobody withdraws."""
    run = Supervised(tmp_path, [trains(1, save=1), trains(2, ends=None)])
    run.run()
    assert [watch.asks_for_room for watch in run.watches] == [False, False]

    def fails(_: Workers) -> Generator[None]:
        raise ZeroDivisionError
        yield

    broken = Supervised(tmp_path / "broken", [fails])
    with pytest.raises(ZeroDivisionError):
        broken.run()
    assert [watch.asks_for_room for watch in broken.watches] == [False]


def test_a_fault_of_the_drivers_own_costs_no_step_and_is_recorded(tmp_path: Path) -> None:
    """The workers are asked to stop, which saves; the run is FAILED with the error, and not left as one that trains."""

    def no_gauge(*_: Any) -> Any:
        return SimpleNamespace(show=lambda *_: 1 / 0)

    run = Supervised(tmp_path, [until_stopped], around={"gauges": no_gauge})
    with pytest.raises(ZeroDivisionError):
        run.run()
    assert len(steps_of(str(tmp_path), RUN_ID)) == 1
    assert not run.workers[0].ended
    assert run.recording.closed
    failed = run.recording.told[-1]
    assert isinstance(failed, Failed)
    assert failed.message == "the driver failed: ZeroDivisionError: division by zero"
    assert "in look" in failed.details


def until_stopped(workers: Workers) -> Generator[None]:
    """Workers that train until they are asked to stop, save, and end."""
    step = 0
    while not workers.asked.stop:
        step += 1
        assert step < 200, "nobody asks them to stop"
        workers.step(step)
        yield
    workers.save(step)
    workers.finish(step, stopped=True)


@pytest.mark.parametrize(
    "advised",
    [
        Advice(move="node a is being drained", leaving=frozenset({"node-a"})),
        Advice(move="there is room for 2"),
    ],
    ids=["a drain", "room"],
)
def test_an_attempt_that_is_to_move_saves_and_the_next_goes_on_from_there(
    tmp_path: Path, advised: Advice
) -> None:
    """No step is repeated, and the end of the first is none of the run's. Ray's own group lets nobody join, though the workers would."""

    def rest(workers: Workers) -> Generator[None]:
        (first,) = run.recording.summaries
        workers.step(first["last_step"] + 1)
        workers.finish(first["last_step"] + 1)
        return
        yield

    run = Supervised(tmp_path, [until_stopped, rest], advice=[advised])
    result = run.run()
    assert (result.status, result.attempts) == ("FINISHED", 2)
    first, second = run.recording.summaries
    assert first["why"] == advised.move
    assert (second["from_step"], second["repeated"]) == (first["last_step"], 0)
    assert sum(isinstance(event, Finished) for event in run.recording.told) == 1


def test_workers_that_ray_replaces_move_for_room_that_none_of_them_is_to_have(tmp_path: Path) -> None:
    """All are there: the room is for more than Ray would start in the place of those that were lost."""

    def replaced(workers: Workers) -> Generator[None]:
        workers.replaced_by_ray = True
        yield from until_stopped(workers)

    run = Supervised(
        tmp_path, [replaced, trains(300, ends=None)], advice=[Advice(move="there is room for 2")]
    )
    assert run.run().attempts == 2
    assert run.recording.summaries[0]["why"] == "there is room for 2"


def test_the_cluster_is_asked_while_workers_train_and_are_not_to_end(tmp_path: Path) -> None:
    """Before their first step there is nothing to save or to move, and a run that is stopped does not move."""

    def asked() -> int:
        return run.watches[0].advised

    def script(workers: Workers) -> Generator[None]:
        yield from workers.until(lambda: run.recording.looks > 4)
        assert asked() == 0
        workers.step(1)
        yield from workers.until(asked)
        run.stop.ask()
        yield from workers.until(lambda: run.recording.asked_to_stop)
        looks, before = run.recording.looks, asked()
        yield from workers.until(lambda: run.recording.looks > looks + 1)
        assert asked() == before
        workers.save(1)
        workers.finish(1, stopped=True)

    run = Supervised(tmp_path, [script])
    assert run.run().attempts == 1


def test_a_signal_ends_an_attempt_after_a_checkpoint_and_the_run_with_it(tmp_path: Path) -> None:
    def signalled(workers: Workers) -> Generator[None]:
        for _ in until_stopped(workers):
            run.stop.ask()
            yield

    run = Supervised(tmp_path, [signalled])
    result = run.run()
    assert (result.status, result.signal_number, result.attempts) == ("KILLED", 15, 1)
    assert run.told.lines == ["stopping after the next step; a second signal ends the run at once"]
    assert run.told.shown[-1][0] == "KILLED"
    finished = run.recording.told[-1]
    assert isinstance(finished, Finished)
    assert finished.summary["signal"] == 15


def test_what_no_attempt_can_mend_is_told_as_it_is(tmp_path: Path) -> None:
    run = Supervised(tmp_path, [trains(ends=SpecError("optimizer.lr: got -1"))])
    with pytest.raises(SpecError, match=rf"^optimizer\.lr: got -1; run {RUN_ID}"):
        run.run()


def suspected(node: str) -> Script:
    """Three workers of which the one on `node` had wrong bits in steps that are taken again; they train until they are asked to stop."""

    def script(workers: Workers) -> Generator[None]:
        for rank, name in enumerate(("node-a", node, "node-c")):
            workers.tell(Joined(rank, name, 1, Path("stacks"), "{}"))
        workers.step(3)
        workers.tell(corrupted(3, since=2))
        for step in range(4, 12):
            if workers.asked.stop:
                break
            workers.step(step)
            time.sleep(0.1)
            yield
        workers.save(step)
        workers.finish(step, stopped=workers.asked.stop)

    return script


@pytest.mark.parametrize("room", [False, True])
def test_an_attempt_leaves_a_node_that_had_wrong_bits_where_others_have_room(
    tmp_path: Path, room: bool
) -> None:
    """The others may not answer, or be about to go; then it stays."""

    def find_place(_: Any, without: frozenset[str]) -> WorkerPlacement:
        assert without == {"node-b"}
        if not room:
            raise SpecError(
                "workers.min: got 2 workers of 2 CPU each, but the cluster has 2 CPU, enough for 1"
            )
        return WorkerPlacement(1, {"CPU": 1.0}, frozenset({"node-a", "node-c"}), frozenset())

    scripts = [trains(1, save=1), suspected("node-b"), trains(20, ends=None)]
    run = Supervised(tmp_path, scripts, around={"find_place": find_place})
    run.run()
    first, second, *_ = run.recording.summaries
    assert (first["corrupted"], len(second["corrupted"])) == ([], 1)
    why = [one["why"] for one in run.recording.summaries[1:]]
    assert why == (["a worker on one of its nodes had wrong bits", "finished"] if room else ["finished"])
    assert run.watches[-1].without == ({"node-b"} if room else frozenset())


@pytest.mark.parametrize("case", ["lost", "there", "lost at a resume", "unsaved"])
def test_a_storage_that_is_lost_while_a_run_trains_is_not_begun_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str
) -> None:
    """An unmounted disk leaves an empty folder: the next attempt would train from step 1 into what the mount hides. The controls go on:
    one with its folder, one whose workers make that with their first checkpoint, and have made none yet."""
    monkeypatch.setattr(storage_retries, "PAUSES_S", ())
    storage, lost = tmp_path / "runs", case.startswith("lost")
    origin = claim(str(storage), RUN_ID, None) if case == "lost at a resume" else AttemptOrigin()

    def script(workers: Workers) -> Generator[None]:
        yield from trains(1, save=1 if case in ("lost", "there") else None)(workers)
        if lost:
            shutil.rmtree(storage)
            storage.mkdir()

    run = Supervised(storage, [script, trains(1, 2, ends=None)], origin=origin)
    if not lost:
        assert run.run().attempts == 2
        return
    with raises(checkpoint_problems.NOTHING_LEFT, run="a" * 32):
        run.run()
    failed = run.recording.told[-1]
    assert isinstance(failed, Failed)
    assert "though it has trained" in failed.message
    assert list(storage.iterdir()) == []


@pytest.mark.parametrize("where", ["room", "storage", "workers"])
def test_what_ends_a_run_beside_its_attempts_is_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    """No room within the time for it, a storage that refuses, workers that Ray does not end: told once, in the words that a person is shown."""
    monkeypatch.setattr(storage_retries, "PAUSES_S", ())

    def refused(*_: Any) -> Any:
        raise ClusterError("no room")

    def script(workers: Workers) -> Generator[None]:
        workers.step(1)
        yield
        if where == "workers":
            raise ClusterError("Ray did not end them")
        if where == "storage":
            RunFolder.create(open_storage(str(tmp_path)), "another")
            (tmp_path / "another").rename(tmp_path / RUN_ID)
        workers.lose()

    run = Supervised(tmp_path, [script], around={"next_place": refused})
    told = {"room": "no room", "storage": "checkpoint.storage: ", "workers": "Ray did not end them"}[where]
    with pytest.raises(
        StorageError if where == "storage" else ClusterError, match=rf"^{told}.*; run a{{32}}"
    ):
        run.run()
    (failed,) = [event for event in run.recording.told if isinstance(event, Failed)]
    assert failed.message.startswith(told)
    assert f"run {RUN_ID}" not in failed.message
    assert run.recording.closed


@pytest.mark.parametrize("where", ["after a loss", "at the wait for workers", "at the wait for storage"])
def test_a_signal_ends_a_run_that_would_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    """It is KILLED with the signal's exit code, which no driver restarter starts again, and says neither that a worker is replaced nor how long nobody waited."""

    def script(workers: Workers) -> Generator[None]:
        yield from trains(2)(workers)
        if where == "after a loss":
            run.stop.ask()

    def no_room(*_: Any) -> Any:
        run.stop.ask()
        raise TOO_SMALL(got=2, need="1 CPU", have="1 CPU", fit=1)

    def no_answer(*_: Any, **__: Any) -> Any:
        run.stop.ask()
        raise StorageError("checkpoint: Stale file handle") from OSError(errno.ESTALE, "Stale file handle")

    run = Supervised(tmp_path, [trains(1, save=1), script])
    if where == "at the wait for workers":
        run = Supervised(tmp_path, [script], around={"next_place": first_placement.next_place})
    claims = iter([claim, no_answer])
    if where == "at the wait for storage":
        monkeypatch.setattr(supervisor, "claim", lambda *given, **more: next(claims)(*given, **more))
    monkeypatch.setattr(first_placement, "find_place", no_room)
    monkeypatch.setattr(first_placement, "most_resources", list)
    monkeypatch.setattr(first_placement, "RoomRequest", NoRequest)
    monkeypatch.setattr(driver_restarter, "first_job", lambda: "first")
    monkeypatch.setattr(
        driver_restarter,
        "_start_driver_restarter",
        lambda *_: SimpleNamespace(ready=SimpleNamespace(remote=str)),
    )
    monkeypatch.setattr(driver_restarter, "in_background", lambda *_, **__: None)
    with pytest.raises(LockstepError) as raised, driver_restarter.kept(3, str):
        run.run()
    failed = run.recording.told[-1]
    assert isinstance(failed, Failed)
    assert failed.status == "KILLED"
    assert run.told.shown[-1][0] == "KILLED"
    assert raised.value.exit_code == 143
    told = {
        "after a loss": "rank 0 of 1 was lost: it was killed (attempt 2; a signal ends the run)",
        "at the wait for workers": ", and a signal ended the wait for workers after 0 s; lower workers.min",
        "at the wait for storage": "checkpoint: Stale file handle",
    }[where]
    assert told in failed.message
    assert (raised.value.code == WAIT_SIGNALLED.code) == (where == "at the wait for workers")


class NoRequest:
    """Nothing is asked of the cluster."""

    def want(self, *_: Any, **__: Any) -> None: ...

    def release(self) -> None: ...


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (None, "no rank made progress"),
        (ClusterError("rank 1: the other workers cannot be reached"), "no rank made progress"),
        (DeviceError("rank 1: a GPU is gone"), "rank 1: a GPU is gone"),
    ],
)
def test_a_hung_attempt_is_told_as_one_whatever_its_end_breaks(
    tmp_path: Path, told: LockstepError | None, why: str
) -> None:
    """Its workers are killed node by node: those that are killed last see the others go. What broke a rank by itself is the cause."""

    def script(workers: Workers) -> Generator[None]:
        workers.step(1)
        yield
        if told is not None:
            workers.break_with(told)
        workers.error = SilentError("no rank made progress for 300 s, so the attempt was ended")

    run = Supervised(tmp_path, [script, trains(1, ends=None)])
    run.run()
    assert run.recording.summaries[0]["why"].startswith(why)


def test_workers_that_go_on_without_a_lost_one_are_another_attempt(tmp_path: Path) -> None:
    """Twice, in two starts of the workers: each tells its own loss, and the numbers of attempts go on from those in memory."""

    def outlives(why: str) -> Script:
        def script(workers: Workers) -> Generator[None]:
            first = workers.attempt
            for step in (first, first + 1):
                workers.step(step)
                yield
            workers.outlive(1, why, first + 1)
            yield from workers.until(lambda: workers.inside == (0,))
            workers.step(first + 2)
            workers.save(first + 2)
            if first == 1:
                workers.lose()
            else:
                workers.finish(first + 2)

        return script

    run = Supervised(tmp_path, [outlives("rank 1: first"), outlives("rank 1: second")], ranks=2)
    assert run.run().attempts == 4
    assert [one.origin.attempt for one in run.workers] == [1, 3]
    told = [(one["attempt"], one["workers"], one["in_memory"], one["why"]) for one in run.recording.summaries]
    assert told == [
        (1, 2, False, "rank 1: first"),
        (2, 1, True, "rank 0 of 1 was lost: it was killed"),
        (3, 2, False, "rank 1: second"),
        (4, 1, True, "finished"),
    ]
    assert [one["from_step"] for one in run.recording.summaries] == [0, 2, 3, 4]
    assert [watch.left for watch in run.watches] == [[1], [1]]
    assert ["decision" in one["seconds"] for one in run.recording.summaries] == [False, False, True, False]
    assert "attempt 1 ended: rank 1: first; the others go on from step 2" in run.told.lines


def device_error() -> DeviceError:
    error = DeviceError("CUDA error: uncorrectable ECC error encountered")
    error.failed_at = FailedAt("cuda", 7, 3, (4, 5))
    return error


def test_a_worker_whose_device_failed_is_outlived(tmp_path: Path) -> None:
    """Its error is why its attempt ended, with no end of the others' processes."""

    def fails(workers: Workers) -> Generator[None]:
        workers.step(1)
        yield
        workers.tell(Broke(device_error(), "its traceback", 1))
        workers.outlive(1, "rank 1 of 2 was lost: it ended", 1)
        yield from workers.until(lambda: workers.inside == (0,))
        workers.step(2)
        workers.finish(2)

    run = Supervised(tmp_path, [fails], ranks=2)
    assert run.run().attempts == 2
    first, second = run.recording.summaries
    assert first["why"] == f"{device_error()}; rank 1 of 2 was lost: it ended"
    assert second["in_memory"] and second["workers"] == 1


def test_a_micro_batch_that_fails_alike_on_workers_that_are_outlived_is_the_jobs(tmp_path: Path) -> None:
    """On one worker after another until none is left it would be found too late."""

    def fails(workers: Workers) -> Generator[None]:
        workers.step(1)
        yield
        for rank in (2, 1):
            workers.tell(Broke(device_error(), "its traceback", rank))
            workers.outlive(rank, f"rank {rank} was lost: it ended", 1)
            yield from workers.until(lambda rank=rank: len(workers.inside) == rank or workers.ended)
        yield from workers.until(lambda: workers.ended)

    run = Supervised(tmp_path, [fails], ranks=3)
    with raises(REPEATED, step=7, micro_batch=3, workers=re.compile("rank 2 .* in attempt 1 and rank 1 ")):
        run.run()


def test_workers_that_wait_for_one_that_never_comes_are_given_up(tmp_path: Path) -> None:
    """They live, and say so; but no step follows on the loss, and nothing tells why. Without a loss they may take as long as they say that they live."""

    def lives(workers: Workers, enough: Callable[[], object]) -> Generator[None]:
        while not enough():
            workers.tell(Alive())
            yield

    def waits(workers: Workers) -> Generator[None]:
        workers.step(1)
        until = time.monotonic() + 0.7
        yield from lives(workers, lambda: time.monotonic() > until)
        assert not workers.given_up
        workers.lost[1] = "rank 1: gone"
        yield from lives(workers, lambda: workers.given_up)
        workers.lose()

    run = Supervised(tmp_path, [waits, trains(1, ends=None)], {"faults": {"longest_silence_s": 0.4}}, ranks=2)
    assert run.run().attempts == 2


def test_what_a_loss_cost_is_told_once_with_the_first_step_after_it(tmp_path: Path) -> None:
    def goes_on(workers: Workers) -> Generator[None]:
        for step in (2, 3):
            workers.step(step)
            looks = run.recording.looks
            yield from workers.until(lambda n=looks: run.recording.looks > n + 1)
            assert sum("attempt 2 continues" in line for line in run.told.lines) == 1
        workers.finish(3)

    run = Supervised(tmp_path, [trains(1, save=1), goes_on])
    assert run.run().attempts == 2


def test_joining_workers_that_fail_have_the_attempt_move(tmp_path: Path) -> None:
    """It had gone on with the workers that it has, and the ones that are to come would never."""

    def fails(workers: Workers) -> Generator[None]:
        workers.can_regroup = True
        workers.joining_workers.failed[2] = "its node is gone"
        yield from until_stopped(workers)

    run = Supervised(
        tmp_path,
        [fails, trains(300, ends=None)],
        advice=[Advice(move="there is room for 2")],
        around={"start_joining": lambda *_: Members((2,), ())},
    )
    assert run.run().attempts == 2
    (workers, _) = run.workers
    assert workers.joining_workers.ended == [2]
    assert run.recording.summaries[0]["why"] == "there is room for 2"
    told = "worker 2 could not join: its node is gone; all workers are restarted from a checkpoint instead"
    assert Warned(told) in run.recording.told


def test_a_worker_that_joins_while_it_trains_makes_another_attempt(tmp_path: Path) -> None:
    def grows(workers: Workers) -> Generator[None]:
        workers.can_regroup = True
        workers.step(1)
        yield
        yield from workers.join(1, 1)
        yield from workers.until(lambda: workers.inside == (0, 1))
        workers.step(2)
        workers.finish(2)

    run = Supervised(
        tmp_path,
        [grows],
        advice=[Advice(move="there is room for 2")],
        around={"start_joining": lambda *_: Members((1,), ())},
    )
    assert run.run().attempts == 2
    first, second = run.recording.summaries
    assert (first["why"], first["last_step"]) == ("there is room for 2", 1)
    assert (second["workers"], second["joined"], second["in_memory"], second["from_step"]) == (2, 1, True, 1)
    assert [(watch.grown, watch.left) for watch in run.watches] == [([2], [])]
    assert "there is room for 2: 1 workers are to join, 0 to leave, while it trains" in run.told.lines
    assert any(line.endswith("the others go on from step 1, and 1 join them") for line in run.told.lines)


def test_a_worker_that_ray_starts_in_the_place_of_a_lost_one_is_let_in(tmp_path: Path) -> None:
    """Nobody else is started for it, and the attempt does not move for the room that Ray keeps for it."""

    def replaced(workers: Workers) -> Generator[None]:
        workers.can_regroup = workers.replaced_by_ray = True
        workers.step(1)
        yield
        workers.outlive(1, "rank 1: gone", step=1)
        workers.step(2)
        yield from workers.until(lambda: run.watches[0].advised > 3)
        assert not workers.asked.stop
        yield from workers.join(2, 2)
        yield from workers.until(lambda: workers.inside == (0, 2))
        workers.step(3)
        workers.finish(3)

    def start_nobody(*_: Any) -> Members:
        raise AssertionError("another worker is started")

    run = Supervised(
        tmp_path,
        [replaced],
        advice=[Advice(), Advice(), Advice(move="there is room for 2")],
        ranks=2,
        around={"start_joining": start_nobody},
    )
    assert run.run().attempts == 3
    told = [(one["workers"], one["in_memory"], one["joined"], one["why"]) for one in run.recording.summaries]
    assert told == [
        (2, False, 0, "rank 1: gone"),
        (1, True, 0, "Ray has replaced a lost worker"),
        (2, True, 1, "finished"),
    ]


def test_a_run_is_named_once_and_what_is_wrong_with_it_is_told_once(tmp_path: Path) -> None:
    """Whatever warns: the workers, the recorder's diagnosis, and what the record contradicts at the end."""

    def warned(workers: Workers) -> Generator[None]:
        workers.tell(Warned("first"), Warned("second"))
        run.recording.state = run.recording.state._replace(
            diagnosed=("it diverges",), violation="a row differs"
        )
        workers.step(1)
        yield from workers.until(lambda: "warning: it diverges" in run.told.lines)
        workers.lose()

    run = Supervised(tmp_path, [warned, trains(2, ends=None)])
    assert run.run().warnings == ["first", "second", "it diverges", "a row differs"]
    assert run.run_ids == [RUN_ID]
    assert run.recording.is_named
    assert [workers.run_id for workers in run.workers] == [RUN_ID] * 2


def test_a_run_that_goes_on_by_itself_is_looked_at_seldom(tmp_path: Path) -> None:
    """Thousands of runs on one cluster: each look is a call to another process. One that is asked to end is looked at at once."""

    def steady(workers: Workers) -> Generator[None]:
        workers.tell(step_row(1, attempt=1, wall_clock=time.time() - 100.0))
        yield from workers.until(lambda: run.recording.is_named)
        before, began = run.recording.looks, time.monotonic()
        while time.monotonic() < began + 0.9:
            yield
        assert run.recording.looks - before <= 1
        workers.finish(1)

    run = Supervised(tmp_path, [steady])
    run.run()


def test_a_run_that_loses_workers_before_each_checkpoint_saves_at_once(tmp_path: Path) -> None:
    """From the third such attempt on: it would be given up though it moves. The first ones save when the spec has them save."""
    asked: list[int] = []

    def dies(workers: Workers) -> Generator[None]:
        workers.step(1)
        yield
        workers.step(2)
        asked.append(workers.asked.saves)
        workers.lose()

    def saves(workers: Workers) -> Generator[None]:
        workers.step(1)
        yield from workers.until(lambda: workers.mailbox.tell(workers.attempt, []).saves)
        workers.save(1)
        workers.lose()

    run = Supervised(tmp_path, [dies, dies, saves, dies, trains(3, ends=None)])
    assert run.run().attempts == 5
    assert asked == [0, 0, 0]
    assert [one["from_step"] for one in run.recording.summaries] == [0, 0, 0, 1, 1]


def test_workers_whose_mailbox_is_lost_are_ended_and_replaced(tmp_path: Path) -> None:
    """They could tell nobody of a step."""

    def cut_off(workers: Workers) -> Generator[None]:
        workers.step(1)
        yield

        def lost() -> RunStatus:
            del run.recording.status  # type: ignore[method-assign]
            raise ray.exceptions.ActorUnavailableError("it is gone", None)

        run.recording.status = lost  # type: ignore[method-assign]
        while True:
            yield

    run = Supervised(tmp_path, [cut_off, trains(1, ends=None)])
    assert run.run().attempts == 2
    assert [workers.ended for workers in run.workers] == [True, False]
    assert run.recording.summaries[0]["why"].startswith("the mailbox was lost: ")


def test_stragglers_are_in_the_account_and_a_person_hears_of_them_once(tmp_path: Path) -> None:
    def in_account() -> int:
        return sum(len(one["stragglers"]) for one in run.recording.summaries)

    def script(workers: Workers) -> Generator[None]:
        workers.step(1)
        for told, text in enumerate(("rank 1 is slow", "rank 1 is slow again")):
            workers.tell(Straggling(text))
            yield from workers.until(lambda n=told + 1: in_account() == n)
            assert run.told.lines == ["warning: rank 1 is slow"]
        workers.finish(1)

    run = Supervised(tmp_path, [script])
    assert run.run().warnings == ["rank 1 is slow"]
    assert run.told.lines == ["warning: rank 1 is slow"]
    assert run.recording.summaries[0]["stragglers"] == ["rank 1 is slow", "rank 1 is slow again"]


def test_a_resumed_run_begins_at_its_newest_checkpoint(tmp_path: Path) -> None:
    Supervised(tmp_path, [trains(4, save=4, ends=None)]).run()
    origin = claim(str(tmp_path), RUN_ID, None)
    run = Supervised(tmp_path, [trains(5, ends=None)], origin=origin)
    assert run.run().attempts == 2
    (only,) = run.recording.summaries
    assert (only["attempt"], only["from_step"], only["last_step"]) == (2, 4, 5)


def test_workers_that_are_lost_before_there_is_a_run_are_replaced(tmp_path: Path) -> None:
    """There is no id to claim an attempt of, and no checkpoint."""

    def named(workers: Workers) -> Generator[None]:
        run.recording.run_id = RUN_ID
        yield from trains(1, ends=None)(workers)

    run = Supervised(tmp_path, [trains(), named], run_id=None)
    assert run.run().attempts == 2
    assert [one.origin for one in run.workers] == [AttemptOrigin(), AttemptOrigin(attempt=2)]
    assert [one["from_step"] for one in run.recording.summaries] == [0, 0]
    assert run.told.shown == [("RUNNING", RUN_ID, 1), ("FINISHED", 1)]


@pytest.mark.parametrize("begun", [False, True])
def test_an_attempt_that_is_silent_is_ended_with_its_stacks(tmp_path: Path, begun: bool) -> None:
    """No rank goes on without the others, which are being ended; the next attempt takes their steps."""

    def silent(workers: Workers) -> Generator[None]:
        if begun:
            workers.step(1)
        while True:
            yield

    faults = {"longest_silence_s": 0.4, "longest_start_s": 60.0} if begun else {"longest_start_s": 0.4}
    run = Supervised(
        tmp_path,
        [silent, trains(1, ends=None)],
        {"faults": faults},
        around={"end_workers": lambda members: f"stacks of {len(members)}"},
    )
    assert run.run().attempts == 2
    assert run.workers[0].ended
    assert run.recording.refused == ["it made no progress"]
    assert Document("stacks-attempt-1.txt", "stacks of 1") in run.recording.told
    why = run.recording.summaries[0]["why"]
    hung = NO_PROGRESS if begun else NO_FIRST_STEP
    assert (run.workers[0].error.code, "stacks-attempt-1.txt" in why) == (hung.code, True)
    assert "no progress for 0 s: the attempt is ended" in run.told.lines
    assert "what each was doing is in stacks-attempt-1.txt" in why


@pytest.mark.parametrize(("waiting_s", "waits", "alerts"), [(0.1, True, 1), (None, True, 0), (0.1, False, 0)])
def test_a_run_that_waits_for_room_for_too_long_is_told_once(
    tmp_path: Path, waiting_s: float | None, waits: bool, alerts: int
) -> None:
    """Between its attempts, twice; one that finds room at once is not told, however long it trains. Why the one before ended is recorded by then."""
    ended: list[str] = []

    def room(spec: Any, left_out: Any, stop: Any, say: Any) -> WorkerPlacement:
        ended.append(run.recording.summaries[-1]["why"])
        if waits:
            say("waiting for workers: no room for 1")
            time.sleep(0.3)
        return WorkerPlacement(1, {"CPU": 1.0}, frozenset({"node-a"}), frozenset())

    def slow(workers: Workers) -> Generator[None]:
        time.sleep(0.3)
        yield from trains(2, save=2)(workers)

    def last(workers: Workers) -> Generator[None]:
        yield
        workers.finish(2)

    sections = {"alert": {"waiting_s": waiting_s}}
    run = Supervised(tmp_path, [trains(1, save=1), slow, last], sections, around={"next_place": room})
    run.run()
    told = [event for event in run.recording.told if isinstance(event, Alerted)]
    assert [(event.rule, event.step) for event in told] == [("waiting", 1), ("waiting", 2)][: 2 * alerts]
    assert len(ended) == 2 and all(ended)
    assert sum(line.startswith("alert: waiting: waiting for workers") for line in run.told.lines) == alerts


def test_an_unwell_node_gets_no_workers_and_is_named_in_the_record(tmp_path: Path) -> None:
    """Before each attempt, the first one too; without faults.health nobody is asked."""
    placed: list[frozenset[str]] = []
    asked: list[int] = []

    def fleet(spec: Any) -> list[Health]:
        asked.append(1)
        return judged(
            {
                "node-a": replace(SOUND, host="first"),
                "node-b": SOUND,
                "node-c": replace(SOUND, host="third", clock_offset_s=9.0),
            }
        )

    def place(spec: Any, left_out: frozenset[str], *_: Any) -> WorkerPlacement:
        placed.append(left_out)
        return WorkerPlacement(1, {"CPU": 1.0}, frozenset({"node-a", "node-b"}) - left_out, frozenset())

    def last(workers: Workers) -> Generator[None]:
        yield
        workers.finish(1)

    around = {"health": fleet, "find_place": place, "next_place": place}
    for wanted in (True, False):
        asked.clear()
        placed.clear()
        sections = {"faults": {"health": wanted}}
        run = Supervised(tmp_path / str(wanted), [trains(1, save=1), last], sections, around=around)
        run.run()
        warnings = [event.text for event in run.recording.told if isinstance(event, Warned)]
        documents = [
            json.loads(event.text)
            for event in run.recording.told
            if isinstance(event, Document) and event.name == "health.json"
        ]
        if not wanted:
            assert not asked and not documents and placed == [frozenset()]
            continue
        assert len(asked) == 2 and placed == [frozenset({"node-c"}), frozenset({"node-c"})]
        assert warnings == [
            "node node-c (third) is left out from now on: its clock differs from the driver's by +9.0 s"
        ]
        assert [len(document) for document in documents] == [3, 3] and documents[0][2]["vitals"][
            "clock_offset_s"
        ] == 9.0
