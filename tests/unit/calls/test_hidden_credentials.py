"""A run whose storage was named with credentials: they are not recorded, and what needs its checkpoints says so in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.calls.pinning import change_pin
from lockstep.calls.resume import resume
from lockstep.checkpoint import problems
from lockstep.proof.recorded_run import recorded_run
from lockstep.record.events.union import Finished
from lockstep.record.recorder import Recorder
from lockstep.spec.loading import load_spec
from tests.raised import raises
from tests.unit.record.rows import step_row

STORAGE = "s3://AKIAIOSFODNN7EXAMPLE:a-secret@bucket/runs?region=us-east-1"
RECORDED = "s3://<redacted: AWS Access Key>:***@bucket/runs?region=us-east-1"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "off")
    document = {
        "job": {"use": "jobs.digits.job:Digits"},
        "record": {"uri": "off", "folder": str(tmp_path)},
        "checkpoint": {"storage": STORAGE},
    }
    recorder = Recorder(load_spec(document))
    recorder.start()
    recorder.tell(step_row(1), Finished({"step": 1}))
    recorder.close()
    return recorder.run_folder()


def test_each_command_names_the_credentials(folder: Path) -> None:
    run, where = folder.name, folder.parent
    with raises(problems.CREDENTIALS_HIDDEN, got=RECORDED):
        change_pin(run, 1, uri="off", folder=where, remove=False)
    with raises(problems.CREDENTIALS_HIDDEN, got=RECORDED):
        recorded_run(run, "off", where)
    with raises(problems.CREDENTIALS_HIDDEN, got=RECORDED):
        resume(run, [f"record.folder={where}"], uri="off", fork=True)
