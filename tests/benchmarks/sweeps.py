"""The digits sweep from its command to its end: `lockstep sweep` beside a bare Tune loop over the same trials, in turn.

Both start a Ray cluster of two CPUs and train the same 12 specs, two at a time, one worker each. Lockstep records all of
it in a fresh SQLite store and saves checkpoints; the bare loop records nothing.

    python -m tests.benchmarks.sweeps [--pairs N] [--trials N]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from lockstep.spec.sweep import SweepSpec, load_sweep
from lockstep.training.worker_environment import WORKER_ENVIRONMENT

ROOT = Path(__file__).parents[2]


def run(command: list[str]) -> tuple[float, str]:
    """Seconds of a command, and what it printed."""
    environment = {**os.environ, **WORKER_ENVIRONMENT, "PYTHONPATH": f"{ROOT / 'platform'}:{ROOT}"}
    began = time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return time.perf_counter() - began, done.stdout


def bare_tune(sweep: SweepSpec) -> tuple[float, float]:
    """Seconds of the bare loop, and the best accuracy that it found."""
    with tempfile.TemporaryDirectory() as folder:
        specs = Path(folder, "specs.json")
        specs.write_text(json.dumps([sweep.trial(sweep.sample(i)).document() for i in range(sweep.total)]))
        seconds, out = run([sys.executable, str(ROOT / "tests/benchmarks/bare_tune.py"), str(specs)])
    return seconds, float(out.split()[-1])


def lockstep(sweep: SweepSpec) -> tuple[float, float]:
    """The same of Lockstep."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--json", "--address", "local", "--uri", f"sqlite:///{folder}/mlflow.db"]
        overrides = [f"trials={sweep.total}", f"spec.checkpoint.storage={folder}/runs"]
        seconds, out = run(
            [sys.executable, "-m", "lockstep", "sweep", "jobs/digits/sweep.yaml", *options, *overrides]
        )
    return seconds, json.loads(out)["best"]["metric"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--trials", type=int, default=12)
    arguments = parser.parse_args()
    sweep = load_sweep(ROOT / "jobs/digits/sweep.yaml", [f"trials={arguments.trials}"], uri="off")
    ratios = []
    for pair in range(arguments.pairs):
        order = (bare_tune, lockstep) if pair % 2 == 0 else (lockstep, bare_tune)
        found = {which.__name__: which(sweep) for which in order}
        (bare, best), (own, own_best) = found["bare_tune"], found["lockstep"]
        if own_best != best:
            raise SystemExit(
                f"the best accuracy is {own_best} here and {best} there: they did not train the same"
            )
        ratios.append(own / bare)
        print(f"pair {pair + 1}: bare Tune {bare:.0f} s, lockstep sweep {own:.0f} s", flush=True)
    low, high = min(ratios), max(ratios)
    print(
        f"sweep, Lockstep / bare Tune: median {median(ratios):.2f} ({low:.2f} … {high:.2f}, {len(ratios)} pairs)"
    )


if __name__ == "__main__":
    main()
