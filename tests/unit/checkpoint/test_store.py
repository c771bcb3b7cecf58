"""The store from end to end, on a disk and in an object store: what was saved last and is whole is what is loaded."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint import problems, pruning
from lockstep.checkpoint.errors import BadCheckpointError
from lockstep.checkpoint.layout import MANIFEST, step_folder
from lockstep.checkpoint.manifest import VERSION, Facts
from lockstep.checkpoint.pruning import apply, clear_leftovers, prune
from lockstep.checkpoint.reader import (
    Checkpoint,
    checkpoint_at,
    checkpoints,
    load,
    load_newest,
    verify,
)
from lockstep.checkpoint.retention import Keep
from lockstep.checkpoint.runs.pins import pin
from lockstep.checkpoint.runs.run_folder import Attempt, RunFolder
from lockstep.checkpoint.snapshot import snapshot
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.checkpoint.writer import (
    Part,
    commit,
    gather_parts,
    post_failure,
    post_receipt,
    write_part,
)
from tests.raised import raises
from tests.unit.checkpoint.one_process import newest_good, write_checkpoint
from tests.unit.checkpoint.states import FACTS, bits, everywhere, everywhere_if_asked, same, state

BIG = 3 << 20  # bytes a tensor: enough of them are worth more than one writing rank


def steps(run: RunFolder) -> list[int | None]:
    return [checkpoint.step for checkpoint in checkpoints(run)]


def equal(sections: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return set(sections) == set(wanted) and all(same(sections[name], wanted[name]) for name in wanted)


@everywhere
def test_what_is_saved_is_loaded_to_the_bit(attempt: Attempt) -> None:
    checkpoint = write_checkpoint(attempt, 7, state(7), FACTS)
    found = load(checkpoint)
    assert equal(found.sections, state(7))
    assert (found.manifest.run, found.manifest.step, found.manifest.attempt) == ("run-a", 7, 1)
    assert found.manifest.facts == FACTS
    assert verify(checkpoint) == found.manifest


def test_some_sections_can_be_loaded_by_themselves(attempt: Attempt) -> None:
    checkpoint = write_checkpoint(attempt, 7, state(7))
    assert equal(
        load(checkpoint, {"model", "ledger"}).sections, {n: state(7)[n] for n in ("model", "ledger")}
    )


@everywhere
def test_the_newest_good_one_is_found(attempt: Attempt) -> None:
    assert newest_good(attempt.run, pytest.fail) is None and checkpoints(attempt.run) == []
    for step in (1, 20, 3):
        write_checkpoint(attempt, step, state(step))
    write_part(attempt, 30, snapshot(state(30)))  # not published: it is none
    assert steps(attempt.run) == [20, 3, 1]
    assert newest_good(attempt.run, pytest.fail) == checkpoints(attempt.run)[0]
    newest = load_newest(attempt.run, pytest.fail)
    assert newest is not None and equal(newest.sections, state(20))


@everywhere_if_asked
def test_a_bad_one_is_passed_over_with_its_file_and_what_is_wrong(attempt: Attempt) -> None:
    for step in (1, 2, 3, 4):
        write_checkpoint(attempt, step, state(step))
    storage, run = attempt.run.storage, attempt.run

    def replaced(step: int, name: str, content: bytes) -> None:
        storage.write(run.path(step_folder(step), name), [content], staging=attempt.staging)

    storage.delete(run.path(step_folder(4), "ledger.a0001.r0000.bin"))
    replaced(3, "ledger.a0001.r0000.bin", bytes(768))
    replaced(2, attempt.manifest, b'{"format": "lockstep-checkpoint", "version": %d}' % (VERSION + 1))
    told: list[str] = []
    found = load_newest(run, told.append)
    assert found is not None and found.checkpoint == checkpoints(run)[-1]
    assert [line.partition(f"checkpoint {run.shown}/")[2] for line in told] == [
        "step-000000004: ledger.a0001.r0000.bin: it is missing; this checkpoint is passed over",
        "step-000000003: ledger.a0001.r0000.bin: it is not what was written: its hash is not the one in its manifest; this checkpoint is passed over",
        f"step-000000002: {attempt.manifest}: it has format version {VERSION + 1}, wanted {VERSION}: it was made by "
        "another Lockstep; use that one; this checkpoint is passed over",
    ]


@everywhere_if_asked
def test_an_older_attempts_checkpoint_of_a_step_is_replaced_in_one_moment(run: RunFolder) -> None:
    write_checkpoint(run.claim(), 7, state(7))
    second = run.claim()
    part = write_part(second, 7, snapshot(state(7)))
    assert load(checkpoints(run)[0]).manifest.attempt == 1
    checkpoint = commit(second, 7, [part], FACTS)
    assert load(checkpoint).manifest.attempt == 2
    assert clear_leftovers(second) == []


def test_an_attempt_never_writes_over_what_it_has_published(attempt: Attempt) -> None:
    write_checkpoint(attempt, 7, state(7))
    with raises(problems.TAKEN, path=f"run-a/{step_folder(7)}/{attempt.manifest}"):
        write_checkpoint(attempt, 7, state(8))


@everywhere
def test_a_part_that_got_lost_is_not_published(attempt: Attempt) -> None:
    part = write_part(attempt, 7, snapshot(state(7)))
    attempt.discard((step_folder(7), part.files[0].name))
    with raises(problems.FILE_CHANGED, got="none"):
        commit(attempt, 7, [part], FACTS)
    assert steps(attempt.run) == []


@pytest.mark.every(2)
@everywhere
def test_ranks_share_the_bytes_out(attempt: Attempt) -> None:
    """Every rank writes its own span; together they are the state, with no tensor twice."""
    sections = {"model": {str(i): bits(torch.float32, BIG // 4, seed=i) for i in range(6)}, "ledger": b"rows"}
    copies = [snapshot(sections, rank=rank, ranks=5) for rank in range(5)]
    assert {copied.writers for copied in copies} == {4}
    assert copies[4].nbytes == 0
    assert all(BIG <= copied.nbytes <= 2 * BIG for copied in copies[:4])
    own = write_part(attempt, 7, copies[0])

    def other(rank: int) -> None:
        post_receipt(attempt, 7, write_part(attempt, 7, copies[rank]))

    threads = [threading.Thread(target=other, args=(rank,)) for rank in (3, 2, 1)]
    for thread in threads:
        thread.start()
    parts = gather_parts(attempt, 7, own, 4, timeout_s=60.0)
    for thread in threads:
        thread.join()
    assert [part.rank for part in parts] == [0, 1, 2, 3]
    checkpoint = commit(attempt, 7, parts, FACTS)
    assert equal(load(checkpoint).sections, sections)
    listed = {entry.name for entry in checkpoint.manifest().files}
    assert {item.name for item in attempt.run.storage.list(checkpoint.folder)} == {attempt.manifest} | listed


def test_a_rank_that_fails_ends_the_waiting(attempt: Attempt) -> None:
    own = write_part(attempt, 7, snapshot(state(7)))
    post_failure(attempt, 7, 1, "no space left on device")
    with raises(problems.PART_FAILED, rank=1, step=7, got="no space left on device"):
        gather_parts(attempt, 7, own, 2, timeout_s=60.0)


def test_a_rank_that_is_silent_ends_the_waiting_in_time(attempt: Attempt) -> None:
    own = write_part(attempt, 7, snapshot(state(7)))
    post_receipt(attempt, 7, own._replace(rank=2))
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    with raises(problems.SILENT_RANKS, ranks=[1, 3], step=7, waited_s=60):
        gather_parts(attempt, 7, own, 4, timeout_s=60.0, sleep=sleep, clock=lambda: now)


def test_waiting_for_ranks_ends_with_the_attempt(attempt: Attempt) -> None:
    own = write_part(attempt, 7, snapshot(state(7)))
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        if now == 0.0:
            attempt.run.claim()
        now += seconds

    with raises(problems.OVER, attempt=1, run="run-a"):
        gather_parts(attempt, 7, own, 2, timeout_s=60.0, sleep=sleep, clock=lambda: now)
    assert now < 10


def test_a_rank_that_holds_another_state_is_named(attempt: Attempt) -> None:
    own = write_part(attempt, 7, snapshot(state(7)))
    post_receipt(attempt, 7, Part(1, snapshot({"model": {}}).structure(), []))
    with raises(problems.OTHER_STATE, ranks=[1], step=7, rank=0):
        gather_parts(attempt, 7, own, 2, timeout_s=60.0)


def test_a_receipt_that_cannot_be_understood_is_told(attempt: Attempt) -> None:
    own = write_part(attempt, 7, snapshot(state(7)))
    attempt.write((step_folder(7), "receipt.a0001.r0001.part"), [b'{"files": 3}'])
    with raises(problems.RECEIPT, rank=1):
        gather_parts(attempt, 7, own, 2, timeout_s=60.0)


@everywhere_if_asked
def test_pruning_deletes_what_is_not_to_be_kept(attempt: Attempt) -> None:
    for step, loss in ((10, 0.3), (20, 0.1), (30, 0.2), (40, 0.4)):
        write_checkpoint(attempt, step, state(step), Facts(metrics={"eval/loss": loss}))
    assert prune(attempt, Keep(last=1, metric="eval/loss", every=30), whole=40) == [10]
    assert steps(attempt.run) == [40, 30, 20]
    assert prune(attempt, Keep(last=1, pinned=frozenset({30}))) == [20]
    assert steps(attempt.run) == [40, 30]
    left = attempt.run.storage.list(attempt.run.path())
    assert [item.name for item in left if item.name.startswith("step-")] == [
        "step-000000030",
        "step-000000040",
    ]


def test_pruning_never_deletes_the_last_good_one(attempt: Attempt) -> None:
    """The newer ones have the right sizes and wrong bits: without reading them they pass for good."""
    for step in (1, 2, 3):
        write_checkpoint(attempt, step, state(step))
    for step in (2, 3):
        path = attempt.run.path(step_folder(step), "ledger.a0001.r0000.bin")
        attempt.run.storage.write(path, [bytes(768)], staging=attempt.staging)
    assert prune(attempt, Keep(last=1)) == []
    attempt.run.storage.delete(attempt.run.path(step_folder(3), "ledger.a0001.r0000.bin"))
    assert prune(attempt, Keep(last=1), whole=3) == [], "the one that is said to be whole is not"
    write_checkpoint(attempt, 4, state(4))
    assert prune(attempt, Keep(last=1), whole=4) == [1, 2, 3]
    assert equal(load(checkpoints(attempt.run)[0]).sections, state(4))


def test_a_pin_that_comes_while_others_are_deleted_is_in_time(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3, 4):
        write_checkpoint(attempt, step, state(step))

    def slow(attempt: Attempt, deleted: Iterable[int]) -> bool:
        pin(attempt.run, 2)
        return apply(attempt, deleted)

    monkeypatch.setattr(pruning, "apply", slow)
    assert prune(attempt, Keep(last=1), whole=4) == [1, 3]
    assert steps(attempt.run) == [4, 2]


def test_a_checkpoint_of_another_format_is_not_deleted(attempt: Attempt) -> None:
    for step in (1, 2):
        write_checkpoint(attempt, step, state(step))
    newer = b'{"format": "lockstep-checkpoint", "version": %d}' % (VERSION + 1)
    attempt.publish((step_folder(1), MANIFEST), newer)
    assert prune(attempt, Keep(last=1), whole=2) == []
    assert steps(attempt.run) == [2, 1]
    assert clear_leftovers(attempt.run.claim()) == []


def test_a_damaged_checkpoint_goes_when_a_newer_one_is_good(attempt: Attempt) -> None:
    for step in (1, 2, 3):
        write_checkpoint(attempt, step, state(step))
    attempt.publish((step_folder(2), MANIFEST), b"{}")
    assert prune(attempt, Keep(last=2), whole=3) == [2]
    assert steps(attempt.run) == [3, 1]
    deleted = clear_leftovers(attempt)
    assert {name.partition("/")[0] for name in deleted} == {"step-000000002"}


def test_deleting_twice_is_no_error(attempt: Attempt) -> None:
    write_checkpoint(attempt, 1, state(1))
    apply(attempt, [1, 1, 5])
    assert steps(attempt.run) == []


def test_a_copied_checkpoint_is_loaded_where_it_lies_alone(attempt: Attempt, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(attempt, 7, state(7), FACTS)
    alone = tmp_path / "downloaded"
    alone.mkdir()
    for item in attempt.run.storage.list(checkpoint.folder):
        (alone / item.name).write_bytes(attempt.run.storage.read(checkpoint.path(item.name)))
    found = load(checkpoint_at(str(alone)))
    assert equal(found.sections, state(7)) and found.manifest.run == "run-a"


def test_a_checkpoint_that_lies_where_another_should_is_bad(tmp_path: Path) -> None:
    run = RunFolder.create(open_storage(str(tmp_path)), "run-a")
    attempt = run.claim()
    write_checkpoint(attempt, 1, state(1))
    write_checkpoint(attempt, 2, state(2))
    (tmp_path / "run-a" / step_folder(2)).rename(tmp_path / "run-a" / step_folder(3))
    told: list[str] = []
    assert newest_good(run, told.append) == Checkpoint.of(run, 1)
    assert "it belongs to step 2, but is in the place of step 3" in told[0]


def test_a_store_that_cannot_be_read_is_no_reason_to_start_from_an_older_state(tmp_path: Path) -> None:
    run = RunFolder.create(open_storage(str(tmp_path)), "run-a")
    attempt = run.claim()
    for step in (1, 2):
        write_checkpoint(attempt, step, state(step))
    manifest = tmp_path / "run-a" / step_folder(2) / MANIFEST
    manifest.unlink()
    manifest.mkdir()  # what a read of it then tells is no sign of damage: permissions, a lost mount, …
    with raises(problems.FAILED, got="Is a directory") as raised:
        newest_good(run, pytest.fail)
    assert not isinstance(raised.value, BadCheckpointError)
