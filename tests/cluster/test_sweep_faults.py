"""What happens to the trials and recorders of a sweep changes no trial: storage that fails for a moment, and recorders that are killed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep import sweep
from lockstep.driver.options import RunOptions
from lockstep.driver.signals import StopSignal
from lockstep.record.events.union import Failed
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.live_rows import RowsSoFar
from lockstep.spec.loading import load_spec
from lockstep.spec.sweep import load_sweep
from lockstep.sweeps import first_trial, problems
from lockstep.sweeps.recorders import AGAIN, GOES_ON
from lockstep.sweeps.sweep_resume import resume_sweep
from tests.cluster.test_sweep import ROOT, command, document, events, outcome, statuses, until
from tests.processes import named
from tests.raised import raises

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    # Ray and MLflow leave sockets and temporary folders to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def interruptions(folder: Path) -> int:
    """How often the trials of a sweep were interrupted, together."""
    tags = [json.loads(path.read_text())["tags"] for path in folder.glob("runs/*/run.json")]
    return sum(int(each["lockstep.interruptions"]) for each in tags if "lockstep.interruptions" in each)


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


@pytest.mark.scenario
def test_a_fault_that_the_first_trial_meets_before_the_sweep_begins_ends_no_sweep(tmp_path: Path) -> None:
    """Before the sweep is created one trial is prepared in the driver: what it meets there may pass as well."""
    changes = {"trials": 1, "spec": {"length": {"epochs": 1}}}
    expected = sweep(document(tmp_path / "undisturbed", **changes))
    given, faults = document(tmp_path / "disturbed", **changes), tmp_path / "faults"
    faults.mkdir()
    (faults / "nccl").touch()
    given["spec"]["job"] = {
        "use": "tests.chaos.exposed:ExposedDigits",
        "params": {"width": 4, "faults": str(faults)},
    }
    result = sweep(given)
    assert not list(faults.iterdir())
    assert [(row["weights_digest"], row["restarts"]) for row in result.trials] == [
        (row["weights_digest"], 0) for row in expected.trials
    ]


PREPARED_BY_A_WORKER = """
import sys
import ray
from lockstep.driver.signals import StopSignal
from lockstep.errors import ClusterError, SpecError
from lockstep.spec.loading import load_spec
from lockstep.spec.sweep import load_sweep
from lockstep.sweeps.first_trial import first_trial

ray.init(address="local", num_cpus=1, num_gpus=1, include_dashboard=False, log_to_driver=False)
said = []
spec = load_sweep(sys.argv[1])
facts = first_trial(spec, None, gpu=True, stop=StopSignal(), say=said.append, then="")
assert facts["total_steps"] > 0
(text,) = said
assert text.startswith("warning: the first trial could not be prepared: NCCL failed (first micro-batch"), text
assert text.endswith("prematurely.; it is tried again"), text
try:
    first_trial(spec.model_copy(update={"metric": "eval/lost"}), None, gpu=True, stop=StopSignal(), say=print, then="")
except SpecError as error:
    assert str(error).startswith("metric: the job gives no 'eval/lost'"), error
else:
    raise AssertionError("a metric that the job never gives was accepted")
