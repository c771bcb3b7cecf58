"""`record check`: what differs between journal, ledger, checkpoint and store is told, and mended where there is a second place for it."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.calls.lost_files import sync_whole
from lockstep.calls.problems import FILE_DAMAGED
from lockstep.calls.record_check import check_record
from lockstep.checkpoint.manifest import Facts
from lockstep.checkpoint.runs.run_folder import Attempt, RunFolder
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.errors import RecordError
from lockstep.record import problems
from lockstep.record.events.codec import from_line, to_line
from lockstep.record.events.union import (
    CheckpointRow,
    Event,
    Failed,
    Finished,
    Opened,
    Printed,
    Restored,
    Started,
    Warned,
)
from lockstep.record.ledger.history import History
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.journal_end import GONE
from lockstep.record.ledger.journal_file import NAME
from lockstep.record.ledger.tables import read_evaluations, read_parquet, write_parquet
from lockstep.record.mirror.mlflow import in_mlflow
from lockstep.record.mirror.seal import seal
from lockstep.record.mirror.stores import find_files, reader
from lockstep.record.mirror.sync import sync
from lockstep.record.recorder import Recorder
from lockstep.record.runs import heartbeat
from lockstep.record.runs.record_differences import COPIED
from lockstep.spec.fields import Spec
from lockstep.training.integrity.state_digest import weights_digest
from lockstep.training.weights import save_weights
from tests.raised import raises
from tests.unit.checkpoint.one_process import write_checkpoint
from tests.unit.record.rows import corrupted, evaluation_row, step_row
from tests.unit.record.test_outage import recorded
from tests.unit.record.written import read_steps

Specs = Callable[..., Spec]
STEPS = 20
ROWS = [step_row(step) for step in range(1, STEPS + 1)]
EVALUATIONS = [evaluation_row(step) for step in (5, 10, 15, 20)]
WEIGHTS = {"w": torch.ones(1)}


def finished(spec: Spec, saved: int = STEPS, before: Sequence[Event] = (), *, weights: bool = False) -> Path:
    """The folder of a run that finished, with a checkpoint of its rows up to the step `saved`."""
    recorder = Recorder(spec)
    recorder.start()
    folder = recorder.run_folder()
    files = save_weights(folder, {"final": WEIGHTS}) if weights else []
    digest = {"weights_digest": weights_digest(WEIGHTS)} if weights else {}
    recorder.tell(*before, *ROWS, *EVALUATIONS, Finished({"step": STEPS, **digest}, files))
    recorder.close()
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


def test_the_journal_of_another_run_is_told_and_not_gone_on_with(database: str, spec: Specs) -> None:
    """Its rows may have the same bits: what is false then is when they were computed, and by which attempts."""
    folder, other = finished(spec(database)), finished(spec(database))
    own = (folder / NAME).read_bytes()
    (folder / NAME).write_bytes((other / NAME).read_bytes())
    (told, *_) = check_record(folder, database, repair=False)
    assert (told.where, told.what, told.mended) == ("journal", f"is that of run {other.name}", False)
    recorder = Recorder(spec(database), run_id=folder.name)
    recorder.start()
    for go_on in (
        recorder.run_id,
        recorder.close,
        lambda: check_record(folder, database, repair=True),
        lambda: sync(folder, database, again=True),
    ):
        with raises(problems.OTHER_JOURNAL, run=folder.name, got=other.name):
            go_on()
    (folder / NAME).write_bytes(own)
    assert check_record(folder, database, repair=False) == []


@pytest.mark.scenario
def test_a_damaged_first_line_is_told_and_mended(database: str, spec: Specs) -> None:
    """It says when the run began, and nothing else does."""
    folder = finished(spec(database))
    flip(folder, b'{"opened":')
    told = [f"{one.where}: {one.what}" for one in check_record(folder, database, repair=False)]
    assert told == ["journal: a damaged line at byte 0: opened"]
    assert [one.mended for one in check_record(folder, database, repair=True)] == [True]
    assert check_record(folder, database, repair=False) == []


@pytest.mark.scenario
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


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize("status", ["FINISHED", "FAILED"])
def test_a_run_that_was_continued_elsewhere_is_not_told_from_its_old_folder(
    database: str, spec: Specs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """The store has more than the old folder, and a status that is not for it to say; nothing changes anywhere."""

    def recorded_in(name: str, until: int, end: Finished | Failed, run_id: str | None = None) -> Path:
        own = spec(database, record={"uri": database, "folder": str(tmp_path / name)})
        recorder = Recorder(own, run_id=run_id)
        recorder.start()
        recorder.tell(Restored(ROWS[:until], []), end)
        recorder.close()
        return recorder.run_folder()

    old = recorded_in("old", 10, Failed("killed"))
    monkeypatch.setattr(heartbeat, "started", lambda pid: "another process")
    end = Finished({"step": STEPS}) if status == "FINISHED" else Failed("the loss is nan")
    new = recorded_in("new", STEPS, end, run_id=old.name)
    monkeypatch.undo()
    before, journal = in_mlflow(database, old.name, COPIED), (old / NAME).read_bytes()
    for call in (lambda: sync(old, again=True), lambda: check_record(old, database, repair=True)):
        with raises(problems.CONTINUED, run=old.name, folder=new, step=20, status=status):
            call()
        assert in_mlflow(database, old.name, COPIED) == before
        assert (old / NAME).read_bytes() == journal
    assert sync(new, again=True).sent
    assert check_record(new, database, repair=True) == []
    moved = old.parents[1] / "moved" / old.name
    new.parent.rename(moved.parent)
    assert sync(moved, again=True).sent, "a folder that was moved is the run's own"
    assert in_mlflow(database, old.name, COPIED).status == status


def test_a_run_whose_damage_no_checkpoint_mends_is_not_finished(spec: Specs) -> None:
    folder = finished(spec(), saved=5)
    flip(folder, b'{"step":[7,')
    told = check_record(folder, "off", repair=True)
    assert [one.what for one in told if not one.mended][:1] == ["lacks steps 7 to 7; no checkpoint has them"]
    with raises(problems.NOT_WHOLE, got="its ledger lacks step 7"):
        sync(folder, again=True)
    run = json.loads((folder / "run.json").read_text())
    assert run["status"] == "FAILED"
    assert run["tags"]["lockstep.error"].startswith("the record is not whole: its ledger lacks step 7")


def cut(folder: Path, count: int) -> None:
    """Take the last lines of the journal away, and leave `count`."""
    (folder / NAME).write_bytes(b"".join(lines(folder)[:count]))


def forget_times(folder: Path) -> None:
    """Make the journal one that does not say when the run ended, as one whose end a check has written."""
    events = [from_line(line[:-1], folder) for line in lines(folder)]
    events = [replace(event, at=None) if isinstance(event, Finished) else event for event in events]
    (folder / NAME).write_bytes(b"".join(to_line(event, folder) for event in events if event))
    seal(folder)


def end_of(folder: Path, uri: str) -> tuple[str, float | None]:
    run = reader(uri, folder.parent).run(folder.name)
    return run.status, run.ended


@pytest.mark.every(12)
@pytest.mark.thinned(3)
@pytest.mark.parametrize("left", [-2, -6, 0])
@pytest.mark.parametrize("recorded_in", ["off", "mlflow"])
@pytest.mark.parametrize("steps", ["the checkpoint", "the tables"])
def test_an_end_that_the_journal_has_lost_is_told_and_written_again(
    database: str, spec: Specs, recorded_in: str, steps: str, left: int
) -> None:
    """By a copy in part, or a damaged disk. What the store was told stays; the rows come from the checkpoint, or from the tables."""
    uri = database if recorded_in == "mlflow" else "off"
    folder = finished(spec(uri))
    before = end_of(folder, uri)
    cut(folder, left)
    if steps == "the tables":
        shutil.rmtree(folder / f"step-{STEPS:09d}")
    with raises(problems.END_LOST, status="FINISHED", folder=folder):
        sync(folder, again=True)
    told = [one.what for one in check_record(folder, uri, repair=False)]
    assert told[-1] == "has lost the run's end: the run is FINISHED"
    assert end_of(folder, uri) == before
    assert all(one.mended for one in check_record(folder, uri, repair=True))
    assert check_record(folder, uri, repair=False) == []
    assert end_of(folder, uri) == before
    assert read_parquet(folder / "ledger.parquet") == ROWS
    assert read_evaluations(folder / "evaluations.parquet") == EVALUATIONS


def test_an_end_after_steps_that_are_lost_everywhere_is_not_written_again(spec: Specs) -> None:
    folder = finished(spec(), saved=5)
    cut(folder, 7)
    write_parquet(ROWS[:19], folder / "ledger.parquet")
    before = (folder / "run.json").read_bytes()
    (told,) = [one for one in check_record(folder, "off", repair=True) if not one.mended]
    assert told.what == "has lost the run's end: the run is FINISHED"
    with raises(problems.END_LOST):
        sync(folder, again=True)
    assert (folder / "run.json").read_bytes() == before
    assert read_parquet(folder / "ledger.parquet") == ROWS[:19], "the table has more than the journal"


@pytest.mark.parametrize("recorded", [True, False])
def test_a_folder_that_is_named_otherwise_is_no_difference(
    database: str, spec: Specs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    uri = database if recorded else "off"
    folder = finished(spec(uri), before=[STARTED], weights=True)
    (tmp_path / "link").symlink_to(folder.parent)
    assert check_record(tmp_path / "link" / folder.name, uri, repair=False) == []
    monkeypatch.chdir(folder.parent)
    assert check_record(Path(folder.name), uri, repair=False) == []
    assert check_record(Path(folder.name), uri, repair=True) == []


def test_a_folder_that_was_moved_has_another_name_in_a_store_alone(
    database: str, spec: Specs, tmp_path: Path
) -> None:
    told = []
    for uri in ("off", database):
        folder = finished(spec(uri), before=[STARTED], weights=True)
        moved = folder.rename(tmp_path / folder.name)
        told.append([one.what for one in check_record(moved, uri, repair=False)])
    assert told == [[], ["has another tag lockstep.folder"]]


STARTED = Started(
    {"identity": "abc", "fields": {"seed": 1}, "plan": {"steps": 20}, "git": {"commit": "c0ffee"}}
)
EDITED = (
    "lockstep.identity", "lockstep.weights_digest", "lockstep.folder", "lockstep.error", "lockstep.step",
    "mlflow.source.name", "mlflow.source.git.commit", "lockstep.checkpoint_step",
)  # fmt: skip
OWN = {"mlflow.note.content": "my note", "mine": "kept", "team": "vision"}


def test_edited_tags_of_a_store_are_told_and_put_back(database: str, spec: Specs) -> None:
    """Its description, and tags that nobody but a user writes, are the user's."""
    from mlflow import MlflowClient

    saved = CheckpointRow(STEPS, "s3://a/b", None, 1, 1.0, 1.0, 1.0, 1.0)
    folder = finished(spec(database), before=[STARTED, saved], weights=True)
    client = MlflowClient(tracking_uri=database)
    for name, text in OWN.items():
        client.set_tag(folder.name, name, text)
    assert check_record(folder, database, repair=False) == []
    before = client.get_run(folder.name).data.tags
    client.delete_tag(folder.name, EDITED[0])
    for name in EDITED[1:]:
        client.set_tag(folder.name, name, "edited")
    told = [(one.where, one.what) for one in check_record(folder, database, repair=False)]
    wanted = [f"lacks the tag {EDITED[0]}", *(f"has another tag {name}" for name in EDITED[1:])]
    assert sorted(told) == sorted(("store", what) for what in wanted)
    assert all(one.mended for one in check_record(folder, database, repair=True))
    assert check_record(folder, database, repair=False) == []
    after = client.get_run(folder.name).data.tags
    assert {name: after[name] for name in EDITED} == {name: before[name] for name in EDITED}
    assert {name: after[name] for name in ("mine", "team")} == {"mine": "kept", "team": "vision"}


