"""Workers die, the run goes on with the same bits: nobody has to do anything."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep import train
from lockstep.attempts.restart_stages import STAGES
from lockstep.driver.progress import Silent
from lockstep.driver.result import Result
from lockstep.errors import ClusterError, JobError
from lockstep.record.events.union import TimeSpent
from lockstep.record.ledger.goodput import spent_text, text_of_tags
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.tables import DETERMINISTIC, read_evaluations, read_parquet
from tests.cluster.test_ray_train import columns
from tests.processes import named

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    # Ray and MLflow leave sockets and temporary folders to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
]


def spec(folder: Path, **changes: Any) -> dict[str, Any]:
    base = {
        "job": {"use": "tests.cluster.broken_jobs:SlowDigits", "params": {"width": 4, "pause_s": 0.02}},
        "length": {"epochs": 4},
        "batch": {"global": 192, "micro": 32},
        "data": {"drop_last": False},
        "workers": {"min": 1, "max": 2},
        "checkpoint": {"storage": str(folder / "runs"), "every": {"steps": 4}},
        "record": {"uri": "off"},
    }
    return {**base, **changes}


def workers() -> list[psutil.Process]:
    """The processes of Ray Train's workers on this test's own cluster."""
    return named("RayTrainWorker")


class Killer(threading.Thread):
    """SIGKILLs one worker, whenever a run has saved so many more checkpoints, `times` times."""

    def __init__(self, folder: Path, seed: int, times: int) -> None:
        super().__init__(daemon=True)
        self.folder, self.left, self.random = folder, times, random.Random(seed)
        self.killed: list[int] = []

    def run(self) -> None:
        seen = 0
        while self.left:
            saved = len(list(self.folder.glob("runs/*/step-*/manifest.json")))
            newest = max(
                (int(path.parent.name[5:]) for path in self.folder.glob("runs/*/step-*/manifest.json")),
                default=0,
            )
            alive = workers()
            if saved and newest > seen and alive:
                time.sleep(self.random.uniform(0, 0.3))
                victim = self.random.choice(alive)
                victim.kill()
                self.killed.append(victim.pid)
                self.left -= 1
                seen = newest + 4
            time.sleep(0.05)


def accounts(result: Result) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(Path(result.folder, "attempts.json").read_text())
    return found


def second_attempt(folder: Path) -> bool:
    """Whether a run below this folder has had its second attempt begin."""
    found = [json.loads(path.read_text()) for path in folder.glob("runs/*/attempts.json")]
    return any(len(rows) > 1 and rows[1]["last_step"] for rows in found)


def assert_stages_are_all(account: dict[str, Any]) -> None:
    """Where the seconds between the last step of the attempt before and the first of this one went, without a gap."""
    assert tuple(account["seconds"]) == STAGES
    lost_s = pytest.approx(account["lost_s"])  # differences of moments: their sum is rounded
    assert sum(account["seconds"].values()) == lost_s


def assert_time(result: Result, interruptions: int) -> TimeSpent:
    """What the record, its tags and the result say of the run's time is what its rows do."""
    folder = Path(result.folder)
    rows = read_parquet(folder / "ledger.parquet")
    (spent,) = [event for event in Journal(folder, read_only=True).events if isinstance(event, TimeSpent)]
    counted_s = sum(row.step_s for row in rows)
    assert (spent.counted_s, spent.interruptions) == (counted_s, interruptions)
    gaps = [
        (row.wall_clock - row.step_s - before.wall_clock, before.attempt)
        for before, row in pairwise(rows)
        if row.attempt > before.attempt
    ]
    assert spent.lost_s == pytest.approx(sum(gap for gap, _ in gaps))
    workers = {account["attempt"]: account["workers"] for account in accounts(result)}
    lost_h = sum(gap * workers[attempt] / 3600 for gap, attempt in gaps)
    assert (result.effective, result.lost_worker_h) == (counted_s / spent.wall_s, pytest.approx(lost_h))
    tags = json.loads((folder / "run.json").read_text())["tags"]
    assert text_of_tags(tags) == spent_text(spent)
    assert 0 < spent.effective < 1
    return spent


MIRRORED = {"sharding": "optimizer", "faults": {"mirror": True}}
ALL_MIRRORED = {"sharding": "full", "faults": {"mirror": True}}


