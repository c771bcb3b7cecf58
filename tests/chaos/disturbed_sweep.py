"""Sweeps that are disturbed again and again, held against the same sweeps left alone.

    python -m tests.chaos.disturbed_sweep --runs random=12,optuna=12 --seed 1

Each is `lockstep sweep` on several Ray nodes, into one SQLite store. At random moments, which follow from the seed, something happens to it:

* SIGKILL to a worker of a trial, to the raylet of a node with trials (another node joins), to the process of the recorders, which ends the
  sweep with one line, or to the driver; then `lockstep resume`;
* a worker or the recorders are stopped for a while, and go on (`pause`, `recorder-pause`);
* the connections between two workers of a trial are cut (`link`; where trials have one worker, one is killed);
* the file system of checkpoints, decisions and record is full for some seconds (`full`);
* a second command is given on the sweep, which has to end with exit code 2 (`second`);
* a worker's call fails as `exposed.ERRORS` names.

At the end each trial is what it is in the sweep left alone, and no run of the store is RUNNING.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.chaos.cluster import ENVIRONMENT, Nodes, started
from tests.chaos.exposed import ERRORS
from tests.chaos.ways import PATIENCE_S, cut_link, fill, one_of, plant, refused_second, shared_out, small_disk

ROOT = Path(__file__).parents[2]

WEIGHTS = {
    "worker": 4, "node": 3, "recorder": 2, "driver": 3, "pause": 2, "recorder-pause": 2, "link": 2, "full": 2, "second": 2,
    **dict.fromkeys(ERRORS, 1),
}  # fmt: skip
"""How often each happens, beside the others. A flipped bit shows only where several workers are compared: tests.chaos.disturbed has it."""

REFUSALS = "|".join(
    [
        r"the process of the sweep's recorders was lost: .*; (?:lockstep resume goes on with the sweep|no trial has begun since: give the command again)",
        r"workers\.min: got .*, but the cluster has",  # a driver that was started before another node had joined
        re.escape(os.strerror(errno.ENOSPC)),
    ]
)
"""What a driver may say that ends by itself, before the sweep is resumed: docs/failures.md lists it."""

RUNS: dict[str, dict[str, Any]] = {
    "random": {"trials": 8, "concurrency": 2},
    # One at a time, of two workers each: what is suggested and decided next follows from what was before.
    "optuna": {
        "trials": 6, "concurrency": 1, "search": "optuna", "spec": {"workers": {"min": 2}},
        "scheduler": {"name": "asha", "grace_steps": 5, "reduction_factor": 2},
    },
}  # fmt: skip


def document(folder: Path, name: str, pause_s: float) -> dict[str, Any]:
    """The sweep's file; the pause makes its steps slow enough to be hit, and changes no bit."""
    changes = dict(RUNS[name])
    spec = {
        "job": {
            "use": "tests.chaos.exposed:ExposedDigits",
            "params": {"width": 4, "pause_s": pause_s, "faults": f"{folder}/faults"},
        },
        "length": {"epochs": 4},
        "batch": {"global": 256, "micro": 64},
        "checkpoint": {"storage": f"{folder}/runs", "every": {"steps": 4}},
        "faults": {"max_worker_failures": 100},
        "record": {"uri": f"sqlite:///{folder}/mlflow.db"},
        **changes.pop("spec", {}),
    }
    space = {"optimizer.lr": {"loguniform": [1e-4, 3e-2]}}
    return {"spec": spec, "space": space, "seed": 5, "metric": "eval/loss", "mode": "min", **changes}