def test_parameters_that_a_store_has_lost_are_told_and_sent_again(database: str, spec: Specs) -> None:
    from sqlalchemy import create_engine, text

    folder = finished(spec(database), before=[STARTED])
    engine = create_engine(database)
    with engine.begin() as connection:
        gone = "DELETE FROM params WHERE run_uuid = :run AND key IN ('plan.steps', 'seed')"
        assert connection.execute(text(gone), {"run": folder.name}).rowcount == 2
    engine.dispose()
    told = [one.what for one in check_record(folder, database, repair=False)]
    assert told == ["lacks the parameter seed", "lacks the parameter plan.steps"]
    assert all(one.mended for one in check_record(folder, database, repair=True))
    assert check_record(folder, database, repair=False) == []


def test_an_edited_run_json_is_told_and_put_back(spec: Specs) -> None:
    folder = finished(spec(), before=[STARTED], weights=True)
    run = json.loads((folder / "run.json").read_text())
    run["tags"] |= {"lockstep.identity": "edited", "lockstep.weights_digest": "edited", "mine": "kept"}
    run["params"] |= {"plan.steps": "7", "mine": "kept"}
    (folder / "run.json").write_text(json.dumps(run))
    told = [(one.where, one.what) for one in check_record(folder, "off", repair=False)]
    names = ("parameter plan.steps", "tag lockstep.identity", "tag lockstep.weights_digest")
    assert sorted(told) == sorted(("folder", f"run.json has another {name}") for name in names)
    assert all(one.mended for one in check_record(folder, "off", repair=True))
    assert check_record(folder, "off", repair=False) == []


