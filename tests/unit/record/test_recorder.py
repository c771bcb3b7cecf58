"""The recorder against the folder store, and against stores that fail in the ways that real ones do."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from lockstep.errors import RecordError, StorageError
from lockstep.files import append_bounded
from lockstep.record import problems, writer_process
from lockstep.record.errors import UnavailableError
from lockstep.record.events.metrics import Point
from lockstep.record.events.union import (
    Document,
    Failed,
    Finished,
    Printed,
    Started,
    TakenOver,
    Violated,
    Warned,
)
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.journal_file import NAME
from lockstep.record.ledger.rows import StepRow
from lockstep.record.ledger.tables import read_evaluations, read_parquet
from lockstep.record.mirror.folder import FolderStore
from lockstep.record.mirror.stores import reader
from lockstep.record.mirror.sync import sync
from lockstep.record.recorder import Recorder
from lockstep.spec.fields import Spec
from tests.processes import named
from tests.raised import raises
from tests.unit.record.rows import corrupted, evaluation_row, step_row

Specs = Callable[..., Spec]


class Shaky(FolderStore):
    """A folder store that keeps its points, and does not answer while `away` is set."""

    def __init__(self, storage: Path) -> None:
        super().__init__(storage, "shaky")
        self.points: list[Point] = []
        self.away = threading.Event()
        self.refuses = ""
        self.last: dict[str, int] = {}
        self.tries = 0

    def last_steps(self) -> Mapping[str, int]:
        return self.last

    def log_metrics(self, points: Sequence[Point]) -> None:
        self.tries += 1
        if self.away.is_set():
            raise UnavailableError("record.uri: 'shaky' does not answer")
        if self.refuses:
            raise RecordError(self.refuses)
        self.points.extend(points)


def test_of_what_a_worker_prints_the_newest_part_is_kept(tmp_path: Path) -> None:
    """Bounded, in whole lines, and it says what was dropped; the control is what fits."""
    path = tmp_path / "logs" / "rank.txt"
    lines = [f"line {i} é" for i in range(100)]
    for line in lines:
        append_bounded(path, f"{line}\n", most=300)
    kept = path.read_text().splitlines()
    assert path.stat().st_size <= 600 + 100
    assert kept[0].startswith("… what was here before was dropped")
    assert 5 < len(kept) < 100
    assert kept[1:] == lines[-len(kept) + 1 :]
    whole = tmp_path / "whole.txt"
    for line in lines[:10]:
        append_bounded(whole, f"{line}\n", most=300)
    assert whole.read_text().splitlines() == lines[:10]


@pytest.fixture
def shaky(tmp_path: Path) -> Shaky:
    return Shaky(tmp_path / "runs")


def recorder_on(store: Shaky, spec: Spec, **options: float) -> Recorder:
    recorder = Recorder(spec, lambda _: store, **options)
    recorder.start()
    return recorder


def losses(points: Sequence[Point]) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in points if point.key == "train/loss"]


def run_json(recorder: Recorder) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((recorder.run_folder() / "run.json").read_text())
    return found


def test_a_run_without_mlflow_is_whole_in_its_folder(spec: Specs) -> None:
    recorder = Recorder(spec())
    recorder.start()
    folder = recorder.run_folder()
    (folder / "weights").mkdir()
    (folder / "weights" / "final.safetensors").write_bytes(b"weights")
    recorder.tell(
        Started(
            {
                "identity": "abc",
                "identity_fields": {"seed": 0},
                "environment": {"python": "3.11"},
                "plan": {"m": 8},
                "source": {"plugins/mlp.py": "password = 'as-it-is'\n"},
            }
        )
    )
    recorder.tell(step_row(1), step_row(2))
    recorder.tell(evaluation_row(2))
    recorder.tell(
        Finished(
            {"step": 2, "weights_digest": "f00", "metrics": {"eval/loss": 0.5}},
            [folder / "weights/final.safetensors"],
        )
    )
    recorder.close()
    run = run_json(recorder)
    assert run["status"] == "FINISHED"
    assert run["params"]["plan.m"] == "8"
    assert run["params"]["optimizer.lr"] == "0.001"
    assert run["tags"]["lockstep.identity"] == "abc"
    assert run["tags"]["lockstep.weights_digest"] == "f00"
    assert run["tags"]["lockstep.note"].startswith("**FINISHED** at step 2 · eval/loss 0.5\n")
    assert read_parquet(folder / "ledger.parquet") == [step_row(1), step_row(2)]
    assert read_evaluations(folder / "evaluations.parquet") == [evaluation_row(2)]
    assert yaml.safe_load((folder / "spec.yaml").read_text())["job"]["use"] == "jobs.digits.job:Digits"
    assert json.loads((folder / "environment.json").read_text()) == {"python": "3.11"}
    assert (folder / "source" / "plugins" / "mlp.py").read_text() == "password = 'as-it-is'\n"
    assert json.loads((folder / "identity_fields.json").read_text()) == {"seed": 0}
    assert not list(folder.rglob("*.partial"))


def test_metrics_survive_an_outage_each_once_and_in_order(shaky: Shaky, spec: Specs) -> None:
    """G4: what is told while the store is away is written when it is back."""
    recorder = recorder_on(shaky, spec(), patience_s=0.3)
    recorder.run_id()
    shaky.away.set()
    recorder.tell(*[step_row(i) for i in range(1, 299)])
    wait_until(lambda: recorder.state.failure is not None)
    log = recorder.run_folder() / "log.txt"
    recorder.tell(step_row(299))
    wait_until(lambda: log.exists() and "the store is away: " in log.read_text())
    shaky.away.clear()
    recorder.tell(*[step_row(i) for i in range(300, 501)])
    wait_until(lambda: recorder.state.failure is None)
    recorder.tell(Finished({"step": 500}))
    recorder.close()
    assert losses(shaky.points) == [(i, 1 / (i + 2)) for i in range(1, 501)]
    assert run_json(recorder)["status"] == "FINISHED"
    assert [log.read_text().count(f"the store is {words}") for words in ("away: ", "back")] == [1, 1]


def test_replayed_steps_leave_no_trace(shaky: Shaky, spec: Specs) -> None:
    """G4: an attempt that starts again from a checkpoint re-sends steps, with other timings."""
    recorder = recorder_on(shaky, spec())
    recorder.tell(*[step_row(i) for i in range(1, 31)])
    recorder.tell(evaluation_row(20))
    recorder.tell(*[step_row(i, wall_clock=2e9, attempt=2) for i in range(11, 41)])
    recorder.tell(evaluation_row(20)._replace(wall_clock=2e9))
    recorder.tell(Finished({}))
    recorder.close()
    assert [step for step, _ in losses(shaky.points)] == list(range(1, 41))
    assert [p.step for p in shaky.points if p.key == "eval/loss"] == [20]
    ledger = read_parquet(recorder.run_folder() / "ledger.parquet")
    assert [(row.step, row.attempt) for row in ledger] == [(i, 1 if i <= 30 else 2) for i in range(1, 41)]


def test_a_run_that_goes_on_keeps_its_ledger_and_sends_what_is_new_of_each_key(
    shaky: Shaky, spec: Specs
) -> None:
    first = recorder_on(shaky, spec())
    first.tell(*[step_row(i) for i in range(1, 11)])
    first.tell(Failed("stopped by SIGTERM", status="KILLED"))
    first.close()
    shaky.last = {"train/loss": 10, "train/lr": 8}
    shaky.points.clear()
    second = Recorder(spec(), lambda _: shaky, first.run_id())
    second.start()
    second.tell(*[step_row(i) for i in range(6, 13)])
    second.tell(Finished({"step": 12}))
    second.close()
    assert [step for step, _ in losses(shaky.points)] == [11, 12]
    assert [p.step for p in shaky.points if p.key == "train/lr"] == [9, 10, 11, 12]
    assert [row.step for row in read_parquet(second.run_folder() / "ledger.parquet")] == list(range(1, 13))
    assert run_json(second)["tags"]["lockstep.error"] == ""


def test_a_store_that_stays_away_is_told_at_close_and_the_ledger_is_there(shaky: Shaky, spec: Specs) -> None:
    recorder = recorder_on(shaky, spec())
    recorder.run_id()
    shaky.away.set()
    recorder.tell(step_row(1))
    recorder.tell(Finished({}))
    wait_until(lambda: shaky.tries >= 3)
    with raises(
        problems.NOT_SENT,
        got=re.compile("does not answer$"),
        remedy=re.compile("^what was recorded .* is in"),
    ):
        recorder.close(timeout_s=1.0)
    assert read_parquet(recorder.run_folder() / "ledger.parquet") == [step_row(1)]


def test_a_call_that_is_refused_costs_no_other(shaky: Shaky, spec: Specs) -> None:
    recorder = recorder_on(shaky, spec())
    shaky.refuses = "record.uri: 'shaky' refuses: no such run"
    recorder.tell(step_row(1))
    wait_until(lambda: recorder.state.failure is not None)
    recorder.tell(Finished({}))
    with raises(problems.NOT_RECORDED, got=re.compile("no such run")):
        recorder.close()
    assert run_json(recorder)["status"] == "FINISHED"


@pytest.mark.parametrize("deleted", [True, False])
def test_a_record_whose_file_was_deleted_while_it_was_written_is_not_whole(
    spec: Specs, deleted: bool
) -> None:
    """The process that writes goes on in a file without a name, and another may write a new one beside it. G4: the run does not end as if all were there."""
    recorder = Recorder(spec("off"))
    recorder.start()
    recorder.run_id()
    recorder.tell(step_row(1))
    if deleted:
        (recorder.run_folder() / NAME).unlink()
    recorder.tell(step_row(2), Finished({"step": 2}))
    if not deleted:
        recorder.close()
        return
    with raises(problems.FOLDER_DELETED, folder=recorder.run_folder()):
        recorder.close()


def test_a_run_that_is_closed_without_an_end_has_failed(spec: Specs) -> None:
    recorder = Recorder(spec())
    recorder.start()
    recorder.close()
    assert run_json(recorder)["status"] == "FAILED"
    assert "without a result" in (recorder.run_folder() / "error.txt").read_text()


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_a_run_that_ends_early_keeps_the_line_the_details_and_the_ledger(spec: Specs, status: str) -> None:
    recorder = Recorder(spec())
    recorder.start()
    recorder.tell(step_row(1))
    recorder.tell(Failed("the loss of step 2 is nan", "Traceback …", status=status))
    recorder.close()
    run, folder = run_json(recorder), recorder.run_folder()
    assert run["status"] == status
    assert run["tags"]["lockstep.error"] == "the loss of step 2 is nan"
    assert run["tags"]["lockstep.note"].startswith(f"**{status}** after step 1: the loss of step 2 is nan")
    assert (folder / "error.txt").read_text() == "the loss of step 2 is nan\n\nTraceback …\n"
    assert read_parquet(folder / "ledger.parquet") == [step_row(1)]


class Utf8(Shaky):
    """A store whose texts are sent in UTF-8."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        for text in tags.values():
            text.encode()
        super().set_tags(tags)


