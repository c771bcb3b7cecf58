"""How much of its time a run spends in new steps while it loses a worker again and again, and whether its bits are those of a run left alone.

    python -m tests.benchmarks.outliving --minutes 5 --every 60

Each worker has a one-CPU node of one local cluster. Any of them is killed by SIGKILL, rank 0 included; the others go on in memory, and another one joins. After
so many minutes the run is stopped, and as many steps are trained in one process. Told is the share of the time that went into steps that count, from the
first step on and from the start of the run; and how many steps it took, beside the number at the pace that it has with all workers: with one less a step takes longer.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from lockstep.record.ledger.live_rows import RowsSoFar
from tests.benchmarks.restart import PATIENCE_S, launch
from tests.chaos.cluster import ENVIRONMENT, Nodes, started

STEP_S = 0.2
"""What a step with all workers takes besides its computation."""

MICRO_BATCHES = 4
"""Of a step, which the workers share."""

ENDS_S = 60.0
"""How long a run may take to end after a signal."""


def words(folder: Path, pause_s: float, *more: str) -> list[str]:
    return [
        "-m", "lockstep", "train", "jobs/digits/train.yaml", "--uri", "off", "job.use=tests.cluster.broken_jobs:SlowDigits",
        f"job.params={{width: 32, pause_s: {pause_s}}}", "checkpoint.every.steps=100", "evaluate.every.steps=500",
        "schedule={name: constant}",  # others depend on the length of the run, which is not known before it is stopped
        f"checkpoint.storage={folder}/runs", *more,
    ]  # fmt: skip


class Disturbed:
    """A run on `workers` nodes, in `folder`."""

    def __init__(self, nodes: Nodes, folder: Path, workers: int) -> None:
        self.nodes, self.folder, self.workers = nodes, folder, workers
        pause_s = STEP_S / math.ceil(MICRO_BATCHES / workers)
        more = ["length.steps=1000000", "workers.min=1", f"workers.max={workers}", "--address", nodes.address]
        self.process = launch(folder, words(folder, pause_s, *more), kept=tuple(ENVIRONMENT))

    @property
    def run(self) -> Path:
        (path,) = self.folder.glob("runs/*/journal.jsonl")
        return path.parent

    def trains(self) -> bool:
        return any([*RowsSoFar(path.parent).steps()] for path in self.folder.glob("runs/*/journal.jsonl"))

    def lose_workers(self, minutes: float, every_s: float) -> int:
        """Kill a worker each `every_s` seconds; how many were."""
        draw, began, killed = random.Random(0), time.monotonic(), 0
        for number in range(1, math.ceil(60 * minutes / every_s)):
            time.sleep(max(0.0, began + number * every_s - time.monotonic()))
            assert self.process.poll() is None, "the run has ended"
            workers = [process for node in self.nodes.nodes for process in self.nodes.workers(node)]
            draw.choice(workers).kill()
            killed += 1
        time.sleep(max(0.0, began + 60 * minutes - time.monotonic()))
        return killed

    def stop(self) -> dict[str, str]:
        """End the run after its next step; its tags."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(ENDS_S)
        tags: dict[str, str] = json.loads((self.run / "run.json").read_text())["tags"]
        return tags


def digest_alone(folder: Path, steps: int, *more: str) -> str:
    """The digest of as many steps in one process that nothing happens to."""
    done = subprocess.run(
        [sys.executable, *words(folder, 0.0, f"length.steps={steps}", "--local", "--json", *more)],
        env={**os.environ, **ENVIRONMENT}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return str(json.loads(done.stdout)["weights_digest"])


def report(run: Disturbed, killed: int, tags: dict[str, str]) -> bool:
    """Print what became of the run. Whether its bits are those of one that was left alone."""
    accounts: list[dict[str, Any]] = json.loads((run.run / "attempts.json").read_text())
    rows = [*RowsSoFar(run.run).steps()]
    whole = {account["attempt"] for account in accounts if account["workers"] == run.workers}
    pace_s = statistics.median(row.step_s for row in rows if row.attempt in whole)
    seconds = rows[-1].wall_clock - rows[0].wall_clock + rows[0].step_s
    losses = [now for before, now in pairwise(accounts) if "lost" in str(before["why"])]
    lost_s = sorted(account["lost_s"] for account in losses) or [0.0]
    alone = digest_alone(run.folder / "alone", rows[-1].step)
    control = digest_alone(run.folder / "control", rows[-1].step, "seed=1")
    same = alone == tags["lockstep.weights_digest"] != control
    print(
        f"{run.workers} workers, {killed} of them killed one after another in {seconds / 60:.1f} min: {sum(row.step_s for row in rows) / seconds:.1%} of the time went into "
        f"steps that count, {float(tags['lockstep.effective']):.1%} with the start; {len(rows)} steps, {len(rows) * pace_s / seconds:.1%} of those at the pace with all workers ({pace_s:.3f} s); from the last step "
        f"before a loss to the end of the next: median {statistics.median(lost_s):.1f} s ({lost_s[0]:.1f} … {lost_s[-1]:.1f}); "
        f"{sum(account['repeated'] for account in losses)} steps repeated, {sum(not account['in_memory'] for account in losses)} of {len(losses)} losses not "
        f"outlived in memory; bits of step {rows[-1].step} beside a run left alone: {'the same' if same else 'OTHER'}; load {os.getloadavg()[0]:.1f}"
    )
    return same


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds from one loss to the next")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-outliving-", ignore_cleanup_errors=True) as name,
        started(given.workers) as nodes,
    ):
        run = Disturbed(nodes, Path(name), given.workers)
        try:
            until = time.monotonic() + PATIENCE_S
            while not run.trains():
                assert time.monotonic() < until and run.process.poll() is None, "it does not train"
                time.sleep(0.2)
            killed = run.lose_workers(given.minutes, given.every)
            same = report(run, killed, run.stop())
        except BaseException:
            print(Path(name, "log").read_text()[-3000:], file=sys.stderr)
            raise
        finally:
            run.process.kill()
            run.process.wait()
    raise SystemExit(not same)


if __name__ == "__main__":
    main()
