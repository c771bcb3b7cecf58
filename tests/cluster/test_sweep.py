"""Sweeps on a real cluster: trials are runs like any other, whatever is killed on the way."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep import SweepResult, sweep, train
from lockstep.clusters.problems import UNANSWERED
from lockstep.driver.options import RunOptions
from lockstep.errors import SpecError
from lockstep.record.mirror.stores import find_run
from lockstep.spec.loading import load_spec
from lockstep.sweeps import problems
from lockstep.sweeps.recorders import GOES_ON
from lockstep.sweeps.sweep_resume import resume_sweep
from tests.processes import named
from tests.raised import raises

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    # Ray and MLflow leave sockets and temporary folders to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

LR = {"optimizer.lr": {"loguniform": [1e-4, 3e-2]}}


def document(folder: Path, **changes: Any) -> dict[str, Any]:
    spec = {
        "job": {"use": "tests.cluster.broken_jobs:SlowDigits", "params": {"width": 4, "pause_s": 0.0}},
        "length": {"epochs": 4},
        "batch": {"global": 256, "micro": 64},
        "checkpoint": {"storage": str(folder / "runs"), "every": {"steps": 4}},
        "record": {"uri": "off"},
    }
    base = {"spec": spec, "space": LR, "trials": 3, "seed": 5, "metric": "eval/loss", "mode": "min"}
    spec |= changes.pop("spec", {})
    return {**base, **changes}


def outcome(result: SweepResult) -> list[tuple[Any, ...]]:
    """What must not depend on anything but the sweep."""
    return [
        (t["trial"], t["fields"], t["step"], t["metric"], t["curve"], t["weights_digest"], t["status"])
        for t in result.trials
    ]


def statuses(result: SweepResult) -> dict[int, str]:
    """What the record says of each trial's run."""
    return {
        t["trial"]: find_run(result.tracking_uri, t["run_id"], Path(result.folder).parent).status
        for t in result.trials
    }


def all_is_given_back() -> None:
    """Every CPU is free again, and no placement group is left."""
    import ray
    from ray.util import placement_group_table

    until = time.monotonic() + 60
    while time.monotonic() < until:
        left = [g for g in placement_group_table().values() if g["state"] != "REMOVED"]
        if not left and ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"]:
            return
        time.sleep(0.2)
    raise AssertionError(f"left: {left}, {ray.available_resources()}")


