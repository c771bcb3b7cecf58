"""What it costs that ranks compare what they hold, and that micro-batches are computed twice.

Processor time of rank 0 of two workers on one core each, for the byte-level GPT of `jobs/stdlib_gpt`: of a step without digests, of one
comparison, of a step with digests, and of a step whose every micro-batch is computed again. What a run pays follows from how often each is done.
How much of the second computing lies in time in which its worker would wait for the others is counted, from the plan.

    python -m tests.benchmarks.agreement [--steps N]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from contextlib import closing
from statistics import median
from typing import Any

import torch

from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.communication.group import Group
from lockstep.job.loading import load_job
from lockstep.record.events.union import tell_nobody
from lockstep.reduction_tree import worker_ranges
from lockstep.spec.loading import load_spec
from lockstep.training.determinism import determinism
from lockstep.training.integrity.recheck import assigned_again
from lockstep.training.setup import prepare
from lockstep.training.worker_environment import WORKER_ENVIRONMENT
from tests.distributed.pool import Pool

SHARE = 0.01
"""Of `determinism.recheck` as it is meant to be used."""


def document(**changes: Any) -> dict[str, Any]:
    base = {
        "job": {"use": "jobs.stdlib_gpt.job:StdlibGPT"},
        "length": {"steps": 1000},
        "batch": {"global": 32, "micro": 4},
        "checkpoint": {"every": None},
        "record": {"uri": "off", "digest_every": None},
        "rehearsal": "off",
    }
    return {**base, **changes}


def spent(action: Callable[[], Any]) -> float:
    """Seconds of processor time of this process."""
    began = time.process_time()
    action()
    return time.process_time() - began


def measured(changes: dict[str, Any], steps: int) -> tuple[float, float]:
    """Medians over `steps` steps: the seconds of a step, and of one comparison of the ranks."""
    spec = load_spec(document(**changes))
    with determinism("strict", 1):
        run = prepare(
            spec,
            load_job(spec.job.use, spec.job.params),
            Group.join(torch.device("cpu")),
            tell_nobody,
            AttemptOrigin(),
        )
        taken, compared = [], []
        with closing(run.loader()) as batches:
            for position in run.ahead(over=False):
                taken.append(spent(lambda position=position: run.step(position, batches)))
                compared.append(spent(run.step.agreement.check))
                if position.number == steps:
                    break
    return median(taken[2:]), median(compared[2:])


def hidden(micro_batches: int, workers: int) -> float:
    """The share of micro-batches whose second computing makes no step longer: no worker has more to compute than without."""
    ranges = worker_ranges(micro_batches, workers)
    counts, found = [len(own) for own in ranges], 0
    for owner, own in enumerate(ranges):
        for m in own:
            again = assigned_again(counts, {m: owner})[m]
            found += counts[again] < max(counts)
    return found / micro_batches


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=12)
    steps = options.parse_args().steps
    os.environ |= WORKER_ENVIRONMENT
    pool = Pool(2)
    try:
        plain, compared = pool.run(2, measured, {}, steps)[0]
        digests, _ = pool.run(2, measured, {"record": {"uri": "off", "digest_every": 1}}, steps)[0]
        twice, _ = pool.run(2, measured, {"determinism": {"mode": "strict", "recheck": 1.0}}, steps)[0]
    finally:
        pool.close()
    print(f"a step: {1e3 * plain:.1f} ms of processor time")
    print(f"a comparison: {1e3 * compared:.2f} ms, {100 * compared / plain:.2f} % of a step")
    print(
        f"a step with digests: {100 * (digests / plain - 1):.1f} % more; each 100 steps: {(digests / plain - 1):.3f} %"
    )
    print(
        f"all computed again: {100 * (twice / plain - 1):.0f} % more; {SHARE:g} of it: {100 * SHARE * (twice / plain - 1):.2f} %"
    )
    for micro_batches, workers in ((8, 2), (8, 3), (16, 6), (64, 24)):
        print(
            f"in waiting time, {micro_batches} micro-batches on {workers} workers: {100 * hidden(micro_batches, workers):.0f} %"
        )


if __name__ == "__main__":
    main()
