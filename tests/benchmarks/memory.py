"""The most memory that a worker takes for gradients, in sets of them, beside a hand-written DDP loop. Run by `make bench`.

A set is as many bytes as the model's parameters. Two workers with 1 … 8 micro-batches each; DDP accumulates with `no_sync`
into its buckets. Counted is what torch's allocator gives and takes back from the third step on, and the buckets, which
are there before.

    python -m tests.benchmarks.memory
"""

from __future__ import annotations

import os
from typing import Any

import torch

from lockstep.job.loading import load_job
from lockstep.spec.loading import load_spec
from lockstep.training.worker_environment import WORKER_ENVIRONMENT
from tests.benchmarks import handwritten
from tests.distributed.pool import Pool
from tests.distributed.test_peak_memory import SET, document, peak
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


if __name__ == "__main__":
    main()
