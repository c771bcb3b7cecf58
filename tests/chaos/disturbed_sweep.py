"""Sweeps whose trials' workers and drivers are killed again and again, held against the same sweeps left alone.

    python -m tests.chaos.disturbed_sweep --runs random=15,optuna=15 --seed 1

Each is `lockstep sweep` on several Ray nodes, into one SQLite store. At random moments, which follow from the seed, a
worker of a trial gets SIGKILL, or the driver (then `lockstep resume`). At the end each trial is what it is in the sweep
left alone, and no run of the store is RUNNING.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.chaos.cluster import ENVIRONMENT, Nodes, started

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300.0
"""How long there may be no trial to kill, and nothing to resume."""

WEIGHTS = {"worker": 3, "driver": 1}
"""How often each is killed, beside the other."""

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
        "job": {"use": "tests.cluster.broken_jobs:SlowDigits", "params": {"width": 4, "pause_s": pause_s}},
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
    """One sweep on `nodes`, in `folder`."""

    def __init__(self, nodes: Nodes, folder: Path, given: dict[str, Any]) -> None:
        folder.mkdir()
        self.nodes, self.folder = nodes, folder
        self.drivers = 0
        (folder / "sweep.yaml").write_text(yaml.safe_dump(given))
        self.uri = given["spec"]["record"]["uri"]
        self.driver = self._start("sweep", str(folder / "sweep.yaml"))

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        self.drivers += 1
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
        with self._log("out").open("wb") as out, self._log("log").open("wb") as log:
            return subprocess.Popen([*command, "--json"], cwd=ROOT, env=environment, stdout=out, stderr=log)

    def _log(self, kind: str) -> Path:
        return self.folder / f"driver-{self.drivers}.{kind}"

    def over(self) -> bool:
        """Whether the driver has ended, which it does well or not at all."""
        code = self.driver.poll()
        assert code in {None, 0}, self._log("log").read_text()[-3000:]
        return code is not None

    def trial_workers(self) -> list[psutil.Process]:
        """The processes that train: of each trial the one that Tune knows, and its peers."""
        return [process for node in self.nodes.nodes for name in ("ResourceTrainable", "Peer") for process in self.nodes.named(node, name)]  # fmt: skip

    def kill_worker(self, draw: random.Random) -> bool:
        """Kill one of them; False where there is none."""
        alive = self.trial_workers()
        if alive:
            try:
                draw.choice(alive).kill()
            except psutil.NoSuchProcess:
                return False
        return bool(alive)

    def kill_driver(self, draw: random.Random) -> bool:
        """Kill it and resume the sweep; False where there is nothing to resume yet."""
        begun = list(self.folder.glob("runs/*/decisions.jsonl"))
        if begun:
            self.driver.kill()
            self.driver.wait()
            where = f"record.folder={self.folder}/runs"
            self.driver = self._start("resume", begun[0].parent.name, where)
        return bool(begun)

    def told(self) -> dict[str, Any]:
        """What the sweep came to, once it is over."""
        until = time.monotonic() + 2 * PATIENCE_S
        while not self.over():
            assert time.monotonic() < until, f"it does not end\n{self._log('log').read_text()[-3000:]}"
            time.sleep(0.2)
        result: dict[str, Any] = json.loads(self._log("out").read_text().splitlines()[-1])
        return result

    def __enter__(self) -> Sweep:
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.kill()
        self.driver.wait()


def disturb(sweep: Sweep, kills: int, seed: int) -> dict[str, int]:
    """Carry out so many kills, or as many as the sweep lasts for."""
    draw = random.Random(seed)
    done = dict.fromkeys(WEIGHTS, 0)
    targets = draw.choices(list(WEIGHTS), list(WEIGHTS.values()), k=kills)
    ways: dict[str, Callable[[random.Random], bool]] = {
        "worker": sweep.kill_worker,
        "driver": sweep.kill_driver,
    }
    for target in targets:
        pause, until = draw.uniform(0.0, 6.0), time.monotonic() + PATIENCE_S
        while not sweep.trial_workers() and not sweep.over():
            assert time.monotonic() < until, "no trial is trained"
            time.sleep(0.1)
        time.sleep(pause)
        while not sweep.over():
            if ways[target](draw):
                done[target] += 1
                break
            assert time.monotonic() < until, f"there is no {target}"
            time.sleep(0.1)
    return done


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
    parser.add_argument("--runs", default="random=15,optuna=15", help="sweeps, each with how many kills")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    wrong, total = [], 0
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as place, started(2) as nodes:
        for number, entry in enumerate(given.runs.split(",")):
            name, kills = entry.split("=")
            alone, folder = Path(place, f"{number}-alone"), Path(place, f"{number}-{name}")
            with Sweep(nodes, alone, document(alone, name, 0.0)) as sweep:
                expected = outcome(sweep.told(), sweep.uri)
            began = time.monotonic()
            with Sweep(nodes, folder, document(folder, name, 0.15)) as sweep:
                done = disturb(sweep, int(kills), given.seed * 1000 + number)
                found = outcome(sweep.told(), sweep.uri)
            assert expected["running"] == expected["given up"] == 0
            # A driver may die between the creation of a run and the moment when the sweep knows of it.
            found["given up"] = max(0, found["given up"] - done["driver"])
            other = [key for key in expected if found[key] != expected[key]]
            total += sum(done.values())
            if other:
                wrong.append(number)
            print(
                f"sweep {number} {name}: {done['worker']} workers and {done['driver']} drivers killed, {sweep.drivers} drivers, "
                f"{time.monotonic() - began:.0f} s: {'OTHER ' + ', '.join(other) if other else 'the same'}",
                flush=True,
            )
            for key in other:
                print(f"  {key}: expected {expected[key]}\n  {key}: found    {found[key]}", flush=True)
    print(f"{total} kills; sweeps that did not end as they must: {wrong or 'none'}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
