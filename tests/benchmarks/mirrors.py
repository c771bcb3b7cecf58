"""What mirrors cost: a step of the byte-level GPT of `jobs/stdlib_gpt`, beside one whose state is sharded and not mirrored; and what a lost worker costs.

The workers take a step of the one and of the other in turn, so that a busy machine slows both. A mirrored step also keeps its start.

A worker is killed just before it updates, `--losses` times, each in a run of its own on one worker more. Told is the time of that step and the next one,
less what two steps take with the workers that are left: so it includes what the step had done before the loss. Beside it, the same without sharding.

    python -m tests.benchmarks.mirrors [--workers N] [--steps N] [--losses N] [--sharding optimizer|full]
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import ExitStack, closing
from itertools import islice, pairwise
from statistics import median
from typing import Any, NamedTuple

import torch

from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.communication.group import Group
from lockstep.job.loading import load_job
from lockstep.record.events.union import tell_nobody
from lockstep.spec.loading import load_spec
from lockstep.training.determinism import determinism
from lockstep.training.observe.worker_memory import bytes_before, optimizer_bytes
from lockstep.training.setup import prepare
from lockstep.training.worker_environment import WORKER_ENVIRONMENT
from tests.benchmarks.agreement import document
from tests.distributed.pool import Pool
from tests.distributed.survivors import Fall, outlive

FALL, STEPS = 6, 12
"""The step in which a worker is lost, and how many the run has."""


class Costs(NamedTuple):
    """What the steps of one kind took on a worker, and the bytes that it has of the optimizer's state."""

    seconds: list[float]
    processor_s: list[float]
    optimizer_bytes: int


def measured(steps: int, sharding: str) -> tuple[Costs, Costs]:
    """The costs without mirrors, and with them."""
    runs = []
    with determinism("strict", 1), ExitStack() as stack:
        for mirror in (False, True):
            spec = load_spec(document(sharding=sharding, faults={"mirror": mirror}))
            job = load_job(spec.job.use, spec.job.params)
            run = prepare(spec, job, Group.join(torch.device("cpu")), tell_nobody, AttemptOrigin())
            run.step.keeps_start = True
            runs.append(
                (run, stack.enter_context(closing(run.loader())), islice(run.ahead(over=False), steps))
            )
        costs = [Costs([], [], 0), Costs([], [], 0)]
        for positions in zip(*(ahead for *_, ahead in runs), strict=True):
            for cost, (run, batches, _), position in zip(costs, runs, positions, strict=True):
                run.group.gather(None)
                began, began_cpu = time.perf_counter(), time.process_time()
                run.step(position, batches)
                cost.seconds.append(time.perf_counter() - began)
                cost.processor_s.append(time.process_time() - began_cpu)
        plain, mirrored = (
            cost._replace(optimizer_bytes=optimizer_bytes(run.state.optimizer) + bytes_before(run.state))
            for cost, (run, *_) in zip(costs, runs, strict=True)
        )
    return plain, mirrored


def loss_s(workers: int, changes: dict[str, Any]) -> tuple[float, float]:
    """What the loss of one of so many workers costs beyond a step of those that are left, and such a step, in seconds."""
    run = document(length={"steps": STEPS}, **changes)
    ended = outlive(run, workers, [Fall(workers - 1, FALL, "update")]).ended
    steps = [later - earlier for earlier, later in pairwise(ended)]  # of step 2 and so on
    step_s = median(steps[FALL:])
    # Where no state is sharded the others can end the step, and notice in the next one.
    return sum(steps[FALL - 2 : FALL]) - 2 * step_s, step_s


def tell_losses(workers: int, rounds: int, sharding: str) -> None:
    """What lost workers cost, of this sharding with mirrors and of none, in turn."""
    kinds: dict[str, dict[str, Any]] = {
        "sharding: none": {},
        f"sharding: {sharding}, mirrored": {"sharding": sharding, "faults": {"mirror": True}},
    }
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, changes in kinds.items():
            costs[name].append(loss_s(workers, changes))
    for name, pairs in costs.items():
        lost, step = ([pair[i] for pair in pairs] for i in range(2))
        print(
            f"{name}: one of {workers} workers lost costs {median(lost):.2f} s beyond a step of {median(step):.2f} s "
            f"(median of {rounds}; {min(lost):.2f} to {max(lost):.2f})"
        )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--losses", type=int, default=5, help="how many workers are lost of each kind")
    options.add_argument("--sharding", choices=["optimizer", "full"], default="optimizer")
    arguments = options.parse_args()
    os.environ |= WORKER_ENVIRONMENT
    pool = Pool(arguments.workers)
    try:
        by_rank = pool.run(arguments.workers, measured, arguments.steps, arguments.sharding)
    finally:
        pool.close()
    plain, mirrored = by_rank[0]
    seconds = [cost.seconds[2:] for cost in (plain, mirrored)]
    ratio = median(second / first for first, second in zip(*seconds, strict=True))
    print(
        f"a step without mirrors: {1e3 * median(seconds[0]):.1f} ms, with: {1e3 * median(seconds[1]):.1f} ms"
    )
    print(f"median ratio: {ratio:.4f}, {100 * (ratio - 1):.1f} % more")
    least = [sum(min(pair[i].processor_s[2:]) for pair in by_rank) for i in range(2)]
    print(
        f"processor time of all workers, least of each: {1e3 * least[0]:.1f} ms without, {1e3 * least[1]:.1f} ms with, "
        f"{100 * (least[1] / least[0] - 1):.1f} % more"
    )
    print(
        f"the optimizer's state on rank 0: {plain.optimizer_bytes:,} bytes without, {mirrored.optimizer_bytes:,} with"
    )
    if arguments.losses:
        tell_losses(arguments.workers + 1, arguments.losses, arguments.sharding)


if __name__ == "__main__":
    main()