def test_a_file_name_that_is_not_utf8_costs_the_record_nothing(spec: Specs, tmp_path: Path) -> None:
    """Python holds its bytes as surrogates, which no UTF-8 can hold: they are recorded as escapes. The warning comes back as it was told."""
    name = os.fsdecode(b"caf\xe9.png")
    recorder = recorder_on(Utf8(tmp_path / "runs"), spec())
    recorder.tell(step_row(1), Warned(f"{name} is damaged"), Printed("rank0", f"reads {name}\n"))
    recorder.tell(step_row(2), Failed(f"cannot read {name}", f"Traceback: {name}"))
    recorder.close()
    folder = recorder.run_folder()
    assert run_json(recorder)["status"] == "FAILED"
    assert run_json(recorder)["tags"]["lockstep.error"] == r"cannot read caf\udce9.png"
    assert (folder / "error.txt").read_text() == "cannot read caf\\udce9.png\n\nTraceback: caf\\udce9.png\n"
    assert r" warning: caf\udce9.png is damaged" in (folder / "log.txt").read_text()
    assert (folder / "logs" / "rank0.txt").read_text() == "reads caf\\udce9.png\n"
    assert read_parquet(folder / "ledger.parquet") == [step_row(1), step_row(2)]
    assert Warned(f"{name} is damaged") in Journal(folder, read_only=True).events


