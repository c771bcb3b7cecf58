"""Samples a second from a Parquet table, beside peers, and the memory that it takes. Run by `make bench`.

2 M rows of 64 float32 numbers, two workers, global batch 8192, a small network. `fit` is measured, whole, on
jobs.tabular: with the table in memory that both workers share, and with a bound of a quarter of the table, read by row
group (data.shuffle=blocks). Its record runs, after each block of its steps, as many of a hand-written DDP loop that
gathers rows from a tensor in memory, without any loader, and some of one with `DistributedSampler` and `DataLoader`:
in the same processes, so that what slows the machine down for longer than a block slows all of them.

    python -m tests.benchmarks.tables [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import pyarrow.parquet as pq
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from jobs.tabular.sample import GROUP_ROWS, write_sample
from lockstep.communication.group import Group
from lockstep.data import node_folder
from lockstep.data.order import WINDOW
from lockstep.job.loading import load_job
from lockstep.record.events.union import Event, Started
from lockstep.record.ledger.rows import StepRow
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec
from lockstep.training.determinism import WORKER_ENVIRONMENT
from lockstep.training.driver_requests import NoRequests
from lockstep.training.loop import fit
from tests.benchmarks import handwritten
from tests.distributed.pool import Pool

FEATURES, GLOBAL, WORKERS = 64, 8192, 2

WARM_UP = 10
"""Steps before the first round."""

BLOCK = 40
"""Steps of Lockstep in a round: ten times what its thread, where it has one, may fetch ahead while others run."""

STEPS = {"gather": BLOCK, "DataLoader": 4}
"""Steps of the others."""

WANTED = {"DataLoader": 3.0, "gather": 0.9, "blocks": 0.5, "memory": 1.3}


def spec_of(folder: str, steps: int, **more: Any) -> Spec:
    data = more.pop("data", {"shuffle": "full"})
    params = {"train": folder, "evaluation": None, "inputs": FEATURES, **more}
    return load_spec(
        {
            "job": {"use": "jobs.tabular.job:Tabular", "params": params},
            "seed": 17,
            "batch": {"global": GLOBAL, "micro": GLOBAL // WORKERS},
            "length": {"steps": steps},
            "optimizer": {"lr": 1e-3},
            "data": data,
            "checkpoint": {"every": None},
        }
    )


# --- in the workers ---------------------------------------------------------------------------------------


class Contest:
    """What `fit` tells: it times its blocks of steps, and runs the hand-written loops between them.

    `rows` has, for each round, the seconds of a step of each side.
    """

    def __init__(self, loops: Mapping[str, Iterator[None]]) -> None:
        self.loops = loops
        self.rows: list[dict[str, float]] = []
        self.waited = 0.0
        self._steps = -WARM_UP
        self._began = 0.0

    def tell(self, event: Event) -> None:
        if isinstance(event, Started):
            for side, loop in self.loops.items():
                taken(loop, STEPS[side])
        if isinstance(event, StepRow):
            self._step(event)

    def _step(self, row: StepRow) -> None:
        self._steps += 1
        if self._steps > 0:
            self.waited += row.data_wait_s
        if self._steps and self._steps % BLOCK == 0:
            row_s = {"Lockstep": (time.perf_counter() - self._began) / BLOCK}
            turn = -1 if len(self.rows) % 2 else 1  # neither of the others is always the one before Lockstep
            for side in list(self.loops)[::turn]:
                row_s[side] = taken(self.loops[side], STEPS[side])
            self.rows.append(row_s)
        if self._steps % BLOCK == 0:
            dist.barrier()
            self._began = time.perf_counter()


def taken(loop: Iterator[None], steps: int) -> float:
    """Seconds of a step of a hand-written loop."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        next(loop)
    return (time.perf_counter() - began) / steps


def contest(folder: str, rounds: int, memory_mb: float | None) -> tuple[list[dict[str, float]], float]:
    """The seconds of a step, a row a round, and the share of Lockstep's time that was spent waiting for data."""
    torch.set_num_threads(1)
    record = Contest({"gather": by_hand(folder, gathered), "DataLoader": by_hand(folder, loaded)})
    train(folder, WARM_UP + rounds * BLOCK, memory_mb, record)
    return record.rows, record.waited / (BLOCK * sum(row["Lockstep"] for row in record.rows))


def memory(folder: str, rounds: int, memory_mb: float | None) -> tuple[float, float]:
    """Bytes that a run takes beyond the same run on a table of two steps: of this process's own, and shared."""
    train(f"{folder}/few", 2, None, Contest({}), whole="")
    watched = Memory()
    with watched:
        train(folder, WARM_UP + BLOCK, memory_mb, Contest({}))
    return watched.own - watched.before, watched.shared


def train(folder: str, steps: int, memory_mb: float | None, record: Contest, whole: str = "/all") -> None:
    data = {"shuffle": "full"}
    if memory_mb is not None:
        data = {"shuffle": "blocks", "window": window(memory_mb)}
    spec = spec_of(folder + whole, steps, data=data, memory_mb=memory_mb)
    fit(
        spec,
        load_job(spec.job.use, spec.job.params),
        Group.join(torch.device("cpu")),
        record.tell,
        NoRequests(),
    )


def window(memory_mb: float) -> int:
    """As many row groups as are mixed by default, or what a small bound has room for, twice."""
    group_mb = GROUP_ROWS * (FEATURES + 1) * 4 / 2**20
    return min(WINDOW, int(memory_mb / group_mb / 2))