@pytest.mark.scenario
def test_trials_are_runs_below_the_sweep_and_are_not_trained_twice(tmp_path: Path) -> None:
    """One of the processes that train is killed meanwhile, and the other goes on without it."""
    space = {"optimizer.lr": {"loguniform": [1e-4, 3e-2]}, "precision": {"grid": ["fp32", "bf16"]}}
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    changes = {"record": {"uri": uri}, "workers": {"min": 2}, "length": {"epochs": 2}}
    given = document(tmp_path, space=space, trials=2, spec=changes)
    given["spec"]["job"]["params"]["pause_s"] = 0.02
    killed: list[int] = []

    def kill_one() -> None:
        # Both trials train by then: a worker that is lost before is not outlived.
        while len({path.parents[1] for path in tmp_path.glob("runs/*/step-*/manifest.json")}) < 2:
            time.sleep(0.05)
        victim = trial_workers()[-1]
        victim.kill()
        killed.append(victim.pid)

    threading.Thread(target=kill_one, daemon=True).start()
    told = tmp_path / "told"
    first = sweep(given, notify=f"cat >> '{told}'; echo >> '{told}'")
    assert (first.status, first.counts) == ("FINISHED", {"finished": 2})
    assert killed
    events = [json.loads(line) for line in told.read_text().splitlines()]
    steps = sum(trial["step"] for trial in first.trials)
    assert [(one["event"], one["status"], one["step"]) for one in events] == [
        ("start", "RUNNING", 0),
        ("end", "FINISHED", steps),
    ]
    assert {(one["run_id"], one["folder"]) for one in events} == {(first.sweep_id, first.folder)}
    assert sum(trial["restarts"] for trial in first.trials) == 0
    all_is_given_back()

    alone = train(Path(first.folder, "best.yaml"), ["record.uri=off"], local=True)
    assert first.best is not None
    assert alone.weights_digest == first.best["weights_digest"], "one process against two workers of a sweep"

    again = sweep(given)
    assert again.counts == {"reused": 2}
    assert [row[:-1] for row in outcome(again)] == [row[:-1] for row in outcome(first)]

    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    for result in (first, again):
        parent = client.get_run(result.sweep_id)
        assert parent.info.status == "FINISHED"
        assert parent.data.tags["lockstep.trials"] == ("2 finished" if result is first else "2 reused")
        assert parent.data.tags["lockstep.best_trial"] == str(first.best["trial"])
        files = {item.path for item in client.list_artifacts(result.sweep_id)}
        assert {"sweep.yaml", "best.yaml", "trials.json", "trials.csv", "figures"} <= files
        children = client.search_runs(
            [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{result.sweep_id}'"
        )
        assert {run.info.status for run in children} == {"FINISHED"}
        found = {int(run.data.tags["lockstep.trial"]): run for run in children}
        for trial in result.trials:
            run = found[trial["trial"]]
            assert run.info.run_id == trial["run_id"]
            assert float(run.data.params["optimizer.lr"]) == trial["fields"]["optimizer.lr"]
            history = client.get_metric_history(run.info.run_id, "eval/loss")
            assert [(point.step, point.value) for point in history] == [tuple(p) for p in trial["curve"]]


@pytest.mark.exact  # a minute
def test_halving_stops_trials_and_gives_all_back(tmp_path: Path) -> None:
    """Of two workers a trial: the peer of one that is stopped in mid-step is free for the next trial at once."""
    given = document(
        tmp_path,
        space={"optimizer.lr": {"grid": [1e-2, 1e-7, 3e-3]}},  # the second one is hopeless beside the first
        trials=None,
        spec={"workers": {"min": 2}},
        scheduler={"name": "asha", "grace_steps": 5, "reduction_factor": 2},
        concurrency=1,
    )
    result = sweep(given)
    all_is_given_back()
    assert result.counts["pruned"] >= 1
    assert result.counts["finished"] >= 1
    expected = {t["trial"]: "KILLED" if t["status"] == "pruned" else "FINISHED" for t in result.trials}
    assert statuses(result) == expected
    assert all("asha" in t["reason"] for t in result.trials if t["status"] == "pruned")


@pytest.mark.exact
def test_a_trial_worse_than_the_median_is_pruned(tmp_path: Path) -> None:
    """The grid has its hopeless rates last: three trials have set the median before them."""
    space = {"optimizer.lr": {"grid": [3e-3, 1e-2, 5e-3, 1e-6, 1e-7]}}
    median = {"name": "median", "grace_steps": 5, "min_trials": 3}
    result = sweep(document(tmp_path, space=space, trials=None, scheduler=median, concurrency=1))
    assert [trial["status"] for trial in result.trials] == ["finished"] * 3 + ["pruned"] * 2
    assert all("median" in trial["reason"] for trial in result.trials[3:])


@pytest.mark.exact
@pytest.mark.parametrize("budget", [{"steps": 25}, {"seconds": 4.0}], ids=["steps", "seconds"])
def test_a_budget_ends_the_sweep(tmp_path: Path, budget: dict[str, float]) -> None:
    """What has been trained by then is kept, and the trial at hand has a checkpoint to go on from."""
    given = document(tmp_path, trials=50, concurrency=1, budget=budget)
    given["spec"]["job"]["params"]["pause_s"] = 0.02
    result = sweep(given)
    (key,) = budget
    assert result.status == "FINISHED"
    assert 1 <= len(result.trials) < 50
    if key == "steps":
        assert 25 <= sum(trial["step"] for trial in result.trials) < 25 + 20
    assert "RUNNING" not in statuses(result).values()
    assert f"budget.{key}" in Path(result.folder, "run.json").read_text()


@pytest.mark.scenario
def test_a_trial_that_fails_does_not_stop_the_sweep(tmp_path: Path) -> None:
    given = document(tmp_path, space={"optimizer.lr": {"grid": [1e30, 3e-3]}}, trials=None, concurrency=1)
    result = sweep(given)
    assert [t["status"] for t in result.trials] == ["failed", "finished"]
    assert "not finite" in result.trials[0]["reason"] or "nan" in result.trials[0]["reason"]
    assert statuses(result)[0] == "FAILED"


def trial_workers() -> list[psutil.Process]:
    """The processes that train trials on this test's own cluster."""
    return named("ray::ResourceTrainable") + named("ray::Peer")


@pytest.mark.exact  # minutes
def test_killed_workers_change_no_trial(tmp_path: Path) -> None:
    changes = {"spec": {"workers": {"min": 2}}}
    expected = sweep(document(tmp_path / "undisturbed", **changes))
    slow = {"params": {"width": 4, "pause_s": 0.05}}
    given = document(tmp_path / "disturbed", **changes)
    given["spec"]["job"] = {**given["spec"]["job"], **slow}
    killed: list[int] = []
    over = threading.Event()

    def kill() -> None:
        source = random.Random(3)
        while len(killed) < 3 and not over.wait(4.0):
            if alive := trial_workers():
                victim = source.choice(alive)
                victim.kill()
                killed.append(victim.pid)

    killer = threading.Thread(target=kill)
    killer.start()
    result = sweep(given)
    over.set()
    killer.join()
    assert killed, "nothing was killed"
    assert outcome(result) == outcome(expected)
    assert set(statuses(result).values()) == {"FINISHED"}


@pytest.mark.exact  # a minute
def test_a_trial_that_hangs_is_found_and_goes_on(tmp_path: Path) -> None:
    """SIGSTOP to a worker: no error, no end, only silence; the sweep itself has no clock."""
    expected = sweep(document(tmp_path / "undisturbed", trials=2))
    given = document(
        tmp_path / "disturbed", trials=2, concurrency=1, spec={"faults": {"longest_silence_s": 6.0}}
    )
    given["spec"]["job"]["params"]["pause_s"] = 0.05
    stopped: list[int] = []

    def stop_one() -> None:
        while not list(tmp_path.glob("disturbed/runs/*/step-*/manifest.json")):
            time.sleep(0.05)
        victim = trial_workers()[-1]
        victim.suspend()
        stopped.append(victim.pid)

    thread = threading.Thread(target=stop_one, daemon=True)
    thread.start()
    result = sweep(given)
    assert stopped
    assert outcome(result) == outcome(expected)
    assert sum(trial["restarts"] for trial in result.trials) == 1
    (stacks,) = tmp_path.glob("disturbed/runs/*/stacks-attempt-1.txt")
    assert "stopped" in stacks.read_text()


@pytest.mark.exact  # a minute
def test_a_trial_that_hangs_before_its_first_step_starts_again(tmp_path: Path) -> None:
    expected = sweep(document(tmp_path / "undisturbed", trials=1))
    job = {
        "use": "tests.cluster.broken_jobs:HungAtFirst",
        "params": {"width": 4, "file": str(tmp_path / "hung")},
    }
    faults = {"longest_start_s": 90.0}
    given = document(tmp_path / "disturbed", trials=1, spec={"faults": faults, "job": job})
    result = sweep(given)
    assert outcome(result) == outcome(expected)
    assert [trial["restarts"] for trial in result.trials] == [1]
    (stacks,) = tmp_path.glob("disturbed/runs/*/stacks-attempt-1.txt")
    assert "train_data" in stacks.read_text()


@pytest.mark.exact  # a minute
def test_a_sweep_for_whose_trials_is_no_room_says_so_and_ends(tmp_path: Path) -> None:
    from ray.util import placement_group, remove_placement_group

    held = placement_group([{"CPU": 4.0}])
    assert held.wait(60)
    given = document(tmp_path, trials=2, spec={"faults": {"wait_for_workers_s": 15.0}})
    try:
        with raises(problems.NO_ROOM, seconds=15):
            sweep(given, notify=f"cat > '{tmp_path}/told'")
    finally:
        remove_placement_group(held)
    failure = json.loads((tmp_path / "told").read_text())
    assert (failure["event"], failure["status"]) == ("failure", "FAILED")
    assert failure["error"].startswith("no trial could be placed for 15 s")
    sweep_id = next(tmp_path.glob("runs/*/decisions.jsonl")).parent.name
    result = resume_sweep(RunOptions(), sweep_id, [f"record.folder={tmp_path}/runs"], uri="off")
    assert result is not None
    assert [trial["status"] for trial in result.trials] == ["finished", "finished"]
    all_is_given_back()


@pytest.mark.exact  # a minute
def test_a_sweep_whose_recorders_hang_ends_and_goes_on_when_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.sweeps.trial_watchdog.NEWS_S", 8.0)
    expected = sweep(document(tmp_path / "undisturbed", concurrency=1))
    given = document(tmp_path / "disturbed", concurrency=1)
    given["spec"]["job"]["params"]["pause_s"] = 0.05

    def stop_recorders() -> None:
        while not list(tmp_path.glob("disturbed/runs/*/step-*/manifest.json")):
            time.sleep(0.05)
        for process in named("ray::RecordersActor"):
            process.suspend()

    threading.Thread(target=stop_recorders, daemon=True).start()
    with raises(UNANSWERED, whose="the process of the sweep's recorders", seconds=8, advice=GOES_ON):
        sweep(given)
    sweep_id = next((tmp_path / "disturbed").glob("runs/*/decisions.jsonl")).parent.name
    result = resume_sweep(RunOptions(), sweep_id, [f"record.folder={tmp_path}/disturbed/runs"], uri="off")
    assert result is not None
    assert outcome(result) == outcome(expected)


def command(folder: Path, given: dict[str, Any]) -> subprocess.Popen[bytes]:
    import yaml

    folder.mkdir(exist_ok=True)
    (folder / "sweep.yaml").write_text(yaml.safe_dump(given))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'platform'}:{ROOT}"}
    environment.pop("RAY_ADDRESS", None)
    arguments = [sys.executable, "-m", "lockstep", "sweep", str(folder / "sweep.yaml"), "--address", "local"]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen([*arguments, "--json"], cwd=ROOT, env=environment, stdout=log, stderr=log)