class LateBeats(Shaky):
    """Takes its time for a heartbeat."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        if "lockstep.beat" in tags:
            time.sleep(0.3)
        super().set_tags(tags)


def test_a_heartbeat_that_is_late_takes_no_error_back(spec: Specs, tmp_path: Path) -> None:
    recorder = recorder_on(LateBeats(tmp_path / "runs"), spec())
    recorder.tell(step_row(1), Failed("the loss of step 2 is nan"))
    recorder.close()
    assert run_json(recorder)["tags"]["lockstep.error"] == "the loss of step 2 is nan"


class Noteless(Shaky):
    """Answers everything but the tags that say how the run stands."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        if "lockstep.note" in tags:
            raise UnavailableError("record.uri: 'noteless' does not answer")
        super().set_tags(tags)


def test_a_store_that_cannot_be_told_how_the_run_stands_is_not_told_of_its_end(
    spec: Specs, tmp_path: Path
) -> None:
    """A reader would take its record for complete."""
    recorder = recorder_on(Noteless(tmp_path / "runs"), spec())
    recorder.tell(step_row(1), Failed("the loss of step 2 is nan"))
    with raises(problems.END_UNTOLD, remedy=re.compile("lockstep record sync")):
        recorder.close(3.0)
    assert run_json(recorder)["status"] == "RUNNING"


