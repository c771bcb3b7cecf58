"""A journal that is cut has what one has that never was, wherever the process is killed and whatever is damaged."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import RecordError
from lockstep.record import journal as journal_module
from lockstep.record import ledger, segments
from lockstep.record.check import check_journal
from lockstep.record.events import (
    Delivered,
    Document,
    EvaluationRow,
    Event,
    Finished,
    Opened,
    Restored,
    Sampled,
    Started,
    StepRow,
)
from lockstep.record.folder_store import newest_step
from lockstep.record.journal import Journal
from lockstep.record.journal_file import NAME, NEXT
from lockstep.record.recorder import Recorder
from lockstep.record.sealed import FOLDER
from lockstep.record.sync import sync
from lockstep.spec.fields import Spec
from tests.unit.record.failed_at_every_call import KeepingStore, Kept, quick
from tests.unit.record.rows import evaluation_row, step_row
from tests.unit.record.written import read_steps

Specs = Callable[..., Spec]
SEGMENT = 5


@pytest.fixture(autouse=True)
def short() -> Iterator[None]:
    with quick(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(segments, "SEGMENT_STEPS", SEGMENT)
        yield


def events(first: int, last: int) -> list[Any]:
    told: list[Any] = []
    for step in range(first, last + 1):
        told.append(step_row(step))
        if step % 3 == 0:
            told.append(evaluation_row(step))
        if step % 4 == 0:
            told.append(Sampled("node-0", 1.0 * step, {"system/cpu": 0.5}))
    return told


def seen(journal: Journal) -> dict[str, Any]:
    """All that a journal tells."""
    numbers = range(60)
    return {
        "steps": list(journal.steps()),
        "table": [row for table in journal.tables(["step"]) for row in table.column("step").to_pylist()],
        "evaluations": journal.evaluations(),
        "events": journal.events,
        "has": [journal.has_step(n) for n in numbers],
        "each": [journal.step(n) for n in numbers],
        "missing": journal.missing_steps(),
        "last": journal.last_step,
        "others": [
            e.event for e in journal.read(0) if isinstance(e.event, EvaluationRow | Sampled | Started)
        ],
    }


def both(folder: Path) -> tuple[Journal, Journal]:
    return Journal(folder / "cut"), Journal(folder / "uncut")


def add(journals: tuple[Journal, Journal], told: list[Any]) -> None:
    for journal in journals:
        journal.add(told)


@pytest.mark.parametrize("seed", range(25))
def test_a_cut_journal_tells_what_an_uncut_one_tells(tmp_path: Path, seed: int) -> None:
    """G4: with gaps that are filled late, wherever it is cut, and after it was opened again."""
    chance = random.Random(seed)
    journals = both(tmp_path)
    add(journals, [Opened(0.0), Started({"identity": "abc"})])
    late: list[Any] = []
    step = chance.choice([1, 1, 1, 8])
    for _ in range(12):
        last = step + chance.randrange(1, 7)
        told = events(step, last)
        if chance.random() < 0.3:
            late += told[1:3]
            told[1:3] = []
        add(journals, told)
        step = last + 1
        if late and chance.random() < 0.5:
            add(journals, late)
            late = []
        delivered = chance.choice([journals[0].size, journals[0].size, 0, journals[0].size // 2])
        starts = [entry.start for entry in journals[0].read(0)] + [journals[0].size]
        journals[0].seal(min(start for start in starts if start >= delivered))
        if chance.random() < 0.4:
            for journal in journals:
                journal.close()
            journals = both(tmp_path)
        assert seen(journals[0]) == seen(journals[1])
    assert journals[0].segments and not journals[1].segments
    for journal in journals:
        journal.close()
    assert read_steps(tmp_path / "cut") == list(read_steps(tmp_path / "uncut"))
    assert newest_step(tmp_path / "cut") == newest_step(tmp_path / "uncut")
    assert (tmp_path / "cut" / NAME).stat().st_size < (tmp_path / "uncut" / NAME).stat().st_size


def test_a_journal_is_opened_without_a_look_at_the_steps_that_are_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    journal.add(events(1, 503))
    while journal.seal(journal.size):
        pass
    journal.close()
    read: list[bytes] = []
    monkeypatch.setattr(
        journal_module,
        "from_line",
        lambda line, folder, real=journal_module.from_line: (read.append(line), real(line, folder))[1],
    )
    again = Journal(tmp_path)
    segment = again.segments[40]
    assert (
        again.last_step == 503
        and again.has_step(77)
        and not again.missing_steps()
        and again.has_segment(segment)
    )
    assert sum(line.startswith(b'{"step"') for line in read) == 3
    again.close()


def test_what_is_read_goes_on_over_a_cut(tmp_path: Path) -> None:
    """The lane of points reads from its cursor on while the writer seals what it has sent."""
    journal = Journal(tmp_path)
    journal.add(events(1, 12))
    entries = list(journal.read(0))
    at = next(entry.start for entry in entries if isinstance(entry.event, StepRow) and entry.event.step == 8)
    reading = journal.read(at)
    first = next(reading)
    assert journal.seal(at) and [one.last for one in journal.segments] == [5]
    journal.add(events(13, 14))
    assert [first, *reading] == [entry for entry in entries if entry.start >= at]
    assert list(journal.read(at))[: len(entries)] == [
        *(entry for entry in entries if entry.start >= at),
        *list(journal.read(entries[-1].end)),
    ]
    journal.close()


def killed_at(folder: Path, at: int) -> bool:
    """Seal in a process that is killed at call `at` of the file system. Whether it was."""
    child = os.fork()
    if child == 0:
        try:
            count = 0

            def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
                def call(*arguments: Any) -> Any:
                    nonlocal count
                    count += 1
                    if count == at:
                        if name == "write":
                            real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real(*arguments)

                return call

            for name in ("open", "write", "fsync", "replace", "close", "ftruncate"):
                setattr(os, name, counted(name, getattr(os, name)))
            journal = Journal(folder)
            journal.seal(journal.size)
            journal.add(events(13, 14))
            journal.close()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("each", [3, pytest.param(1, marks=pytest.mark.exact)])
def test_killed_at_any_call_nothing_is_lost(tmp_path: Path, each: int) -> None:
    """G4: also between sealing and cutting; whoever comes next goes on, and seals what is full."""
    for at in itertools.count(1, each):
        folder = tmp_path / str(at)
        journal = Journal(folder)
        journal.add([Started({"identity": "abc"}), *events(1, 12)])
        journal.close()
        if not killed_at(folder, at):
            break
        again = Journal(folder)
        assert [row.step for row in again.steps()][:12] == list(range(1, 13)), at
        assert not again.damage and not again.lost and not again.missing_steps()
        again.add(events(again.last_step + 1, 20))
        while again.seal(again.size):
            pass
        again.close()
        assert read_steps(folder) == [step_row(i) for i in range(1, 21)], at
        assert {path.name for path in folder.iterdir()} <= {NAME, FOLDER}, at
    assert at > 12


def test_a_disk_that_refuses_leaves_the_journal_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    journal.add(events(1, 12))
    before = seen(journal)

    def full(file: int, data: Any, real: Any = os.write) -> int:
        if Path(f"/proc/self/fd/{file}").readlink().name == NEXT:
            raise OSError(28, "No space left on device")
        return int(real(file, data))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RecordError, match="No space left"):
        journal.seal(journal.size)
    assert seen(journal) == before
    monkeypatch.undo()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(segments, "SEGMENT_STEPS", SEGMENT)
        assert journal.seal(journal.size)
    assert seen(journal) | {"others": 0} == before | {"others": 0}
    journal.close()


def test_a_second_process_does_not_take_the_file_that_was_replaced(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add(events(1, 12))
    with (tmp_path / NAME).open("rb") as old:
        assert journal.seal(journal.size)
        assert os.fstat(old.fileno()).st_ino != (tmp_path / NAME).stat().st_ino
    with pytest.raises(RecordError, match="another process records it now"):
        Journal(tmp_path)
    journal.close()
    Journal(tmp_path).close()


# --- damage -------------------------------------------------------------------------------------------------


def sealed(folder: Path, last: int = 18) -> None:
    journal = Journal(folder)
    journal.add([Opened(0.0), *events(1, last)])
    while journal.seal(journal.size):
        pass
    journal.close()


@pytest.mark.parametrize("how", ["flipped", "gone"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_damaged_file_of_sealed_steps_is_mended_from_a_checkpoint(
    tmp_path: Path, how: str, which: int
) -> None:
    """What a check tells, and with `repair` mends; a ledger whose first steps are lost is not taken for whole."""
    sealed(tmp_path)
    path = sorted((tmp_path / FOLDER).iterdir())[which]
    content = path.read_bytes()
    path.unlink() if how == "gone" else path.write_bytes(
        content[:200] + bytes([content[200] ^ 4]) + content[201:]
    )
    history = ledger.Rows([step_row(i) for i in range(1, 19)], [])
    journal = Journal(tmp_path)
    first = 1 + 5 * which
    assert journal.missing_steps() == range(first, first + 5)
    assert [one.first for one in journal.lost] == [first]
    found = list(check_journal(journal, history, repair=True))
    assert found and all(one.mended for one in found)
    assert list(journal.steps()) == history.steps and not journal.lost
    while journal.seal(journal.size):
        pass
    journal.close()
    again = Journal(tmp_path)
    assert list(again.steps()) == history.steps and not again.lost and len(again.segments) == 3
    again.close()


def test_a_damaged_first_line_loses_no_step(tmp_path: Path) -> None:
    sealed(tmp_path)
    path = tmp_path / NAME
    content = path.read_bytes()
    assert content.startswith(b'{"sealed":')
    path.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
    journal = Journal(tmp_path)
    assert [damage.start for damage in journal.damage] == [0]
    assert [row.step for row in journal.steps()] == list(range(1, 19))
    journal.close()


# --- a recorder ---------------------------------------------------------------------------------------------


def record(spec: Spec, kept: Kept, told: list[Event], run_id: str | None = None) -> Recorder:
    storage = spec.folder
    recorder = Recorder(spec, lambda _: KeepingStore(storage, kept, None, "", lasts=False), run_id)
    recorder.start()
    recorder.run_id()
    for start in range(0, len(told), 7):
        recorder.tell(*told[start : start + 7])
        until = time.monotonic() + 5.0
        while recorder.state.journaled < min(start + 7, len(told)) and time.monotonic() < until:
            time.sleep(0.002)
    return recorder


def wait_for_segments(folder: Path, count: int) -> None:
    until = time.monotonic() + 20.0
    while len(list((folder / FOLDER).glob("*.rows"))) < count:
        assert time.monotonic() < until
        time.sleep(0.005)


def test_a_recorder_seals_what_its_store_has_and_the_ledger_is_whole(spec: Specs) -> None:
    """G4: through a cut journal, a process that ended without a word, and a second attempt that starts from the middle."""
    kept = Kept()
    told: list[Event] = [Started({"identity": "abc"}), *events(1, 23)]
    recorder = record(spec(), kept, told)
    wait_for_segments(recorder.run_folder(), 4)
    recorder.close()
    again = record(
        spec(),
        kept,
        [
            Started({"identity": "abc"}),
            Restored([step_row(i) for i in range(1, 18)], []),
            *events(18, 40),
            Finished({"step": 40}),
        ],
        recorder.run_id(),
    )
    again.close()
    assert not again.state.violation
    folder = again.run_folder()
    assert ledger.read_parquet(folder / "ledger.parquet") == [step_row(i) for i in range(1, 41)]
    losses = sorted(point.step for point in kept.points if point.key == "train/loss")
    assert losses == list(range(1, 41))
    journal = Journal(folder, read_only=True)
    assert len(journal.segments) >= 4 and journal.delivered and isinstance(journal.events[-1], Delivered)
    journal.close()


def test_a_store_that_was_put_back_from_a_backup_gets_what_it_has_lost(
    spec: Specs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G4: it had confirmed these points and documents, so the steps were sealed, and the journal says that all is delivered."""
    kept, sent = Kept(), list[str]()
    monkeypatch.setattr(KeepingStore, "log_file", lambda self, path, folder: sent.append(path.name))
    where = spec(f"sqlite:///{tmp_path}/mlflow.db")
    told = [Started({"identity": "abc"}), Document("a.txt", "a"), *events(1, 23)]
    recorder = record(where, kept, told)
    wait_for_segments(recorder.run_folder(), 4)
    recorder.close()
    whole = sorted((point.key, point.step) for point in kept.points)
    goes_on = [Started({"identity": "abc"}), Finished({"step": 23})]
    sent.clear()
    record(where, kept, goes_on, recorder.run_id()).close()
    assert "a.txt" not in sent, "it has everything"
    for point in [point for point in kept.points if point.step > 7]:
        del kept.points[point]
    record(where, kept, goes_on, recorder.run_id()).close()
    assert sorted((point.key, point.step) for point in kept.points) == whole
    assert sent.count("a.txt") == 1


