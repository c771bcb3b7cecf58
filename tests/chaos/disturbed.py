"""A run that is killed again and again, and held against the run that nothing happened to.

    python -m tests.chaos.disturbed --runs digits=10,stdlib_gpt=10 --seed 1

Each run is `lockstep train` on several Ray nodes. At random moments, which follow from the seed, one of its processes gets
SIGKILL: a worker, the raylet of a node with workers (another node joins later), the recorder, or the driver, in which
Ray Train's controller lives (then `lockstep resume`). Some of the moments lie within the recovery from the kill before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from lockstep.record.ledger import DETERMINISTIC, read_evaluations, read_parquet
from tests.chaos.cluster import ENVIRONMENT, Nodes, started

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300.0
"""How long a run may take to train again after a kill, and half of what it may take to end after the last."""

WEIGHTS = {"worker": 8, "node": 4, "recorder": 2, "driver": 3}
"""How often each is killed, beside the others."""

RUNS = {
    "digits": ["jobs/digits/train.yaml", "job.use=tests.cluster.broken_jobs:SlowDigits", "job.params={width: 8, pause_s: 0.04}", "checkpoint.every.steps=7"],
    "stdlib_gpt": ["jobs/stdlib_gpt/train.yaml", "job.params={depth: 2, heads: 2, head_width: 16, context: 64, corpus_bytes: 200000}", "evaluate.every.steps=40", "checkpoint.every.steps=10"],
    "forgetful": ["jobs/digits/train.yaml", "job.use=tests.cluster.broken_jobs:Forgetful", "job.params={width: 8, pause_s: 0.04}", "checkpoint.every.steps=7"],
}  # fmt: skip
RUNS["brief"] = [*RUNS["digits"], "length.epochs=9"]
"""Long enough for two kills."""

CONTROL = "forgetful"
"""Loses something with each worker: what does not show here would show nowhere."""

PLACED = [
    "workers.min=1",
    "workers.max=3",
    "faults.max_worker_failures=100",
    "faults.longest_silence_s=60",
    "faults.standby_after_s=1",
]


class Kill(NamedTuple):
    """What is killed, so many seconds after the run trains again, or after the kill before where it is `soon`."""

    target: str
    soon: bool
    after_s: float


def plan(seed: int, kills: str) -> list[Kill]:
    """The kills of one run: so many, of any kind, or those of `worker+node`; none where the run kills by itself."""
    draw = random.Random(seed)
    if ":" in kills:
        return []
    if kills.isdigit():
        targets = draw.choices(list(WEIGHTS), list(WEIGHTS.values()), k=int(kills))
    else:
        return [Kill(target, False, draw.uniform(0.0, 2.0)) for target in kills.split("+")]
    return [
        Kill(target, n > 0 and draw.random() < 0.25, draw.uniform(0.0, 4.0))
        for n, target in enumerate(targets)
    ]


class Disturbed:
    """One run on `nodes`, in `folder`."""

    def __init__(
        self, nodes: Nodes, folder: Path, words: list[str], seed: int, rates: str | None = None
    ) -> None:
        self.nodes, self.folder, self.draw = nodes, folder, random.Random(seed)
        self.killed: list[str] = []
        self.seconds = 0.0
        self.rates = ["--chaos", rates] if rates else []
        self.drivers = 0
        self.driver = self._start("train", *words, *PLACED, f"checkpoint.storage={folder}/runs")

    def _start(self, *words: str) -> subprocess.Popen[str]:
        self.drivers += 1
        log = (self.folder / f"driver-{self.drivers}.log").open("w")
        return subprocess.Popen(
            [sys.executable, "-m", "lockstep", *words, *self.rates, "--address", self.nodes.address, "--uri", self.uri, "-v"],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(ROOT / "platform"), str(ROOT)])},
            stdout=log,
            stderr=log,
            text=True,
        )  # fmt: skip

    @property
    def uri(self) -> str:
        return f"sqlite:///{self.folder}/mlflow.db"

    @property
    def run(self) -> Path | None:
        """The run's folder, once it can be resumed."""
        found = list(self.folder.glob("runs/*/spec.yaml"))
        return found[0].parent if found else None

    def attempts(self) -> list[dict[str, Any]]:
        """Those that have begun to train."""
        if self.run is None or not (self.run / "attempts.json").exists():
            return []
        found: list[dict[str, Any]] = json.loads((self.run / "attempts.json").read_text())
        return [attempt for attempt in found if attempt["last_step"]]

    def over(self) -> bool:
        """Whether the driver has ended by itself, and well. One that ended otherwise is resumed, as one that was killed."""
        code = self.driver.poll()
        if code is None:
            return False
        assert code in {0, -9}, self.log()
        if code:
            self.resume()
        return code == 0

    def resume(self) -> None:
        assert self.run is not None, "the driver was killed before there was a run"
        self.driver = self._start("resume", self.run.name, "checkpoint.storage=" + str(self.folder / "runs"))

    def disturb(self, kill: Kill) -> bool:
        """Carry it out when its time has come. Whether it could be: a run may end before."""
        until = time.monotonic() + PATIENCE_S
        while not kill.soon and (not self.attempts() or not self.trains()):
            assert time.monotonic() < until, f"it does not train again\n{self.log()}"
            if self.over():
                return False
            time.sleep(0.1)
        time.sleep(kill.after_s)
        while not self.over():
            killed = self._carry_out(kill.target)
            if killed is not None:
                self.killed.append(f"{kill.target}{' soon' if kill.soon else ''} ({killed})")
                return True
            assert time.monotonic() < until, f"there is no {kill.target}\n{self.log()}"
            time.sleep(0.1)
        return False

    def trains(self) -> bool:
        """Whether the newest attempt is one that nothing ended yet."""
        return self.attempts()[-1]["ended"] is None and bool(self.nodes.busy())

    def _carry_out(self, target: str) -> str | None:
        """Kill one of what there is now: which, or None where there is none."""
        if target == "driver":
            if self.run is None:
                return None
            self.driver.kill()
            self.driver.wait()
            self.resume()
            return str(self.driver.pid)
        if target == "node":
            busy = self.nodes.busy()
            if not busy:
                return None
            node = self.draw.choice(busy)
            self.nodes.kill(node)
            self.nodes.add()
            return str(node.node_ip_address)
        there = [process for node in self.nodes.nodes for process in self.nodes.workers(node)]
        return one_of(self.nodes.recorders() if target == "recorder" else there, self.draw)

    def __enter__(self) -> Disturbed:
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.kill()
        self.driver.wait()

    def finish(self) -> dict[str, Any]:
        """Until it ends: what it came to."""
        until = time.monotonic() + 2 * PATIENCE_S
        while not self.over():
            assert time.monotonic() < until, f"it does not end\n{self.log()}"
            time.sleep(0.2)
        assert self.run is not None
        return outcome(self.run, self.uri)

    def own_kills(self) -> list[str]:
        """What `--chaos` said that it killed."""
        logs = [path.read_text() for path in sorted(self.folder.glob("driver-*.log"))] if self.rates else []
        return re.findall(r"^chaos: (.*) is killed$", "\n".join(logs), re.MULTILINE)

    def told(self, other: list[str]) -> str:
        """The run in a line."""
        attempts = self.attempts()
        return (
            f"{len(self.killed)} kills, {attempts[-1]['attempt']} attempts, {self.drivers} drivers, "
            f"{sum(attempt['repeated'] for attempt in attempts)} steps repeated, {self.seconds:.0f} s: "
            f"{'OTHER ' + ', '.join(other) if other else 'the same'}"
        )

    def log(self) -> str:
        return (self.folder / f"driver-{self.drivers}.log").read_text()[-3000:]


