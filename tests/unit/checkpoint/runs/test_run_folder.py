"""A run's folder belongs to one run, and in it one attempt at a time publishes and deletes."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from lockstep.checkpoint import problems
from lockstep.checkpoint.errors import StaleAttemptError
from lockstep.checkpoint.layout import MANIFEST, file_name, staging_folder, step_folder, step_of
from lockstep.checkpoint.pruning import apply, clear_leftovers, prune
from lockstep.checkpoint.reader import checkpoints, load
from lockstep.checkpoint.retention import Keep
from lockstep.checkpoint.runs.run_checkpoints import claim
from lockstep.checkpoint.runs.run_folder import Attempt, RunFolder
from lockstep.checkpoint.snapshot import snapshot
from lockstep.checkpoint.storage.interface import Storage
from lockstep.checkpoint.storage.local import LocalStorage
from lockstep.checkpoint.writer import commit, post_receipt, write_part
from lockstep.errors import StorageError
from tests.raised import raises
from tests.unit.checkpoint.one_process import write_checkpoint
from tests.unit.checkpoint.states import FACTS, everywhere, same, state

ROOT = Path(__file__).parents[4]


@everywhere
def test_two_runs_never_share_a_folder(storage: Storage) -> None:
    RunFolder.create(storage, "run-a")
    with raises(problems.OWNED, folder=re.compile("run-a$"), owner="run-a"):
        RunFolder.create(storage, "run-a")
    RunFolder.create(storage, "run-b")
    assert RunFolder.open(storage, "run-a").run_id == "run-a"


def test_of_many_that_create_one_folder_one_succeeds(tmp_path: Path) -> None:
    script = (
        "import sys; from lockstep.checkpoint.runs.run_folder import RunFolder\n"
        "from lockstep.checkpoint.storage.opening import open_storage\n"
        "sys.stdin.readline()\n"
        f"print(RunFolder.create(open_storage({str(tmp_path)!r}), 'run-a').run_id)"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(ROOT / "platform")},
        )
        for _ in range(3)
    ]
    told = [process.communicate("go\n") for process in processes]
    assert sorted(out for out, _ in told) == ["", "", "run-a\n"]
    assert sum("already belongs to run run-a" in err for _, err in told) == 2


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    RunFolder.create(storage, "run-a")
    (tmp_path / "run-a").rename(tmp_path / "run-b")
    with raises(problems.OTHER_OWNER, got="run-a", wanted="run-b"):
        RunFolder.open(storage, "run-b")


@everywhere
def test_a_run_that_is_not_there_is_told(storage: Storage) -> None:
    with raises(problems.NO_RUN, run="run-x"):
        RunFolder.open(storage, "run-x")


@pytest.mark.parametrize("run_id", ["", "..", "../x", "a/b", ".hidden", "a\nb"])
def test_a_run_id_that_leads_elsewhere_is_refused(tmp_path: Path, run_id: str) -> None:
    for make in (RunFolder.create, RunFolder.open):
        with raises(problems.RUN_ID, run=run_id):
            make(LocalStorage(tmp_path), run_id)


def test_a_step_that_has_no_checkpoint_is_refused(tmp_path: Path) -> None:
    run = RunFolder.create(LocalStorage(tmp_path), "run-a")
    write_checkpoint(run.claim(), 2, state(2))
    with raises(problems.NO_STEP, run="run-a", got=1, wanted=2):
        claim(str(tmp_path), "run-a", 1)
    assert claim(str(tmp_path), "run-a", 2).step == 2


@everywhere
def test_attempts_count_up(run: RunFolder) -> None:
    assert run.fence().number == 0
    assert run.claim().number == 1
    assert run.claim(5).number == 5
    assert run.claim().number == 6
    for late in (1, 5, 6):
        with raises(problems.LATE, attempt=late, run="run-a", reason="attempt 6 has begun"):
            run.claim(late)


class FailsOnce:
    """A storage of which call number `at` fails, before it has acted or after."""

    def __init__(self, storage: Storage, at: int, *, acts: bool) -> None:
        self._storage, self._left, self._acts = storage, at, acts

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._storage, name)
        if not callable(real):
            return real

        def call(*args: Any, **more: Any) -> Any:
            self._left -= 1
            if self._left:
                return real(*args, **more)
            if self._acts and name != "begin_staging":  # a folder is made, or it is not
                real(*args, **more)
            raise StorageError(f"checkpoint.storage: cannot {name}: No space left on device")

        return call

    @property
    def failed(self) -> bool:
        return self._left <= 0


@pytest.mark.thinned(2)
@pytest.mark.parametrize("uri", ["local", pytest.param("s3", marks=pytest.mark.scenario)], indirect=True)
@pytest.mark.parametrize("acts", [False, True])
def test_a_claim_that_fails_at_any_call_can_be_made_again(storage: Storage, acts: bool) -> None:
    """As it is at a run's next save: what it left behind the first time is no other process's."""
    for at in range(1, 30):
        run = RunFolder.create(storage, f"run-{at}")
        first = run.claim()
        disk = FailsOnce(storage, at, acts=acts)
        shaky, token = replace(run, storage=cast(Storage, disk)), uuid.uuid4().hex
        with suppress(StorageError):
            shaky.claim(2, token)
        second = run.claim(2, token)
        assert second.number == 2
        write_checkpoint(second, 1, state(1))
        with pytest.raises(StaleAttemptError):
            first.ensure_current()
        with raises(problems.LATE, attempt=2, reason="attempt 2 has begun"):
            run.claim(2, "another process's")
        if not disk.failed:
            return
    raise AssertionError("a claim makes more calls than were tried")


@everywhere
def test_of_many_that_claim_at_once_each_number_is_given_once(run: RunFolder) -> None:
    claimed: list[Attempt] = []
    refused: list[StaleAttemptError] = []
    barrier = threading.Barrier(8)

    def claim() -> None:
        barrier.wait()
        try:
            claimed.append(run.claim())
        except StaleAttemptError as error:
            refused.append(error)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(claimed) + len(refused) == 8
    numbers = [attempt.number for attempt in claimed]
    assert len(set(numbers)) == len(numbers)
    newest = run.claim()
    assert newest.number > max(numbers, default=0)
    write_checkpoint(newest, 1, state(1))


class Paced(LocalStorage):
    """A folder in which chosen calls of a process wait, or are followed by something."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.before: dict[str, Callable[[], object]] = {}
        """What happens, once, before a call of this name."""

    def __getattribute__(self, name: str) -> Any:
        before = super().__getattribute__("__dict__").get("before", {})
        if name in before:
            before.pop(name)()
        return super().__getattribute__(name)


