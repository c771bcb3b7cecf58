"""G4 against a real tracking server that is killed, and real processes that are: each step once, the ledger's bits."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep import train
from lockstep.record import problems
from lockstep.record.events.metrics import Point, step_points
from lockstep.record.events.union import Finished
from lockstep.record.ledger.journal_file import NAME
from lockstep.record.ledger.rows import StepRow
from lockstep.record.ledger.tables import DETERMINISTIC, read_parquet
from lockstep.record.mirror.sync import sync
from lockstep.record.recorder import Recorder
from lockstep.spec.fields import Spec
from tests.forked import Forked, lockstep
from tests.in_process import here
from tests.raised import raises
from tests.unit.record.rows import step_row
from tests.unit.record.server import Server
from tests.unit.record.written import read_steps

STEPS = 600
"""Enough for three attempts, each of which writes a second of steps at once."""
OUTAGE_S = 6.0
KEYS = ("train/loss", "train/lr", "train/grad_norm", "train/clipped_norm", "train/accuracy")
"""Keys whose values are the same in every execution of the run."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield server


def command(uri: str, folder: Path, *words: str) -> Forked:
    return lockstep(*words, "--json", "--uri", uri, cwd=folder)


def spec_file(folder: Path, steps: int = STEPS) -> Path:
    spec = folder / "digits.yaml"
    spec.write_text(
        f"job: {{use: 'tests.untraced_jobs:UntracedDigits', params: {{width: 8}}}}\nlength: {{steps: {steps}}}\n"
        "batch: {global: 64, micro: 16}\nclip_norm: 1.0\nevaluate: {every: {steps: 50}}\n"
        "checkpoint: {every: {steps: 50}}\n"
    )
    return spec


def training(uri: str, folder: Path, steps: int = STEPS) -> Forked:
    return command(uri, folder, "train", str(spec_file(folder, steps)), "--local")


def answer(process: Forked, code: int = 0) -> dict[str, Any]:
    out, err = process.communicate(timeout=400)
    assert process.returncode == code, err
    told: dict[str, Any] = json.loads(out)
    return told


def lost(process: Forked) -> None:
    """Kill a command and its guardian, which would record its end, as the loss of a machine does."""
    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    process.send_signal(signal.SIGKILL)
    process.communicate()


def wait_for_steps(folder: Path, count: int, process: Forked) -> Path:
    """The run's folder, once its journal has so many steps."""
    until = time.monotonic() + 300
    while True:
        for journal in folder.glob(f"runs/*/{NAME}"):
            if len(read_steps(journal.parent)) >= count:
                return journal.parent
        assert time.monotonic() < until
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def recorded(uri: str, run_id: str) -> dict[str, list[tuple[int, int, float]]]:
    """Step, timestamp and value of every point of every metric."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    keys = client.get_run(run_id).data.metrics
    return {k: [(m.step, m.timestamp, m.value) for m in client.get_metric_history(run_id, k)] for k in keys}


def expected(ledger: list[StepRow]) -> dict[str, list[tuple[int, int, float]]]:
    """What the ledger's rows are as points."""
    points: dict[str, list[tuple[int, int, float]]] = {}
    for before, row in zip([None, *ledger[:-1]], ledger, strict=True):
        for point in step_points(row, before, scaled=False):
            assert isinstance(point, Point)
            points.setdefault(point.key, []).append((point.step, point.timestamp_ms, point.value))
    return points


def check(uri: str, folder: Path, run_id: str) -> None:
    """G4: what is recorded is the ledger, no point less, no point more."""
    found = recorded(uri, run_id)
    wanted = expected(read_parquet(folder / "ledger.parquet"))
    assert [step for step, _, _ in found["train/loss"]] == list(range(1, STEPS + 1))
    for key, points in wanted.items():
        assert found[key] == points, key
    assert [step for step, _, _ in found["eval/loss"]] == [*range(50, STEPS + 1, 50)]
    beside = {"eval/loss", "eval/accuracy", "perf/evaluation_s"}
    assert {key for key in found.keys() - wanted.keys() if key.split("/")[0] != "system"} >= beside
    for key, points in found.items():
        steps = [step for step, _, _ in points]
        assert steps == sorted(set(steps)), key


def deterministic(folder: Path) -> list[tuple[str, ...]]:
    return [
        tuple(repr(getattr(row, name)) for name in DETERMINISTIC)
        for row in read_parquet(folder / "ledger.parquet")
    ]


Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def ask(server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Ask:
    """The answer of a command that is called in a folder, in this process."""

    def answered(folder: Path, *words: str, code: int = 0) -> dict[str, Any]:
        found, out, err = here(monkeypatch, capfd, folder, *words, "--json", "--uri", server.uri)
        assert found == code, err
        told: dict[str, Any] = json.loads(out)
        return told

    return answered


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing happened to, in this process and without MLflow; test_stores has one with a server."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return Path(
        train(spec_file(folder), ["record.uri=off", f"checkpoint.storage={folder}"], local=True).folder
    )


