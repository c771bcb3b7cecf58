"""The commands that people type, whole: `lockstep train`, on Ray and with its record, beside five peers, in turn.

    python -m tests.benchmarks.commands [--cases tiny,gpt,rows] [--workers 1,2,4] [--rounds 3] [--steps N] [--json FILE]

Cases: `tiny`, a small MLP; `gpt`, a language model of 0.9 M parameters on ragged texts; `rows`, 2 M rows of 64 numbers in Parquet files.
Peers: hand-written DDP under torchrun, Accelerate, Lightning and a bare Ray Train script, which
train the same model on batches of the same size: `programs.py`. They save, evaluate and record nothing; Lockstep does all that it does by default,
into SQLite. Of `rows` there is one more, a DDP loop that gathers rows from tensors in memory, without a loader. `limit` is no peer but the least that a step can take
(`limit.py`). The first peer runs twice: how far the
second time is from the first is the noise. A step is the mean time from the end of one to the end of the next, without the first tenth of them; evaluations, which no
peer has, are left out of it, and counted in the next column. Peers that are not installed (`pip install lockstep-train[peers]`) are named and left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml

from jobs.tabular.sample import write_sample
from lockstep.record.ledger.live_rows import RowsSoFar
from tests.benchmarks.programs import CLIP_NORM, LR, SEED, TABLE, cases
from tests.benchmarks.tables import FEATURES

ROOT = Path(__file__).parents[2]
ROWS = 2_000_000


class Run(NamedTuple):
    """What one command took."""

    step_ms: float
    evaluated_ms: float
    """A step with its share of the evaluations between steps."""
    first_step_s: float
    """From the command to the end of the first step."""
    whole_s: float
    peak_mb: float
    """The most memory that rank 0 held."""


def lockstep(folder: Path, case: str, steps: int, workers: int) -> Run:
    """`lockstep train` on a local Ray cluster of its own."""
    chosen = cases()[case]
    spec = {
        "job": {"use": chosen.use, "params": chosen.params}, "seed": SEED, "length": {"steps": steps}, "threads": 1,
        "batch": {"global": chosen.batch, "micro": chosen.batch // workers}, "data": {"drop_last": True},
        "optimizer": {"name": "adamw", "lr": LR}, "clip_norm": CLIP_NORM,
        "workers": {"min": workers, "max": workers, "cpus_each": min(1.0, 2 / workers)}, "checkpoint": {"storage": f"{folder}/runs"},
    }  # fmt: skip
    (folder / "train.yaml").write_text(yaml.safe_dump(spec))
    words = [
        "-m", "lockstep", "train", str(folder / "train.yaml"), "--address", "local", "--uri", f"sqlite:///{folder}/mlflow.db", "--json",
    ]  # fmt: skip
    began, ended = run([sys.executable, *words], folder)
    (run_folder,) = {path.parent for path in folder.glob("runs/*/spec.yaml")}
    peaks = json.loads((run_folder / "memory.json").read_text())["peak_bytes_by_rank"]
    rows = RowsSoFar(run_folder)
    evaluated = [(row.wall_clock, row.seconds) for row in rows.evaluations]
    return told([row.wall_clock for row in rows.steps()], peaks[0], began, ended, evaluated)


def peer(name: str) -> Callable[[Path, str, int, int], Run]:
    """One of `programs.py`, as it is started by hand."""

    def call(folder: Path, case: str, steps: int, workers: int) -> Run:
        out = folder / "out.json"
        program = ["-m", "tests.benchmarks.programs", name, case, str(steps), str(out)]
        several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers), *program]
        if name in {"lightning", "ray"}:
            words = [*program, str(workers)]
        else:  # `accelerate launch --cpu` starts one process, whatever it is told
            words = several if workers > 1 else program
        began, ended = run([sys.executable, *words], folder)
        found = json.loads(out.read_text())
        if found["ranks"] != workers:
            raise SystemExit(f"{name} trained on {found['ranks']} ranks, wanted {workers}")
        return told(found["times"], found["peak_bytes"], began, ended)

    return call


def told(
    ends: list[float],
    peak_bytes: int,
    began: float,
    ended: float,
    evaluated: Sequence[tuple[float, float]] = (),
) -> Run:
    """`evaluated`: when each evaluation ended, and how many seconds it took."""
    warm = len(ends) // 10
    steps, all_s = len(ends) - 1 - warm, ends[-1] - ends[warm]
    evaluations_s = sum(seconds for end, seconds in evaluated if ends[warm] < end < ends[-1])
    step_ms, evaluated_ms = 1e3 * (all_s - evaluations_s) / steps, 1e3 * all_s / steps
    return Run(step_ms, evaluated_ms, ends[0] - began, ended - began, peak_bytes / 1e6)


def run(command: list[str], folder: Path) -> tuple[float, float]:
    """When the command began, and when it ended."""
    path = os.pathsep.join([str(ROOT / "platform"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONHASHSEED", None)  # a person's shell has none
    began = time.time()
    with (folder / "log").open("w") as log:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=900, check=False
        )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{(folder / 'log').read_text()[-4000:]}"
        )
    return began, time.time()


def contestants(against: str) -> dict[str, Callable[[Path, str, int, int], Run]]:
    """Those of a case whose steps are measured against that peer's, which comes first, and again at the end."""
    found: dict[str, Callable[[Path, str, int, int], Run]] = {
        against: peer(against),
        "lockstep": lockstep,
        "limit": peer("limit"),
        "ddp": peer("ddp"),
        "ray": peer("ray"),
    }
    for name in ("accelerate", "lightning"):
        if importlib.util.find_spec(name) is None:
            print(f"{name} is not installed, and left out: pip install lockstep-train[peers]")
        else:
            found[name] = peer(name)
    return {**found, f"{against} again": peer(against)}