def one_of(processes: list[psutil.Process], draw: random.Random) -> str | None:
    """Kill one of them: which, or None where there is none any more."""
    if not processes:
        return None
    process = draw.choice(processes)
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return None
    return str(process.pid)


def alone(folder: Path, words: list[str]) -> dict[str, Any]:
    """The same run in one process, left alone."""
    uri = f"sqlite:///{folder}/mlflow.db"
    folder.mkdir(parents=True)
    subprocess.run(
        [sys.executable, "-m", "lockstep", "train", *words, f"checkpoint.storage={folder}/runs", "--local", "--uri", uri],
        cwd=ROOT, env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(ROOT / "platform"), str(ROOT)])},
        check=True, capture_output=True,
    )  # fmt: skip
    (spec,) = folder.glob("runs/*/spec.yaml")
    return outcome(spec.parent, uri)


def outcome(run: Path, uri: str) -> dict[str, Any]:
    """All that has to be the same: digest, deterministic columns, evaluations, and MLflow's history of each metric, in which each step is once."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    found = client.get_run(run.name)
    keys = [key for key in found.data.metrics if not key.startswith(("perf/", "system/"))]
    histories = {
        key: [(metric.step, repr(metric.value)) for metric in client.get_metric_history(run.name, key)]
        for key in sorted(keys)
    }
    for key, history in histories.items():
        steps = [step for step, _ in history]
        assert len(steps) == len(set(steps)), f"{key} has a step twice"
    return {
        "status": found.info.status,
        "weights_digest": found.data.tags["lockstep.weights_digest"],
        "violation": found.data.tags.get("lockstep.violation", ""),
        "columns": [
            [repr(getattr(row, name)) for name in DETERMINISTIC]
            for row in read_parquet(run / "ledger.parquet")
        ],
        "evaluations": [
            (row.step, repr(row.metrics)) for row in read_evaluations(run / "evaluations.parquet")
        ],
        "histories": histories,
    }


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What is not the same."""
    return [name for name in one if one[name] != other[name]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs",
        default="digits=9,digits=8,digits=8,stdlib_gpt=9,stdlib_gpt=8,stdlib_gpt=8,forgetful=worker",
        help="jobs, each with how many kills, or with which: digits=worker+node, or with the rates of --chaos: digits=worker:0.02+driver:0.01",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=3)
    given = parser.parse_args()
    kills, wrong = 0, []
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as name, started(given.nodes) as nodes:
        references: dict[str, dict[str, Any]] = {}
        for number, entry in enumerate(given.runs.split(",")):
            job, wanted = entry.split("=")
            if job not in references:
                references[job] = alone(Path(name, f"{job}-alone"), RUNS[job])
            run, found = disturbed(
                nodes, Path(name, f"{number}-{job}"), job, wanted, given.seed * 1000 + number
            )
            kills += len(run.killed)
            other = differences(found, references[job])
            told = run.told(other)
            if bool(other) != (job == CONTROL):
                wrong.append(number)
            print(f"run {number} {job}: {told}", flush=True)
    print(f"{kills} kills; runs that did not end as they must: {wrong or 'none'}")
    raise SystemExit(bool(wrong))


def disturbed(
    nodes: Nodes, folder: Path, job: str, wanted: str, seed: int
) -> tuple[Disturbed, dict[str, Any]]:
    """A run that was killed as `wanted` and has ended, and what it came to."""
    folder.mkdir()
    began = time.monotonic()
    rates = wanted.replace("+", ",") if ":" in wanted else None
    with Disturbed(nodes, folder, RUNS[job], seed, rates) as run:
        for kill in plan(seed, wanted):
            if run.disturb(kill):
                print(f"  {time.monotonic() - began:6.1f} s {run.killed[-1]}", flush=True)
        found = run.finish()
        run.killed += run.own_kills()
    run.seconds = time.monotonic() - began
    return run, found


if __name__ == "__main__":
    main()
