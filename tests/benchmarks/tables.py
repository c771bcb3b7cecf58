"""Samples a second from a Parquet table, beside peers, and the memory that it takes. Run by `make bench`.

2 M rows of 64 float32 numbers, two workers, global batch 8192, a small network. In every round each side trains for
the same number of steps in the same two processes, in turn; a side's rate is that of its steps after the first ones.

* DataLoader: a hand-written DDP loop with `DistributedSampler` and `DataLoader` over the rows in memory
* gather: the same loop without any loader: `torch.index_select` from a tensor in memory by a ready permutation
* Lockstep: `fit` on jobs.tabular, the table in memory that both workers share
* Lockstep, blocks: the same with a bound of a quarter of the table, read by row group (data.shuffle=blocks)

    python -m tests.benchmarks.tables [--quick] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.parquet as pq
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from jobs.tabular.sample import GROUP_ROWS, write_sample
from lockstep.data import node_folder
from lockstep.data.order import WINDOW
from lockstep.job import load_job
from lockstep.spec import Spec, load_spec
from lockstep.training.determinism import WORKER_ENVIRONMENT
from lockstep.training.group import Group
from lockstep.training.loop import fit
from tests.benchmarks import handwritten
from tests.distributed.pool import Pool

FEATURES, GLOBAL, WORKERS = 64, 8192, 2

WARM_UP = 10
"""Steps that are left out of a rate."""

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


class Timed:
    """A record that notes when each step ended."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.waited = 0.0

    def step(self, row: Any) -> None:
        self.at.append(time.perf_counter())
        self.waited += row.data_wait_s if len(self.at) > WARM_UP else 0.0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: False


def lockstep(folder: str, steps: int, memory_mb: float | None) -> dict[str, float]:
    """`fit` itself, whole. Its memory is what it takes beyond the same run on a table of two steps."""
    few = spec_of(f"{folder}/few", 2)
    fit(few, load_job(few.job.use, few.job.params), Group.join(torch.device("cpu")), Timed())
    data = {"shuffle": "full"} if memory_mb is None else {"shuffle": "blocks", "window": window(memory_mb)}
    spec = spec_of(f"{folder}/all", steps, data=data, memory_mb=memory_mb)
    record, memory = Timed(), Memory()
    with memory:
        fit(spec, load_job(spec.job.use, spec.job.params), Group.join(torch.device("cpu")), record)
    taken = record.at[-1] - record.at[WARM_UP - 1]
    return {"rate": GLOBAL * (steps - WARM_UP) / taken, "waited": record.waited / taken, **memory.figures()}


def window(memory_mb: float) -> int:
    """As many row groups as are mixed by default, or what a small bound has room for, twice."""
    group_mb = GROUP_ROWS * (FEATURES + 1) * 4 / 2**20
    return min(WINDOW, int(memory_mb / group_mb / 2))


def by_hand(
    folder: str, steps: int, batches: Callable[[Tensor, Tensor], Iterator[tuple[Tensor, Tensor]]]
) -> float:
    torch.set_num_threads(1)
    spec = spec_of(f"{folder}/all", steps)
    torch.manual_seed(17)
    model = load_job(spec.job.use, spec.job.params).model()
    wrapped, optimizer = handwritten.in_ddp(model), handwritten.adamw(model, spec)
    given, began = batches(*in_memory(folder)), 0.0
    for step in range(steps):
        if step == WARM_UP:
            dist.barrier()
            began = time.perf_counter()
        x, y = next(given)
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(wrapped(x).squeeze(1), y)
        loss.backward()
        optimizer.step()
        loss.item()
    return GLOBAL * (steps - WARM_UP) / (time.perf_counter() - began)