@pytest.mark.parametrize("name", ["run.json", "summary.json", "fields.json"])
@pytest.mark.parametrize("content", [None, b"", b"[]", b"{}", b"\xff"])
def test_a_file_of_the_folder_is_told_and_written_again(
    spec: Specs, name: str, content: bytes | None
) -> None:
    folder = finished(spec(), before=[Started({"identity": "abc", "fields": {"seed": 1}})])
    whole = json.loads((folder / name).read_text())
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    (told,) = check_record(folder, "off", repair=False)
    assert told.what.startswith(name) and told.where == "folder"
    assert [one.mended for one in check_record(folder, "off", repair=True)] == [True]
    assert check_record(folder, "off", repair=False) == []
    again = json.loads((folder / name).read_text())
    if name == "run.json":
        assert again.pop("started") == pytest.approx(
            whole.pop("started"), abs=60
        )  # its first event's, or its own
        for run in (whole, again):  # a sync beats as well
            run["tags"] = {n: v for n, v in run["tags"].items() if v and not n.endswith("beat")}
    assert again == whole


def test_weights_that_are_not_there_and_a_wrong_status_are_told(spec: Specs) -> None:
    folder = finished(spec(), weights=True)
    assert check_record(folder, "off", repair=False) == []
    (folder / "weights" / "final.safetensors").write_bytes(b"")
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**run, "status": "FAILED"}))
    told = [one.what for one in check_record(folder, "off", repair=False)]
    assert told[0].startswith("weights/final.safetensors cannot be read")
    assert told[1:] == ["has status FAILED, wanted FINISHED"]
    with raises(FILE_DAMAGED):
        check_record(folder, "off", repair=True)
    (folder / "weights" / "final.safetensors").unlink()
    with raises(FILE_DAMAGED, got="weights/final.safetensors is missing"):
        check_record(folder, "off", repair=True)
    save_weights(folder, {"final": WEIGHTS})
    assert [one.mended for one in check_record(folder, "off", repair=True)] == [True]