def until(happened: Any, process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + 480
    while not happened():
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.2)


def events(folder: Path) -> list[dict[str, Any]]:
    paths = list(folder.glob("runs/*/decisions.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


@pytest.mark.exact  # a minute each
@pytest.mark.parametrize(
    "changes",
    [
        {
            "search": "optuna",
            "trials": 4,
            "scheduler": {"name": "asha", "grace_steps": 5, "reduction_factor": 2},
        },
        {"trials": 4, "scheduler": {"name": "pbt", "every_steps": 5, "quantile": 0.5}},
    ],
    ids=["optuna-asha", "pbt"],
)
def test_a_killed_sweep_ends_as_the_undisturbed_one(tmp_path: Path, changes: dict[str, Any]) -> None:
    """One trial at a time: every suggestion, every decision and every bit is the same."""
    expected = sweep(document(tmp_path / "undisturbed", concurrency=1, **changes))
    slow = document(tmp_path / "disturbed", concurrency=1, **changes)
    slow["spec"]["job"]["params"]["pause_s"] = 0.02
    process = command(tmp_path / "disturbed", slow)
    saved = "runs/*/step-*/manifest.json"
    until(lambda: len(list((tmp_path / "disturbed").glob(saved))) >= 7, process, tmp_path / "disturbed")
    for child in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        child.kill()
    process.wait()
    sweep_id = next((tmp_path / "disturbed").glob("runs/*/decisions.jsonl")).parent.name
    result = resume_sweep(RunOptions(), sweep_id, [f"record.folder={tmp_path}/disturbed/runs"], uri="off")
    assert result is not None
    assert outcome(result) == outcome(expected)
    assert "RUNNING" not in statuses(result).values()


@pytest.mark.exact
def test_a_signal_ends_trials_with_a_checkpoint_and_the_sweep_goes_on(tmp_path: Path) -> None:
    expected = sweep(document(tmp_path / "undisturbed"))
    slow = document(tmp_path / "disturbed")
    slow["spec"]["job"]["params"]["pause_s"] = 0.1
    slow["spec"]["checkpoint"]["every"] = {"seconds": 1000}
    process = command(tmp_path / "disturbed", slow)
    until(
        lambda: [*(tmp_path / "disturbed").glob("runs/*/environment.json")], process, tmp_path / "disturbed"
    )
    for one in [*psutil.Process(process.pid).children(recursive=True), process]:  # as Slurm and systemd do
        with suppress(psutil.NoSuchProcess):
            one.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 143, (tmp_path / "disturbed/log").read_text()
    told = json.loads((tmp_path / "disturbed/log").read_text().splitlines()[-1])
    assert told["status"] == "KILLED"
    assert any(t["status"] == "stopped" for t in told["trials"])
    result = resume_sweep(
        RunOptions(), told["sweep_id"], [f"record.folder={tmp_path}/disturbed/runs"], uri="off"
    )
    assert result is not None
    assert outcome(result) == outcome(expected)


@pytest.mark.exact
def test_a_member_of_a_population_can_be_trained_alone(tmp_path: Path) -> None:
    given = document(tmp_path, trials=4, scheduler={"name": "pbt", "every_steps": 5, "quantile": 0.5})
    result = sweep(given)
    all_is_given_back()
    moved = [t for t in result.trials if find_run("off", t["run_id"], tmp_path / "runs").spec["fork"]]
    assert moved, "nobody has taken over another one's state"
    recorded = find_run("off", moved[0]["run_id"], tmp_path / "runs").spec
    alone = train(load_spec(recorded), local=True)
    assert alone.weights_digest == moved[0]["weights_digest"]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"metric": "eval/acuracy"},
            "metric: the job gives no 'eval/acuracy'; did you mean 'eval/accuracy'?",
        ),
        ({"spec": {"workers": {"min": 64}, "batch": {"global": 64, "micro": 1}}}, "workers.min: got 64"),
    ],
)
def test_mistakes_are_found_before_the_first_trial(
    tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(SpecError) as caught:
        sweep(document(tmp_path, **changes))
    assert line in str(caught.value)
    assert not list(tmp_path.glob("runs/*/ledger.parquet"))