"""


@pytest.mark.scenario
def test_what_a_worker_with_a_gpu_meets_before_the_sweep_begins_is_told_in_one_line(tmp_path: Path) -> None:
    """A cluster that says that it has a GPU: no driver prepares the trial then, and the line is no traceback of Ray's."""
    given = document(tmp_path)
    (tmp_path / "nccl").touch()
    given["spec"]["job"] = {
        "use": "tests.chaos.exposed:ExposedDigits",
        "params": {"width": 4, "faults": str(tmp_path)},
    }
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(given))
    done = subprocess.run(
        [sys.executable, "-c", PREPARED_BY_A_WORKER, tmp_path / "sweep.yaml"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_gpu_that_is_waited_for_is_told_and_a_signal_ends_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This cluster has none to give, as one whose GPUs another job holds. Nothing keeps asking for it."""
    import ray

    monkeypatch.setattr(first_trial, "TELL_S", 0.0)
    stop, told, cancelled, cancel = StopSignal(), list[str](), list[bool](), ray.cancel

    def say(text: str) -> None:
        told.append(text)
        stop.ask()

    def noted(task: Any, *, force: bool) -> None:
        cancelled.append(force)
        cancel(task, force=force)

    monkeypatch.setattr(ray, "cancel", noted)
    spec = load_sweep(document(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        first_trial.first_trial(spec, None, gpu=True, stop=stop, say=say, then="")
    assert told == [
        "waiting up to 3600 s (faults.longest_start_s) for a worker with a GPU to prepare the first trial"
    ]
    assert cancelled == [True]


def test_recorders_that_are_killed_as_they_start_are_told_in_one_line(tmp_path: Path) -> None:
    """Before any trial: nothing is there to resume."""

    def kill_recorders() -> None:
        while not (found := named("ray::RecordersActor")):
            time.sleep(0.005)
        found[0].kill()

    threading.Thread(target=kill_recorders, daemon=True).start()
    with raises(problems.RECORDERS_LOST, then=AGAIN):
        sweep(document(tmp_path))
    assert not list(tmp_path.glob("runs/*/decisions.jsonl"))


@pytest.mark.scenario
def test_a_sweep_whose_recorders_are_killed_ends_and_goes_on_when_it_is_resumed(tmp_path: Path) -> None:
    """No trial is told to have failed of it."""
    expected = sweep(document(tmp_path / "undisturbed", concurrency=1))
    given = document(tmp_path / "disturbed", concurrency=1)
    given["spec"]["job"]["params"]["pause_s"] = 0.05

    def kill_recorders() -> None:
        saved(tmp_path / "disturbed")
        for process in named("ray::RecordersActor"):
            process.kill()

    threading.Thread(target=kill_recorders, daemon=True).start()
    with raises(problems.RECORDERS_LOST, then=GOES_ON):
        sweep(given)
    sweep_id = next((tmp_path / "disturbed").glob("runs/*/decisions.jsonl")).parent.name
    result = resume_sweep(RunOptions(), sweep_id, [f"record.folder={tmp_path}/disturbed/runs"], uri="off")
    assert result is not None
    assert outcome(result) == outcome(expected)


@pytest.mark.scenario
def test_trials_that_had_finished_are_untouched_where_the_driver_of_their_sweep_is_killed(
    tmp_path: Path,
) -> None:
    """Its guardian records the end of the sweep and of the trial that was under way; resumed, it ends as the undisturbed one."""
    expected = sweep(document(tmp_path / "undisturbed", concurrency=1, trials=2))
    folder = tmp_path / "disturbed"
    slow = document(folder, concurrency=1, trials=2)
    slow["spec"]["job"]["params"]["pause_s"] = 0.2
    process = command(folder, slow)
    until(lambda: any("status" in event for event in events(folder)), process, folder)
    until(lambda: len(list(folder.glob("runs/*/journal.jsonl"))) == 2, process, folder)
    process.kill()
    process.wait()
    sweep_id = next(folder.glob("runs/*/decisions.jsonl")).parent.name
    deadline = time.monotonic() + 120
    while stored(folder / "runs" / sweep_id) != "FAILED":
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.2)
    trials = [path.parent for path in folder.glob("runs/*/journal.jsonl")]
    assert sorted(map(stored, trials)) == ["FAILED", "FINISHED"]
    finished = next(trial for trial in trials if stored(trial) == "FINISHED")
    lr = expected.trials[0]["fields"]["optimizer.lr"]
    assert load_spec(finished / "spec.yaml").optimizer.lr == lr
    with closing(Journal(finished, read_only=True)) as journal:
        assert not any(isinstance(event, Failed) for event in journal.events)
    result = resume_sweep(RunOptions(), sweep_id, [f"record.folder={folder}/runs"], uri="off")
    assert result is not None
    assert outcome(result) == outcome(expected)
    assert set(statuses(result).values()) == {"FINISHED"}


def stored(folder: Path) -> str:
    """The status of a run as its file has it, which a reader would change."""
    return str(json.loads((folder / "run.json").read_text())["status"])


@pytest.mark.parametrize(
    ("changes", "restarts"),
    [
        pytest.param({}, 0, marks=pytest.mark.scenario, id="trials"),
        # It is Tune's own actor.
        pytest.param({"lost": "ray::ResourceTrainable"}, 1, marks=pytest.mark.exact, id="rank-0"),
        pytest.param(
            {"scheduler": {"name": "pbt", "every_steps": 20, "quantile": 0.5}, "epochs": 8},
            0,
            marks=pytest.mark.exact,
            id="population",
        ),
        # On fewer workers it would be another run.
        pytest.param({"reduction": "native"}, 1, marks=pytest.mark.exact, id="control"),
    ],
)
def test_a_trial_goes_on_in_memory_without_a_worker_that_is_lost(
    tmp_path: Path, changes: Mapping[str, Any], restarts: int
) -> None:
    """Tune does not hear of it, the trial's bits are those of one that lost nothing, and the trials after it have all workers again."""
    changes = dict(changes)
    lost = changes.pop("lost", "ray::Peer")
    spec = {
        "workers": {"min": 3},
        "reduction": changes.pop("reduction", "exact"),
        "length": {"epochs": changes.pop("epochs", 4)},
    }
    expected = sweep(document(tmp_path / "undisturbed", trials=2, concurrency=1, spec=spec, **changes))
    given = document(tmp_path / "disturbed", trials=2, concurrency=1, spec=spec, **changes)
    given["spec"]["job"]["params"]["pause_s"] = 0.05
    killed: list[int] = []

    def kill() -> None:
        while not any(
            len([*RowsSoFar(path.parent).steps()]) > 8
            for path in tmp_path.glob("disturbed/runs/*/journal.jsonl")
        ):  # not where a population decides
            time.sleep(0.05)
        victim = named(lost)[-1]
        victim.kill()
        killed.append(victim.pid)

    threading.Thread(target=kill, daemon=True).start()
    result = sweep(given)
    assert killed
    assert sum(trial["restarts"] for trial in result.trials) == restarts
    assert outcome(result) == outcome(expected)
    journals = [path.read_text() for path in (tmp_path / "disturbed").glob("runs/*/journal.jsonl")]
    outlived = r"rank [12] of trial [01] was lost: .*; the others go on without it"
    assert any(re.search(outlived, text) for text in journals) == (not restarts)
    assert (interruptions(tmp_path / "undisturbed"), interruptions(tmp_path / "disturbed")) == (0, 1)


@pytest.mark.scenario
def test_a_population_goes_on_without_workers_that_are_lost_between_an_evaluation_and_its_save(
    tmp_path: Path,
) -> None:
    """Tune waits for the checkpoint of that step and rank 0 for Tune, while the lost worker's part of it never comes."""
    spec = {"workers": {"min": 2}, "length": {"steps": 24}}
    scheduler = {"name": "pbt", "every_steps": 8, "quantile": 0.5}
    results = {}
    for name, lost in {"undisturbed": {}, "disturbed": {"evaluated": 8, "save": 16}}.items():
        space = {"clip_norm": {"uniform": [0.05, 0.3]}}
        given = document(tmp_path / name, trials=2, spec=dict(spec), space=space, scheduler=scheduler)
        given["spec"]["job"] = {
            "use": "tests.cluster.broken_jobs:LostBeforeSave",
            "params": {"width": 4, "lost": lost},
        }
        results[name] = sweep(given)
    journals = "".join(path.read_text() for path in tmp_path.glob("disturbed/runs/*/journal.jsonl"))
    assert len(re.findall(r"rank 1 of trial [01] was lost: .*; the others go on without it", journals)) >= 2
    assert outcome(results["disturbed"]) == outcome(results["undisturbed"])
    assert interruptions(tmp_path / "undisturbed") == 0 < interruptions(tmp_path / "disturbed")
    assert [(trial["status"], trial["restarts"]) for trial in results["disturbed"].trials] == [
        ("finished", 0)
    ] * 2