def data_loader(folder: str, steps: int) -> dict[str, float]:
    def batches(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        data = TensorDataset(x, y)
        sampler = DistributedSampler(data, seed=17, drop_last=True)
        for epoch in range(1000):
            sampler.set_epoch(epoch)
            yield from DataLoader(data, GLOBAL // WORKERS, sampler=sampler, drop_last=True)

    return {"rate": by_hand(folder, steps, batches)}


def gather(folder: str, steps: int) -> dict[str, float]:
    def batches(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for epoch in range(1000):
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(17 + epoch))
            own = order[dist.get_rank() :: WORKERS].contiguous()
            for ids in own.split(GLOBAL // WORKERS):
                yield x.index_select(0, ids), y.index_select(0, ids)

    return {"rate": by_hand(folder, steps, batches)}


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

    def figures(self) -> dict[str, float]:
        return {"own": self.own - self.before, "shared": self.shared}

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


def measure(folder: str, table_mb: float, steps: int, rounds: int) -> dict[str, Any]:
    sides: dict[str, tuple[Any, ...]] = {
        "Lockstep": (lockstep, folder, steps, None),
        "Lockstep, blocks": (lockstep, folder, steps, table_mb / 4),
        "DataLoader": (data_loader, folder, max(WARM_UP + 10, steps // 4)),
        "gather": (gather, folder, steps),
    }
    rows: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for turn in range(rounds):
        order = list(sides) if turn % 2 == 0 else list(sides)[::-1]
        for side in order:
            pool = Pool(WORKERS)  # fresh processes: what one side leaves in memory is no other's
            try:
                ranks = pool.run(WORKERS, *sides[side])
            finally:
                pool.close()
            row = {"rate": min(rank["rate"] for rank in ranks)}
            if "own" in ranks[0]:
                row["memory"] = sum(rank["own"] for rank in ranks) + max(rank["shared"] for rank in ranks)
                row["shared"] = max(rank["shared"] for rank in ranks)
                row["waited"] = max(rank["waited"] for rank in ranks)
            rows[side].append(row)
            print(f"round {turn + 1}: {told(side, row)}", flush=True)
    return {"table_mb": table_mb, "steps": steps, "rows": rows}


def told(side: str, row: Mapping[str, float]) -> str:
    more = ""
    if "memory" in row:
        more = (
            f", {row['memory'] / 2**20:.0f} MiB at most on the node ({row['shared'] / 2**20:.0f} shared), "
            f"{row['waited']:.1%} of the time spent waiting for data"
        )
    return f"{side}: {row['rate'] / 1e3:.0f} k samples/s{more}"


def summary(result: Mapping[str, Any]) -> Iterator[str]:
    rows = result["rows"]
    rates = {side: [row["rate"] for row in rows[side]] for side in rows}

    def line(what: str, ratios: list[float], wanted: float, *, at_most: bool = False) -> str:
        found = median(ratios)
        held = found <= wanted if at_most else found >= wanted
        every = " ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
        return f"{what}: {found:.2f} ({every}), wanted {'at most' if at_most else 'at least'} {wanted} {'ok' if held else 'MISSED'}"

    def pairs(one: str, other: str) -> list[float]:
        return [a / b for a, b in zip(rates[one], rates[other], strict=True)]

    memory = [row["memory"] / 2**20 / result["table_mb"] for row in rows["Lockstep"]]
    yield line("Lockstep / DDP with DataLoader", pairs("Lockstep", "DataLoader"), WANTED["DataLoader"])
    yield line("Lockstep / gather from memory", pairs("Lockstep", "gather"), WANTED["gather"])
    yield line("blocks from a quarter / in memory", pairs("Lockstep, blocks", "Lockstep"), WANTED["blocks"])
    yield line("peak memory of the node / table", memory, WANTED["memory"], at_most=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="an eighth of the rows, one round")
    parser.add_argument("--rounds", type=int, help="rounds, 3 by default")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    options = parser.parse_args()
    rows, rounds = (250_000, 1) if options.quick else (2_000_000, 3)
    rounds = options.rounds or rounds
    os.environ.update(WORKER_ENVIRONMENT, OMP_NUM_THREADS="1")  # before a worker starts
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        write_sample(Path(folder, "all"), rows, FEATURES)
        write_sample(Path(folder, "few"), 2 * GLOBAL, FEATURES)
        steps = max(2 * WARM_UP, 2 * rows // GLOBAL)
        result = measure(folder, rows * (FEATURES + 1) * 4 / 2**20, steps, rounds)
    for line in summary(result):
        print(line)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
