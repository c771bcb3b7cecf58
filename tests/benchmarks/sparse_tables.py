"""A table of ten million rows of 16 numbers whose gradients are sparse, on two workers: time, memory and messages of a step. Run by `make bench`.

Each of four micro-batches touches some thousands of rows. Beside the run stands the loop by hand, without any other worker: the same
lookups, backward and SGD with all samples in one batch. Memory is what torch's allocator gives beyond what was there, in the third step and those
after it; messages are what a worker gives to the others. Last, what one digest of the whole table takes, which a step has each
`record.digest_every` steps and at checkpoints.

    python -m tests.benchmarks.sparse_tables [--rows 10000000]
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep
from lockstep.communication.group import Group
from lockstep.job.loading import load_job
from lockstep.record.events.union import Event
from lockstep.record.ledger.rows import StepRow
from lockstep.spec.loading import load_spec
from lockstep.training.driver_requests import NoRequests
from lockstep.training.integrity.digests import Digester
from lockstep.training.loop import fit
from lockstep.training.worker_environment import WORKER_ENVIRONMENT
from tests.distributed.pool import Pool
from tests.live_bytes import counted

WIDTH, STEPS, GLOBAL, MICRO = 16, 12, 4096, 1024
WORKERS, FIRST = 2, 2
"""Workers, and the steps that are not counted."""


class Lookups(lockstep.Job):
    """Each sample looks up one row, and learns a number from it."""

    class Params(lockstep.Params):
        rows: int = 10_000_000

    params: Params

    def model(self) -> nn.Module:
        table = nn.Embedding(
            self.params.rows, WIDTH, sparse=True, _weight=torch.zeros(self.params.rows, WIDTH)
        )
        return nn.Sequential(table, nn.Linear(WIDTH, 1))

    def train_data(self) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(self.params.rows, (GLOBAL * STEPS,), generator=generator)
        return TensorDataset(ids, torch.randn(len(ids), generator=generator))

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        ids, y = batch
        return lockstep.Loss((model(ids)[:, 0] - y).square().sum(), len(y))


def document(rows: int) -> dict[str, Any]:
    return {
        "job": {"use": "tests.benchmarks.sparse_tables:Lookups", "params": {"rows": rows}},
        "batch": {"global": GLOBAL, "micro": MICRO},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "clip_norm": 1.0,
        "rehearsal": "off",
        "record": {"digest_every": None, "observe_every": None},
        "determinism": {"recheck": 0},
    }


class Steps(NoRequests):
    """When each step was told of; counts the memory from the second step on."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.sent = 0
        self._counting = counted()

    def tell(self, event: Event) -> None:
        if isinstance(event, StepRow):
            self.at.append(time.perf_counter())
            if event.step == FIRST:
                self.found, self.sent = self._counting.__enter__(), 0
            if event.step == STEPS:
                self._counting.__exit__(None, None, None)


def of_run(rows: int) -> tuple[float, float, float]:
    """Seconds of a step, bytes at the most within one, bytes sent in one."""
    spec, steps, group = load_spec(document(rows)), Steps(), Group.join(torch.device("cpu"))
    swap = Group.swap

    def counting(group: Group, message: Tensor, *rest: Any) -> Any:
        steps.sent += message.nbytes * (group.size - 1)
        return swap(group, message, *rest)

    with mock.patch.object(Group, "swap", counting):
        fit(spec, load_job(spec.job.use, spec.job.params), group, steps.tell, steps)
    group.close()
    counted_steps = STEPS - FIRST
    return (steps.at[-1] - steps.at[FIRST - 1]) / counted_steps, steps.found.peak, steps.sent / counted_steps


def by_hand(rows: int) -> tuple[float, float]:
    """Seconds of a step, and bytes at the most within one, of all samples of a step in one batch."""
    job = Lookups(Lookups.Params(rows=rows))
    model, (ids, y) = job.model(), job.train_data().tensors  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(i: int) -> None:
        some = slice(i * GLOBAL, (i + 1) * GLOBAL)
        optimizer.zero_grad()
        ((model(ids[some])[:, 0] - y[some]).square().mean()).backward()
        optimizer.step()

    for i in range(FIRST):
        step(i)
    with counted() as found:
        began = time.perf_counter()
        for i in range(FIRST, STEPS):
            step(i)
        taken = time.perf_counter() - began
    return taken / (STEPS - FIRST), found.peak


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=10_000_000)
    rows = parser.parse_args().rows
    os.environ.update(WORKER_ENVIRONMENT, OMP_NUM_THREADS="1")  # before a worker starts
    torch.set_num_threads(1)
    table = rows * WIDTH * 4
    touched = GLOBAL * (WIDTH * 4 + 8)
    print(f"table {table / 1e6:.0f} MB, rows that a step touches {touched / 1e6:.2f} MB")
    seconds, peak = by_hand(rows)
    print(f"by hand, one worker   {1e3 * seconds:8.1f} ms   {peak / 1e6:8.2f} MB at the most")
    pool = Pool(WORKERS)
    try:
        found = pool.run(WORKERS, of_run, rows)
    finally:
        pool.close()
    seconds, peak, sent = (max(column) for column in zip(*found, strict=True))
    print(
        f"lockstep, two workers {1e3 * seconds:8.1f} ms   {peak / 1e6:8.2f} MB at the most, {sent / 1e6:.2f} MB sent"
    )
    digester, weights = Digester(torch.device("cpu")), torch.ones(rows, WIDTH)
    began = time.perf_counter()
    digester.digest({"table": weights})
    print(f"one digest of the table {1e3 * (time.perf_counter() - began):6.1f} ms")


if __name__ == "__main__":
    main()