@pytest.mark.thinned(2)
@pytest.mark.scenario
@pytest.mark.parametrize("sharding", [{}, MIRRORED, ALL_MIRRORED], ids=["none", "optimizer", "full"])
def test_the_others_outlive_a_killed_worker(tmp_path: Path, sharding: dict[str, Any]) -> None:
    """G1 and G4: one of three is killed. The two others go on in their processes; no checkpoint is read, no step done is taken again."""
    changes = {"workers": {"min": 1, "max": 3}, "length": {"epochs": 3}, **sharding}
    whole = train(spec(tmp_path / "whole", **changes), local=True)
    before, after = list[int](), list[int]()

    def kill_one() -> None:
        while not list(tmp_path.glob("runs/*/step-*/manifest.json")):
            time.sleep(0.05)
        before.extend(process.pid for process in workers())
        psutil.Process(before[0]).kill()
        while not second_attempt(tmp_path):
            time.sleep(0.05)
        after.extend(process.pid for process in workers())

    thread = threading.Thread(target=kill_one, daemon=True)
    thread.start()
    result = train(spec(tmp_path, **changes))
    thread.join(60.0)
    assert after == before[1:]  # the same processes, and no other
    first, second = accounts(result)
    assert (first["workers"], second["workers"], result.attempts) == (3, 2, 2)
    assert first["why"].startswith("rank ")
    assert (second["in_memory"], second["repeated"], second["why"]) == (True, 0, "finished")
    assert second["from_step"] == first["last_step"]
    assert tuple(second["seconds"]) == ("detection", "first_step")
    assert (first["planned"], second["planned"]) == (False, True)
    assert_time(result, 1)
    assert result.weights_digest == whole.weights_digest
    assert result.metrics == whole.metrics
    assert columns(result) == columns(whole)


@pytest.mark.exact
def test_rows_that_nobody_mirrors_are_not_outlived(tmp_path: Path) -> None:
    """The control of the test before: without mirrors the next attempt reads a checkpoint."""
    changes = {"workers": {"min": 1, "max": 3}, "length": {"epochs": 3}, "sharding": "full"}
    killer = Killer(tmp_path, seed=1, times=1)
    killer.start()
    result = train(spec(tmp_path, **changes))
    first, second = accounts(result)
    assert len(killer.killed) == 1
    assert (first["in_memory"], second["in_memory"]) == (False, False)
    assert second["from_step"] <= first["last_step"]
    assert result.weights_digest == train(spec(tmp_path / "whole", **changes), local=True).weights_digest


@pytest.mark.exact  # a minute
def test_lost_workers_are_replaced_while_the_others_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G1 and G4: each of the two first workers is killed, and a joining worker joins; no process is restarted, no checkpoint is there to be read."""
    monkeypatch.setattr("lockstep.attempts.resizing.REFILL_S", 1.0)
    slow = tmp_path / "fast-from-now-on"
    changes = {
        "job": {"use": "tests.cluster.broken_jobs:Held", "params": {"width": 4, "until": str(slow)}},
        "length": {"steps": 60},
        "checkpoint": {"storage": str(tmp_path / "runs")},
    }

    def trains(attempt: int) -> None:
        until = time.monotonic() + 300.0
        while time.monotonic() < until:
            found = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/attempts.json")]
            if any(rows[-1]["attempt"] >= attempt and rows[-1]["last_step"] for rows in found):
                return
            time.sleep(0.05)

    def kill_both() -> None:
        try:
            trains(1)
            first = workers()
            first[0].kill()
            trains(3)
            first[1].kill()
            trains(5)
        finally:
            slow.touch()

    thread = threading.Thread(target=kill_both, daemon=True)
    thread.start()
    result = train(spec(tmp_path, **changes))
    thread.join()
    found = accounts(result)
    assert [(one["workers"], one["joined"], one["in_memory"]) for one in found] == [
        (2, 0, False),
        (1, 0, True),
        (2, 1, True),
        (1, 0, True),
        (2, 1, True),
    ]
    assert [one["repeated"] for one in found] == [0, 0, 0, 0, 0]
    assert [one["from_step"] for one in found[1:]] == [one["last_step"] for one in found[:-1]]
    assert [one["planned"] for one in found] == [False, True, False, True, True]
    spent = next(
        event for event in Journal(Path(result.folder), read_only=True).events if isinstance(event, TimeSpent)
    )
    assert spent.interruptions == 2  # and not the two times that a worker joined
    whole = train(
        spec(tmp_path, **changes | {"checkpoint": {"storage": str(tmp_path / "whole")}}), local=True
    )
    assert result.weights_digest == whole.weights_digest
    assert columns(result) == columns(whole)


@pytest.mark.exact  # a minute
def test_killed_workers_are_replaced_and_the_bits_stay(tmp_path: Path) -> None:
    """G1 and G4: two workers are killed, one after the other, whom the other may not outlive; ledger, evaluations and weights are the undisturbed run's."""
    whole = train(spec(tmp_path / "whole"), local=True)
    killer = Killer(tmp_path, seed=1, times=2)
    killer.start()
    result = train(spec(tmp_path, workers={"min": 2, "max": 2}))
    assert len(killer.killed) == 2
    assert result.attempts == 3
    assert result.weights_digest == whole.weights_digest
    assert result.metrics == whole.metrics
    assert columns(result) == columns(whole)
    evaluations = [
        [(row.step, row.metrics) for row in read_evaluations(Path(run.folder, "evaluations.parquet"))]
        for run in (result, whole)
    ]
    assert evaluations[0] == evaluations[1]
    first, second, third = accounts(result)
    assert first["seconds"] == {}
    for account in (second, third):
        assert_stages_are_all(account)
    assert (first["attempt"], second["attempt"], third["attempt"]) == (1, 2, 3)
    assert third["why"] == "finished"
    for account in (second, third):
        assert account["from_step"] % 4 == 0
        assert account["from_step"] > 0
        assert account["lost_s"] > 0
    assert assert_time(result, 2).lost_worker_h > 0
    assert {row.attempt for row in read_parquet(Path(result.folder, "ledger.parquet"))} <= {1, 2, 3}