def test_damaged_weights_are_not_sent_in_the_place_of_good_ones(database: str, spec: Specs) -> None:
    """Neither does a seal cover them. The refusal names the good copy, which mends the folder."""
    folder = finished(spec(database), weights=True)
    sealed, name = (folder / "seal.json").read_bytes(), "weights/final.safetensors"
    save_weights(folder, {"final": {"w": torch.zeros(1)}})
    with raises(FILE_DAMAGED, remedy=re.compile(f"^the good copy is the artifact {name!r} of this run in ")):
        check_record(folder, database, repair=True)
    assert (folder / "seal.json").read_bytes() == sealed
    stored = folder.parent / "stored"
    stored.mkdir()
    find_files(database, folder.name, ("weights",), folder.parent / "nowhere", stored)
    shutil.copy(stored / name, folder / name)
    assert check_record(folder, database, repair=True) == []


@pytest.mark.parametrize("content", [None, {"w": torch.zeros(1)}])
def test_a_sync_refuses_weights_that_are_not_those_of_the_run(
    spec: Specs, content: dict[str, torch.Tensor] | None
) -> None:
    """Its process was killed before its store knew everything: the sync would seal what is there."""
    folder = finished(spec(), weights=True)
    cut(folder, -1)  # what was delivered
    sealed = (folder / "seal.json").read_bytes()
    (folder / "weights" / "final.safetensors").unlink()
    if content is not None:
        save_weights(folder, {"final": content})
    with raises(FILE_DAMAGED, remedy=re.compile("^no good copy is known")):
        sync_whole(folder, "off")
    assert (folder / "seal.json").read_bytes() == sealed
    save_weights(folder, {"final": WEIGHTS})
    assert sync_whole(folder, "off").sent


