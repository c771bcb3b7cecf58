"""Each part of a run is killed: the command, the record and MLflow say within a minute how the run ended; a deleted folder is told as such."""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from itertools import product
from pathlib import Path

import psutil
import pytest

from tests.chaos.deaths import PARTS, STAGES, command, kill, reached, statuses
from tests.chaos.disturbed import ENVIRONMENT, ROOT
from tests.processes import named

FEW = [("raylet", "training"), ("gcs_server", "created"), ("driver", "saved"), ("sweep's recorders", "saved")]


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("part", "stage"),
    [
        pytest.param(*pair, marks=pytest.mark.scenario if pair in FEW else pytest.mark.exact)
        for pair in product(PARTS, STAGES)
    ],
)
def test_a_killed_part_is_known(part: str, stage: str, tmp_path: Path) -> None:
    death = kill(tmp_path / "run", part, stage, random.Random(f"{part} {stage}"))
    assert death.problem == "", death.told


@pytest.mark.parametrize("local", [True, pytest.param(False, marks=pytest.mark.exact)])
@pytest.mark.parametrize("stage", ["created", pytest.param("saved", marks=pytest.mark.exact)])
@pytest.mark.scenario
def test_a_deleted_folder_is_told_as_such(local: bool, stage: str, tmp_path: Path) -> None:
    """Also before the first checkpoint, which would make the folder anew."""
    words = [*command(tmp_path, local=local), "job.params.pause_s=0.2", "length={steps: 400}"]
    process = subprocess.Popen(
        words, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**ENVIRONMENT, **_paths()}
    )
    until = time.monotonic() + 240
    while not reached(tmp_path, stage):
        assert time.monotonic() < until
        time.sleep(0.05)
    time.sleep(1.5)  # the command has the run's id
    (folder,) = (tmp_path / "runs").iterdir()
    shutil.rmtree(folder, ignore_errors=True)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    last = err.splitlines()[-1]
    assert last.startswith("lockstep: ")
    assert str(folder) in last
    assert "was deleted while it trained" in last
    assert "has taken its place" not in err
    assert statuses(tmp_path) == ["FAILED"]


@pytest.mark.scenario
def test_a_run_with_nobody_behind_it_is_ended_by_a_check(tmp_path: Path) -> None:
    """The process that trains is killed, and its guardian before it: the store has RUNNING until somebody looks."""
    environment = {**ENVIRONMENT, **_paths()}
    process = subprocess.Popen(
        command(tmp_path, local=True), cwd=ROOT, stderr=subprocess.DEVNULL, env=environment
    )
    until = time.monotonic() + 240
    while not (reached(tmp_path, "training") and statuses(tmp_path) == ["RUNNING"]):
        assert time.monotonic() < until
        time.sleep(0.05)
    for other in named("driver.guardian", among=psutil.Process(process.pid).children()):
        other.kill()
    process.kill()
    process.wait()
    assert statuses(tmp_path) == ["RUNNING"]
    (folder,) = (tmp_path / "runs").iterdir()
    uri = ["--uri", f"sqlite:///{tmp_path}/mlflow.db", "--storage", str(tmp_path / "runs")]
    words = [command(tmp_path, local=True)[0], "-m", "lockstep"]
    checked = subprocess.run(
        [*words, "record", "check", folder.name, "--repair", *uri],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert statuses(tmp_path) == ["FAILED"]
    shown = subprocess.run(
        [*words, "runs", "--json", *uri],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert '"status": "FAILED"' in shown.stdout
    assert "gone" in shown.stdout


def _paths() -> dict[str, str]:
    import os

    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(ROOT / "platform"), str(ROOT)])}