@pytest.mark.exact  # a minute
def test_a_worker_that_dies_again_and_again_ends_the_run(tmp_path: Path) -> None:
    """Without a checkpoint between the deaths the budget runs out; the message says after how many."""
    with pytest.raises(
        ClusterError, match=r"attempt \d+; 2 attempts in a row .* faults\.max_worker_failures is 1"
    ):
        train(
            spec(
                tmp_path,
                job={"use": "tests.cluster.broken_jobs:Dying", "params": {"at_sample": 3}},
                rehearsal="off",
                faults={"max_worker_failures": 1},
            )
        )
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "run.json").read_text())["status"] == "FAILED"


def test_an_error_of_the_job_reaches_the_driver_as_one_line_and_is_not_tried_again(tmp_path: Path) -> None:
    """G7: told with its place, in one attempt; the run keeps the user's own traceback."""
    with pytest.raises(JobError, match="a label is out of range") as caught:
        train(
            spec(
                tmp_path,
                job={"use": "tests.cluster.broken_jobs:LabelsOutOfRangeLater", "params": {}},
                rehearsal="off",
            )
        )
    assert "\n" not in str(caught.value)
    (run,) = (tmp_path / "runs").iterdir()
    (account,) = json.loads((run / "attempts.json").read_text())
    assert "a label is out of range" in account["why"]
    assert os.path.basename(__file__) not in (run / "error.txt").read_text()  # noqa: PTH119
    assert "broken_jobs.py" in (run / "error.txt").read_text()
    assert "IndexError" in (run / "error.txt").read_text()


@pytest.mark.scenario
def test_a_bit_that_flips_in_a_rehearsal_does_not_end_a_run_that_has_trained(tmp_path: Path) -> None:
    """G4: the rehearsal takes it for a mistake of the job, which an attempt before it has trained."""
    (tmp_path / "crash").touch()
    params = {"width": 4, "faults": str(tmp_path)}
    changes = {"workers": {"min": 1, "max": 1}, "length": {"steps": 6}}
    changes["job"] = {"use": "tests.cluster.broken_jobs:FlippedInRehearsal", "params": params}
    result = train(spec(tmp_path, **changes))
    _, refused, last = accounts(result)
    assert "depends on which micro-batch its worker ran last" in refused["why"]
    assert (refused["last_step"], last["why"]) == (0, "finished")
    whole = train(spec(tmp_path / "whole", **changes), local=True)
    assert result.weights_digest == whole.weights_digest