def measure(case: str, workers: int, rounds: int, steps: int) -> dict[str, list[Run]]:
    """The runs of each contestant, a round after the other; each round begins with another one."""
    every = contestants(cases()[case].against)
    found: dict[str, list[Run]] = {name: [] for name in every}
    for number in range(rounds):
        names = [*every][number % len(every) :] + [*every][: number % len(every)]
        for name in names:
            with tempfile.TemporaryDirectory(prefix="lockstep-", ignore_cleanup_errors=True) as folder:
                found[name].append(every[name](Path(folder), case, steps, workers))
    return found


def lines(found: dict[str, list[Run]]) -> list[str]:
    """A line each, as the median over the rounds; a ratio is to the first peer of the same round, with its least and its greatest."""
    first = next(iter(found))
    told = [
        f"  {'':12}  ms a step   of {first:6}              evaluated   first step s   of ray   whole s   of ray   peak MB"
    ]
    for name, runs in found.items():
        ratios = sorted(one.step_ms / other.step_ms for one, other in zip(runs, found[first], strict=True))
        evaluated = median(
            one.evaluated_ms / other.step_ms for one, other in zip(runs, found[first], strict=True)
        )
        begun_of_ray, whole_of_ray = (
            median(
                getattr(one, field) / getattr(bare, field)
                for one, bare in zip(runs, found["ray"], strict=True)
            )
            for field in ("first_step_s", "whole_s")
        )
        step, _, begun, over, peak = (median(one[i] for one in runs) for i in range(5))
        told.append(
            f"  {name:12}  {step:9.2f}   {median(ratios):5.2f} ({ratios[0]:.2f} … {ratios[-1]:.2f})   {evaluated:9.2f}   "
            f"{begun:12.1f}   {begun_of_ray:6.2f}   {over:7.1f}   {whole_of_ray:6.2f}   {peak:7.0f}"
        )
    return told


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(cases()))
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="in place of the case's own number")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    kept: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as table:
        os.environ[TABLE] = table
        if "rows" in given.cases.split(","):
            write_sample(Path(table, "all"), ROWS, FEATURES)
        for case in given.cases.split(","):
            for workers in map(int, given.workers.split(",")):
                steps = given.steps or cases()[case].steps
                found = measure(case, workers, given.rounds, steps)
                print(
                    f"{case}, {workers} workers, {steps} steps, {given.rounds} rounds, load {os.getloadavg()[0]:.1f}:"
                )
                print("\n".join(lines(found)), flush=True)
                kept.append(
                    {
                        "case": case,
                        "workers": workers,
                        "runs": {name: [one._asdict() for one in runs] for name, runs in found.items()},
                    }
                )
    if given.json:
        given.json.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