def test_a_folder_that_cannot_be_written_is_one_clear_line(spec: Specs, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    recorder = Recorder(spec())
    recorder.start()
    with raises(problems.CANNOT_WRITE) as told:
        recorder.run_id()
    assert "\n" not in str(told.value)
    with pytest.raises((RecordError, StorageError)):
        recorder.run_folder()
    recorder.tell(step_row(1))
    with raises(problems.CANNOT_WRITE):
        recorder.close()


def test_an_unknown_run_is_one_clear_line(spec: Specs) -> None:
    recorder = Recorder(spec(), run_id="0" * 32)
    recorder.start()
    with raises(problems.NO_RUN):
        recorder.run_id()


class Silent(Shaky):
    """It takes points, and does not return before it is told to."""

    def __init__(self, storage: Path) -> None:
        super().__init__(storage)
        self.asked, self.go = threading.Event(), threading.Event()

    def log_metrics(self, points: Sequence[Point]) -> None:
        self.asked.set()
        self.go.wait()
        super().log_metrics(points)


@pytest.mark.scenario
def test_telling_waits_for_no_store(tmp_path: Path, spec: Specs) -> None:
    """A store that does not return keeps none of the calls: were one to wait for it, the thread would not end."""
    silent = Silent(tmp_path / "runs")
    recorder = recorder_on(silent, spec())
    recorder.tell(step_row(1))
    assert silent.asked.wait(60)
    training = threading.Thread(
        target=lambda: [recorder.tell(step_row(i)) for i in range(2, 5001)], daemon=True
    )
    training.start()
    training.join(60)
    assert not training.is_alive() and silent.points == []
    silent.go.set()
    recorder.tell(Finished({}))
    recorder.close()
    assert len(losses(silent.points)) == 5000


def test_no_password_is_recorded(shaky: Shaky, spec: Specs) -> None:
    """Nor where it is told: in what workers print, in a traceback, in a difference to the commit."""
    secret = "http://me:hunter2@host/a?token=hunter2"
    recorder = recorder_on(shaky, spec("postgresql://me:hunter2@host/db"))
    recorder.tell(Started({"identity": "abc", "git": {"dirty": True}}), Printed("rank-0", f"at {secret}\n"))
    recorder.tell(
        Document("stacks.txt", secret), Failed(f"cannot reach {secret}", f'File "{secret}", line 1')
    )
    recorder.close()
    for name in ("logs/rank-0.txt", "stacks.txt", "error.txt", "journal.jsonl"):
        told = (recorder.run_folder() / name).read_text()
        assert "http://me:***@host/a?token=***" in told or name == "journal.jsonl", told
    for file in recorder.run_folder().rglob("*"):
        assert file.is_dir() or b"hunter2" not in file.read_bytes()
    assert run_json(recorder)["params"]["record.uri"] == "postgresql://me:***@host/db"


def test_importing_the_record_imports_neither_mlflow_nor_pyarrow_nor_torch() -> None:
    modules = ["recorder", "environment", "ledger.tables", "mirror.mlflow", "mirror.folder"]
    script = "".join(f"import lockstep.record.{name}\n" for name in modules)
    script += "import sys; print([m for m in ('mlflow', 'pyarrow', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def wait_until(happened: Callable[[], bool], timeout_s: float = 20.0) -> None:
    until = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.01)