@pytest.mark.exact  # tests/unit/cli/test_mistakes.py, without Ray
def test_a_mistake_that_is_found_before_the_first_step_leaves_nothing_behind(tmp_path: Path) -> None:
    """G7: the rehearsal finds it in a worker, and there is no run of which it could be told."""
    with pytest.raises(JobError, match="a label is out of range") as caught:
        train(spec(tmp_path, job={"use": "tests.cluster.broken_jobs:LabelsOutOfRange", "params": {}}))
    assert "run " not in str(caught.value)
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.exact
def test_a_rank_that_keeps_the_other_waiting_is_named(tmp_path: Path) -> None:
    """In the account and as a warning, by rank, host and steps; what the run computes is that of a run without it."""
    changes = {"length": {"steps": 60}, "workers": {"min": 2, "max": 2}}
    job = {"use": "tests.cluster.broken_jobs:Uneven", "params": {"width": 4, "pause_s": 0.03}}
    result = train(spec(tmp_path, job=job, **changes))
    (account,) = accounts(result)
    (straggler,) = account["stragglers"]
    assert straggler.startswith(f"rank 1 of 2 on {socket.gethostname()} takes ")
    assert straggler.endswith("for a micro-batch, in steps 1 to 50")
    assert result.warnings == [straggler]
    assert Path(result.folder, "log.txt").read_text().count(f" warning: {straggler}\n") == 1
    even = train(spec(tmp_path / "even", **changes), local=True)
    assert result.weights_digest == even.weights_digest
    assert columns(result) == columns(even)


@pytest.mark.thinned(2)
@pytest.mark.scenario
@pytest.mark.parametrize("mailbox", ["kept", "lost"])
def test_a_rank_that_hangs_is_found_and_replaced(tmp_path: Path, mailbox: str) -> None:
    """SIGSTOP to one of two: no error, no end, only silence. Its peer's stacks tell where it waited.

    Where it is lost, SIGKILL comes to the mailbox of the attempt after that, which costs another.
    """
    whole = train(spec(tmp_path / "whole"), local=True)

    def stop_one() -> None:
        while not list(tmp_path.glob("runs/*/step-*/manifest.json")):
            time.sleep(0.05)
        workers()[-1].suspend()
        while mailbox == "lost" and not second_attempt(tmp_path):
            time.sleep(0.05)
        if mailbox == "lost":
            actors("Mailbox")[-1].kill()

    thread = threading.Thread(target=stop_one, daemon=True)
    thread.start()
    began = time.monotonic()
    result = train(spec(tmp_path, workers={"min": 2, "max": 2}, faults={"longest_silence_s": 6.0}))
    assert time.monotonic() - began < 240  # the process group itself would have waited a quarter of an hour
    assert result.weights_digest == whole.weights_digest
    assert columns(result) == columns(whole)
    first, *others = accounts(result)
    assert len(others) == result.attempts - 1 == (2 if mailbox == "lost" else 1)
    assert "no rank made progress" in first["why"]
    if mailbox == "lost":
        assert "mailbox was lost" in others[0]["why"]
    assert others[-1]["why"] == "finished"
    for account in others:
        assert_stages_are_all(account)
    stacks = Path(result.folder, "stacks-attempt-1.txt").read_text()
    assert "rank 0" in stacks
    assert "rank 1" in stacks
    assert "stopped" in stacks
    assert "training/loop.py" in stacks


def actors(name: str) -> list[psutil.Process]:
    return named(f"ray::{name}")


