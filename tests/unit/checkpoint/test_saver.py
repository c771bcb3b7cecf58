"""Saving beside training: what it costs, what it waits for, and that no failure of it reaches the run."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint import problems
from lockstep.checkpoint.errors import StaleAttemptError
from lockstep.checkpoint.layout import MANIFEST, step_folder
from lockstep.checkpoint.manifest import Facts
from lockstep.checkpoint.reader import Checkpoint, checkpoints, load_step
from lockstep.checkpoint.retention import Keep
from lockstep.checkpoint.runs.run_folder import Attempt, RunFolder
from lockstep.checkpoint.saver import AsyncSaver, Pause, Saved, SaveFailed
from lockstep.checkpoint.storage.interface import Written
from lockstep.checkpoint.storage.local import LocalStorage
from lockstep.errors import StorageError
from tests.raised import raises
from tests.unit.checkpoint.one_process import newest_good
from tests.unit.checkpoint.states import FACTS, bits, everywhere, same, state

ROOT = Path(__file__).parents[3]


class Gated(LocalStorage):
    """A disk that is as slow, and fails as often, as a test wants."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        self.gate.set()
        self.writing = threading.Event()
        self.failures: list[Exception] = []
        self.only = ""
        """Failures concern paths that hold this."""

    def write(self, path: str, pieces: Iterable[bytes | memoryview], *, staging: str) -> Written:
        self.writing.set()
        assert self.gate.wait(60)
        if self.failures and self.only in path:
            raise self.failures.pop(0)
        return super().write(path, pieces, staging=staging)


@pytest.fixture
def disk(tmp_path: Path) -> Gated:
    return Gated(tmp_path)


@pytest.fixture
def attempt(disk: Gated) -> Attempt:
    return RunFolder.create(disk, "run-a").claim()


def steps(attempt: Attempt) -> list[int | None]:
    return [checkpoint.step for checkpoint in checkpoints(attempt.run)]


def whole(attempt: Attempt, step: int, sections: dict[str, Any]) -> bool:
    found = load_step(attempt.run, step).sections
    return set(found) == set(sections) and all(same(found[name], sections[name]) for name in sections)


@everywhere
def test_a_save_is_written_beside_the_run(uri: str) -> None:
    from lockstep.checkpoint.storage.opening import open_storage

    attempt = RunFolder.create(open_storage(uri), "run-a").claim()
    told: list[Saved] = []
    saver = AsyncSaver(attempt, on_saved=told.append)
    saver.save(7, state(7), FACTS)
    saver.close()
    assert whole(attempt, 7, state(7)) and saver.failure is None
    (saved,) = told
    assert saved == saver.last and (saved.step, saved.tries, saved.deleted, saved.warning) == (7, 1, (), None)
    assert (
        saved.checkpoint == Checkpoint.of(attempt.run, 7, attempt.manifest)
        and saved.checkpoint.manifest().facts == FACTS
    )


def test_the_step_waits_for_the_copy_alone(disk: Gated, attempt: Attempt) -> None:
    """What changes after `save` has returned is not in the checkpoint."""
    saver = AsyncSaver(attempt)
    sections = state(7)
    disk.gate.clear()
    pause = saver.save(7, sections)
    assert disk.writing.wait(60) and not saver.wait(0.0) and steps(attempt) == []
    for tensor in sections["model"].values():
        tensor.zero_()
    sections["scaler"]["scale"] = 0.0
    disk.gate.set()
    assert saver.wait()
    assert whole(attempt, 7, state(7))
    assert pause.waited_s < 1.0  # of nothing


def test_a_second_save_waits_for_the_first(disk: Gated, attempt: Attempt) -> None:
    """One in flight: its buffers are those that the next one copies into. How long it waited is told."""
    saver = AsyncSaver(attempt, keep=Keep(last=9))
    disk.gate.clear()
    saver.save(1, state(1))
    threading.Timer(0.3, disk.gate.set).start()
    pause = saver.save(2, state(2))
    assert pause.waited_s > 0.2 and 1 in steps(attempt)
    saver.close()
    assert steps(attempt) == [2, 1] and whole(attempt, 1, state(1)) and whole(attempt, 2, state(2))


