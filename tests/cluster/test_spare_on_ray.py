"""G1, G6 on Ray: the spare process beside rank 0 proves that a run can be resumed, or ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.in_process import here
from tests.processes import named

ROOT = Path(__file__).parents[2]
NEVER = 10**9


def started(folder: Path, begins: int) -> subprocess.Popen[str]:
    """A run on two workers whose first checkpoint is tried as soon as it is there."""
    words = [
        "job.use=tests.distributed.late_kinds:JobAttribute",
        f"job.params={{begins: {begins}, pause_s: 0.02}}",
        "length.steps=100000",
        "evaluate.every.steps=100000",
        "batch.global=12",
        "batch.micro=3",
        "workers.min=2",
        "checkpoint.every.steps=20",
        "checkpoint.keep_last=500",
        "checkpoint.verify_after_s=0",
        f"checkpoint.storage={folder}",
        "record.uri=off",
    ]
    spec = folder / "late.yaml"
    spec.write_text("job: {use: tests.distributed.late_kinds:JobAttribute}\n")
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", "train", str(spec), "--json", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "platform")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.scenario
def test_a_run_that_could_not_be_resumed_ends_with_its_checkpoint(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    process = started(tmp_path, begins=7)
    request.addfinalizer(process.kill)
    _, err = process.communicate(timeout=400)
    assert process.returncode == 1, err
    assert "resume: a process that took up the checkpoint of step 20 computes step 21 otherwise" in err
    assert "no checkpoint restores job.patience" in err
    (record,) = tmp_path.glob("*/run.json")
    assert json.loads(record.read_text())["status"] == "FAILED"
    newest = max(int(path.parent.name[5:]) for path in tmp_path.glob("*/step-*/manifest.json"))
    assert newest > 21


@pytest.mark.scenario
def test_a_run_that_can_be_resumed_shows_it(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    process = started(tmp_path, begins=NEVER)
    request.addfinalizer(process.kill)
    deadline = time.monotonic() + 400
    while not any("was taken up by" in log.read_text() for log in tmp_path.glob("*/log.txt")):
        assert time.monotonic() < deadline, "no checkpoint was tried"
        assert process.poll() is None, process.communicate()
        time.sleep(0.5)
    everyone = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 143, err
    assert not named(
        "lockstep.training.integrity.resume_check", among=[one for one in everyone if one.is_running()]
    )
    run_id = json.loads(out)["run_id"]
    words = ["show", run_id, "--uri", "off", "--storage", str(tmp_path)]
    code, shown, _ = here(monkeypatch, capfd, ROOT, *words)
    assert code == 0
    assert "at step 20: a spare process took up that checkpoint" in shown
