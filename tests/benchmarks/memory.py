"""The most memory that a worker takes for gradients, in sets of them, beside a hand-written DDP loop. Run by `make bench`.

A set is as many bytes as the model's parameters. Two workers with 1 … 8 micro-batches each; DDP accumulates with `no_sync`
into its buckets. Counted is what torch's allocator gives and takes back from the third step on, and the buckets, which
are there before.

Then what a worker of 2, 4 and 8 holds at the most where everything is sharded, beside what `lockstep estimate` says. Last, the anonymous memory of the process by the
stage of its life, which counts where its memory is limited: also of a process that keeps what it has freed, as glibc does by itself.

    python -m tests.benchmarks.memory
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch

from lockstep.checkpoint.runs.run_checkpoints import claim
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.job.loading import load_job
from lockstep.spec.loading import load_spec
from lockstep.training.worker_environment import WORKER_ENVIRONMENT
from tests.benchmarks import handwritten
from tests.distributed import memory_by_stage, test_sharded_memory
from tests.distributed.pool import Pool
from tests.distributed.test_peak_memory import SET, document, peak
from tests.distributed.test_sharded_memory import MODEL
from tests.live_bytes import counted

WORKERS = 2


def by_hand(given: dict[str, Any]) -> float:
    """Sets of gradients that a worker of the hand-written loop has at the most."""
    spec = load_spec({**given, "optimizer": {"name": "adamw"}})
    loop = handwritten.training(spec, load_job(spec.job.use, spec.job.params), handwritten.classification)
    for _ in range(2):
        next(loop)
    with counted() as found:
        for _ in range(2):
            next(loop)
    return found.peak / SET + 1


def main() -> None:
    os.environ.update(WORKER_ENVIRONMENT, OMP_NUM_THREADS="1")  # before a worker starts
    torch.set_num_threads(1)
    print("micro-batches of a worker   by hand   native    exact")
    pool = Pool(WORKERS)
    try:
        for each in (1, 2, 4, 8):
            given = document(each * WORKERS)
            sides = [pool.run(WORKERS, by_hand, given)]
            sides += [pool.run(WORKERS, peak, document(each * WORKERS, how)) for how in ("native", "exact")]
            print(f"{each:25}" + "".join(f"{max(side):9.2f}" for side in sides), flush=True)
    finally:
        pool.close()
    print("workers, fully sharded      held   by the estimate, in sets")
    for workers in (2, 4, 8):
        pool = Pool(workers)
        try:
            given = test_sharded_memory.document(workers, micro_batches=8)
            held = max(pool.run(workers, test_sharded_memory.peak, given)) / MODEL
            print(
                f"{workers:22}{held:10.2f}{test_sharded_memory.estimate_of(given) / MODEL:16.2f}", flush=True
            )
        finally:
            pool.close()
    print("stage, fully sharded on 4   anonymous memory   freed memory kept   by arithmetic, in sets")
    with tempfile.TemporaryDirectory() as folder:
        of_stages = [most(folder, AttemptOrigin()), most(f"{folder}/kept", AttemptOrigin(), True)]
        for kept, each in zip((folder, f"{folder}/kept"), of_stages, strict=True):
            origin = claim(f"{kept}/checkpoints", "run", 1)
            each["resume"] = most(kept, origin, kept != folder)["resume"]
        for stage, arithmetic in memory_by_stage.by_arithmetic(4).items():
            given_back, held_on = (each[stage] for each in of_stages)
            print(f"{stage:25}{given_back:19.2f}{held_on:20.2f}{arithmetic:16.2f}", flush=True)


def most(folder: str, origin: AttemptOrigin, keeps: bool = False) -> dict[str, float]:
    """The peak of each stage on the worker that has the most, in new processes."""
    pool = Pool(4)
    try:
        every = pool.run(4, memory_by_stage.peaks, memory_by_stage.document(folder), origin, keeps)
    finally:
        pool.close()
    return {stage: max(of_rank[stage] for of_rank in every) for stage in every[0]}


if __name__ == "__main__":
    main()