def test_later_saves_copy_into_the_buffers_of_the_first(attempt: Attempt) -> None:
    saver = AsyncSaver(attempt)
    places = set()
    for step in (1, 2, 3):
        saver.save(step, state(step))
        assert saver._copied is not None
        places.add(saver._copied.tensors["model"]["conv.weight"].data_ptr())
    assert len(places) == 1
    saver.close()
    assert whole(attempt, 3, state(3))


def test_what_need_not_be_kept_is_deleted(attempt: Attempt) -> None:
    told: list[Saved] = []
    saver = AsyncSaver(attempt, keep=Keep(last=1, metric="eval/loss"), on_saved=told.append)
    for step, loss in ((1, 0.2), (2, 0.1), (3, 0.3), (4, 0.2)):
        saver.save(step, state(step), Facts(metrics={"eval/loss": loss}))
    saver.close()
    assert [saved.deleted for saved in told] == [(), (1,), (), (3,)] and steps(attempt) == [4, 2]


def damaged(attempt: Attempt, *steps: int) -> None:
    """Flip a bit of these checkpoints; the sizes stay right."""
    for step in steps:
        path = attempt.run.path(step_folder(step), "model.a0001.r0000.safetensors")
        content = bytearray(attempt.run.storage.read(path))
        content[-1] ^= 1
        attempt.run.storage.write(path, [bytes(content)], staging=attempt.staging)


def taken_up(attempt: Attempt, since: int, *steps: int) -> list[Saved]:
    """Another attempt of the run, which starts from `since` and saves these steps."""
    told: list[Saved] = []
    saver = AsyncSaver(attempt.run.claim(), keep=Keep(last=2), since=since, on_saved=told.append)
    for step in steps:
        saver.save(step, state(step))
    saver.close()
    return told


@pytest.mark.parametrize(
    ("bad", "since", "saved", "deleted", "left"),
    [
        ((3, 4), 2, (5,), [(1, 3, 4)], [5, 2]),  # 3 and 4 are damaged, and older than what is saved
        ((3, 4), 2, (3,), [(1,)], [4, 3, 2]),  # 4 is evidence until a newer one is good
        ((2, 3, 4), 0, (1, 2, 3), [(), (), (1,)], [4, 3, 2]),  # from the beginning, which saves them again
    ],
)
def test_a_checkpoint_that_was_passed_over_takes_no_other_ones_place(
    attempt: Attempt,
    bad: tuple[int, ...],
    since: int,
    saved: tuple[int, ...],
    deleted: list[tuple[int, ...]],
    left: list[int],
) -> None:
    """G5: of the newest, wrong bits in files of the right size. What the attempt saves stays, and what it starts from."""
    first = AsyncSaver(attempt, keep=Keep(last=4))
    for step in (1, 2, 3, 4):
        first.save(step, state(step))
    first.close()
    damaged(attempt, *bad)
    if not since:
        damaged(attempt, 1)
    told = taken_up(attempt, since, *saved)
    assert [one.deleted for one in told] == deleted and steps(attempt) == left
    assert [one.essential[0][0] for one in told] == list(saved), "no damaged one is essential"
    found = newest_good(attempt.run, lambda text: None)
    assert found is not None and found.step == saved[-1]


def test_what_an_attempt_has_just_saved_stays_where_newer_ones_are_good(attempt: Attempt) -> None:
    """It was started from an older step on purpose."""
    first = AsyncSaver(attempt, keep=Keep(last=2))
    for step in (10, 20, 30):
        first.save(step, state(step))
    first.close()
    told = taken_up(attempt, 5, 6, 7)
    assert [one.deleted for one in told] == [(), (6,)] and steps(attempt) == [30, 20, 7]


def test_a_failed_save_is_tried_again(disk: Gated, attempt: Attempt) -> None:
    failed: list[SaveFailed] = []
    saver = AsyncSaver(attempt, tries=3, pause_s=0.001, on_failure=failed.append)
    for only in (".safetensors", MANIFEST):  # while its part is written, while it is published
        disk.only, disk.failures = only, [StorageError("not now"), StorageError("not yet")]
        saver.save(7 if only == MANIFEST else 8, state(7))
        saver.wait()
        assert saver.last is not None and saver.last.tries == 3
    assert failed == [] and steps(attempt) == [8, 7]


