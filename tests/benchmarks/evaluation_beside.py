"""What it costs that another process evaluates while a run trains.

A run of the byte-level GPT of `jobs/stdlib_gpt` in one process: without an evaluation before its end, with evaluations beside it, and with evaluations in place, in
turn. Told are the seconds of the same steps beside those of the run without: of all steps from the first evaluation on, in which the process starts, and of
those after the second one has begun. The process needs a core of its own for that; `--busy` has another program use it.

    python -m tests.benchmarks.evaluation_beside [--steps N] [--every N] [--limit SAMPLES] [--rounds N] [--busy]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from lockstep.communication.group import Group
from lockstep.job.loading import load_job
from lockstep.record.events.union import Event, Warned
from lockstep.record.ledger.rows import EvaluationRow, StepRow
from lockstep.spec.loading import load_spec
from lockstep.training.driver_requests import NoRequests
from lockstep.training.loop import fit
from lockstep.training.worker_environment import WORKER_ENVIRONMENT

MODES: dict[str, dict[str, Any] | None] = {
    "no evaluation": None,
    "beside": {"beside": True},
    "in place": {},
    "no evaluation again: the noise": None,
}


def document(steps: int, every: int, limit: int, evaluates: dict[str, Any] | None) -> dict[str, Any]:
    every = every if evaluates is not None else steps
    return {
        "job": {"use": "jobs.stdlib_gpt.job:StdlibGPT"},
        "length": {"steps": steps},
        "batch": {"global": 16, "micro": 4},
        "evaluate": {"every": {"steps": every}, "limit": limit, **(evaluates or {})},
        "record": {"uri": "off", "digest_every": None},
        "rehearsal": "quick",
    }


@dataclass
class Told(NoRequests):
    """What a run tells that is measured."""

    rows: list[StepRow] = field(default_factory=list)
    evaluations: list[EvaluationRow] = field(default_factory=list)

    def tell(self, event: Event) -> None:
        match event:
            case StepRow():
                self.rows.append(event)
            case EvaluationRow():
                self.evaluations.append(event)
            case Warned():
                print(f"warning: {event.text}")


def trained(steps: int, every: int, limit: int, evaluates: dict[str, Any] | None) -> Told:
    spec, told = load_spec(document(steps, every, limit, evaluates)), Told()
    job = load_job(spec.job.use, spec.job.params)
    fit(spec, job, Group(0, 1, torch.device("cpu")), told.tell, told)
    return told


def seconds(told: Told, first: int) -> float:
    """Of the steps after number `first`, with whatever lies between them, up to the last step."""
    return told.rows[-1].wall_clock - told.rows[first - 1].wall_clock


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=240)
    options.add_argument("--every", type=int, default=60)
    options.add_argument("--limit", type=int, default=256)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--busy", action="store_true")
    given = options.parse_args()
    os.environ |= WORKER_ENVIRONMENT
    with ExitStack() as opened:
        if given.busy:
            other = opened.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            opened.callback(other.kill)
        trained(5, 5, given.limit, None)
        runs = [
            {mode: trained(given.steps, given.every, given.limit, MODES[mode]) for mode in MODES}
            for _ in range(given.rounds)
        ]
    took_s = median(row.seconds for run in runs for row in run["in place"].evaluations[:-1])
    between_s = median(seconds(run["no evaluation"], given.every) for run in runs) / (
        given.steps / given.every - 1
    )
    print(
        f"an evaluation takes {took_s:.2f} s in place, and training {between_s:.2f} s from one to the next; {os.cpu_count()} cores"
    )
    for mode in MODES:
        for what, first in (("from the first evaluation", given.every), ("from the second", 2 * given.every)):
            ratios = [seconds(run[mode], first) / seconds(run["no evaluation"], first) for run in runs]
            steps = median(row.step_s for run in runs for row in run[mode].rows[first:])
            print(
                f"{mode}, {what}: {median(ratios):.3f} of the seconds without ({', '.join(f'{ratio:.3f}' for ratio in ratios)}), "
                f"a step {1e3 * steps:.1f} ms"
            )


if __name__ == "__main__":
    main()
