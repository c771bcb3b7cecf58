"""Time of a Lockstep step against the step of a hand-written DistributedDataParallel loop, and against the least that a step can take. Run by `make bench`.

`fit` itself is measured, whole. It runs into a record that counts its steps; after each block of them the record
runs blocks of other steps before it returns: two of hand-written ones, from two instances of one loop, and one of `limit.py`. So all sides share the
processes, the gloo group, the one intra-op thread, the environment and the strict determinism flags that `fit`
sets; they take micro-batches of the same shape from the same dataset, and whatever slows the machine down for
longer than a block slows all of them. Lockstep over the first loop is the ratio; the second loop over the first
is the noise (A/A); Lockstep over `limit.py` is what is left to gain. Of each, the median over the rounds and a 95 % interval of it by order statistics.

    python -m tests.benchmarks.step_time [--quick] [--json FILE] [--only SUBSTRING]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jobs.tabular.sample import write_sample
from lockstep.communication.group import Group
from lockstep.job.loading import load_job
from lockstep.record.events.union import Event, Started
from lockstep.record.ledger.rows import StepRow
from lockstep.spec.loading import load_spec
from lockstep.training.driver_requests import NoRequests
from lockstep.training.loop import fit
from lockstep.training.worker_environment import WORKER_ENVIRONMENT
from tests.benchmarks import handwritten
from tests.benchmarks.handwritten import MeanLoss
from tests.benchmarks.limit import Limit, gathered_from
from tests.benchmarks.programs import TABLE, rows_in_memory, two_classes
from tests.benchmarks.tables import FEATURES
from tests.distributed.pool import Pool

BLOCK_S = 0.06
"""Seconds of a block, about: long enough to bury the caches' change of hands, short enough that noise hits all."""

ROWS = 500_000
"""Rows of the table."""

WARM_UP = 10
"""Steps that each side takes before the first round."""


@dataclass(frozen=True)
class Case:
    """One contest. `mean_loss` is the hand-written loss; `wanted` the ratio to the loop by hand that is wanted, None where none is."""

    name: str
    workers: int
    reduction: str
    wanted: float | None
    job: str
    batch: tuple[int, int]
    mean_loss: MeanLoss
    params: Mapping[str, Any] = field(default_factory=dict)
    of_limit: float | None = None
    """The ratio to `limit.py` that is wanted."""
    tensors: Callable[[], tuple[Tensor, Tensor]] | None = None
    """The others' data, where the job's own cannot be indexed by them."""


