"""The most memory that a worker takes for gradients, in sets of them, beside a hand-written DDP loop. Run by `make bench`.

A set is as many bytes as the model's parameters. Two workers with 1 … 8 micro-batches each; DDP accumulates with `no_sync`
into its buckets. Counted is what torch's allocator gives and takes back from the third step on, and the buckets, which
are there before.

Then what a worker of 2 and 4 holds at the most where everything is sharded, beside what the arithmetic of docs/models-that-do-not-fit.md says: parameters,
gradients and AdamW's state over W, the tree's partial sums of a worker's rows, and a unit three times. Last, the anonymous memory of the process by the
stage of its life, which counts where its memory is limited: also of a process that keeps what it has freed, as glibc does by itself.

    python -m tests.benchmarks.memory
"""

from __future__ import annotations

import gc
import os
import tempfile
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.runs.run_checkpoints import claim
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.communication.group import Group
from lockstep.job.loading import load_job
from lockstep.record.events.union import Event, StepRow
from lockstep.spec.loading import load_spec
from lockstep.training.loop import fit
from lockstep.training.observe.worker_memory import UNIT_COPIES, sums_in_passes
from lockstep.training.worker_environment import WORKER_ENVIRONMENT
from tests.benchmarks import handwritten
from tests.distributed import memory_by_stage
from tests.distributed.pool import Pool
from tests.distributed.small_jobs import Plain
from tests.distributed.test_peak_memory import SET, Counting, document, peak
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


UNITS, UNIT_WIDTH = 16, 512
MODEL = UNITS * UNIT_WIDTH * UNIT_WIDTH * 4


class Wide(Plain):
    """Units of one size, large enough that what does not depend on the model is next to nothing."""

    def model(self) -> nn.Module:
        units = [nn.Linear(UNIT_WIDTH, UNIT_WIDTH, bias=False) for _ in range(UNITS)]
        return nn.Sequential(nn.ZeroPad1d((0, UNIT_WIDTH - 8)), *units)


class Standing(Counting):
    """Notes what lives after the second step, and counts in the third alone: at the end rank 0 puts whole weights together."""

    standing = 0

    def tell(self, event: Event) -> None:
        if isinstance(event, StepRow) and event.step == 2:
            gc.collect()
            tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]
            gradients = [one.grad for one in tensors if one.is_leaf and one.grad is not None]
            gone = {gradient.untyped_storage().data_ptr() for gradient in gradients}  # before the next step
            storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
            storages = {begin: size for begin, size in storages.items() if begin not in gone}
            self.standing = sum(storages.values())
        super().tell(event)
        if isinstance(event, StepRow) and event.step == 3:
            self.context.__exit__(None, None, None)


def sharded_peak(given: dict[str, Any]) -> int:
    """Bytes that a worker holds at the most in a step, of whatever kind."""
    spec, record = load_spec(given), Standing("cpu")
    job, group = load_job(spec.job.use, spec.job.params), Group.join(torch.device("cpu"))
    fit(spec, job, group, record.tell, record)
    group.close()
    return record.standing + record.found.peak


def by_arithmetic(workers: int, micro_batches: int) -> int:
    """What the page says of a model of equal units without activations."""
    unit = MODEL // UNITS
    return MODEL * (4 + sums_in_passes(micro_batches, workers)) // workers + UNIT_COPIES * unit


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
    print("workers, fully sharded      held   by arithmetic, in sets")
    for workers in (2, 4, 8):
        pool = Pool(workers)
        try:
            given = {**document(8), "sharding": "full", "optimizer": {"name": "adamw"}}
            given["job"] = {"use": "tests.benchmarks.memory:Wide"}
            held = max(pool.run(workers, sharded_peak, given)) / MODEL
            print(f"{workers:22}{held:10.2f}{by_arithmetic(workers, 8) / MODEL:16.2f}", flush=True)
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