@pytest.mark.parametrize("name", ["log.txt", "logs/rank-0.txt", "journal.jsonl", "spec.yaml"])
def test_a_file_that_is_not_as_it_was_sealed_is_told_and_not_sealed_again(spec: Specs, name: str) -> None:
    """Unless its seal is deleted, which accepts it."""
    folder = finished(spec(), before=[Printed("rank-0", "a loss of 0.1\n"), Warned("slow")])
    path = folder / name
    whole, sealed = path.read_bytes(), (folder / "seal.json").read_bytes()
    if name == NAME:
        first, second, *others = lines(folder)
        assert b"slow" in second
        path.write_bytes(b"".join([first, to_line(Warned("fine"), folder), *others]))
    else:
        path.write_bytes(b"# edited\n" + whole)
    (told,) = check_record(folder, "off", repair=False)
    assert told.where == "folder" and re.match(f"{name} has \\w+, where the seal has ", told.what)
    with raises(FILE_DAMAGED, got=told.what):
        check_record(folder, "off", repair=True)
    assert (folder / "seal.json").read_bytes() == sealed
    path.write_bytes(whole)
    assert check_record(folder, "off", repair=False) == []
    if name.startswith("log"):
        path.write_bytes(b"# edited\n" + whole)
        (folder / "seal.json").unlink()
        assert all(one.mended for one in check_record(folder, "off", repair=True))
        assert check_record(folder, "off", repair=False) == []


@pytest.mark.parametrize("recorded_in", ["off", "mlflow"])
def test_weights_of_another_run_and_a_lost_seal_are_told(
    database: str, spec: Specs, recorded_in: str
) -> None:
    """Each by itself; a seal that was lost is written again."""
    uri = "off" if recorded_in == "off" else database
    folder = finished(spec(uri), weights=True)
    assert check_record(folder, uri, repair=False) == []
    (folder / "seal.json").unlink()
    (told,) = check_record(folder, uri, repair=False)
    assert (told.where, told.what) == ("folder", "seal.json is missing")
    assert [one.mended for one in check_record(folder, uri, repair=True)] == [True]
    assert check_record(folder, uri, repair=False) == []
    others = {"w": torch.zeros(1)}
    save_weights(folder, {"final": others})
    (told,) = check_record(folder, uri, repair=False)
    stated, found = weights_digest(WEIGHTS), weights_digest(others)
    assert told.what == f"weights/final.safetensors has {found}, where the journal has {stated}"


@pytest.mark.every(2)
@pytest.mark.parametrize("recorded_in", ["off", "mlflow"])
@pytest.mark.parametrize("timeless", [False, True])
def test_a_run_that_is_told_again_ended_when_it_ended(
    database: str, spec: Specs, recorded_in: str, timeless: bool
) -> None:
    uri = database if recorded_in == "mlflow" else "off"
    folder = finished(spec(uri))
    before = end_of(folder, uri)
    if timeless:
        forget_times(folder)
    (folder / "ledger.parquet").unlink()
    assert all(one.mended for one in check_record(folder, uri, repair=True))
    assert end_of(folder, uri) == before