class Sweep:
    """One sweep on `nodes`, in `folder`, which exists."""

    def __init__(self, nodes: Nodes, folder: Path, given: dict[str, Any], seed: int = 0) -> None:
        self.nodes, self.folder, self.draw = nodes, folder, random.Random(seed)
        self.drivers = 0
        self.happened: Counter[str] = Counter()
        self.faults = folder / "faults"
        self.faults.mkdir()
        (folder / "sweep.yaml").write_text(yaml.safe_dump(given))
        self.uri = given["spec"]["record"]["uri"]
        self.driver = self._start("sweep", str(folder / "sweep.yaml"))

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        self.drivers += 1
        return self._command(self._log("out"), self._log("log"), *words)

    def _command(self, out: Path, log: Path, *words: str) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "lockstep",
            *words,
            "--address",
            self.nodes.address,
            "--uri",
            self.uri,
        ]
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": f"{ROOT / 'platform'}:{ROOT}"}
        with out.open("wb") as told, log.open("wb") as said:
            return subprocess.Popen([*command, "--json"], cwd=ROOT, env=environment, stdout=told, stderr=said)

    def _log(self, kind: str) -> Path:
        return self.folder / f"driver-{self.drivers}.{kind}"

    def said(self) -> str:
        """The end of what the driver has said."""
        return self._log("log").read_text()[-3000:]

    def over(self) -> bool:
        """Whether the driver has ended, and well. One that was killed is resumed, and one that said that the sweep goes on so."""
        code = self.driver.poll()
        if code is None:
            return False
        if code:
            refused = re.search(rf"^lockstep: .*(?:{REFUSALS})", self.said(), re.MULTILINE)
            assert code == -9 or (code in {1, 2} and refused), self.said()
            assert self.resume(), f"there is nothing to resume\n{self.said()}"
        return code == 0

    @property
    def begun(self) -> str | None:
        """The sweep's id, once it can be resumed."""
        found = list(self.folder.glob("runs/*/decisions.jsonl"))
        return found[0].parent.name if found else None

    def _resumption(self, sweep_id: str) -> tuple[str, ...]:
        return "resume", sweep_id, f"record.folder={self.folder}/runs"

    def resume(self) -> bool:
        """Resume the sweep; False where there is nothing to resume yet."""
        if self.begun is None:
            return False
        self.driver.wait()
        self.driver = self._start(*self._resumption(self.begun))
        return True

    def trial_workers(self) -> list[psutil.Process]:
        """The processes that train: of each trial the one that Tune knows, and its peers."""
        return [process for node in self.nodes.nodes for process in self._workers(node)]

    def _workers(self, node: Any) -> list[psutil.Process]:
        return self.nodes.named(node, "ResourceTrainable") + self.nodes.named(node, "Peer")

    def carry_out(self, kind: str) -> str | None:
        """Have it happen to one of what there is now: which, or None where there is none."""
        recorders = self.nodes.named(self.nodes.cluster.head_node, "RecordersActor")
        match kind:
            case "worker":
                return one_of(self.trial_workers(), self.draw, psutil.Process.kill)
            case "recorder":
                return one_of(recorders, self.draw, psutil.Process.kill) if self.begun else None
            case "pause":
                return one_of(self.trial_workers(), self.draw, self._pause)
            case "recorder-pause":
                return one_of(recorders, self.draw, self._pause)
            case "link":
                workers = self.trial_workers()
                return cut_link(workers, self.draw) or one_of(workers, self.draw, psutil.Process.kill)
            case "node":
                return self._lose_node()
            case "driver":
                return self._lose_driver()
            case "second":
                return self._second()
            case "full":
                fill(self.folder / "runs", self.draw.uniform(1.0, 4.0))
                return "ENOSPC"
            case _ if kind in ERRORS:
                return self._plant(kind)
        raise ValueError(f"{kind!r} is nothing that can happen; wanted one of {', '.join(WEIGHTS)}")

    def _pause(self, process: psutil.Process) -> None:
        process.suspend()
        try:
            time.sleep(self.draw.uniform(1.0, 8.0))
        finally:
            if process.is_running():  # it may have been replaced meanwhile
                process.resume()

    def _lose_node(self) -> str | None:
        busy = [node for node in self.nodes.nodes if self._workers(node)]
        if not busy:
            return None
        node = self.draw.choice(busy)
        self.nodes.kill(node)
        self.nodes.add()
        return str(node.node_ip_address)

    def _lose_driver(self) -> str | None:
        if self.begun is None:
            return None
        self.driver.kill()
        return str(self.driver.pid) if self.resume() else None

    def _second(self) -> str | None:
        """Give the command that would take the sweep up: it has to leave a sweep alone that is alive."""
        sweep_id = self.begun
        if sweep_id is None:
            return None
        began, log = time.monotonic(), self.folder / "second.log"
        second = self._command(self.folder / "second.out", log, *self._resumption(sweep_id))
        return refused_second(second, self.driver, log, began)

    def _plant(self, kind: str) -> str | None:
        return plant(self.faults / kind, self.over, self.said)

    def told(self) -> dict[str, Any]:
        """What the sweep came to, once it is over."""
        until = time.monotonic() + 2 * PATIENCE_S
        while not self.over():
            assert time.monotonic() < until, f"it does not end\n{self.said()}"
            time.sleep(0.2)
        result: dict[str, Any] = json.loads(self._log("out").read_text().splitlines()[-1])
        return result

    def __enter__(self) -> Sweep:
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.kill()
        self.driver.wait()


