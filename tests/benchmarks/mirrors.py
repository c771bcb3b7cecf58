"""What a mirrored optimizer costs: a step of the byte-level GPT of `jobs/stdlib_gpt`, beside one whose optimizer is sharded and not mirrored.

Two workers take a step of the one and of the other in turn, so that a busy machine slows both. A mirrored step also keeps its start.

    python -m tests.benchmarks.mirrors [--workers N] [--steps N]
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import ExitStack, closing
from itertools import islice
from statistics import median

import torch

from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.communication.group import Group
from lockstep.job.loading import load_job
from lockstep.record.events.union import tell_nobody
from lockstep.spec.loading import load_spec
from lockstep.training.determinism import determinism
from lockstep.training.observe.worker_memory import optimizer_bytes
from lockstep.training.setup import prepare
from lockstep.training.worker_environment import WORKER_ENVIRONMENT
from tests.benchmarks.agreement import document
from tests.distributed.pool import Pool


def measured(steps: int) -> tuple[list[float], list[float], int, int]:
    """The seconds of each step without and with mirrors, and the bytes of the optimizers' state on this worker."""
    runs = []
    with determinism("strict", 1), ExitStack() as stack:
        for mirror in (False, True):
            spec = load_spec(document(sharding="optimizer", faults={"mirror": mirror}))
            job = load_job(spec.job.use, spec.job.params)
            run = prepare(spec, job, Group.join(torch.device("cpu")), tell_nobody, AttemptOrigin())
            run.step.keeps_start = True
            runs.append(
                (run, stack.enter_context(closing(run.loader())), islice(run.ahead(over=False), steps))
            )
        taken: tuple[list[float], list[float]] = [], []
        for positions in zip(*(ahead for *_, ahead in runs), strict=True):
            for seconds, (run, batches, _), position in zip(taken, runs, positions, strict=True):
                run.group.gather(None)
                began = time.perf_counter()
                run.step(position, batches)
                seconds.append(time.perf_counter() - began)
        plain, mirrored = (optimizer_bytes(run.state.optimizer) for run, *_ in runs)
    return *taken, plain, mirrored


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--steps", type=int, default=40)
    given = options.parse_args()
    os.environ |= WORKER_ENVIRONMENT
    pool = Pool(given.workers)
    try:
        plain, mirrored, bytes_plain, bytes_mirrored = pool.run(given.workers, measured, given.steps)[0]
    finally:
        pool.close()
    ratio = median(two / one for one, two in zip(plain[2:], mirrored[2:], strict=True))
    print(
        f"a step without mirrors: {1e3 * median(plain[2:]):.1f} ms, with: {1e3 * median(mirrored[2:]):.1f} ms"
    )
    print(f"median ratio: {ratio:.4f}, {100 * (ratio - 1):.1f} % more")
    print(f"the optimizer's state on rank 0: {bytes_plain:,} bytes without, {bytes_mirrored:,} with")


if __name__ == "__main__":
    main()
