"""Time from the command to the first step: `lockstep train` beside a bare Ray Train script, in turn.

Each starts a Ray cluster of its own, with two workers; the record goes to a fresh SQLite file. With `--warm`: both on a cluster that `lockstep
cluster up` has started and that has run each of them before, and into the file of the run before. With `--rehearsal`: what each extent of the rehearsal adds to that time, in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lockstep.clusters.authentication import LOOPBACK_ONLY

ROOT = Path(__file__).parents[2]


def bare_ray(**environment: str) -> float:
    """Seconds to the first step of the bare script."""
    script = str(ROOT / "tests/benchmarks/bare_ray.py")
    out = run([sys.executable, script, repr(time.time())], environment)
    return float(out.splitlines()[-1])


def lockstep(**environment: str) -> float:
    """Seconds to the first step of the same job in Lockstep."""
    address = environment.get("RAY_ADDRESS", "local")
    with tempfile.TemporaryDirectory() as folder:
        overrides = ["length.steps=2", "workers.min=2", f"checkpoint.storage={folder}/runs"]
        command = [sys.executable, "-m", "lockstep", "train", "jobs/digits/train.yaml", "--json"]
        uri = f"sqlite:///{environment.get('XDG_STATE_HOME', folder)}/mlflow.db"  # a second run finds tables
        out = run([*command, "--address", address, "--uri", uri, *overrides], environment)
    return float(json.loads(out)["first_step_s"])


@contextmanager
def warm_cluster() -> Iterator[dict[str, str]]:
    """The environment of commands that use a cluster which `lockstep cluster up` starts, with two CPUs."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {"XDG_STATE_HOME": folder}
        cluster = [sys.executable, "-m", "lockstep", "cluster"]
        words = ["--nodes", "1", "--cpus", "2", "--port", "0", "--json"]
        found = json.loads(run([*cluster, "up", *words], environment))
        try:
            yield {**environment, **found["environment"], **LOOPBACK_ONLY, "RAY_ADDRESS": found["address"]}
        finally:
            run([*cluster, "down"], environment)


def compared(pairs: int, environment: Mapping[str, str]) -> None:
    """The two commands in turn: the time to the first step, that of the whole command, and their ratios."""
    rows = []
    for pair in range(pairs):
        order = (bare_ray, lockstep) if pair % 2 == 0 else (lockstep, bare_ray)
        seconds = {}
        for which in order:
            began = time.time()
            first = which(**environment)
            seconds[which.__name__] = (first, time.time() - began)
        rows.append(seconds)
        told = (f"{name} {first:.1f} s, whole {whole:.1f} s" for name, (first, whole) in seconds.items())
        print(f"pair {pair + 1}: {'; '.join(told)}", flush=True)
    for i, what in enumerate(("command to first step", "whole command")):
        ratios = sorted(row["lockstep"][i] / row["bare_ray"][i] for row in rows)
        print(
            f"{what}, Lockstep / bare Ray Train: median {statistics.median(ratios):.2f} ({ratios[0]:.2f} … {ratios[-1]:.2f}, {pairs} pairs)"
        )


def rehearsed(job: str, extent: str) -> float:
    """Seconds to the first step of one of the jobs here in one process, with so much of a rehearsal."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            "length.epochs=null",
            "length.steps=1",
            f"checkpoint.storage={folder}",
            f"rehearsal={extent}",
        ]
        command = [sys.executable, "-m", "lockstep", "train", f"jobs/{job}/train.yaml", "--local", "--json"]
        out = run([*command, "--uri", "off", *overrides])
    return float(json.loads(out)["first_step_s"])


def rehearsals(pairs: int) -> None:
    """The median of each extent, the three in turn."""
    for job in ("digits", "stdlib_gpt"):
        rows = [{extent: rehearsed(job, extent) for extent in ("off", "quick", "full")} for _ in range(pairs)]
        medians = {extent: statistics.median(row[extent] for row in rows) for extent in rows[0]}
        told = ", ".join(f"{extent} {seconds:.2f} s" for extent, seconds in medians.items())
        print(f"{job}: command to first step, rehearsal {told} (medians of {pairs})", flush=True)


def run(command: list[str], more: Mapping[str, str] | None = None) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "platform"), **(more or {})}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--rehearsal", action="store_true")
    given = parser.parse_args()
    pairs = given.pairs
    if given.rehearsal:
        rehearsals(pairs)
        return
    if given.warm:
        with warm_cluster() as environment:
            for which in (bare_ray, lockstep):
                which(**environment)
            compared(pairs, environment)
        return
    compared(pairs, {})


if __name__ == "__main__":
    main()