def violations(store: Shaky, spec: Spec, again: Sequence[StepRow]) -> Recorder:
    """A run whose steps 1…10 are done, of which some are done again."""
    recorder = recorder_on(store, spec)
    recorder.tell(*[step_row(i) for i in range(1, 11)])
    recorder.tell(evaluation_row(5))
    recorder.tell(*again)
    recorder.tell(Finished({"step": 10}))
    recorder.close()
    return recorder


def test_a_replayed_step_with_the_same_bits_is_no_violation(shaky: Shaky, spec: Specs) -> None:
    again = [step_row(i, wall_clock=2e9, attempt=2, step_s=1.0) for i in range(4, 12)]
    recorder = violations(shaky, spec(), again)
    assert recorder.state.violation == ""
    assert "lockstep.violation" not in run_json(recorder)["tags"]


def test_a_replayed_step_with_another_bit_is_a_determinism_violation(shaky: Shaky, spec: Specs) -> None:
    """G1, watched in every run that goes on: the last bit of one loss, tagged and told first."""
    loss = step_row(7).loss
    recorder = violations(shaky, spec(), [step_row(6), step_row(7, loss=math.nextafter(loss, 1.0))])
    assert recorder.state.violation.startswith(
        f"step 7 gave other bits when it was done again: loss {loss!r} → "
    )
    tags = run_json(recorder)["tags"]
    assert tags["lockstep.violation"] == recorder.state.violation
    assert f"not exact: {recorder.state.violation}" in tags["lockstep.note"].splitlines()[0]
    assert recorder.state.violation in (recorder.run_folder() / "log.txt").read_text()
    assert losses(shaky.points)[6] == (7, loss)


def test_a_violation_is_shown_by_whoever_records_the_run_next(shaky: Shaky, spec: Specs) -> None:
    """By a sync, and by an attempt that resumes it: it is in the journal, once. The control is a second one of that attempt."""
    first = violations(shaky, spec(), [step_row(7, loss=0.5), step_row(8, loss=0.5)])
    sync(first.run_folder(), again=True)
    assert "not exact: step 7" in run_json(first)["tags"]["lockstep.note"].splitlines()[0]
    second = Recorder(spec(), lambda _: shaky, first.run_id())
    second.start()
    second.tell(Started({}), step_row(9, loss=0.5), Finished({"step": 10}))
    second.close()
    assert second.state.violation.startswith("step 9 gave other bits")
    assert "not exact: step 7" in run_json(second)["tags"]["lockstep.note"].splitlines()[0]
    journal = Journal(second.run_folder(), read_only=True)
    recorded = [event.text[:6] for event in journal.events if isinstance(event, Violated)]
    journal.close()
    assert recorded == ["step 7", "step 9"]


def test_rows_of_corrupted_bits_give_way_to_those_of_the_steps_taken_again(shaky: Shaky, spec: Specs) -> None:
    """G4: ledger and store have what the steps came to at last; of the doubted ones alone, and once."""
    right = step_row(7, loss=0.5, attempt=2)
    recorder = recorder_on(shaky, spec())
    recorder.tell(*[step_row(i) for i in range(1, 9)])
    recorder.tell(evaluation_row(8, loss=0.5), corrupted(8, since=5))
    recorder.tell(step_row(6, attempt=2), right, evaluation_row(8, loss=0.25))
    recorder.tell(Finished({"step": 8}))
    recorder.close()
    assert recorder.state.violation == ""
    ledger = read_parquet(recorder.run_folder() / "ledger.parquet")
    assert [row.step for row in ledger] == list(range(1, 9))
    assert ledger[6] == right
    assert (ledger[5].attempt, ledger[7].attempt) == (1, 1)
    assert [
        row.metrics["eval/loss"] for row in read_evaluations(recorder.run_folder() / "evaluations.parquet")
    ] == [0.25]
    assert losses(shaky.points)[-1] == (7, 0.5)
    assert run_json(recorder)["tags"]["lockstep.corrupted"] == str(corrupted(8, since=5))