def test_tries_are_bounded_and_further_and_further_apart(disk: Gated, attempt: Attempt) -> None:
    failed: list[SaveFailed] = []
    saver = AsyncSaver(attempt, tries=3, pause_s=0.1, on_failure=failed.append)
    disk.failures = [StorageError(f"failure {i}") for i in range(5)]
    began = time.perf_counter()
    saver.save(7, state(7))
    saver.wait()
    assert time.perf_counter() - began >= 0.1 + 0.2
    (failure,) = failed
    assert failure == saver.failure and (failure.step, failure.tries, str(failure.error)) == (
        7,
        3,
        "failure 2",
    )
    assert steps(attempt) == [] and saver.last is None


@pytest.mark.parametrize(
    "error", [StorageError("no space"), ValueError("a bug\nin two lines"), MemoryError(), OSError(5, "odd")]
)
def test_no_failure_reaches_the_run(disk: Gated, attempt: Attempt, error: Exception) -> None:
    """It is reported, what was saved stands, and the next save goes well."""
    saver = AsyncSaver(attempt, tries=1)
    saver.save(1, state(1))
    saver.wait()
    disk.only, disk.failures = ".safetensors", [error]
    saver.save(2, state(2))
    saver.wait()
    assert saver.failure is not None and saver.failure.step == 2
    assert isinstance(saver.failure.error, StorageError) and "\n" not in str(saver.failure.error)
    assert newest_good(attempt.run, pytest.fail) == Checkpoint.of(attempt.run, 1)
    saver.save(3, state(3))
    saver.close()
    assert saver.failure is None and steps(attempt) == [3, 1] and whole(attempt, 3, state(3))
    assert not (disk.root / "run-a" / step_folder(2)).exists()


def test_a_machine_that_starts_no_thread_is_told_as_that(attempt: Attempt) -> None:
    """Not as what closing the saver meets then."""
    before = threading.stack_size(1 << 46)
    saver = AsyncSaver(attempt)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            saver.save(7, state(7))
    finally:
        threading.stack_size(before)
    saver.close()
    assert steps(attempt) == []


def test_facts_that_cannot_be_written_fail_the_save_alone(attempt: Attempt) -> None:
    saver = AsyncSaver(attempt)
    saver.save(1, state(1), Facts(counters={"step": object()}))
    saver.wait()
    assert saver.failure is not None and saver.failure.error.facts == {
        "where": "counters/step",
        "got": "a builtins.object",
    }


def test_a_failed_step_may_be_saved_again_and_a_saved_one_is_not(disk: Gated, attempt: Attempt) -> None:
    """The last save of a run may be of a step that was saved just before."""
    saver = AsyncSaver(attempt, tries=1)
    disk.only, disk.failures = MANIFEST, [StorageError("not now")]
    saver.save(7, state(7))
    saver.wait()
    assert saver.failure is not None
    saver.save(7, state(7))
    saver.wait()
    assert saver.failure is None and steps(attempt) == [7]
    assert saver.save(7, {"model": object()}).copied_s == 0.0, "it is not even looked at"


def test_a_commit_that_was_told_as_failed_and_was_not_is_found_done(disk: Gated, attempt: Attempt) -> None:
    saver, other = AsyncSaver(attempt), AsyncSaver(attempt)
    other.save(7, state(7))
    other.close()
    saver.save(7, state(7))
    saver.close()
    assert saver.failure is None and saver.last is not None
    assert saver.last.checkpoint == Checkpoint.of(attempt.run, 7, attempt.manifest)


def test_a_stale_attempt_is_not_tried_again(attempt: Attempt) -> None:
    saver = AsyncSaver(attempt, tries=3, pause_s=60.0)
    attempt.run.claim()
    saver.save(7, state(7))
    assert saver.wait(30.0)
    assert saver.failure is not None and isinstance(saver.failure.error, StaleAttemptError)
    assert saver.failure.tries == 1 and steps(attempt) == []


def test_what_no_checkpoint_can_hold_is_the_jobs_error_at_once(attempt: Attempt) -> None:
    saver = AsyncSaver(attempt)
    with raises(problems.UNSTORABLE, where="job/rng", got="a builtins.object"):
        saver.save(7, {"job": {"rng": object()}})
    saver.save(8, state(8))
    saver.close()
    assert steps(attempt) == [8]


