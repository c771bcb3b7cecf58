"""`record check`: what differs between journal, ledger, checkpoint and store is told, and mended where there is a second place for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.calls.record_check import check_record
from lockstep.checkpoint.manifest import Facts
from lockstep.checkpoint.run_folder import Attempt, RunFolder
from lockstep.checkpoint.storages import open_storage
from lockstep.checkpoint.writer import write_checkpoint
from lockstep.errors import RecordError, SpecError
from lockstep.record.events import Finished
from lockstep.record.history import History
from lockstep.record.journal_file import NAME
from lockstep.record.ledger import read_evaluations, read_parquet
from lockstep.record.recorder import Recorder
from lockstep.record.sync import sync
from lockstep.spec.fields import Spec
from tests.unit.record.rows import corrupted, evaluation_row, step_row
from tests.unit.record.test_outage import recorded
from tests.unit.record.written import read_steps

Specs = Callable[..., Spec]
STEPS = 20
ROWS = [step_row(step) for step in range(1, STEPS + 1)]
EVALUATIONS = [evaluation_row(step) for step in (5, 10, 15, 20)]


def finished(spec: Spec, saved: int = STEPS) -> Path:
    """The folder of a run that finished, with a checkpoint of its rows up to the step `saved`."""
    recorder = Recorder(spec)
    recorder.start()
    recorder.tell(*ROWS, *EVALUATIONS, Finished({"step": STEPS}))
    recorder.close()
    folder = recorder.run_folder()
    attempt = RunFolder.create(open_storage(spec.checkpoint.storage), folder.name).claim()
    save(attempt, saved)
    return folder


def save(attempt: Attempt, step: int) -> None:
    """A checkpoint of the rows up to `step`."""
    history = History()
    for row in ROWS[:step]:
        history.add(row)
    history.evaluations = [row for row in EVALUATIONS if row.step <= step]
    rows = history.saving()
    blocks = {name: block() for name, block in rows.blocks().items()}
    write_checkpoint(attempt, step, blocks, Facts())


def lines(folder: Path) -> list[bytes]:
    return (folder / NAME).read_bytes().splitlines(keepends=True)


def flip(folder: Path, *starts: bytes) -> None:
    """Flip a bit in the middle of the lines that begin so."""
    changed = []
    for line in lines(folder):
        if line.startswith(starts):
            middle = len(line) // 2
            line = line[:middle] + bytes([line[middle] ^ 1]) + line[middle + 1 :]
        changed.append(line)
    (folder / NAME).write_bytes(b"".join(changed))


def test_a_whole_record_has_no_difference(database: str, spec: Specs) -> None:
    folder = finished(spec(database))
    before = (folder / NAME).read_bytes()
    assert check_record(folder, database, repair=False) == []
    assert (folder / NAME).read_bytes() == before


def test_what_was_recorded_of_corrupted_bits_is_no_difference(database: str, spec: Specs) -> None:
    """A store lets go of no point: beside the one of corrupted bits is that of the step when it was taken again."""
    recorder = Recorder(spec(database))
    recorder.start()
    recorder.tell(*ROWS, *EVALUATIONS, corrupted(STEPS, since=15))
    recorder.tell(
        step_row(17, loss=0.5, attempt=2, wall_clock=2e9),
        evaluation_row(20, loss=0.25),
        Finished({"step": STEPS}),
    )
    recorder.close()
    folder = recorder.run_folder()
    save(RunFolder.create(open_storage(spec(database).checkpoint.storage), folder.name).claim(), 15)
    assert check_record(folder, database, repair=False) == []
    points = recorded(database, folder.name)["train/loss"]
    assert {value for step, _, value in points if step == 17} == {ROWS[16].loss, 0.5}


def test_damage_is_told_mended_from_the_checkpoint_and_gone(database: str, spec: Specs) -> None:
    """A flipped bit in a step and an evaluation, a torn middle, a lost ledger, a point that the store lacks."""
    folder = finished(spec(database))
    run_id = folder.name
    flip(folder, b'{"step":[7,', b'{"evaluation":[10,')
    text = (folder / NAME).read_bytes()
    at = text.index(b'{"step":[12,')
    (folder / NAME).write_bytes(text[: at + 30] + text[at + 90 :])  # the middle is gone
    (folder / "ledger.parquet").write_bytes(b"PAR1 and then nothing")
    whole = recorded(database, run_id)

    told = check_record(folder, database, repair=False)
    shown = [f"{one.where}: {one.what}" for one in told]
    assert "journal: lacks step 7, which the checkpoint has" in shown
    assert "journal: lacks step 12, which the checkpoint has" in shown
    assert "journal: lacks the evaluation after step 10, which the checkpoint has" in shown
    assert sum("a damaged line" in line for line in shown) == 3
    assert not any(one.mended for one in told)

    mended = check_record(folder, database, repair=True)
    assert all(one.mended for one in mended)
    assert any(line.what.startswith("ledger.parquet cannot be read") for line in mended)
    assert read_parquet(folder / "ledger.parquet") == ROWS
    assert read_evaluations(folder / "evaluations.parquet") == EVALUATIONS
    assert check_record(folder, database, repair=False) == []
    assert recorded(database, run_id) == whole
    assert "lines (step 7" in (folder / "log.txt").read_text() or read_steps(folder) == ROWS


def test_what_the_store_lacks_is_sent_and_what_it_has_twice_is_told(database: str, spec: Specs) -> None:
    from mlflow import MlflowClient
    from sqlalchemy import create_engine, text

    folder = finished(spec(database))
    whole = recorded(database, folder.name)
    engine = create_engine(database)
    with engine.begin() as connection:
        gone = "DELETE FROM metrics WHERE run_uuid = :run AND key = 'train/loss' AND step BETWEEN 5 AND 9"
        assert connection.execute(text(gone), {"run": folder.name}).rowcount == 5
    engine.dispose()
    MlflowClient(tracking_uri=database).set_terminated(folder.name, "FAILED")
    told = [one.what for one in check_record(folder, database, repair=False)]
    assert told == ["lacks 5 points of train/loss, from step 5 on", "has status FAILED, wanted FINISHED"]
    assert all(one.mended for one in check_record(folder, database, repair=True))
    assert {k: sorted(v) for k, v in recorded(database, folder.name).items()} == whole
    MlflowClient(tracking_uri=database).log_metric(folder.name, "train/loss", 7.0, timestamp=1, step=3)
    (left,) = [
        one for one in check_record(folder, database, repair=True) if not one.mended and "twice" in one.what
    ]
    assert left.what == "has step 3 of train/loss twice"


def test_a_run_whose_damage_no_checkpoint_mends_is_not_finished(spec: Specs) -> None:
    folder = finished(spec(), saved=5)
    flip(folder, b'{"step":[7,')
    told = check_record(folder, "off", repair=True)
    assert [one.what for one in told if not one.mended][:1] == ["lacks steps 7 to 7; no checkpoint has them"]
    with pytest.raises(RecordError, match="its ledger lacks step 7"):
        sync(folder, again=True)
    run = json.loads((folder / "run.json").read_text())
    assert run["status"] == "FAILED"
    assert run["tags"]["lockstep.error"].startswith("the record is not whole: its ledger lacks step 7")


def test_a_run_that_is_resumed_mends_its_journal_and_says_so(spec: Specs) -> None:
    """The history that an attempt starts from fills what a damaged line held, and the run ends well."""
    from lockstep.record.events import Restored

    folder = finished(spec())
    flip(folder, b'{"step":[7,', b'{"evaluation":[10,')
    recorder = Recorder(spec(), run_id=folder.name)
    recorder.start()
    recorder.tell(Restored(ROWS, EVALUATIONS), Finished({"step": STEPS}))
    recorder.close()
    assert read_parquet(folder / "ledger.parquet") == ROWS
    assert read_evaluations(folder / "evaluations.parquet") == EVALUATIONS
    assert json.loads((folder / "run.json").read_text())["status"] == "FINISHED"
    log = (folder / "log.txt").read_text()
    assert "damaged lines of the journal are passed over" in log
    assert "the journal is mended: lines of it were damaged (step 7, evaluation 10)" in log
    assert check_record(folder, "off", repair=False) == []


def test_a_run_that_is_being_recorded_is_left_alone(spec: Specs) -> None:
    recorder = Recorder(spec())
    recorder.start()
    folder = recorder.run_folder()
    with pytest.raises(RecordError, match="another process records it now"):
        check_record(folder, "off", repair=True)
    recorder.close()


def test_without_a_journal_there_is_nothing_to_check(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"there is no journal\.jsonl"):
        check_record(tmp_path, "off", repair=False)
