"""A fully sharded step of Lockstep beside the same step of torch's FSDP2 alone. Run by `make bench`.

As in `step_time`: both sides share the processes, the gloo group and one intra-op thread, and take blocks of steps in turn. Both reduce the gradients of
each micro-batch, so that no worker has whole ones. Bytes are those that the loopback interface has carried in a block, headers included: the processes are in a
network namespace of their own where that is possible (root on Linux), else they are left out.

    python -m tests.benchmarks.full_sharding [--rounds 20]
"""

from __future__ import annotations

import argparse
import ctypes
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from lockstep.communication.group import Group
from lockstep.job.loading import load_job
from lockstep.record.events.union import Event
from lockstep.spec.loading import load_spec
from lockstep.training.driver_requests import NoRequests
from lockstep.training.loop import fit
from lockstep.training.worker_environment import WORKER_ENVIRONMENT
from tests.benchmarks import handwritten
from tests.benchmarks.step_time import WARM_UP, Contest, block_length, estimate
from tests.distributed.pool import Pool
from tests.network import ip

TIME, BYTES = 1.05, 1.02
"""The ratios that are wanted."""

_CLONE_NEWNET = 0x40000000


class Round(NamedTuple):
    """Seconds of a step of Lockstep, of FSDP2 and of FSDP2 again; bytes that all workers sent in a step of Lockstep, and of FSDP2."""

    lockstep_s: float
    fsdp_s: float
    again_s: float
    lockstep_bytes: float
    fsdp_bytes: float


def carried_bytes() -> int:
    """Bytes that the loopback interface of this network namespace has carried."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    fields = next(line for line in lines if line.strip().startswith("lo:")).split(":")[1].split()
    return int(fields[8])


class CountedContest(Contest):
    """Counts the bytes of each block as well."""

    def __init__(self, loops: Sequence[Iterator[float]], block: int) -> None:
        super().__init__(loops, block)
        self.bytes: list[tuple[float, float]] = []
        self._before = 0

    def tell(self, event: Event) -> None:
        super().tell(event)
        if self._steps == 0:
            self._before = carried_bytes()

    def _round(self, own: float) -> None:
        own_bytes, between = carried_bytes() - self._before, carried_bytes()
        super()._round(own)
        self.bytes.append((own_bytes / self.block, (carried_bytes() - between) / (2 * self.block)))


def contest(micro_batches: int, rounds: int) -> list[Round]:
    """One worker's part of a contest."""
    torch.set_num_threads(1)
    document = {
        "job": {"use": "jobs.stdlib_gpt.job:StdlibGPT", "params": {"corpus_bytes": 400_000}},
        "seed": 17,
        "batch": {"global": 4 * micro_batches, "micro": 4},
        "optimizer": {"lr": 1e-3},
        "clip_norm": 1.0,
        "sharding": "full",
        "evaluate": {"every": {"steps": 1_000_000}},
    }
    spec = load_spec(document)
    job = load_job(spec.job.use, spec.job.params)
    loops = [handwritten.training(spec, job, handwritten.language) for _ in range(2)]
    block = min(map(block_length, loops))
    spec = load_spec(document, [f"length.steps={WARM_UP + rounds * block}"])
    record = CountedContest(loops, block)
    fit(spec, job, Group.join(torch.device("cpu")), record.tell, NoRequests())
    return [Round(*times, *sizes) for times, sizes in zip(record.times, record.bytes, strict=True)]


def line(workers: int, micro_batches: int, ranks: Sequence[Sequence[Round]], counts: bool) -> str:
    """One result as a row of the table. A block takes as long as on the slowest rank; rank 0 counts the bytes of all."""
    times = [
        [max(each[side] for each in of_ranks) for side in range(3)] for of_ranks in zip(*ranks, strict=True)
    ]
    ratio, noise = (
        estimate([own / hand for own, hand, _ in times]),
        estimate([again / hand for _, hand, again in times]),
    )
    sizes = median(one.lockstep_bytes for one in ranks[0]), median(one.fsdp_bytes for one in ranks[0])
    sent = (
        f"{sizes[0] / sizes[1]:5.3f} {'ok' if sizes[0] <= BYTES * sizes[1] else 'OVER'} {BYTES}"
        if counts
        else "not counted"
    )
    hand, own = 1e3 * median(one[1] for one in times), 1e3 * median(one[0] for one in times)
    return f"{workers} {micro_batches:2} {hand:8.2f} ms {own:8.2f} ms   {ratio} {'ok' if ratio.median <= TIME else 'OVER'} {TIME}   {noise}   {sent}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    os.environ.update(WORKER_ENVIRONMENT, OMP_NUM_THREADS="1")  # before a worker starts
    counts = ctypes.CDLL(None).unshare(_CLONE_NEWNET) == 0
    if counts:
        ip("link", "set", "lo", "up")
    print("W  M       FSDP2    Lockstep   time ratio [95 %]               A/A [95 %]             bytes ratio")
    for workers, micro_batches in ((2, 2), (2, 8), (4, 4), (4, 8)):
        pool = Pool(workers)
        try:
            ranks = pool.run(workers, contest, micro_batches, options.rounds)
            print(line(workers, micro_batches, ranks, counts), flush=True)
        finally:
            pool.close()


if __name__ == "__main__":
    main()
