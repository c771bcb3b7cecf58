"""What a record and its store refuse, each as the problem that it is."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import LockstepError, Problem
from lockstep.files import NoLocksError
from lockstep.record import problems
from lockstep.record import recorder as recorder_module
from lockstep.record.ledger import journal_file
from lockstep.record.ledger.journal import newest_step
from lockstep.record.ledger.journal_file import JournalFile
from lockstep.record.mirror import database_lock
from lockstep.record.mirror.folder import FolderReader, FolderStore, run_in_folder
from lockstep.record.mirror.run_store import no_such_run, recorded
from lockstep.record.mirror.store_uri import check_database, check_uri
from lockstep.record.mirror.stores import find_files, store_for
from lockstep.record.mirror.sync import spec_of
from lockstep.record.opening import no_fetch
from lockstep.record.recorder import Recorder
from lockstep.spec.loading import load_spec
from lockstep.spec.problems import RECORD_NO_URI
from tests.raised import raises

ID = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("status", "spec", "summary", "problem", "facts"),
    [
        ("FAILED", "a: [", None, problems.DAMAGED, {"file": "record"}),
        ("FINISHED", "a: 1", "{", problems.DAMAGED, {"file": "record"}),
        ("FINISHED", "a: 1", None, problems.DAMAGED, {"file": "summary.json", "got": "is missing"}),
        ("FAILED", "a: 1", "[]", problems.DAMAGED, {"file": "summary.json", "got": "has no summary"}),
        ("FAILED", None, None, problems.NO_SPEC, {"where": "there"}),
    ],
)
def test_a_record_that_is_not_whole(
    status: str, spec: str | None, summary: str | None, problem: Problem[LockstepError], facts: dict[str, str]
) -> None:
    with raises(problem, run=ID, **facts):
        recorded(ID, status, spec, summary, "", "there")


def test_a_run_that_a_store_does_not_have() -> None:
    for run_id, problem in ((ID, problems.NO_RUN), (ID[:8], problems.PART_OF_ID), ("", problems.PART_OF_ID)):
        with raises(problem, where="there"):
            raise no_such_run(run_id, "there", "give another id")


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("file:///data/mlruns", problems.FOLDER_URI),
        ("/data/mlruns", problems.FOLDER_URI),
        ("sqlite:////data/%41.db", problems.ODD_PATH),
        ("sqlite:////data/?x/a.db", problems.ODD_PATH),
        ("http://[::1", RECORD_NO_URI),
        ("http://x:99999999", RECORD_NO_URI),
    ],
)
def test_a_uri_that_names_no_store(uri: str, problem: Problem[LockstepError]) -> None:
    with raises(problem, got=uri):
        check_uri(uri)


def test_a_folder_and_another_programs_database_are_no_store(tmp_path: Path) -> None:
    with raises(problems.DATABASE_IS_FOLDER, path=tmp_path):
        check_database(tmp_path)
    with closing(sqlite3.connect(tmp_path / "users.db")) as connection:
        connection.execute("create table users (a int)")
        connection.commit()
    with raises(problems.OTHER_PROGRAM, got="users"):
        check_database(tmp_path / "users.db")


def no_locks(*_: Any, **__: Any) -> None:
    raise NoLocksError(38, "Function not implemented")


def held(*_: Any, **__: Any) -> None:
    raise BlockingIOError(11, "Resource temporarily unavailable")


@pytest.mark.parametrize(
    ("lock", "problem"), [(no_locks, problems.DATABASE_LOCKS), (held, problems.DATABASE_BUSY)]
)
def test_a_database_that_cannot_be_locked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lock: Callable[..., None],
    problem: Problem[LockstepError],
) -> None:
    monkeypatch.setattr(database_lock, "lock", lock)
    monkeypatch.setattr(database_lock, "_PATIENCE_S", 0.0)
    path = tmp_path / "mlflow.db"
    with raises(problem, database=path), database_lock.database_lock(f"sqlite:///{path}"):
        pass


def test_a_folder_that_cannot_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_file, "lock", no_locks)
    with raises(problems.FOLDER_LOCKS, folder=tmp_path, got="Function not implemented"):
        JournalFile(tmp_path)


def test_a_spec_without_a_store_and_one_without_its_password(tmp_path: Path) -> None:
    spec = load_spec({"job": {"use": "any:Job"}, "record": {"folder": str(tmp_path)}})
    nowhere = spec.model_copy(update={"record": spec.record.model_copy(update={"uri": None})})
    with raises(problems.URI_MISSING):
        store_for(nowhere, 0.0)
    (tmp_path / "spec.yaml").write_text("job: {use: 'any:Job'}\nrecord: {uri: 'http://me:***@host'}\n")
    with raises(problems.PASSWORD, run=tmp_path.name):
        spec_of(tmp_path, None)
    (tmp_path / "spec.yaml").write_text("job: [")
    with raises(problems.UNREADABLE, run=tmp_path.name, file="spec"):
        spec_of(tmp_path, None)


def test_names_that_lead_out_of_a_record(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("{}\n")
    (tmp_path / ID).mkdir()
    (tmp_path / ID / journal_file.NAME).symlink_to(tmp_path / "secret")
    with raises(problems.LEADS_OUT, run=ID):
        newest_step(tmp_path / ID)
    with raises(problems.LEADS_OUT):
        find_files("off", "..", ["spec.yaml"], tmp_path, tmp_path)
    with raises(problems.UNREADABLE, run=ID, file=re.compile("secret")):
        FolderReader(tmp_path).text(ID, "../secret")


def test_files_that_cannot_be_read_or_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(tmp_path, "r", 0.0)
    store.open(None)
    with raises(problems.CANNOT_COPY, path=tmp_path / "none", got="No such file or directory"):
        store.log_file(tmp_path / "none", "")
    with raises(problems.UNREADABLE, run=ID, file="weights.rows"):
        no_fetch(ID, "weights.rows")

    def failing(error: OSError) -> Callable[[Path], Any]:
        def read(path: Path) -> Any:
            raise error

        return read

    for error, problem in (
        (PermissionError(13, "Permission denied"), problems.DENIED),
        (OSError(5, "Input/output error"), problems.CANNOT_READ),
    ):
        monkeypatch.setattr("lockstep.record.mirror.folder._read", failing(error))
        with raises(problem, got=error.strerror):
            run_in_folder(tmp_path, ID)


@pytest.mark.parametrize(
    ("content", "got"), [("[", "^cannot be read "), (json.dumps({"name": 3}), "^cannot be read ")]
)
def test_a_run_json_that_is_damaged(tmp_path: Path, content: str, got: str) -> None:
    folder = tmp_path / ID
    folder.mkdir()
    (folder / "run.json").write_text(content)
    with raises(problems.RUN_JSON, run=ID, folder=folder, got=re.compile(got)):
        run_in_folder(tmp_path, ID)


def test_a_database_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/none.db"
    with raises(problems.NO_STORE, what=f"run {ID}", uri=uri):
        find_files(uri, ID, ("spec.yaml",), tmp_path / "runs", tmp_path)
    assert not (tmp_path / "none.db").exists()


def test_a_store_that_fails_otherwise(spec: Callable[..., Any]) -> None:
    def fails(_: Any) -> Any:
        raise ZeroDivisionError("no digits")

    recorder = Recorder(spec(), fails)
    recorder.start()
    for told in (recorder.run_id, recorder.close):
        with raises(problems.OTHER, got=re.compile("no digits")):
            told()


def test_a_store_that_takes_a_call_and_does_not_answer(
    spec: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "OPEN_S", 0.1)
    answers = threading.Event()
    recorder = Recorder(spec(), lambda spec: (answers.wait(), store_for(spec, started_at=0.0))[1])
    recorder.start()
    try:
        with raises(problems.SLOW_STORE, what="the creation of the run", waited_s=0):
            recorder.run_id()
    finally:
        answers.set()
        recorder.close(1)