def plan(seed: int, wanted: str) -> list[tuple[str, float]]:
    """What happens in one sweep, and so many seconds after the last: so much, of any kind, or that of `worker+node`."""
    draw = random.Random(seed)
    kinds = (
        draw.choices(list(WEIGHTS), list(WEIGHTS.values()), k=int(wanted))
        if wanted.isdigit()
        else wanted.split("+")
    )
    return [(kind, draw.uniform(0.0, 6.0)) for kind in kinds]


def disturb(sweep: Sweep, coming: list[tuple[str, float]]) -> None:
    """Have all of it happen, or as much as the sweep lasts for."""
    began = time.monotonic()
    for kind, pause_s in coming:
        until = time.monotonic() + PATIENCE_S
        while not sweep.trial_workers() and not sweep.over():
            assert time.monotonic() < until, f"no trial is trained\n{sweep.said()}"
            time.sleep(0.1)
        time.sleep(pause_s)
        while not sweep.over():
            what = sweep.carry_out(kind)
            if what is not None:
                sweep.happened[kind] += 1
                print(f"  {time.monotonic() - began:6.1f} s {kind} ({what})", flush=True)
                break
            assert time.monotonic() < until, f"{kind} cannot happen\n{sweep.said()}"
            time.sleep(0.1)


def outcome(result: dict[str, Any], uri: str) -> dict[str, Any]:
    """What must not depend on anything but the sweep; and how the runs of the store stand."""
    from mlflow import MlflowClient

    keys = ("trial", "fields", "step", "metric", "curve", "weights_digest", "status")
    client = MlflowClient(uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments, max_results=1000)
    return {
        "status": result["status"],
        "best": result["best"]["trial"],
        "trials": sorted([[t[key] for key in keys] for t in result["trials"]], key=lambda trial: trial[0]),
        "finished": sum(run.info.status == "FINISHED" for run in runs),
        "running": sum(run.info.status == "RUNNING" for run in runs),
        "given up": len(runs) - 1 - len(result["trials"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs",
        default="random=15,optuna=15",
        help="sweeps, each with how much happens, or with what: random=worker+node",
    )
    parser.add_argument(
        "--faults", type=int, help="so much in all, in sweeps of both kinds; in place of --runs"
    )
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    runs = given.runs if given.faults is None else shared_out(given.faults, tuple(RUNS))
    wrong, total = [], Counter[str]()
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as place, started(2) as nodes:
        expected: dict[str, dict[str, Any]] = {}
        for number, entry in enumerate(runs.split(",")):
            name, wanted = entry.split("=")
            if name not in expected:
                expected[name] = alone(nodes, Path(place, f"{name}-alone"), name)
            began = time.monotonic()
            sweep, found = disturbed(
                nodes, Path(place, f"{number}-{name}"), name, wanted, given.seed * 1000 + number
            )
            other = [key for key in expected[name] if found[key] != expected[name][key]]
            total += sweep.happened
            if other:
                wrong.append(number)
            print(
                f"sweep {number} {name}: {sweep.happened.total()} disturbances, {sweep.drivers} drivers, "
                f"{time.monotonic() - began:.0f} s: {'OTHER ' + ', '.join(other) if other else 'the same'}",
                flush=True,
            )
            for key in other:
                print(f"  {key}: expected {expected[name][key]}\n  {key}: found    {found[key]}", flush=True)
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(total.items()))
    print(f"{total.total()} disturbances ({kinds}); sweeps that did not end as they must: {wrong or 'none'}")
    raise SystemExit(bool(wrong))


def alone(nodes: Nodes, folder: Path, name: str) -> dict[str, Any]:
    """The sweep of this name, left alone."""
    folder.mkdir()
    with Sweep(nodes, folder, document(folder, name, 0.0)) as sweep:
        found = outcome(sweep.told(), sweep.uri)
    assert found["running"] == found["given up"] == 0
    return found


def disturbed(nodes: Nodes, folder: Path, name: str, wanted: str, seed: int) -> tuple[Sweep, dict[str, Any]]:
    """A sweep to which happened what is `wanted`, and which has ended, and what it came to."""
    folder.mkdir()
    coming = plan(seed, wanted)
    with ExitStack() as stack:
        if any(kind == "full" for kind, _ in coming):
            stack.enter_context(small_disk(folder / "runs"))
        sweep = stack.enter_context(Sweep(nodes, folder, document(folder, name, 0.15), seed))
        disturb(sweep, coming)
        found = outcome(sweep.told(), sweep.uri)
    # A driver or its recorders may die between the creation of a run and the moment when the sweep knows of it.
    found["given up"] = max(0, found["given up"] - (sweep.drivers - 1))
    return sweep, found


if __name__ == "__main__":
    main()