@pytest.mark.exact  # a minute
def test_a_recorder_and_a_mailbox_that_hang_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP to each: no error, no end, only silence. The recorder costs no attempt, the mailbox one, and neither a bit or a row."""
    # By name: Ray reads the environment as it is imported, and the scenarios that import this module set it.
    monkeypatch.setattr("lockstep.attempts.recording.SILENT_S", 8.0)
    monkeypatch.setattr("lockstep.attempts.recording.ANSWER_S", 8.0)
    whole = train(spec(tmp_path / "whole"), local=True)
    stopped: list[str] = []

    def stop_both() -> None:
        for name in ("RecorderActor", "Mailbox"):
            saved = len(list(tmp_path.glob("runs/*/step-*/manifest.json")))
            while len(list(tmp_path.glob("runs/*/step-*/manifest.json"))) < saved + 1:
                time.sleep(0.05)
            actors(name)[-1].suspend()
            stopped.append(name)
            time.sleep(12.0)

    threading.Thread(target=stop_both, daemon=True).start()
    changes = {"job": {"use": "tests.cluster.broken_jobs:SlowDigits", "params": {"width": 4, "pause_s": 0.2}},
               "checkpoint": {"storage": str(tmp_path / "runs"), "every": {"steps": 4}, "keep_last": 100}}  # fmt: skip
    result = train(spec(tmp_path, **changes))
    assert stopped == ["RecorderActor", "Mailbox"]
    assert result.weights_digest == whole.weights_digest
    assert columns(result) == columns(whole)
    first, second = accounts(result)
    assert "the run's mailbox was lost: it did not answer for 8 s" in first["why"]
    assert second["why"] == "finished"


@pytest.mark.exact  # a minute
def test_an_attempt_that_hangs_before_its_first_step_is_ended_and_the_next_goes_on(tmp_path: Path) -> None:
    whole = train(spec(tmp_path / "whole"), local=True)
    params = {"width": 4, "file": str(tmp_path / "hung")}
    job = {"use": "tests.cluster.broken_jobs:HungAtFirst", "params": params}
    result = train(spec(tmp_path, job=job, faults={"longest_start_s": 100.0}))
    assert result.weights_digest == whole.weights_digest
    assert columns(result) == columns(whole)
    first, second = accounts(result)
    assert "no first step within 100 s (faults.longest_start_s)" in first["why"]
    assert "in its stage data" in first["why"]
    assert second["why"] == "finished"
    assert 100 < second["lost_s"] < 1000  # from the beginning on: no step had been done


@pytest.mark.exact  # minutes
def test_a_wait_for_room_that_others_hold_has_a_limit_and_says_so(tmp_path: Path) -> None:
    """Everything that the cluster has is held until the first attempt has been given up; the second finds room."""
    from ray.util import placement_group, remove_placement_group

    held = placement_group([{"CPU": 4.0}])
    assert held.wait(60)

    class Heard(Silent):
        def say(self, text: str) -> None:
            if text.startswith("attempt 1 ended"):
                remove_placement_group(held)

    whole = train(spec(tmp_path / "whole"), local=True)
    result = train(spec(tmp_path, faults={"longest_start_s": 100.0}), progress=Heard())
    assert result.weights_digest == whole.weights_digest
    first, second = accounts(result)
    assert "no first step within 100 s" in first["why"]
    assert "in its stage placement" in first["why"]
    assert second["why"] == "finished"


def in_a_process(module: str, folder: Path) -> dict[str, Any]:
    """What a scenario on several nodes came to."""
    done = subprocess.run(
        [sys.executable, "-m", module, str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "platform"), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-12_000:]
    told: dict[str, Any] = json.loads((folder / "told.json").read_text())
    return told


def left_alone(folder: Path, steps: int) -> Result:
    """The run of such a scenario, to which nothing happened, and without the pauses."""
    job = {"use": "tests.cluster.broken_jobs:SlowDigits", "params": {"width": 4}}
    return train(spec(folder / "whole", length={"steps": steps}, job=job), local=True)


@pytest.mark.exact  # minutes
def test_a_notice_with_nowhere_to_go_is_met_with_two_checkpoints(tmp_path: Path) -> None:
    """The attempt goes on until the node is gone, and loses no more than what it did after the second save."""
    told = in_a_process("tests.cluster.notice", tmp_path)
    assert len(told["saves"]) == 2
    first, second = json.loads(Path(told["folder"], "attempts.json").read_text())
    assert first["last_step"] > second["from_step"] > 0
    assert second["repeated"] == first["last_step"] - second["from_step"]
    assert second["repeated"] < 15  # of some fifty since the first save; no other was due
    whole = left_alone(tmp_path, 110)
    assert told["weights_digest"] == whole.weights_digest


@pytest.mark.exact  # minutes
def test_a_run_grows_moves_and_shrinks_with_its_cluster(tmp_path: Path) -> None:
    """Two workers, four when a node joins, two when it is drained, one when another is lost: one run, the same bits, all of it in memory."""
    told = in_a_process("tests.cluster.elastic", tmp_path)
    whole = left_alone(tmp_path, told["step"])
    found = json.loads(Path(told["folder"], "attempts.json").read_text())
    assert [account["workers"] for account in found] == [2, 4, 2, 1]
    assert [(account["joined"], account["in_memory"]) for account in found] == [
        (0, False),
        (2, True),
        (0, True),
        (0, True),
    ]
    assert "room for 4 workers" in found[0]["why"]
    assert "is being drained" in found[1]["why"]
    assert "lost" in found[2]["why"] or "cannot be reached" in found[2]["why"]
    assert [account["repeated"] for account in found[:3]] == [0, 0, 0]  # what is planned repeats no step
    assert told["weights_digest"] == whole.weights_digest
    ledgers = [read_parquet(Path(folder, "ledger.parquet")) for folder in (told["folder"], whole.folder)]
    assert [[getattr(row, name) for name in DETERMINISTIC] for row in ledgers[0]] == [
        [getattr(row, name) for name in DETERMINISTIC] for row in ledgers[1]
    ]
