"""Time from the command to the first step: `lockstep train` beside a bare Ray Train script, in turn.

Each starts a Ray cluster of its own, with two workers; the record goes to a fresh SQLite file. With `--rehearsal`: what each
extent of the rehearsal adds to that time, in one process.
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
from pathlib import Path

ROOT = Path(__file__).parents[2]


def bare_ray() -> float:
    """Seconds to the first step of the bare script."""
    out = run([sys.executable, str(ROOT / "tests/benchmarks/bare_ray.py"), repr(time.time())])
    return float(out.splitlines()[-1])


def lockstep() -> float:
    """Seconds to the first step of the same job in Lockstep."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = ["length.steps=2", "workers.min=2", f"checkpoint.storage={folder}/runs"]
        command = [sys.executable, "-m", "lockstep", "train", "jobs/digits/train.yaml", "--json"]
        out = run([*command, "--address", "local", "--uri", f"sqlite:///{folder}/mlflow.db", *overrides])
    return float(json.loads(out)["first_step_s"])


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


def run(command: list[str]) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "platform")}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rehearsal", action="store_true")
    given = parser.parse_args()
    pairs = given.pairs
    if given.rehearsal:
        rehearsals(pairs)
        return
    rows = []
    for pair in range(pairs):
        order = (bare_ray, lockstep) if pair % 2 == 0 else (lockstep, bare_ray)
        seconds = {which.__name__: which() for which in order}
        rows.append(seconds)
        print(
            f"pair {pair + 1}: bare Ray Train {seconds['bare_ray']:.1f} s, Lockstep {seconds['lockstep']:.1f} s",
            flush=True,
        )
    ratios = sorted(row["lockstep"] / row["bare_ray"] for row in rows)
    print(
        f"command to first step, Lockstep / bare Ray Train: median {statistics.median(ratios):.2f} "
        f"({ratios[0]:.2f} … {ratios[-1]:.2f}, {pairs} pairs)"
    )


if __name__ == "__main__":
    main()