@pytest.mark.parametrize("timeless", [False, True])
def test_a_store_that_was_never_told_the_end_hears_when_it_was(spec: Specs, *, timeless: bool) -> None:
    """Where its journal does not say it, the last row's time counts."""
    folder = finished(spec())
    (status, ended) = end_of(folder, "off")
    if timeless:
        forget_times(folder)
    cut(folder, -1)
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**run, "status": "RUNNING", "ended": None}))
    assert sync(folder).sent
    now = end_of(folder, "off")
    assert now[0] == status
    assert now[1] == (EVALUATIONS[-1].wall_clock if timeless else pytest.approx(ended, abs=1))


def test_a_run_that_was_killed_outright_ended_with_its_last_row(spec: Specs) -> None:
    folder = finished(spec())
    cut(folder, -2)
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**run, "status": "RUNNING", "ended": None}))
    assert sync(folder).sent
    assert end_of(folder, "off") == ("FAILED", EVALUATIONS[-1].wall_clock)


def test_an_attempt_that_was_killed_outright_did_not_end_as_the_one_before(spec: Specs) -> None:
    """Its store did not hear that it had begun."""
    recorder = Recorder(spec())
    recorder.start()
    recorder.tell(*ROWS[:5], Failed("the loss is nan"))
    recorder.close()
    folder = recorder.run_folder()
    later = step_row(6, wall_clock=time.time() + 5)
    with closing(Journal(folder)) as journal:
        journal.add([Opened(time.time()), Started({}), later])
    assert sync(folder).sent
    assert end_of(folder, "off") == ("FAILED", later.wall_clock)
    assert json.loads((folder / "run.json").read_text())["tags"]["lockstep.error"] == GONE


def test_why_a_run_failed_is_not_forgotten_with_the_journals_last_lines(spec: Specs) -> None:
    recorder = Recorder(spec())
    recorder.start()
    recorder.tell(*ROWS, Failed("the loss is nan", "Traceback …"))
    recorder.close()
    folder = recorder.run_folder()
    before, why = end_of(folder, "off"), (folder / "error.txt").read_text()
    cut(folder, -2)
    assert sync(folder).sent
    assert end_of(folder, "off") == before
    assert (folder / "error.txt").read_text() == why
    assert json.loads((folder / "run.json").read_text())["tags"]["lockstep.error"] == "the loss is nan"


def test_a_run_that_is_resumed_mends_its_journal_and_says_so(spec: Specs) -> None:
    """The history that an attempt starts from fills what a damaged line held, and the run ends well."""
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


def test_a_fork_that_is_resumed_mends_its_journal(spec: Specs) -> None:
    """Its first step is not step 1. The control is told from its second step on: nothing says that the first is what it was."""
    began = Started({"fields": {"fork": "0123456789abcdef@5"}})
    for told, status in ((ROWS[5:], "FINISHED"), (ROWS[6:], "FAILED")):
        recorder = Recorder(spec())
        recorder.start()
        folder = recorder.run_folder()
        recorder.tell(began, *ROWS[5:])
        recorder.close()
        flip(folder, b'{"step":[8,')
        again = Recorder(spec(), run_id=folder.name)
        again.start()
        again.tell(began, Restored(told, ()), Finished({"step": STEPS}))
        with suppress(RecordError):
            again.close()
        assert json.loads((folder / "run.json").read_text())["status"] == status
        assert read_parquet(folder / "ledger.parquet") == ROWS[5:]


def test_a_run_that_is_being_recorded_is_left_alone(spec: Specs) -> None:
    recorder = Recorder(spec())
    recorder.start()
    folder = recorder.run_folder()
    with raises(problems.LOCKED):
        check_record(folder, "off", repair=True)
    recorder.close()


def test_without_a_journal_there_is_nothing_to_check(tmp_path: Path) -> None:
    with raises(problems.NO_JOURNAL):
        check_record(tmp_path, "off", repair=False)
