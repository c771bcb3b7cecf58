"""G1 for tables with sparse gradients, as commands: a worker of a sharded run is killed, then the run as a whole, and it goes on on other workers, shared out in another way."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch import nn

from lockstep.record.ledger.tables import DETERMINISTIC, read_parquet
from tests.cluster.commands import command, result_of
from tests.distributed.gradient_kinds import Recommender
from tests.processes import named

ROOT = Path(__file__).parents[2]
STEPS = 80


class Paced(Recommender):
    """Each step takes a while, so that a test can do something to the run."""

    def after_step(self, model: nn.Module, step: int) -> None:
        time.sleep(0.05)


def begun(folder: Path, *words: str) -> subprocess.Popen[str]:
    folder.mkdir()
    spec = folder / "tables.yaml"
    spec.write_text("job: {use: tests.cluster.test_tables_on_ray:Paced}\n")
    settings = [
        f"length.steps={STEPS}",
        "batch.global=12",
        "batch.micro=2",
        "clip_norm=1.0",
        "record.uri=off",
    ]
    return command(folder, "train", str(spec), *settings, "checkpoint.every.steps=2", *words)


def ledger(result: dict[str, Any]) -> list[dict[str, str]]:
    """What is deterministic of each step, with every bit."""
    rows = read_parquet(Path(result["folder"], "ledger.parquet"))
    return [{name: repr(getattr(row, name)) for name in DETERMINISTIC} for row in rows]


def newest_save(folder: Path) -> int:
    return max((int(path.parent.name[5:]) for path in folder.glob("*/step-*/manifest.json")), default=0)


def until_saved(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    """Until a checkpoint of `step` or a later one is there."""
    limit = time.monotonic() + 300
    while newest_save(folder) < step:
        assert process.poll() is None and time.monotonic() < limit, process.communicate()
        time.sleep(0.05)


def workers(most: int, least: int | None = None) -> list[str]:
    """So many workers, also on two cores."""
    return [f"workers.min={least or most}", f"workers.max={most}", "workers.cpus_each=0.5"]


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["sharding=full", *workers(3)], ["sharding=optimizer", *workers(2)]),
        pytest.param(
            ["sharding=optimizer", *workers(2)], ["sharding=full", *workers(3)], marks=pytest.mark.exact
        ),
        pytest.param(
            ["sharding=optimizer", "faults.mirror=true", *workers(3, least=1)],
            ["sharding=none", *workers(1)],
            marks=pytest.mark.exact,
        ),
    ],
    ids=["full", "optimizer", "mirrored"],
)
def test_a_killed_run_with_tables_goes_on_under_another_sharding(
    tmp_path: Path, request: pytest.FixtureRequest, before: list[str], after: list[str]
) -> None:
    whole = result_of(begun(tmp_path / "whole", "--local"))
    folder = tmp_path / "killed"
    run = begun(folder, *before)
    request.addfinalizer(run.kill)
    until_saved(run, folder, 4)
    everyone = psutil.Process(run.pid).children(recursive=True)
    victim = named("RayTrainWorker", among=everyone)[0]
    saved = newest_save(folder)
    victim.kill()
    until_saved(run, folder, saved + 8)  # the next attempt saves as well
    everyone = psutil.Process(run.pid).children(recursive=True)
    os.killpg(run.pid, signal.SIGKILL)
    for process in everyone:
        if process.is_running():
            process.kill()
    run.communicate()
    (run_id,) = [path.parent.name for path in folder.glob("*/journal.jsonl")]
    resumed = result_of(command(folder, "resume", run_id, "--uri", "off", *after))
    for name in ("weights_digest", "identity", "metrics"):
        assert resumed[name] == whole[name]
    assert ledger(resumed) == ledger(whole)
    attempts = {row.attempt for row in read_parquet(Path(resumed["folder"], "ledger.parquet"))}
    assert attempts >= {1, 2, 3}
