"""A disk that refuses the journal for a while leaves no hole in the ledger, and a ledger with a hole is never FINISHED."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.record import problems
from lockstep.record.events.union import Finished
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.journal_file import NAME
from lockstep.record.ledger.live_rows import RowsSoFar
from lockstep.record.ledger.tables import read_parquet
from lockstep.record.recorder import Recorder
from lockstep.record.runs.record_differences import InStore, check_store
from lockstep.record.runs.state_differences import State
from lockstep.spec.fields import Spec
from tests.raised import raises
from tests.unit.record.rows import evaluation_row, step_row
from tests.unit.record.written import read_steps

Specs = Callable[..., Spec]


class FullDisk:
    """`os.write` to the journal fails while `full` is set, as it does on a disk without room."""

    def __init__(self) -> None:
        self.full = threading.Event()
        self.refused = 0
        self._write = os.write

    def __call__(self, descriptor: int, data: Any) -> int:
        if self.full.is_set() and Path(f"/proc/self/fd/{descriptor}").readlink().name == NAME:
            self.refused += 1
            if self.refused % 2:  # half of the writes leave a part behind first
                self._write(descriptor, bytes(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(descriptor, data)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[FullDisk]:
    monkeypatch.setattr("lockstep.record.writer.FLUSH_S", 0.05)
    disk = FullDisk()
    monkeypatch.setattr(os, "write", disk)
    yield disk


def wait_until(happened: Callable[[], bool], timeout_s: float = 30.0) -> None:
    until = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_what_a_full_disk_refused_is_written_when_there_is_room_again(disk: FullDisk, spec: Specs) -> None:
    """G4: rows, evaluations and the run's end, in order; the failure is told meanwhile and taken back."""
    recorder = Recorder(spec())
    recorder.start()
    recorder.run_id()
    recorder.tell(*[step_row(i) for i in range(1, 11)])
    wait_until(lambda: recorder.state.journaled == 10)
    disk.full.set()
    recorder.tell(*[step_row(i) for i in range(11, 21)], evaluation_row(20))
    wait_until(lambda: disk.refused > 3)
    failure = recorder.state.failure
    assert failure is not None and "No space left on device" in str(failure)
    disk.full.clear()
    recorder.tell(*[step_row(i) for i in range(21, 31)], Finished({"step": 30}))
    recorder.close()
    folder = recorder.run_folder()
    assert read_parquet(folder / "ledger.parquet") == [step_row(i) for i in range(1, 31)]
    assert json.loads((folder / "run.json").read_text())["status"] == "FINISHED"


def test_a_disk_that_stays_full_ends_in_a_run_that_says_so(
    disk: FullDisk, spec: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: nothing pretends that the rows are there."""
    monkeypatch.setattr("lockstep.record.writer.DISK_PATIENCE_S", 0.3)
    recorder = Recorder(spec())
    recorder.start()
    recorder.run_id()
    disk.full.set()
    recorder.tell(step_row(1), Finished({"step": 1}))
    with raises(problems.EVENTS_LOST, got=re.compile("No space left on device"), count=2):
        recorder.close()
    assert json.loads((recorder.run_folder() / "run.json").read_text())["status"] == "FAILED"
    assert read_steps(recorder.run_folder()) == []


def test_a_ledger_with_a_hole_is_filled_from_what_is_restored(spec: Specs) -> None:
    """Rows that an earlier process could not write are inserted when a later attempt is handed the whole history."""
    recorder = Recorder(spec())
    recorder.start()
    recorder.tell(*[step_row(i) for i in (*range(1, 6), *range(9, 13))])
    recorder.close()
    again = Recorder(spec(), run_id=recorder.run_id())
    again.start()
    again.tell(*[step_row(i) for i in range(1, 15)], Finished({"step": 14}))
    again.close()
    folder = again.run_folder()
    assert read_parquet(folder / "ledger.parquet") == [step_row(i) for i in range(1, 15)]
    assert read_steps(folder) == [step_row(i) for i in range(1, 15)]
    assert json.loads((folder / "run.json").read_text())["status"] == "FINISHED"


def test_a_run_whose_ledger_is_not_whole_is_not_finished(spec: Specs) -> None:
    recorder = Recorder(spec())
    recorder.start()
    recorder.tell(*[step_row(i) for i in (1, 2, 5)], Finished({"step": 5}))
    with raises(problems.NOT_WHOLE, got="its ledger lacks steps 3 to 4"):
        recorder.close()
    run = json.loads((recorder.run_folder() / "run.json").read_text())
    assert run["status"] == "FAILED"
    assert run["tags"]["lockstep.error"].startswith("the record is not whole: its ledger lacks steps 3 to 4")


@pytest.mark.parametrize(
    ("summary", "status"),
    [
        ({"unsaved": "the checkpoint of step 2 could not be saved: full"}, "FAILED"),
        ({"unsaved": "the checkpoint of step 2 could not be saved: full", "stopped": True}, "KILLED"),
        ({"unsaved": ""}, "FINISHED"),
    ],
)
def test_a_run_whose_last_state_is_not_saved_is_not_finished(
    summary: dict[str, Any], status: str, spec: Specs
) -> None:
    """For its page, for a check of its record, and for whoever draws its curves; its tables are whole."""
    recorder = Recorder(spec())
    recorder.start()
    recorder.tell(step_row(1), step_row(2), Finished({"step": 2, **summary}))
    recorder.close()
    folder = recorder.run_folder()
    run = json.loads((folder / "run.json").read_text())
    assert run["status"] == status
    assert run["tags"]["lockstep.error"] == (summary["unsaved"] if status == "FAILED" else "")
    assert run["tags"]["lockstep.note"].startswith(f"**{status}** at step 2")
    assert ("could not be saved" in run["tags"]["lockstep.note"]) == (status == "FAILED")
    assert (folder / "error.txt").exists() == (status == "FAILED")
    assert json.loads((folder / "summary.json").read_text())["step"] == 2
    assert RowsSoFar(folder).failed == (status == "FAILED")
    journal = Journal(folder, read_only=True)
    told = [
        one.what for one in check_store(folder, journal, InStore(status, {}, {}, State({}, {})), scaled=False)
    ]
    journal.close()
    assert not [what for what in told if what.startswith("has status")]


def test_a_journal_knows_what_it_lacks(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.missing_steps() == range(0)
    journal.add([step_row(i) for i in (4, 5, 8, 9)])
    assert journal.missing_steps() == range(6, 8)
    journal.add([step_row(7), step_row(6)])
    assert journal.missing_steps() == range(0)
    journal.close()
    again = Journal(tmp_path)
    assert again.missing_steps() == range(0)
    assert [row.step for row in again.steps()] == [4, 5, 6, 7, 8, 9]
    assert again.step(6) == step_row(6)
    again.close()