@pytest.mark.exact  # below, a server that stays away until the run is over; test_recorder.py has one that comes back
def test_a_server_that_is_killed_and_comes_back_gets_every_step_once(
    server: Server, undisturbed: Path, tmp_path: Path
) -> None:
    process = training(server.uri, tmp_path)
    wait_for_steps(tmp_path, 1, process)
    server.kill()
    time.sleep(OUTAGE_S)
    server.start()
    result = answer(process)
    folder = Path(result["folder"])
    check(server.uri, folder, result["run_id"])
    assert deterministic(folder) == deterministic(undisturbed)
    assert "the store is away" in (folder / "log.txt").read_text()
    assert "the store is back" in (folder / "log.txt").read_text()


@pytest.mark.exact  # a minute
def test_killed_drivers_and_servers_leave_no_trace_in_a_run_that_is_resumed(
    server: Server, undisturbed: Path, tmp_path: Path, ask: Ask
) -> None:
    """G4 with all of it: the server killed, the driver killed while it is away, and both again in the next attempt."""
    process = training(server.uri, tmp_path)
    folder = wait_for_steps(tmp_path, 1, process)
    server.kill()
    wait_for_steps(tmp_path, 60, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    server.start()
    seen = ask(tmp_path, "show", folder.name)
    assert (seen["status"], seen["step"] < STEPS) == ("FAILED", True)

    second = command(server.uri, tmp_path, "resume", folder.name, "--local")
    wait_for_steps(tmp_path, len(read_steps(folder)) + 1, second)
    second.send_signal(signal.SIGKILL)
    second.communicate()

    third = command(server.uri, tmp_path, "resume", folder.name, "--local")
    wait_for_steps(tmp_path, len(read_steps(folder)) + 1, third)
    server.kill()
    time.sleep(2)
    server.start()
    result = answer(third)
    assert (result["run_id"], result["status"], result["attempts"]) == (folder.name, "FINISHED", 3)
    assert result["warnings"] == []
    check(server.uri, folder, folder.name)
    assert deterministic(folder) == deterministic(undisturbed)
    ledger = read_parquet(folder / "ledger.parquet")
    assert {row.attempt for row in ledger} == {1, 2, 3}
    after = ask(tmp_path, "show", folder.name)
    assert after["status"] == "FINISHED"
    assert after["tags"]["lockstep.error"] == after["tags"]["lockstep.vanished"] == ""
    assert "lockstep.violation" not in after["tags"]


@pytest.mark.exact  # below `sync` sends what is left; test_folder_reader.py and test_liveness.py mark a run whose process has gone
def test_a_killed_driver_is_marked_and_what_it_left_is_sent(server: Server, tmp_path: Path, ask: Ask) -> None:
    """Lost with its guardian while the server is away: the journal has what MLflow has not, until `record sync`."""
    process = training(server.uri, tmp_path, steps=100_000)
    folder = wait_for_steps(tmp_path, 40, process)
    server.kill()
    wait_for_steps(tmp_path, len(read_steps(folder)) + 60, process)
    lost(process)
    server.start()
    run_id = folder.name
    told = len(recorded(server.uri, run_id).get("train/loss", []))
    left = read_steps(folder)
    assert told < len(left)

    seen = ask(tmp_path, "show", run_id)
    assert seen["status"] == "FAILED"
    assert "the process that recorded it is gone" in seen["tags"]["lockstep.error"]
    (listed,) = [run for run in ask(tmp_path, "runs")["runs"] if run["run_id"] == run_id]
    assert (listed["status"], listed["step"]) == ("FAILED", seen["step"])

    done = ask(tmp_path, "record", "sync", run_id)
    assert (done["sent"], done["step"]) == (True, len(left))
    found = recorded(server.uri, run_id)
    for key, points in expected(left).items():
        assert found[key] == points, key
    assert read_parquet(folder / "ledger.parquet") == left
    after = ask(tmp_path, "show", run_id)
    assert (after["status"], after["step"]) == ("FAILED", len(left))
    assert "ledger.parquet" in after["artifacts"]
    assert ask(tmp_path, "record", "sync", run_id)["sent"] is False


@pytest.mark.scenario
def test_a_server_that_stays_away_costs_the_run_nothing_but_its_record(
    server: Server, spec: Callable[..., Spec], ask: Ask
) -> None:
    """The steps are in the folder; the message says what to type, and that is enough."""
    recorder = Recorder(spec(server.uri))
    recorder.start()
    folder = recorder.run_folder()
    server.kill()
    recorder.tell(*[step_row(i) for i in range(1, 301)])
    recorder.tell(Finished({"step": 300, "stopped": False}))
    with raises(problems.NOT_SENT, remedy=re.compile(f"`lockstep record sync {folder.name}` sends it")):
        recorder.close(timeout_s=1.0)
    rows = read_parquet(folder / "ledger.parquet")
    assert rows == [step_row(i) for i in range(1, 301)]
    server.start()
    assert sync(folder).sent
    found = recorded(server.uri, folder.name)
    assert {key: found[key] for key in expected(rows)} == expected(rows)
    assert ask(folder, "show", folder.name)["status"] == "FINISHED"
    assert not sync(folder).sent


def test_without_a_journal_there_is_nothing_to_send(server: Server, tmp_path: Path, ask: Ask) -> None:
    (tmp_path / "runs" / ("0" * 32)).mkdir(parents=True)
    refused = ask(tmp_path, "record", "sync", "0" * 32, code=2)
    assert "there is no journal.jsonl" in refused["error"]
