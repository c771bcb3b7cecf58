"""G1, G4 on Ray and in local commands: evaluations by a process beside rank 0, which is killed, as is the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.record.ledger.tables import read_evaluations
from tests.cluster.commands import COMMAND, command, result_of
from tests.processes import named

ROOT = Path(__file__).parents[2]
PROCESS = "lockstep.training.evaluation.evaluator_main"


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    spec = folder / "digits.yaml"
    spec.write_text("job: {use: tests.distributed.test_evaluation_beside:Paced}\n")
    settings = [
        "length.steps=24",
        "batch.global=12",
        "batch.micro=3",
        "evaluate.every.steps=4",
        "early_stop={metric: eval/far/loss, mode: max, patience: 20}",
        "checkpoint.every.steps=3",
        "record.uri=off",
    ]
    return command(folder, "train", str(spec), *settings, *words)


def evaluations(result: dict[str, Any]) -> list[Any]:
    rows = read_evaluations(Path(result["folder"], "evaluations.parquet"))
    return [(row.step, row.epoch, {name: value.hex() for name, value in row.metrics.items()}) for row in rows]


def evaluation_process(process: subprocess.Popen[str], storage: Path) -> psutil.Process:
    """The process that evaluates for a command, once there is one: other tests may have such processes at the same time."""
    until = time.monotonic() + 300
    while time.monotonic() < until:
        assert process.poll() is None, process.communicate()
        for candidate in named(PROCESS, among=psutil.process_iter()):
            with suppress(psutil.NoSuchProcess):
                if candidate.environ().get(COMMAND) == str(storage):
                    return candidate
        time.sleep(0.02)
    raise AssertionError("no process evaluates")


def run_folder(storage: Path, process: subprocess.Popen[str]) -> Path:
    """The folder of a command's run, once its journal is there: the process that evaluates may start before it."""
    until = time.monotonic() + 300
    while not (journals := [*storage.glob("*/journal.jsonl")]):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)
    return journals[0].parent


@pytest.mark.thinned(3)
@pytest.mark.scenario
@pytest.mark.parametrize("where", [["workers.min=2"], ["--local"], ["workers.min=1"]], ids=" ".join)
def test_killed_and_resumed_it_has_the_bits_and_rows_of_evaluations_in_place(
    tmp_path: Path, request: pytest.FixtureRequest, where: list[str]
) -> None:
    plain = result_of(started(tmp_path / "plain", "evaluate.delay=next", "--local"))
    assert [step for step, *_ in evaluations(plain)] == [4, 8, 12, 16, 20, 24]
    run = started(tmp_path / "beside", "evaluate.beside=true", "job.params={}", *where)
    request.addfinalizer(run.kill)
    evaluation_process(run, tmp_path / "beside").send_signal(signal.SIGKILL)
    whole = result_of(run)
    assert any("evaluate.beside: the process that evaluates" in text for text in whole["warnings"])
    assert (whole["weights_digest"], whole["identity"]) == (plain["weights_digest"], plain["identity"])
    assert evaluations(whole) == evaluations(plain)

    killed = started(tmp_path / "killed", "evaluate.beside=true", *where)
    request.addfinalizer(killed.kill)
    evaluates = evaluation_process(killed, tmp_path / "killed")
    folder = run_folder(tmp_path / "killed", killed)
    everyone = psutil.Process(killed.pid).children(recursive=True)
    os.killpg(killed.pid, signal.SIGKILL)
    for one in everyone:
        if one.is_running():
            one.kill()
    killed.communicate()
    psutil.wait_procs([evaluates], timeout=60)
    assert not evaluates.is_running()
    words = ["resume", folder.name, "--json", "--uri", "off", f"checkpoint.storage={tmp_path / 'killed'}"]
    local = ["--local"] if "--local" in where else []
    again = subprocess.run(
        [sys.executable, "-m", "lockstep", *words, *local],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "platform"), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    resumed = json.loads(again.stdout)
    assert (resumed["weights_digest"], resumed["identity"]) == (plain["weights_digest"], plain["identity"])
    assert evaluations(resumed) == evaluations(plain)
