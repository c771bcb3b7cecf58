"""What happens to the trials and recorders of a sweep changes no trial: storage that fails for a moment, and recorders that are killed."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psutil
import pytest

from lockstep import sweep
from lockstep.driver.options import RunOptions
from lockstep.errors import SilentError
from lockstep.sweeps.resumption import resume_sweep
from tests.cluster.test_sweep import document, outcome

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    # Ray and MLflow leave sockets and temporary folders to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def saved(folder: Path) -> None:
    """Wait until a trial has a checkpoint."""
    while not list(folder.glob("runs/*/step-*/manifest.json")):
        time.sleep(0.05)


@pytest.mark.exact  # a minute
@pytest.mark.parametrize("workers", [1, 2])
def test_storage_that_fails_in_a_trial_is_tried_again(tmp_path: Path, workers: int) -> None:
    """A full disk, which any rank may meet, is not the trial's mistake."""
    changes = {"trials": 2, "concurrency": 1, "spec": {"workers": {"min": workers}}}
    expected = sweep(document(tmp_path / "undisturbed", **changes))
    given, faults = document(tmp_path / "disturbed", **changes), tmp_path / "faults"
    faults.mkdir()
    given["spec"]["job"] = {
        "use": "tests.chaos.exposed:ExposedDigits",
        "params": {"width": 4, "pause_s": 0.05, "faults": str(faults)},
    }

    def plant() -> None:
        saved(tmp_path / "disturbed")
        (faults / "enospc").touch()

    threading.Thread(target=plant, daemon=True).start()
    result = sweep(given)
    assert not list(faults.iterdir())
    assert sum(trial["restarts"] for trial in result.trials) == 1
    kept = ("trial", "step", "metric", "curve", "weights_digest", "status")
    assert [[row[key] for key in kept] for row in result.trials] == [
        [row[key] for key in kept] for row in expected.trials
    ]


def test_recorders_that_are_killed_as_they_start_are_told_in_one_line(tmp_path: Path) -> None:
    """Before any trial: nothing is there to resume."""

    def kill_recorders() -> None:
        while not (found := recorders()):
            time.sleep(0.005)
        found[0].kill()

    threading.Thread(target=kill_recorders, daemon=True).start()
    with pytest.raises(
        SilentError,
        match=r"^the process of the sweep's recorders was lost: .*; no trial has begun since: give the command again$",
    ):
        sweep(document(tmp_path))
    assert not list(tmp_path.glob("runs/*/decisions.jsonl"))


def recorders() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [process for process in children if "ray::RecordersActor" in " ".join(process.cmdline())]


@pytest.mark.scenario
def test_a_sweep_whose_recorders_are_killed_ends_and_goes_on_when_it_is_resumed(tmp_path: Path) -> None:
    """No trial is told to have failed of it."""
    expected = sweep(document(tmp_path / "undisturbed", concurrency=1))
    given = document(tmp_path / "disturbed", concurrency=1)
    given["spec"]["job"]["params"]["pause_s"] = 0.05

    def kill_recorders() -> None:
        saved(tmp_path / "disturbed")
        for process in recorders():
            process.kill()

    threading.Thread(target=kill_recorders, daemon=True).start()
    with pytest.raises(
        SilentError, match=r"the process of the sweep's recorders was lost: .*; lockstep resume"
    ):
        sweep(given)
    sweep_id = next((tmp_path / "disturbed").glob("runs/*/decisions.jsonl")).parent.name
    result = resume_sweep(RunOptions(), sweep_id, [f"record.folder={tmp_path}/disturbed/runs"], uri="off")
    assert result is not None
    assert outcome(result) == outcome(expected)