def cases() -> Iterator[Case]:
    """The tiny MLP, the GPT and rows of a table, by workers, micro-batches and reduction."""
    for workers, micro_batches in ((2, 2), (2, 8), (1, 2), (1, 8), (4, 4), (4, 8)):
        for reduction in ("native", "exact"):
            yield Case(
                f"mlp M={micro_batches}",
                workers,
                reduction,
                1.05 if workers == 2 else None,
                "tests.benchmarks.mlp:MLP",
                (256, 256 // micro_batches),
                handwritten.classification,
                of_limit={1: 1.25, 2: 1.15}.get(workers) if micro_batches == 2 else None,
            )
    for reduction in ("native", "exact"):
        yield Case(
            "gpt M=8",
            2,
            reduction,
            1.02,
            "jobs.stdlib_gpt.job:StdlibGPT",
            (32, 4),
            handwritten.language,
            {"corpus_bytes": 400_000},
            of_limit=1.02,
        )
    table = {"train": f"{os.environ.get(TABLE, '')}/all", "evaluation": None, "inputs": FEATURES}
    for workers in (1, 2, 4):
        yield Case(
            "rows M=4",
            workers,
            "exact",
            None,
            "jobs.tabular.job:Tabular",
            (8192, 2048),
            two_classes,
            table,
            of_limit=1.03 if workers == 2 else None,
            tensors=rows_in_memory,
        )


# --- in the workers ---------------------------------------------------------------------------------------


SIDES = ("lockstep", "handwritten", "again", "limit")


class Contest:
    """What `fit` tells: it times its blocks of steps, and runs the hand-written ones between them.

    `times` has a row a round: seconds of a step of each of SIDES.
    """

    def __init__(self, loops: Sequence[Iterator[float]], block: int) -> None:
        """Before `fit`, which hides the default process group: the loops have their first step behind them."""
        self.loops = loops
        self.block = block
        self.world = dist.group.WORLD
        self.times: list[tuple[float, ...]] = []
        self._steps = -WARM_UP
        self._began = 0.0

    def tell(self, event: Event) -> None:
        if isinstance(event, Started):
            for loop in self.loops:
                steps(loop, WARM_UP, self.world)
        if not isinstance(event, StepRow):
            return
        self._steps += 1
        if self._steps == self.block:
            self._round(time.perf_counter() - self._began)
        if self._steps in (0, self.block):
            self._steps = 0
            dist.barrier(self.world)
            self._began = time.perf_counter()

    def _round(self, own: float) -> None:
        """The loops take turns in going first: none is always nearer to Lockstep's block."""
        count = len(self.loops)
        taken = [0.0] * count
        for i in range(count):
            turn = (i + len(self.times)) % count
            taken[turn] = steps(self.loops[turn], self.block, self.world)
        self.times.append((own / self.block, *(seconds / self.block for seconds in taken)))


def steps(loop: Iterator[float], count: int, world: Any) -> float:
    """Take `count` steps of a loop over the process group `world`; the seconds they took."""
    dist.barrier(world)
    began = time.perf_counter()
    for _ in range(count):
        next(loop)
    return time.perf_counter() - began


def contest(case: Case, rounds: int) -> list[tuple[float, ...]]:
    """One worker's part of a contest: seconds of a step, a row a round (see Contest)."""
    torch.set_num_threads(1)
    document = {
        "job": {"use": case.job, "params": dict(case.params)},
        "seed": 17,
        "batch": {"global": case.batch[0], "micro": case.batch[1]},
        "optimizer": {"lr": 1e-3},
        "clip_norm": 1.0,
        "reduction": case.reduction,
        "evaluate": {"every": {"steps": 1_000_000}},
    }
    spec = load_spec(document)
    job = load_job(spec.job.use, spec.job.params)
    tensors = None if case.tensors is None else case.tensors()
    loops = [handwritten.training(spec, job, case.mean_loss, tensors) for _ in range(2)]
    torch.manual_seed(spec.seed)
    loops.append(iter(Limit(spec, job.model(), case.mean_loss, *gathered_from(job, tensors))))
    block = min(map(block_length, loops))
    spec = load_spec(document, [f"length.steps={WARM_UP + rounds * block}"])
    record = Contest(loops, block)
    fit(spec, job, Group.join(torch.device("cpu")), record.tell, NoRequests())
    return record.times


def block_length(loop: Iterator[float]) -> int:
    """Steps that take BLOCK_S, at least three; the same on every rank."""
    steps(loop, WARM_UP, dist.group.WORLD)
    step_s = [steps(loop, 3, dist.group.WORLD) / 3 for _ in range(5)]
    agreed = torch.tensor(median(step_s))
    dist.broadcast(agreed, src=0)
    return max(3, round(BLOCK_S / float(agreed)))


# --- in the driver ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A median and its 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:5.3f} [{self.low:5.3f}, {self.high:5.3f}]"


def estimate(values: Sequence[float]) -> Estimate:
    """The median and the order statistics that hold it with 95 % confidence (David & Nagaraja 2003, 7.1)."""
    ordered, n = sorted(values), len(values)
    below, outside = 0, math.comb(n, 0) / 2**n
    while below < (n - 1) // 2 and outside <= 0.025:
        below += 1
        outside += math.comb(n, below) / 2**n
    skip = max(0, below - 1)
    return Estimate(median(ordered), ordered[skip], ordered[n - 1 - skip])


def measure(pool: Pool, case: Case, rounds: int) -> dict[str, Any]:
    """Hold one contest and sum it up. A block takes as long as on the slowest rank."""
    ranks = pool.run(case.workers, contest, case, rounds)
    times = [{side: max(rank[r][i] for rank in ranks) for i, side in enumerate(SIDES)} for r in range(rounds)]

    def ratio(side: str, to: str) -> dict[str, float]:
        return asdict(estimate([row[side] / row[to] for row in times]))

    return {
        "name": case.name,
        "workers": case.workers,
        "reduction": case.reduction,
        "rounds": rounds,
        "ms": {side: 1e3 * median(row[side] for row in times) for side in SIDES},
        "ratio": ratio("lockstep", "handwritten"),
        "a_a": ratio("again", "handwritten"),
        "of_limit": ratio("lockstep", "limit"),
        "wanted": {"ratio": case.wanted, "of_limit": case.of_limit},
    }


HEADER = (
    f"{'case':8} {'W':>1} {'reduction':9} {'by hand':>9} {'Lockstep':>9} {'limit':>9}   {'ratio [95 %]':20}   {'A/A [95 %]':20}   "
    f"{'of the limit [95 %]':20}   wanted"
)


def line(result: Mapping[str, Any]) -> str:
    """One result as a row of the table."""
    ms = result["ms"]
    verdicts = [
        f"{'ok' if result[what]['median'] <= wanted else 'OVER'} {wanted:.2f}"
        for what, wanted in result["wanted"].items()
        if wanted is not None
    ]
    return (
        f"{result['name']:8} {result['workers']} {result['reduction']:9} {ms['handwritten']:6.2f} ms {ms['lockstep']:6.2f} ms {ms['limit']:6.2f} ms   "
        f"{'   '.join(str(Estimate(**result[what])) for what in ('ratio', 'a_a', 'of_limit'))}   {', '.join(verdicts)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two workers alone, the fewest rounds")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    parser.add_argument(
        "--only", default="", help="only the cases whose row begins with this, as in 'mlp M=8 2'"
    )
    options = parser.parse_args()
    rounds = 30 if options.quick else 60
    os.environ.update(WORKER_ENVIRONMENT, OMP_NUM_THREADS="1")  # before a worker starts
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as table:
        os.environ[TABLE] = table
        chosen = [
            case
            for case in cases()
            if f"{case.name} {case.workers} {case.reduction}".startswith(options.only)
            and (case.workers == 2 or not options.quick)
        ]
        if any(case.tensors for case in chosen):
            write_sample(Path(table, "all"), ROWS, FEATURES)
        print(HEADER)
        pool = Pool(max(case.workers for case in chosen))
        results = []
        try:
            for case in chosen:
                results.append(measure(pool, case, rounds))
                print(line(results[-1]), flush=True)
        finally:
            pool.close()
    if options.json is not None:
        options.json.write_text(
            json.dumps({"rounds": rounds, "torch": torch.__version__, "cases": results}, indent=1)
        )


if __name__ == "__main__":
    main()