def test_a_claim_that_is_late_gives_no_number_again_and_ends_no_newer_attempt(tmp_path: Path) -> None:
    """It has looked who is there before two others have begun, and makes its own mark after them."""
    RunFolder.create(LocalStorage(tmp_path), "run-a")
    others = RunFolder(LocalStorage(tmp_path), "run-a")
    late = Paced(tmp_path)
    claimed: list[Attempt] = []
    late.before["begin_staging"] = lambda: claimed.extend((others.claim(), others.claim()))
    with raises(problems.LATE, attempt=1, reason="attempt 2 has begun"):
        RunFolder(late, "run-a").claim()
    assert [attempt.number for attempt in claimed] == [1, 2]
    claimed[1].ensure_current()
    write_checkpoint(claimed[1], 1, state(1))
    assert others.claim().number == 3
    assert sorted(path.name for path in (tmp_path / "run-a").iterdir() if "attempt-" in path.name) == [
        "attempt-0003"
    ]


def test_a_claim_writes_through_no_folder_of_another_with_its_number(tmp_path: Path) -> None:
    """Its own was ended by a newer attempt; a late claim makes one of the same number, which it soon gives up."""
    RunFolder.create(LocalStorage(tmp_path), "run-a")
    others = RunFolder(LocalStorage(tmp_path), "run-a")
    first, late = Paced(tmp_path), Paced(tmp_path)
    newer: list[Attempt] = []
    told: list[StaleAttemptError] = []

    def ended_and_made_again() -> None:
        newer.append(others.claim())
        late.begin_staging(f"run-a/{staging_folder(1)}", "another")

    first.before["write"] = ended_and_made_again
    try:
        RunFolder(first, "run-a").claim()
    except StaleAttemptError as error:
        told.append(error)
    assert len(told) == 1
    newer[0].ensure_current()


@everywhere
def test_other_ranks_join_the_attempt(run: RunFolder) -> None:
    claimed = run.claim()
    joined = RunFolder.open(run.storage, "run-a").attempt(claimed.number)
    assert joined == claimed
    run.claim()
    with raises(problems.OVER, attempt=1, reason="attempt 2 has taken its place"):
        run.attempt(1)


def test_a_lost_fence_gives_no_number_twice(run: RunFolder) -> None:
    """Files bear their attempt's number: given twice, two writers would share names."""
    write_checkpoint(run.claim(3), 7, state(7))
    for content in (None, b"", b"{}", b"[]", b'{"number": "x", "token": 1}'):
        run.storage.delete(run.path("attempt.json"))
        if content is not None:
            run.storage.create(run.path("attempt.json"), content)
        before = run.claim()
        assert before.number > 3
        write_checkpoint(before, before.number, state(1))


def test_a_fence_that_cannot_be_understood_lets_nobody_publish(run: RunFolder) -> None:
    attempt = run.claim()
    run.storage.delete(run.path("attempt.json"))
    with raises(problems.FENCE, got="was deleted while the run trained"):
        write_checkpoint(attempt, 1, state(1))
    run.storage.create(run.path("attempt.json"), b"{")
    with raises(problems.FENCE, got=re.compile("^cannot be understood")):
        write_checkpoint(attempt, 1, state(1))