@pytest.mark.parametrize(
    "again",
    [
        [corrupted(8, since=7), step_row(7, loss=0.5, attempt=2)],
        [corrupted(8, since=5), step_row(7, loss=0.5, attempt=2), step_row(7, loss=0.25, attempt=3)],
    ],
    ids=["before the last agreement", "after it was taken again"],
)
def test_a_row_that_is_not_doubted_gives_way_to_nothing(
    shaky: Shaky, spec: Specs, again: Sequence[StepRow]
) -> None:
    assert violations(shaky, spec(), again).state.violation.startswith("step 7 gave other bits")


def test_a_replayed_evaluation_is_compared_as_well(shaky: Shaky, spec: Specs) -> None:
    recorder = recorder_on(shaky, spec())
    recorder.tell(evaluation_row(5, loss=0.5))
    recorder.tell(evaluation_row(5, loss=0.25))
    recorder.tell(Finished({}))
    recorder.close()
    assert recorder.state.violation == "step 5 gave other bits when it was done again: eval/loss 0.5 → 0.25"


@pytest.mark.parametrize("promise", [{"determinism": "fast"}, {"reduction": "native"}])
def test_without_the_promise_there_is_nothing_to_violate(
    shaky: Shaky, spec: Specs, promise: dict[str, str]
) -> None:
    assert violations(shaky, spec(**promise), [step_row(7, loss=0.0)]).state.violation == ""


def test_a_signal_is_named_in_the_verdict(shaky: Shaky, spec: Specs) -> None:
    recorder = recorder_on(shaky, spec())
    recorder.tell(step_row(1))
    recorder.tell(Finished({"step": 1, "stopped": True, "signal": 15}))
    recorder.close()
    assert run_json(recorder)["status"] == "KILLED"
    assert run_json(recorder)["tags"]["lockstep.note"].startswith("**KILLED** by SIGTERM at step 1")
    assert run_json(recorder)["tags"]["lockstep.signal"] == "15"


