"""Files that checkpoints share go with the last checkpoint that names them, and not before."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable

import pytest

from lockstep.checkpoint import layout
from lockstep.checkpoint.pruning import Catalogue, clear_leftovers
from lockstep.checkpoint.reader import Checkpoint, verify
from lockstep.checkpoint.retention import Keep
from lockstep.checkpoint.runs.run_folder import Attempt, RunFolder
from lockstep.checkpoint.storage import object_store
from lockstep.checkpoint.storage.interface import Written
from lockstep.checkpoint.writer import share
from lockstep.errors import StorageError
from tests.unit.checkpoint.one_process import write_checkpoint
from tests.unit.checkpoint.states import FACTS, everywhere, everywhere_if_asked, state


def name(first: int, last: int, mark: str) -> str:
    return f"{first:09d}-{last:09d}.{mark * 32}.{mark * 16}.rows"


BOTH, OLD, NEW = name(1, 300, "a"), name(301, 600, "b"), name(301, 600, "c")


def save(attempt: Attempt, step: int, *shared: str) -> None:
    write_checkpoint(
        attempt,
        step,
        {"model": state(step, 4)["model"]},
        FACTS,
        {one: one.encode() * 50 for one in shared},
    )


def shared(run: RunFolder) -> set[str]:
    return {item.name for item in run.storage.list(run.path(layout.SHARED))}


@everywhere_if_asked
def test_segments_of_an_abandoned_attempt_go_with_its_last_checkpoint(run: RunFolder) -> None:
    first = run.claim()
    save(first, 300, BOTH)
    save(first, 600, BOTH, OLD)
    second = run.claim()
    catalogue = Catalogue(second)
    save(second, 700, BOTH, NEW)
    assert clear_leftovers(second) == []
    assert shared(run) == {BOTH, OLD, NEW}
    assert catalogue.prune(Keep(last=2), whole=700) == [300]
    assert shared(run) == {BOTH, OLD, NEW}
    save(second, 800, BOTH, NEW)
    assert catalogue.prune(Keep(last=2), whole=800) == [600]
    assert shared(run) == {BOTH, NEW}


@everywhere_if_asked
def test_segments_that_no_checkpoint_names_are_cleared_by_the_next_attempt_that_has_published(
    run: RunFolder,
) -> None:
    first = run.claim()
    save(first, 300, BOTH)
    share(first, OLD, b"a save that was never finished")
    second = run.claim()
    assert clear_leftovers(second) == [] and shared(run) == {BOTH, OLD}
    save(second, 700, BOTH, NEW)
    assert clear_leftovers(second) == [f"shared/{OLD}"]
    assert shared(run) == {BOTH, NEW}


@pytest.mark.every(2)
@everywhere
def test_nothing_is_cleared_beside_a_manifest_that_cannot_be_read(run: RunFolder) -> None:
    first = run.claim()
    save(first, 300, BOTH, OLD)
    damaged = Checkpoint.of(run, 300, first.manifest)
    run.storage.put(damaged.path(first.manifest), b"{")
    second = run.claim()
    save(second, 700, BOTH, NEW)
    clear_leftovers(second)
    assert shared(run) == {BOTH, OLD, NEW}


@pytest.mark.scenario
@pytest.mark.parametrize("uri", ["s3"], indirect=True)
def test_nothing_is_cleared_that_a_late_manifest_may_name(run: RunFolder) -> None:
    """In an object store a manifest may arrive after its attempt has ended; the files of its step are there before it."""
    first = run.claim()
    save(first, 300, BOTH)
    save(first, 800, BOTH, OLD)
    path = Checkpoint.of(run, 800, first.manifest).path(first.manifest)
    content = run.storage.read(path)
    run.storage.delete(path)  # under way
    second = run.claim()
    save(second, 700, BOTH, NEW)
    clear_leftovers(second)
    assert shared(run) == {BOTH, OLD, NEW}
    run.storage.put(path, content)
    assert Checkpoint.of(run, 800, first.manifest).manifest().shared


@pytest.mark.parametrize("uri", ["s3"], indirect=True)
def test_a_segment_that_a_checkpoint_names_outlives_a_store_that_fails(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that takes rank 0's place shares its rows again. What fails half-way in an object store takes what was there with it."""
    save(run.claim(), 300, BOTH)
    second = run.claim()

    def broken(pieces: Iterable[bytes | memoryview], write: Callable[[memoryview], object]) -> Written:
        write(memoryview(b"half"))
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    content = BOTH.encode() * 50
    with monkeypatch.context() as patched:
        patched.setattr(object_store, "hashed", broken)
        again = share(second, BOTH, content)
        with pytest.raises(StorageError):
            share(second, OLD, content)
    assert verify(Checkpoint.of(run, 300, "manifest.a0001.json")).shared == (again,)
    run.storage.put(run.path(layout.SHARED, BOTH), b"half")  # by one that was killed
    assert share(second, BOTH, content) == again
    verify(Checkpoint.of(run, 300, "manifest.a0001.json"))