def test_trouble_with_deleting_is_a_warning(disk: Gated, attempt: Attempt) -> None:
    saver = AsyncSaver(attempt, keep=Keep(last=1))
    saver.save(1, state(1))
    saver.wait()
    file = disk.root / "run-a" / step_folder(1) / "ledger.a0001.r0000.bin"
    file.unlink()
    file.mkdir()  # cannot be unlinked
    (file / "x").touch()
    saver.save(2, state(2))
    saver.close()
    assert saver.failure is None and saver.last is not None and saver.last.checkpoint is not None
    assert saver.last.warning is not None and "cannot delete" in saver.last.warning
    assert whole(attempt, 2, state(2))


def test_a_closed_saver_begins_no_save(attempt: Attempt) -> None:
    saver = AsyncSaver(attempt)
    saver.close()
    with pytest.raises(RuntimeError, match="closed"):
        saver.save(7, state(7))


def large(step: int) -> dict[str, Any]:
    """Enough for two writers."""
    return {
        "model": {str(i): bits(torch.float32, 1 << 20, seed=step + i) for i in range(3)},
        "ledger": b"rows",
    }


def on_ranks(
    attempt: Attempt, ranks: int, work: Callable[[AsyncSaver], None], **options: Any
) -> list[AsyncSaver]:
    """A saver for each rank, each in a thread of its own."""
    savers = [AsyncSaver(attempt, rank=rank, ranks=ranks, **options) for rank in range(ranks)]
    threads = [threading.Thread(target=work, args=(saver,)) for saver in savers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return savers


def test_ranks_save_together(attempt: Attempt) -> None:
    def work(saver: AsyncSaver) -> None:
        for step in (1, 2, 3):
            sections = large(step)
            if saver.rank:
                del sections["ledger"]
            saver.save(step, sections)
        saver.close()

    savers = on_ranks(attempt, 3, work, keep=Keep(last=2))
    assert [saver.failure for saver in savers] == [None] * 3
    assert [saver.last.checkpoint is not None for saver in savers if saver.last] == [True, False, False]
    assert [saver.last.nbytes > 0 for saver in savers if saver.last] == [True, True, True]
    assert steps(attempt) == [3, 2] and whole(attempt, 3, large(3))


def test_a_rank_that_fails_fails_the_save_everywhere_at_once(disk: Gated, attempt: Attempt) -> None:
    disk.only, disk.failures = "r0001.safetensors", [StorageError("no space")]

    def work(saver: AsyncSaver) -> None:
        saver.save(1, large(1))
        saver.wait()

    savers = on_ranks(attempt, 2, work, tries=1, parts_timeout_s=60.0)
    assert [str(saver.failure.error) for saver in savers if saver.failure] == [
        "checkpoint: rank 1 could not write its part of step 1: no space",
        "no space",
    ]
    assert steps(attempt) == []
    for saver in savers:
        saver.save(2, large(2))
    for saver in savers:
        saver.close()
    assert steps(attempt) == [2] and not (disk.root / "run-a" / step_folder(1)).exists()


def test_waiting_for_a_rank_that_is_gone_can_be_given_up(attempt: Attempt) -> None:
    saver = AsyncSaver(attempt, rank=0, ranks=2, parts_timeout_s=600.0)
    saver.save(1, large(1))
    assert not saver.wait(0.3)
    saver.close(abandon=True)
    assert saver.failure is not None and saver.failure.error.code == problems.NOT_SAVED.code


@pytest.mark.scenario
def test_a_process_that_ends_finishes_its_save(tmp_path: Path) -> None:
    script = (
        "from tests.unit.checkpoint.states import state\n"
        "from lockstep.checkpoint.runs.run_folder import RunFolder\n"
        "from lockstep.checkpoint.saver import AsyncSaver\n"
        "from lockstep.checkpoint.storage.opening import open_storage\n"
        f"run = RunFolder.create(open_storage({str(tmp_path)!r}), 'run-a')\n"
        "AsyncSaver(run.claim()).save(7, state(7, items=1_000_000))\n"
    )
    subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env={"PYTHONPATH": f"{ROOT}/platform:{ROOT}"}, check=True
    )
    run = RunFolder.open(LocalStorage(tmp_path), "run-a")
    assert newest_good(run, pytest.fail) == Checkpoint.of(run, 7)


def test_a_pause_is_told_in_seconds(attempt: Attempt) -> None:
    saver = AsyncSaver(attempt)
    pause = saver.save(1, large(1))
    assert isinstance(pause, Pause) and 0 < pause.copied_s < 60 and 0 <= pause.waited_s < 60
    saver.close()