@everywhere
def test_a_deleted_folder_is_told_as_such_and_not_as_another_attempt(run: RunFolder) -> None:
    attempt = run.claim()
    write_checkpoint(attempt, 1, state(1), FACTS)
    claims = [] if run.storage.fences else [run._claim_path(claim) for claim in run._claims()]
    for path in (run.path("owner.json"), run.path("attempt.json"), *claims):
        run.storage.delete(path)
    with raises(problems.FOLDER_DELETED, what="run run-a") as told:
        write_checkpoint(attempt, 2, state(2), FACTS)
    assert not isinstance(told.value, StaleAttemptError)


@pytest.mark.every(2)
@everywhere
def test_a_stale_attempt_neither_publishes_nor_deletes(run: RunFolder) -> None:
    stale = run.claim()
    write_checkpoint(stale, 1, state(1), FACTS)
    write_checkpoint(stale, 2, state(2), FACTS)
    part = write_part(stale, 3, snapshot(state(3)))
    current = run.claim()
    for attempted in (
        lambda: commit(stale, 3, [part], FACTS),
        lambda: write_part(stale, 3, snapshot(state(3))),
        lambda: write_checkpoint(stale, 4, state(4)),
        lambda: apply(stale, [1]),
        lambda: prune(stale, Keep(last=1), whole=2),
        lambda: clear_leftovers(stale),
    ):
        with raises(problems.OVER, attempt=1, run="run-a"):
            attempted()
    assert [checkpoint.step for checkpoint in checkpoints(run)] == [2, 1]
    write_checkpoint(current, 3, state(3))
    assert all(load(checkpoint) for checkpoint in checkpoints(run))


class Late(LocalStorage):
    """A disk under a worker that is held up between its last look at the fence and what it does then."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.held_up = False

    def _hold_up(self, path: str) -> None:
        if self.held_up and path.endswith(MANIFEST):
            self.held_up = False
            RunFolder.open(LocalStorage(self.root), "run-a").claim()

    def write(self, path: str, pieces: Iterator[bytes], *, staging: str):  # type: ignore[no-untyped-def, override]
        self._hold_up(path)
        return super().write(path, pieces, staging=staging)

    def delete(self, path: str, *, staging: str | None = None) -> None:
        self._hold_up(path)
        super().delete(path, staging=staging)


def test_a_worker_that_wakes_after_its_last_look_is_stopped_too(tmp_path: Path) -> None:
    """On a disk there is no moment between the look and the act: the act itself fails."""
    storage = Late(tmp_path)
    run = RunFolder.create(storage, "run-a")
    attempt = run.claim()
    write_checkpoint(attempt, 1, state(1))
    storage.held_up = True
    with raises(problems.OVER, reason="attempt 2 has taken its place"):
        write_checkpoint(attempt, 2, state(2))
    attempt = run.claim()
    storage.held_up = True
    with raises(problems.OVER, reason="attempt 4 has taken its place"):
        apply(attempt, [1])
    assert [checkpoint.step for checkpoint in checkpoints(run)] == [1]
    assert same(load(checkpoints(run)[0]).sections["model"], state(1)["model"])


@everywhere
def test_a_stale_rank_does_not_disturb_the_step_that_is_written_anew(run: RunFolder) -> None:
    """Names bear the attempt, so the bytes of two attempts lie side by side."""
    stale = run.claim()
    old = write_part(stale, 5, snapshot(state(5)))
    current = run.claim()
    new = write_part(current, 5, snapshot(state(5)))
    assert not {entry.name for entry in old.files} & {entry.name for entry in new.files}
    with suppress(StaleAttemptError):  # an object store takes it: it counts for nothing
        post_receipt(stale, 5, old)
    checkpoint = commit(current, 5, [new], FACTS)
    assert load(checkpoint).manifest.attempt == 2
    names = {item.name for item in run.storage.list(checkpoint.folder)}
    assert names == {current.manifest, *(entry.name for entry in new.files)}


def test_names_are_read_as_they_were_made() -> None:
    for step in (0, 7, 999_999_999, 10**12):
        assert step_of(step_folder(step)) == step
    for other in ("step-7", "step-0000000007", "step-00000007x", "steps", "manifest.json"):
        assert step_of(other) is None
    name = file_name("best_weights.a12345.r0007.safetensors")
    assert name is not None and str(name) == "best_weights.a12345.r0007.safetensors"
    assert name[:] == ("best_weights", 12345, 7, "tensors")
    for other in (
        "model.safetensors",
        "model.a1.r0000.json",
        "../x.a0001.r0000.json",
        "Model.a0001.r0000.json",
        "",
    ):
        assert file_name(other) is None
