"""A fully sharded step of Lockstep beside the same step of torch's FSDP2 alone. Run by `make bench`.

As in `step_time`: both sides share the processes, the gloo group and one intra-op thread, and take blocks of steps in turn. Both reduce the gradients of
each micro-batch, so that no worker has whole ones. First all workers are on this machine's loopback interface; then, with root and iproute2, each is a machine of its own (a
network namespace) on a slow link, and the bytes of a step are those that all of them have sent, headers included.

    python -m tests.benchmarks.full_sharding [--rounds 20] [--mbit 200]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
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
from tests.network import WIRE, can_simulate, sent_bytes, switched

TIME, BYTES = 1.05, 1.02
"""The ratios that are wanted."""

NEAR = ((2, 2), (2, 8), (4, 4), (4, 8))
FAR = ((2, 8), (4, 4), (4, 8), (8, 8))
"""Workers and micro-batches of a step: on the loopback interface, and on slow links."""


class Round(NamedTuple):
    """Seconds of a step of Lockstep, of FSDP2 and of FSDP2 again; bytes that this worker sent in a step of Lockstep, and of FSDP2: 0 where nobody counts."""

    lockstep_s: float
    fsdp_s: float
    again_s: float
    lockstep_bytes: float
    fsdp_bytes: float


def bytes_sent() -> int:
    """Bytes that this worker has sent so far; 0 on the loopback interface, which all have together."""
    return sent_bytes() if os.environ["GLOO_SOCKET_IFNAME"] == WIRE else 0


class CountedContest(Contest):
    """Counts the bytes of each block as well."""

    def __init__(self, loops: Sequence[Iterator[float]], block: int) -> None:
        super().__init__(loops, block)
        self.bytes: list[tuple[float, float]] = []
        self._before = 0

    def tell(self, event: Event) -> None:
        super().tell(event)
        if self._steps == 0:
            self._before = bytes_sent()

    def _round(self, own: float) -> None:
        own_bytes, between = bytes_sent() - self._before, bytes_sent()
        super()._round(own)
        self.bytes.append((own_bytes / self.block, (bytes_sent() - between) / (2 * self.block)))


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


def line(workers: int, micro_batches: int, ranks: Sequence[Sequence[Round]]) -> str:
    """One result as a row of the table. A block takes as long as on the slowest rank."""
    times = [
        [max(each[side] for each in of_ranks) for side in range(3)] for of_ranks in zip(*ranks, strict=True)
    ]
    ratio, noise = (
        estimate([own / hand for own, hand, _ in times]),
        estimate([again / hand for _, hand, again in times]),
    )
    sent = [
        median(sum(each[side] for each in of_ranks) for of_ranks in zip(*ranks, strict=True))
        for side in (3, 4)
    ]
    carried = (
        f"{sent[1] / 1e6:8.2f} MB {sent[0] / sent[1]:5.3f} {'ok' if sent[0] <= BYTES * sent[1] else 'OVER'} {BYTES}"
        if sent[1]
        else ""
    )
    hand, own = 1e3 * median(one[1] for one in times), 1e3 * median(one[0] for one in times)
    return f"{workers} {micro_batches:2} {hand:8.2f} ms {own:8.2f} ms   {ratio} {'ok' if ratio.median <= TIME else 'OVER'} {TIME}   {noise}   {carried}"


def measure(cases: Sequence[tuple[int, int]], rounds: int, machines: Sequence[str] = ()) -> None:
    """Print a row for each case."""
    print(
        "W  M       FSDP2    Lockstep   time ratio [95 %]               A/A [95 %]             bytes, their ratio"
    )
    for workers, micro_batches in cases:
        pool = Pool(workers, machines)
        try:
            print(line(workers, micro_batches, pool.run(workers, contest, micro_batches, rounds)), flush=True)
        finally:
            pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--mbit", type=int, default=200, help="of a slow link, a second and direction")
    options = parser.parse_args()
    os.environ.update(WORKER_ENVIRONMENT, OMP_NUM_THREADS="1")  # before a worker starts
    print("on one machine's loopback interface:")
    measure(NEAR, options.rounds)
    reason = can_simulate(slow=True)
    if reason is not None:
        print(f"no slow links: {reason}")
        return
    print(f"each worker on a link of {options.mbit} Mbit/s:")
    with switched(max(workers for workers, _ in FAR), options.mbit) as machines:
        measure(FAR, options.rounds, [name for name, _ in machines])


if __name__ == "__main__":
    main()
