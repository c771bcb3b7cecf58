"""What a run pays for looking at itself: gradient flow, memory and time, as shares of a step. Run by hand.

Processor time of rank 0 of two workers on one core each. Every second step is observed, in the same processes, so that the two kinds of step
have the same machine; what a run pays follows from how often it looks.

    python -m tests.benchmarks.watching [--steps N]
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import closing
from statistics import median
from typing import Any

import torch

from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.communication.group import Group
from lockstep.job.loading import load_job
from lockstep.record.events.union import tell_nobody
from lockstep.spec.fields import Record
from lockstep.spec.loading import load_spec
from lockstep.training.clock import Clock
from lockstep.training.determinism import determinism
from lockstep.training.observe.observations import Watch
from lockstep.training.observe.step_times import StepTimes
from lockstep.training.setup import prepare
from lockstep.training.worker_environment import WORKER_ENVIRONMENT
from tests.distributed.pool import Pool

JOBS: dict[str, dict[str, Any]] = {
    "the byte-level GPT of jobs/stdlib_gpt": {
        "job": {"use": "jobs.stdlib_gpt.job:StdlibGPT"},
        "batch": {"global": 32, "micro": 4},
    },
    "the convolutions of jobs/digits": {
        "job": {"use": "jobs.digits.job:Digits"},
        "batch": {"global": 128, "micro": 32},
    },
}
EVERY = Record().observe_every
MARKS = 1000


def measured(document: dict[str, Any], steps: int) -> tuple[float, float, float]:
    """Medians in seconds of processor time: of a step, of one that is observed, and of the marks between the parts of a step."""
    spec = load_spec(
        {
            **document,
            "length": {"steps": 10_000},
            "checkpoint": {"every": None},
            "record": {"uri": "off", "digest_every": None, "observe_every": 2},
            "rehearsal": "off",
        }
    )
    with determinism("strict", 1):
        job = load_job(spec.job.use, spec.job.params)
        run = prepare(spec, job, Group.join(torch.device("cpu")), tell_nobody, AttemptOrigin())
        watch, clock = Watch(run), Clock()
        taken: dict[bool, list[float]] = {True: [], False: []}
        with closing(run.loader()) as batches:
            for position in run.ahead(over=False):
                began = time.process_time()
                watch.begin(position)
                result = run.step(position, batches)
                watch.end(position, clock.timed(result.row, position, batches), tell_nobody)
                taken[position.number % 2 == 0].append(time.process_time() - began)
                if position.number == 2 * steps:
                    break
    times = StepTimes(torch.device("cpu"))
    times.begin()
    began = time.process_time()
    for _ in range(MARKS):
        times.mark("forward")
    marks = (
        (time.process_time() - began)
        / MARKS
        * (2 + 3 * len(run.step.accumulation.assigned(run.plan.position(0))))
    )
    return median(taken[False][2:]), median(taken[True][2:]), marks


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=20)
    steps = options.parse_args().steps
    os.environ |= WORKER_ENVIRONMENT
    pool = Pool(2)
    try:
        found = {name: pool.run(2, measured, document, steps)[0] for name, document in JOBS.items()}
    finally:
        pool.close()
    assert EVERY is not None
    for name, (plain, observed, marks) in found.items():
        cost = (observed - plain) / EVERY + marks
        print(
            f"{name}: a step {1e3 * plain:.1f} ms of processor time, an observation {1e3 * (observed - plain):.2f} ms,"
        )
        print(
            f"  the marks of a step {1e6 * marks:.0f} us; each {EVERY} steps: {100 * cost / plain:.2f} % of a step"
        )


if __name__ == "__main__":
    main()