def test_sync_sends_sealed_steps_as_well(spec: Specs, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a store that has nothing of them, and none twice to one that has some."""
    kept = Kept()
    recorder = record(spec(), kept, [Started({"identity": "abc"}), *events(1, 23), Finished({"step": 23})])
    wait_for_segments(recorder.run_folder(), 4)
    recorder.close()
    whole = sorted((point.key, point.step) for point in kept.points)
    for point in [point for point in kept.points if point.step in (2, 3, 12)]:
        del kept.points[point]
    monkeypatch.setattr(
        "lockstep.record.recorder.store_for",
        lambda spec, started_at: KeepingStore(spec.folder, kept, None, "", lasts=False),
    )
    sync(recorder.run_folder(), again=True)
    assert sorted((point.key, point.step) for point in kept.points) == whole


def test_a_violation_is_found_in_sealed_steps(spec: Specs) -> None:
    """G1: a step that is done again with other bits, long after its first row was sealed."""
    recorder = record(spec(), Kept(), [Started({"identity": "abc"}), *events(1, 23)])
    wait_for_segments(recorder.run_folder(), 4)
    recorder.tell(*[step_row(i) for i in range(3, 12)], step_row(12, loss=0.125))
    recorder.close()
    assert "step 12" in recorder.state.violation and "0.125" in recorder.state.violation