def test_a_recorder_says_that_it_lives(shaky: Shaky, spec: Specs, monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes back what a hasty reader said meanwhile."""
    monkeypatch.setattr("lockstep.record.mirror.reconciler.BEAT_S", 0.2)
    monkeypatch.setattr("lockstep.record.writer.FLUSH_S", 0.1)
    recorder = recorder_on(shaky, spec())
    recorder.run_id()
    wait_until(lambda: "lockstep.vanished" in run_json(recorder)["tags"])  # its first beat
    marked = run_json(recorder)
    marked["status"], marked["tags"]["lockstep.vanished"] = "FAILED", "it seemed so"
    (recorder.run_folder() / "run.json").write_text(json.dumps(marked))
    wait_until(lambda: run_json(recorder)["status"] == "RUNNING")
    wait_until(lambda: run_json(recorder)["tags"]["lockstep.vanished"] == "")
    recorder.tell(Finished({}))
    recorder.close()
    assert run_json(recorder)["status"] == "FINISHED"


def test_a_recorder_says_that_it_lives_while_its_thread_is_busy(
    spec: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It draws, or waits for its disk."""
    monkeypatch.setattr("lockstep.record.mirror.reconciler.BEAT_S", 0.2)
    monkeypatch.setattr("lockstep.record.writer.FLUSH_S", 60.0)
    recorder = Recorder(spec())
    recorder.start()
    recorder.run_id()
    beats: set[str] = set()

    def beat_often() -> bool:
        beats.add(run_json(recorder)["tags"]["lockstep.beat"])
        return len(beats) >= 6

    wait_until(beat_often)
    recorder.tell(Finished({}))
    recorder.close()
    assert run_json(recorder)["status"] == "FINISHED"


@pytest.mark.parametrize("steps", [10_000, pytest.param(20_000, marks=pytest.mark.exact)])
@pytest.mark.scenario
def test_an_outage_costs_no_memory_for_what_the_journal_has(shaky: Shaky, spec: Specs, steps: int) -> None:
    """The steps wait on disk: in memory an offset each, not their eight points, beside what is held of any run."""
    recorder = recorder_on(shaky, spec(), patience_s=0.1)
    recorder.run_id()
    shaky.away.set()
    tracemalloc.start()
    try:
        for start in range(1, steps + 1, 500):
            recorder.tell(*[step_row(i) for i in range(start, start + 500)])
        wait_until(lambda: recorder.state.journaled == steps, 60)
        journal = recorder.run_folder() / "journal.jsonl"
        assert b'{"step":[%d,' % steps in journal.read_bytes()[-400:]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 4e6
    shaky.away.clear()
    recorder.tell(Finished({}))
    recorder.close()
    assert [step for step, _ in losses(shaky.points)] == list(range(1, steps + 1))


# --- in a process of its own ------------------------------------------------------------------------------


def recorded_by(spec: Spec, *, apart: bool) -> tuple[Recorder, Path]:
    recorder = Recorder(spec, apart=apart)
    recorder.start()
    recorder.tell(Started({"identity": "abc", "workers": 1}))
    recorder.tell(*[step_row(step) for step in range(1, 51)])
    recorder.tell(step_row(7, loss=0.5))  # done again, and differs
    recorder.tell(evaluation_row(50, loss=0.25))
    recorder.tell(Finished({"step": 50, "metrics": {"eval/loss": 0.25}}))
    recorder.close()
    return recorder, recorder.run_folder()


@pytest.mark.scenario
@pytest.mark.usefixtures("drawn_figures")
def test_a_process_of_its_own_writes_the_record_that_a_thread_does(spec: Specs) -> None:
    """The same files with the same bits, and the same words about it."""
    (ours, here), (theirs, there) = (recorded_by(spec(), apart=apart) for apart in (False, True))
    assert theirs.state.violation == ours.state.violation != ""
    names = {path.relative_to(here) for path in here.rglob("*") if path.is_file()}
    assert names == {path.relative_to(there) for path in there.rglob("*") if path.is_file()}
    assert read_parquet(there / "ledger.parquet") == read_parquet(here / "ledger.parquet")
    assert (there / "summary.json").read_text() == (here / "summary.json").read_text()
    tags = [json.loads((folder / "run.json").read_text())["tags"] for folder in (here, there)]
    assert tags[0].keys() == tags[1].keys()
    assert tags[0]["lockstep.process"] != tags[1]["lockstep.process"]


@pytest.mark.scenario
def test_a_writer_takes_up_the_process_that_was_started_ahead_of_it(
    spec: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the variables of now; but not where one of MLflow's is another. One that nobody has taken up ends with the block."""
    taken_up = []
    for variable in ("AWS_PROFILE", "MLFLOW_TRACKING_TOKEN"):
        with writer_process.writer_ahead("off"):
            (ahead,) = named("writer_process")
            monkeypatch.setenv(variable, "of the job")
            recorder = Recorder(spec(), apart=True)
            recorder.start()
            recorder.run_id()
            (child,) = named("writer_process")
            taken_up.append(child == ahead)
        recorder.tell(step_row(1), Finished({"step": 1, "metrics": {}}))
        recorder.close()
        assert [row.step for row in read_parquet(recorder.run_folder() / "ledger.parquet")] == [1]
    assert taken_up == [True, False]
    with writer_process.writer_ahead("off"):
        (ahead,) = named("writer_process")
    assert not ahead.is_running()


def test_the_death_of_the_process_that_writes_is_told(spec: Specs) -> None:
    """What was not written is not taken for written; the control is the test above."""
    recorder = Recorder(spec(), apart=True)
    recorder.start()
    recorder.tell(step_row(1))
    run_id = recorder.run_id()
    (child,) = named("writer_process")
    child.kill()
    recorder.tell(step_row(2))
    with raises(problems.PROCESS_LOST, got="has ended (exit code -9)", run=run_id):
        recorder.close()


def test_the_death_of_that_process_before_there_is_a_run_names_none(
    spec: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be sent from the folder of a run that never was."""
    monkeypatch.setattr(
        writer_process, "library_words", lambda *_: [sys.executable, "-c", "raise SystemExit(1)"]
    )
    recorder = Recorder(spec(), apart=True)
    recorder.start()
    with raises(problems.PROCESS_LOST_EARLY, got="has ended (exit code 1)"):
        recorder.run_id()


def test_a_file_beside_the_job_does_not_end_the_process_that_writes(
    spec: Specs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds the job's folder as this process does, but behind what it needs itself."""
    for name in ("random", "typing", "queue"):
        (tmp_path / f"{name}.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "example.py").write_text("# the job's, of which a library has another\n")
    on = spec()
    recorder = Recorder(
        on.model_copy(update={"job": on.job.model_copy(update={"use": "example:Any"})}), apart=True
    )
    recorder.start()
    recorder.tell(step_row(1), Finished({"step": 1, "metrics": {}}))
    recorder.close()
    assert [row.step for row in read_parquet(recorder.run_folder() / "ledger.parquet")] == [1]
    assert (recorder.run_folder() / "source/example.py").read_text() == (tmp_path / "example.py").read_text()


def test_a_signal_to_all_processes_of_a_job_does_not_end_the_one_that_writes(spec: Specs) -> None:
    """Nor one that comes while it starts. The control is SIGKILL, in the test above."""
    recorder = Recorder(spec(), apart=True)
    recorder.start()
    (child,) = named("writer_process")
    for number in (signal.SIGTERM, signal.SIGINT):
        child.send_signal(number)
    recorder.tell(step_row(1))
    recorder.tell(Finished({"step": 1, "metrics": {}}))
    recorder.close()
    assert [row.step for row in read_parquet(recorder.run_folder() / "ledger.parquet")] == [1]


@pytest.mark.scenario
def test_a_process_that_writes_and_is_stopped_does_not_keep_the_run_waiting(
    spec: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP: no error, no end, only silence. The run's folder has what was written."""
    monkeypatch.setattr(writer_process, "SILENT_S", 3.0)
    recorder = Recorder(spec(), apart=True)
    recorder.start()
    run_id = recorder.run_id()
    recorder.tell(step_row(1))
    until = time.monotonic() + 60
    while recorder.state.journaled < 1:
        assert time.monotonic() < until
        time.sleep(0.01)
    (child,) = named("writer_process")
    child.suspend()
    recorder.tell(step_row(2))
    with raises(problems.PROCESS_LOST, got=re.compile("did nothing for 3 s$"), run=run_id):
        recorder.close()
    assert not child.is_running()
    sync(recorder.run_folder())
    assert [row.step for row in read_parquet(recorder.run_folder() / "ledger.parquet")] == [1]


@pytest.mark.scenario
def test_the_process_that_writes_ends_with_the_one_that_trains(tmp_path: Path) -> None:
    """SIGKILL, with a forked child that holds every pipe open and lives on."""
    script = (
        "import os, sys, time, psutil\n"
        "from lockstep.record.recorder import Recorder\n"
        "from lockstep.spec.loading import load_spec\n"
        "recorder = Recorder(load_spec({'job': {'use': 'jobs.digits.job:Digits'}, 'record': {'uri': 'off'},\n"
        f"    'checkpoint': {{'storage': {str(tmp_path)!r}}}}}), apart=True)\n"
        "recorder.start()\n"
        "recorder.run_id()\n"
        "(writer,) = psutil.Process().children()\n"
        "forked = os.fork()\n"
        "if not forked:\n"
        "    os.close(1)\n"
        "    time.sleep(600)\n"
        "print(writer.pid, forked, flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    writer, forked = map(psutil.Process, map(int, process.stdout.readline().split()))
    try:
        assert writer.is_running()
        process.kill()
        process.communicate()
        assert not psutil.wait_procs([writer], timeout=20)[1]
        assert forked.is_running()
    finally:
        forked.kill()
    (run,) = tmp_path.glob("*/run.json")
    assert json.loads(run.read_text())["status"] == "RUNNING"
    assert reader("off", tmp_path).run(run.parent.name).status == "FAILED"


def test_a_run_that_was_taken_over_keeps_the_status_that_the_newer_attempt_gives_it(
    shaky: Shaky, spec: Specs
) -> None:
    """An attempt that is fenced off says what it did, and not how the run ended: not at once, and not in a sync."""
    first = recorder_on(shaky, spec())
    first.tell(*[step_row(i) for i in range(1, 4)], TakenOver("run x was taken over by process 7"))
    first.close()
    assert run_json(first)["status"] == "RUNNING"
    assert not run_json(first)["tags"].get("lockstep.error")
    assert "was taken over by process 7" in (first.run_folder() / "log.txt").read_text()
    assert losses(shaky.points) == [(i, 1 / (i + 2)) for i in range(1, 4)]
    assert not sync(first.run_folder()).sent
    again = sync(first.run_folder(), again=True)
    assert again.sent and run_json(first)["status"] == "RUNNING"
    second = Recorder(spec(), lambda _: shaky, first.run_id())
    second.start()
    second.tell(step_row(4), Finished({"step": 4}))
    second.close()
    assert run_json(second)["status"] == "FINISHED"
