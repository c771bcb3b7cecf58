"""The end of a sweep is recorded by another process where its own cannot, and only where nobody else goes on with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.calls.record_check import check_record
from lockstep.checkpoint.runs.lease import leased
from lockstep.checkpoint.storage.local import LocalStorage
from lockstep.record import problems as record_problems
from lockstep.record.events.union import Failed
from lockstep.record.mirror.stores import reader
from lockstep.spec.sweep import SweepSpec, load_sweep
from lockstep.sweeps.sweep_end import record_sweep_end
from tests.raised import raises

WHY = Failed("the GCS was killed", "where its logs are")

DIES = """
import sys
from pathlib import Path
from lockstep.record.events.union import Finished, Started
from lockstep.record.runs.heartbeat import process_tags
from lockstep.record.recorder import Recorder
from lockstep.spec.sweep import load_sweep
from lockstep.sweeps.sweep_record import SweepRecord
import os, signal

sweep = load_sweep(sys.argv[1])
record = SweepRecord(sweep, None)
for number, lr in enumerate(map(float, sys.argv[2:])):
    trial = Recorder(sweep.trial({"optimizer.lr": lr}))
    trial.start()
    trial.tell(Started({"parent": record.run_id, "trial": number, "plan": {"total_steps": 4}}), Finished({}))
    trial.close()
trial = Recorder(sweep.trial({"optimizer.lr": 0.05}))
trial.start()
trial.tell(Started({"parent": record.run_id, "trial": len(sys.argv) - 2, "plan": {"total_steps": 4}}))
print(record.run_id, trial.run_id(), process_tags(0.0)["lockstep.process"], sep="\\n", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def left(tmp_path: Path) -> tuple[SweepSpec, str, str, str]:
    """A sweep and a trial that a killed process has left RUNNING: their ids, and the process."""
    return leave(tmp_path)


def leave(tmp_path: Path, *finished: float) -> tuple[SweepSpec, str, str, str]:
    """As `left`, after trials with these learning rates that have finished."""
    document = {
        "spec": {
            "job": {"use": "jobs.digits.job:Digits"},
            "length": {"steps": 4},
            "record": {"uri": "off"},
            "checkpoint": {"storage": str(tmp_path / "runs")},
        },
        "space": {"optimizer.lr": {"loguniform": [1e-4, 1e-1]}},
        "trials": 2,
    }
    sweep = load_sweep(document)
    file = tmp_path / "sweep.yaml"
    import yaml

    file.write_text(yaml.safe_dump(document))
    done = subprocess.run(
        [sys.executable, "-c", DIES, str(file), *map(str, finished)], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    sweep_id, trial_id, process = done.stdout.splitlines()
    return sweep, sweep_id, trial_id, process


def statuses(sweep: SweepSpec) -> dict[str, str]:
    """As a store's files have them, which a reader would change."""
    import json

    return {
        path.parent.name: json.loads(path.read_text())["status"]
        for path in sweep.base.folder.glob("*/run.json")
    }


@pytest.mark.every(2)
@pytest.mark.parametrize("named", [True, False])
def test_an_abandoned_sweep_and_its_trials_get_their_end(
    left: tuple[SweepSpec, str, str, str], named: bool
) -> None:
    """Also one whose id nobody was told: it is known by the process that recorded it."""
    sweep, sweep_id, trial_id, process = left
    assert statuses(sweep) == {sweep_id: "RUNNING", trial_id: "RUNNING"}
    assert record_sweep_end(sweep, sweep_id if named else None, WHY, [], [process]) == sweep_id
    assert statuses(sweep) == {sweep_id: "FAILED", trial_id: "FAILED"}
    for run_id in (sweep_id, trial_id):
        assert (
            sweep.base.folder / run_id / "error.txt"
        ).read_text() == "the GCS was killed\n\nwhere its logs are\n"
    assert record_sweep_end(sweep, sweep_id, WHY, [], [process]) is None


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_trials_that_had_finished_are_left_as_they_were(tmp_path: Path) -> None:
    """To the byte; and one that had not keeps the spec that it was trained by, which is not the sweep's."""
    sweep, sweep_id, trial_id, process = leave(tmp_path, 0.002, 0.003)
    folder = sweep.base.folder
    finished = [folder / run_id for run_id, status in statuses(sweep).items() if status == "FINISHED"]
    before, spec = [files(trial) for trial in finished], (folder / trial_id / "spec.yaml").read_bytes()
    assert len(finished) == 2 and b"lr: 0.05" in spec
    assert record_sweep_end(sweep, sweep_id, WHY, [], [process]) == sweep_id
    assert [files(trial) for trial in finished] == before
    assert (folder / trial_id / "spec.yaml").read_bytes() == spec
    assert statuses(sweep)[trial_id] == "FAILED"


def test_a_trial_whose_spec_is_lost_gets_no_other_one(left: tuple[SweepSpec, str, str, str]) -> None:
    """Nor one whose spec was damaged, which is told. A reader marks both, since nobody writes them any more."""
    sweep, sweep_id, trial_id, process = left
    file = sweep.base.folder / trial_id / "spec.yaml"
    file.write_text("spec: [")
    with raises(record_problems.UNREADABLE, run=trial_id, file="spec"):
        record_sweep_end(sweep, sweep_id, WHY, [], [process])
    assert file.read_text() == "spec: ["
    file.unlink()
    record_sweep_end(sweep, sweep_id, WHY, [], [process])
    assert not file.exists()
    assert reader("off", sweep.base.folder).run(trial_id).status == "FAILED"


def test_trials_of_others_are_left_alone(left: tuple[SweepSpec, str, str, str]) -> None:
    sweep, sweep_id, trial_id, process = left
    assert record_sweep_end(sweep, sweep_id, WHY, [], [f"{process}1"]) == sweep_id
    assert statuses(sweep) == {sweep_id: "FAILED", trial_id: "RUNNING"}


def test_a_sweep_that_another_command_holds_is_left_to_it(left: tuple[SweepSpec, str, str, str]) -> None:
    """Its own driver may hold it still, where its cluster has died."""
    sweep, sweep_id, trial_id, process = left
    with leased(LocalStorage(sweep.base.folder), sweep_id, f"sweep {sweep_id}"):
        assert record_sweep_end(sweep, sweep_id, WHY, [], [process]) is None
        assert statuses(sweep) == {sweep_id: "RUNNING", trial_id: "FAILED"}
        assert record_sweep_end(sweep, sweep_id, WHY, [], [process], driver=os.getpid()) == sweep_id
    assert statuses(sweep) == {sweep_id: "FAILED", trial_id: "FAILED"}


@pytest.mark.scenario
def test_a_sweep_with_nobody_behind_it_is_marked_where_runs_are_listed(
    left: tuple[SweepSpec, str, str, str],
) -> None:
    """Its guardian was killed as well. A check with repair does so for a trial."""
    sweep, sweep_id, trial_id, _ = left
    check_record(sweep.base.folder / trial_id, "off", repair=True)
    assert statuses(sweep) == {sweep_id: "RUNNING", trial_id: "FAILED"}
    found = {run.run_id: run for run in reader("off", sweep.base.folder).runs(None, 10)}
    assert {run_id: run.status for run_id, run in found.items()} == {sweep_id: "FAILED", trial_id: "FAILED"}
    assert "is gone" in found[sweep_id].tags["lockstep.vanished"]
    # A guardian that comes late says more than the mark.
    assert record_sweep_end(sweep, sweep_id, WHY, [], []) == sweep_id
