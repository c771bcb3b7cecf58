"""Seconds and steps lost per killed worker and per lost node: Lockstep beside a bare Ray Train script, in turn.

    python -m tests.benchmarks.restart --rounds 10 --workers 2,3,4 --kills worker

Both train with so many workers, each on a one-CPU node of one local cluster with Ray's default settings and one node to spare, save every tenth
step of about 0.2 s, and lose a worker, then a node. Lost is the time from the SIGKILL to the end of the first step after it; repeated are steps
that were done before and are taken again, beside the one under way. Where Lockstep's other workers go on in memory, they do so without
the lost one until another one has joined; each of them then has more micro-batches in a step, and a step takes longer. So it is also told
how much longer than such a step the loss took.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.clusters.authentication import LOOPBACK_ONLY
from lockstep.record.ledger.live_rows import RowsSoFar
from tests.chaos.cluster import ENVIRONMENT, Nodes, started

ROOT = Path(__file__).parents[2]
EVERY, PAUSE_S = 10, 0.2
CALM_S = 60.0
"""By default, how long a run trains undisturbed before it loses something."""

GAP_S = 2.5
"""No step takes so long."""

PACED = 5
"""From so many steps after a loss it is known how long one takes."""

PATIENCE_S = 400.0


class Lost(NamedTuple):
    """What one kill cost."""

    seconds: float
    """From the kill to the end of the first step after it."""
    steps: int
    step_s: float
    """What a step takes with the workers that are there after it."""
    stages: str = ""


class Bare:
    """The bare script; it logs each step."""

    def __init__(self, nodes: Nodes, folder: Path, workers: int) -> None:
        self.out = folder / "steps"
        self.process = launch(
            folder, ["tests/benchmarks/bare_restart.py", nodes.address, str(folder), "100000", str(PAUSE_S), str(EVERY), str(workers)],
            kept=("RAY_AUTH_MODE", *LOOPBACK_ONLY),
        )  # fmt: skip

    def attempts(self) -> list[list[tuple[float, int]]]:
        """The steps of each attempt: time and number; one that starts again is known by its number, or by the gap before it."""
        found: list[list[tuple[float, int]]] = []
        for line in self.out.read_text().splitlines() if self.out.exists() else []:
            at, step = line.split()
            if not found or int(step) <= found[-1][-1][1] or float(at) - found[-1][-1][0] > GAP_S:
                found.append([])
            found[-1].append((float(at), int(step)))
        return found

    def lost(self, number: int, killed_at: float) -> Lost | None:
        """What the loss of attempt `number`, from 1, cost, once it trains again."""
        every = self.attempts()
        if len(every) <= number:
            return None
        before, after = every[number - 1], every[number]
        step_s = pace([at for at, _ in after])
        if step_s is None:
            return None
        return Lost(after[0][0] - killed_at, before[-1][1] - after[0][1] + 1, step_s)

    def trains(self, number: int) -> bool:
        return len(self.attempts()) >= number


class Ours(Bare):
    """Lockstep, by its own account of each attempt."""

    def __init__(self, nodes: Nodes, folder: Path, workers: int) -> None:
        self.folder, self.workers = folder, workers
        # A step's pause is that of the bare script, shared out among the micro-batches of a worker, of four in a step.
        pause_s = PAUSE_S / math.ceil(4 / workers)
        self.process = launch(
            folder,
            [
                "-m", "lockstep", "train", "jobs/digits/train.yaml", "--address", nodes.address, "--uri", f"sqlite:///{folder}/mlflow.db",
                "job.use=tests.cluster.broken_jobs:SlowDigits", f"job.params={{width: 32, pause_s: {pause_s}}}", "length.epochs=100000",
                f"checkpoint.every.steps={EVERY}", "evaluate.every.epochs=100000", "workers.min=1", f"workers.max={workers}", f"checkpoint.storage={folder}/runs",
            ],
            kept=tuple(ENVIRONMENT),
        )  # fmt: skip

    def accounts(self) -> list[dict[str, Any]]:
        for path in self.folder.glob("runs/*/attempts.json"):
            found: list[dict[str, Any]] = json.loads(path.read_text())
            return found
        return []

    def after_losses(self) -> list[dict[str, Any]]:
        """The attempts that a loss began; others began because the one before moved, to have as many workers again."""
        every = self.accounts()
        return [now for before, now in pairwise(every) if "lost" in str(before["why"]) and now["last_step"]]

    def lost(self, number: int, killed_at: float) -> Lost | None:
        found = self.after_losses()
        if len(found) < number:
            return None
        account = found[number - 1]
        (folder,) = {path.parent for path in self.folder.glob("runs/*/attempts.json")}
        done = [row.wall_clock for row in RowsSoFar(folder).steps() if row.attempt == account["attempt"]]
        step_s = pace(done)
        if step_s is None:
            return None
        seconds = " ".join(f"{stage} {seconds:.1f}" for stage, seconds in account["seconds"].items())
        how = "in memory"
        if not account["in_memory"]:  # why the others could not go on is in what came before
            told = (self.folder / "log").read_text().splitlines()
            before = [line for line in told if line.startswith(("attempt ", "warning: "))][-3:]
            how = f"RESTARTED, after: {' / '.join(before)}"
        return Lost(done[0] - killed_at, account["repeated"], step_s, f"{how}: {seconds}")

    def trains(self, number: int) -> bool:
        every = self.accounts()
        whole = bool(every) and every[-1]["workers"] == self.workers and every[-1]["last_step"] > 0
        return whole and len(self.after_losses()) >= number - 1


def pace(ends: list[float]) -> float | None:
    """What a step takes, from when the first ones ended; None as long as there are too few."""
    if len(ends) <= PACED:
        return None
    return statistics.median(later - earlier for earlier, later in pairwise(ends[: PACED + 1]))


def launch(folder: Path, words: list[str], kept: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """A driver; the bare one has none of Lockstep's settings."""
    own = {name: ENVIRONMENT[name] for name in kept}
    others = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    path = os.pathsep.join([str(ROOT / "platform"), str(ROOT)])
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env={**others, **own, "PYTHONPATH": path},
            stdout=log,
            stderr=log,
        )


