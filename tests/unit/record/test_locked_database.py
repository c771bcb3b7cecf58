"""A database that another process has locked is told in one line by every command, and no traceback of its driver's is shown."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.record.events.union import Finished
from lockstep.record.recorder import Recorder
from lockstep.spec.fields import Spec
from tests.empty_store import put_empty_store

pytestmark = pytest.mark.scenario

HOLDS = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None); c.execute('begin exclusive'); print(flush=True); sys.stdin.read()"
ROOT = Path(__file__).parents[3]


@contextmanager
def locked(database: Path) -> Iterator[None]:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(database)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.stdin.close()


@pytest.mark.thinned(4)
@pytest.mark.parametrize("command", ["train", "runs", "show", "record sync"])
def test_a_locked_database_is_told_in_one_line(
    tmp_path: Path, spec: Callable[..., Spec], command: str
) -> None:
    """The control is the same command once the lock is gone: it does not fail for the database."""
    uri = put_empty_store(tmp_path / "mlflow.db")
    recorder = Recorder(spec(uri))
    recorder.start()
    run_id = recorder.run_id()
    folder = recorder.run_folder()
    recorder.tell(Finished({}))
    recorder.close()
    journal = folder / "journal.jsonl"
    # As if the store had never confirmed it: else there is nothing to send.
    kept = [line for line in journal.read_bytes().splitlines(keepends=True) if b'"delivered"' not in line]
    journal.write_bytes(b"".join(kept))
    words = {
        "train": ["train", str(ROOT / "jobs/digits/train.yaml"), "--local", f"checkpoint.storage={tmp_path}/other"],
        "runs": ["runs"],
        "show": ["show", run_id],
        "record sync": ["record", "sync", str(folder)],
    }[command]  # fmt: skip

    def given() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "lockstep", *words, "--uri", uri],
            cwd=tmp_path, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'platform'}:{ROOT}", "PYTHONHASHSEED": "0"},
        )  # fmt: skip

    with locked(tmp_path / "mlflow.db"):
        failed = given()
    assert failed.returncode == 1, failed.stderr
    assert "Traceback" not in failed.stderr
    (line,) = failed.stderr.splitlines()
    assert line.startswith("lockstep: record.uri: ")
    assert "database is locked" in line
    assert "another process writes to it: wait until it has ended" in line
    if command != "train":
        assert given().returncode == 0