def by_hand(
    folder: str, batches: Callable[[Tensor, Tensor], Iterator[tuple[Tensor, Tensor]]]
) -> Iterator[None]:
    """A DDP loop without end: a step each time."""
    spec = spec_of(f"{folder}/all", 1)
    torch.manual_seed(17)
    model = load_job(spec.job.use, spec.job.params).model()
    wrapped, optimizer = handwritten.in_ddp(model), handwritten.adamw(model, spec)
    for x, y in batches(*in_memory(folder)):
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(wrapped(x).squeeze(1), y)
        loss.backward()
        optimizer.step()
        loss.item()
        yield


def loaded(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, seed=17, drop_last=True)
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from DataLoader(data, GLOBAL // WORKERS, sampler=sampler, drop_last=True)


def gathered(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for epoch in count():
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(17 + epoch))
        own = order[dist.get_rank() :: WORKERS].contiguous()
        for ids in own[: len(own) // (GLOBAL // WORKERS) * (GLOBAL // WORKERS)].split(GLOBAL // WORKERS):
            yield x.index_select(0, ids), y.index_select(0, ids)


def in_memory(folder: str) -> tuple[Tensor, Tensor]:
    table = pq.read_table(f"{folder}/all")
    x = table.column("features").combine_chunks().flatten().to_numpy().reshape(-1, FEATURES)
    return torch.tensor(x), torch.tensor(table.column("label").to_numpy())


class Memory:
    """The most memory that this process took of its own, and that the node's shared folder took, meanwhile, in bytes."""

    def __enter__(self) -> None:
        self.before, self.own, self.shared, self._over = anonymous(), 0, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self.own = max(self.own, anonymous())
            self.shared = max(self.shared, shared_bytes())


def anonymous() -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition("RssAnon:")[2].split()[0])


def shared_bytes() -> int:
    total = 0
    for folder, _, names in os.walk(node_folder.MEMORY / f"lockstep-{os.getuid()}"):
        for name in names:
            try:
                total += (Path(folder) / name).stat().st_blocks * 512
            except FileNotFoundError:
                continue  # a block that a worker has just deleted
    return total


# --- in the driver ----------------------------------------------------------------------------------------


def measure(folder: str, table_mb: float, rounds: int) -> dict[str, Any]:
    """Seconds of a step on the slower rank, a row a round, of both contests; the node's memory; the share of waiting."""
    found: dict[str, Any] = {"table_mb": table_mb}
    for kept, bound in (("memory", None), ("blocks", table_mb / 4)):
        own = in_fresh_processes(memory, folder, rounds, bound)
        ranks = in_fresh_processes(contest, folder, rounds, bound)
        found[kept] = {
            "rows": [
                {side: max(r[i][side] for r, _ in ranks) for side in ranks[0][0][i]} for i in range(rounds)
            ],
            "waited": max(waited for _, waited in ranks),
            "node_mb": (sum(o for o, _ in own) + max(shared for _, shared in own)) / 2**20,
            "shared_mb": max(shared for _, shared in own) / 2**20,
        }
        for line in told(kept, found[kept]):
            print(line, flush=True)
    return found


def in_fresh_processes(function: Callable[..., Any], *args: Any) -> list[Any]:
    """What one side leaves in memory is no other's."""
    pool = Pool(WORKERS)
    try:
        return pool.run(WORKERS, function, *args)
    finally:
        pool.close()


def told(kept: str, found: Mapping[str, Any]) -> Iterator[str]:
    for side in found["rows"][0]:
        yield f"{kept:7} {side:11} {GLOBAL / median(row[side] for row in found['rows']) / 1e3:6.0f} k samples/s"
    yield (
        f"{kept:7} {found['node_mb']:.0f} MiB at most on the node, {found['shared_mb']:.0f} of them shared; "
        f"{found['waited']:.1%} of the time spent waiting for data"
    )


def summary(found: Mapping[str, Any]) -> Iterator[str]:
    """Each wanted ratio: median, quartiles, verdict."""

    def ratios(kept: str, side: str) -> list[float]:
        return [row[side] / row["Lockstep"] for row in found[kept]["rows"]]

    def line(what: str, values: list[float], wanted: float) -> str:
        low, middle, high = quantiles(values, n=4) if len(values) > 1 else values * 3
        verdict = "ok" if middle >= wanted else "MISSED"
        return f"{what}: {middle:.2f} ({low:.2f} … {high:.2f}), wanted at least {wanted} {verdict}"

    in_memory_rate = median(ratios("memory", "gather"))
    blocks = [ratio / in_memory_rate for ratio in ratios("blocks", "gather")]
    node = found["memory"]["node_mb"] / found["table_mb"]
    yield line("Lockstep / DDP with DataLoader", ratios("memory", "DataLoader"), WANTED["DataLoader"])
    yield line("Lockstep / gather from memory", ratios("memory", "gather"), WANTED["gather"])
    yield line("blocks from a quarter / in memory, both by the gather loop", blocks, WANTED["blocks"])
    verdict = "ok" if node <= WANTED["memory"] else "MISSED"
    yield f"peak memory of the node / table: {node:.2f}, wanted at most {WANTED['memory']} {verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="an eighth of the rows, a few rounds")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    options = parser.parse_args()
    rows, rounds = (250_000, 4) if options.quick else (2_000_000, 90)
    os.environ.update(WORKER_ENVIRONMENT, OMP_NUM_THREADS="1")  # before a worker starts
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        write_sample(Path(folder, "all"), rows, FEATURES)
        write_sample(Path(folder, "few"), 2 * GLOBAL, FEATURES)
        found = measure(folder, rows * (FEATURES + 1) * 4 / 2**20, rounds)
    for line in summary(found):
        print(line)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