def kill_worker(nodes: Nodes) -> None:
    nodes.workers(nodes.busy()[-1])[0].kill()


def kill_node(nodes: Nodes) -> None:
    nodes.kill(nodes.busy()[-1])


def measure(
    kind: type[Bare], nodes: Nodes, workers: int, kills: list[Callable[[Nodes], None]], calm_s: float
) -> list[Lost]:
    """What each of these kills costs, one after another in one run."""
    found = []
    with tempfile.TemporaryDirectory(
        prefix="lockstep-restart-",
        ignore_cleanup_errors=True,  # workers of a driver that was killed write a moment longer
    ) as name:
        run = kind(nodes, Path(name), workers)
        try:
            for number, kill in enumerate(kills, 1):
                wait(run, lambda n=number: run.trains(n))  # type: ignore[misc]
                time.sleep(calm_s)
                killed_at = time.time()
                kill(nodes)
                wait(run, lambda n=number, at=killed_at: run.lost(n, at) is not None)  # type: ignore[misc]
                lost = run.lost(number, killed_at)
                assert lost is not None
                found.append(lost)
                if kill is kill_node:
                    nodes.add()
        except BaseException:
            print(Path(name, "log").read_text()[-3000:], file=sys.stderr)
            raise
        finally:
            run.process.kill()
            run.process.wait()
    return found


def wait(run: Bare, done: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not done():
        if run.process.poll() is not None:
            raise SystemExit(f"{type(run).__name__} ended with exit code {run.process.returncode}")
        if time.monotonic() > until:
            raise SystemExit(f"{type(run).__name__} did not go on within {PATIENCE_S:.0f} s")
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", default="2")
    parser.add_argument("--kills", default="worker,node")
    parser.add_argument("--calm", type=float, default=CALM_S, help="seconds before each kill")
    parser.add_argument(
        "--per-run", type=int, default=1, help="rounds that one run goes through, one after another"
    )
    given = parser.parse_args()
    for workers in map(int, given.workers.split(",")):
        compare(workers, given.kills.split(","), given.rounds, given.calm, given.per_run)


def compare(workers: int, names: list[str], rounds: int, calm_s: float, per_run: int) -> None:
    """So many rounds with so many workers, a line each, and what they come to."""
    every = {"worker": kill_worker, "node": kill_node}
    kills = [every[name] for name in names]
    rows: list[dict[str, list[Lost]]] = []
    for number in range(rounds):
        if number % per_run == 0:
            of_runs, left = {}, min(per_run, rounds - number)
            for kind in (Bare, Ours) if number // per_run % 2 == 0 else (Ours, Bare):
                with started(workers + 1) as nodes:
                    of_runs[kind.__name__] = measure(kind, nodes, workers, kills * left, calm_s)
        first = number % per_run * len(kills)
        row = {kind: found[first : first + len(kills)] for kind, found in of_runs.items()}
        rows.append(row)
        for i, name in enumerate(names):
            bare, ours = row["Bare"][i], row["Ours"][i]
            print(
                f"round {number + 1}, {workers} workers, a {name} is killed: bare Ray Train {bare.seconds:.1f} s and {bare.steps} "
                f"steps, Lockstep {ours.seconds:.2f} s and {ours.steps} steps, {ours.seconds - ours.step_s:.2f} s beyond a step of "
                f"{ours.step_s:.2f} s ({ours.stages}); load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    for i, name in enumerate(names):
        ratios = sorted(row["Ours"][i].seconds / row["Bare"][i].seconds for row in rows)
        seconds, bare_s = (
            statistics.median(row[kind][i].seconds for row in rows) for kind in ("Ours", "Bare")
        )
        beyond = sorted(row["Ours"][i].seconds - row["Ours"][i].step_s for row in rows)
        steps = max(row["Ours"][i].steps for row in rows)
        print(
            f"{workers} workers, {name}: Lockstep / bare Ray Train: median {statistics.median(ratios):.2f} "
            f"({ratios[0]:.2f} … {ratios[-1]:.2f}, {len(rows)} rounds); medians {seconds:.2f} and {bare_s:.2f} s; beyond the time of a step "
            f"Lockstep takes a median of {statistics.median(beyond):.2f} s ({beyond[0]:.2f} … {beyond[-1]:.2f}), and repeats at most {steps} "
            "steps beside the one under way"
        )


if __name__ == "__main__":
    main()
