"""What a step costs, by what it is spent on, beside the least that one can take (`limit.py`). Run by `make bench`.

`fit` trains, and the functions that make up its steps are timed, each without what it calls that is timed too. What is left of a step is the last
row but one. A row is the lower quartile over the steps: other programs of the machine only ever add time. The clock itself adds some 0.4 us to each call.

    python -m tests.benchmarks.step_costs [--only 'mlp 1'] [--steps N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from itertools import islice
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.nn.parallel import DistributedDataParallel

from jobs.tabular.sample import write_sample
from lockstep.communication.group import Group
from lockstep.data import micro_batches as fetching
from lockstep.data.loader import Loader
from lockstep.record.events.union import Event
from lockstep.record.ledger.rows import StepRow
from lockstep.training import loop as training_loop
from lockstep.training.clock import Clock
from lockstep.training.determinism import determinism
from lockstep.training.driver_requests import NoRequests
from lockstep.training.identity_inputs import Inputs
from lockstep.training.integrity.agreement import Agreement
from lockstep.training.integrity.resume_check.spare_check import SpareCheck
from lockstep.training.integrity.step_digests import StepDigests
from lockstep.training.loop import fit
from lockstep.training.module_modes import Modes
from lockstep.training.observe.observations import Watch
from lockstep.training.observe.rank_speed import Pace
from lockstep.training.step import accumulation, forward_backward, optimizer_step
from lockstep.training.step.buffers import StepBuffers
from lockstep.training.step.learning_rate import Rates
from lockstep.training.step.norm import GradientNorm
from lockstep.training.step.optimizer_step import Stepper
from lockstep.training.step.parameters import ModuleWatch, ParameterWatch
from lockstep.training.step.phase_step import LossModule, PhaseStep
from lockstep.training.step.precision import Precision
from lockstep.training.step.reduction import Reduction, TreeSum
from lockstep.training.step.step_exchange import Exchange
from lockstep.training.torch_settings import Settings
from lockstep.training.worker_environment import WORKER_ENVIRONMENT
from tests.benchmarks.limit import Limit, gathered_from
from tests.benchmarks.programs import SEED, TABLE, cases
from tests.benchmarks.tables import FEATURES
from tests.distributed.pool import Pool

WARM_UP = 20
"""Steps that are not counted."""

TABLE_ROWS = 500_000

OWNERS: dict[str, Sequence[tuple[Any, str]]] = {
    "keys": [(forward_backward, "seed_all"), (fetching, "seed_all")],
    "fetch": [(Loader, "__next__")],
    "forward": [(LossModule, "__call__")],
    "DDP": [(DistributedDataParallel, "__call__")],
    "backward": [(LossModule, "backward"), (PhaseStep, "forget_gradients")],
    "partial sums": [(TreeSum, "add"), (TreeSum, "close"), (accumulation, "add_in_place")],
    "exchange": [
        *((Reduction, name) for name in ("__call__", "begin")),
        *((Exchange, name) for name in ("put", "flag", "vote", "close", "send", "read")),
    ],
    "norm": [(GradientNorm, "__call__"), (Stepper, "_take_mean"), (optimizer_step, "clip_gradients")],
    "update": [(Precision, "update"), (Rates, "set")],
    "digests": [
        *((StepDigests, name) for name in ("begin", "next_micro_batch", "note", "gather", "taken", "compare")),
        (Agreement, "check"),
    ],
    "row and events": [(Clock, "timed"), (training_loop, "note_step")],
    "watches": [
        *((ParameterWatch, name) for name in ("note", "check")),
        *((StepBuffers, name) for name in ("keep", "resized", "keep_late", "restore", "end_step", "check_unseen")),
        *((kind, "check") for kind in (ModuleWatch, Settings)),
        *((Watch, name) for name in ("begin", "end")),
        (Modes, "restore"), (Settings, "put_back"), (Inputs, "look"), (SpareCheck, "stepped"), (Pace, "add"),
    ],
}  # fmt: skip
"""The functions that a step calls, each with where its name is looked up, by what they are for."""

OF_LIMIT = {
    "fetch": "fetch",
    "forward": "forward",
    "backward": "backward",
    "exchange": "exchange",
    "norm": "clip",
    "update": "update",
}
"""The methods of `Limit` that are for the same."""

REST, WHOLE = "rest", "step"


class Work(NamedTuple):
    """A kind of work on some workers, `micro_batches` of them in a step."""

    case: str
    workers: int
    micro_batches: int

    def __str__(self) -> str:
        return f"{self.case} W={self.workers} M={self.micro_batches}"


WORKS = [
    *(Work("tiny", workers, max(2, workers)) for workers in (1, 2, 4)),
    *(Work("gpt", workers, 4) for workers in (1, 2, 4)),
    *(Work("rows", workers, max(2, workers)) for workers in (1, 2, 4)),
]


# --- in the workers ---------------------------------------------------------------------------------------


class Costs:
    """Times functions, each without those of them that it calls."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._within: list[float] = [0.0]
        """For each call under way, the seconds of those within it."""

    def timed(self, owner: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            self._within.append(0.0)
            began = time.perf_counter()
            try:
                return function(*args, **named)
            finally:
                took = time.perf_counter() - began
                self.seconds[owner] += took - self._within.pop()
                self._within[-1] += took
                self.calls[owner] += 1

        return call

    def taken(self, whole: float) -> dict[str, float]:
        """The seconds by owner since the last call, of `whole` seconds that have passed."""
        seconds = dict(self.seconds)
        self.seconds.clear()
        return {**seconds, REST: whole - sum(seconds.values())}


class Steps:
    """What each step took, by owner where it is timed inside."""

    def __init__(self, costs: Costs | None) -> None:
        self.costs = costs
        self.rows: list[dict[str, float]] = []
        self._began = 0.0

    def ended(self) -> None:
        whole = time.perf_counter() - self._began
        self.rows.append({WHOLE: whole} if self.costs is None else self.costs.taken(whole))
        self._began = time.perf_counter()

    def tell(self, event: Event) -> None:
        """What `fit` tells."""
        if isinstance(event, StepRow):
            self.ended()


@contextmanager
def timed_inside(costs: Costs) -> Iterator[None]:
    """Have the functions of OWNERS timed."""
    with ExitStack() as replaced:
        for owner, functions in OWNERS.items():
            for where, name in functions:
                replaced.enter_context(patch.object(where, name, costs.timed(owner, getattr(where, name))))
        yield


class Profile(NamedTuple):
    """Rows of a worker's seconds, one a step: whole ones of the limit and of Lockstep, and those that are timed inside, by owner."""

    limit: list[dict[str, float]]
    whole: list[dict[str, float]]
    limit_inside: list[dict[str, float]]
    inside: list[dict[str, float]]
    calls: dict[str, float]
    """How often functions of an owner are called in a step of Lockstep."""


def profile(work: Work, steps: int) -> Profile:
    """One worker's part."""
    torch.set_num_threads(1)
    case = cases()[work.case]
    job = case.job
    length = f"length.steps={WARM_UP + steps}"
    spec = case.spec(work.micro_batches, length, "checkpoint.every=null", "evaluate.every.steps=1000000")
    tensors = None if case.tensors is None else case.tensors()

    def lockstep(costs: Costs | None) -> list[dict[str, float]]:
        taken = Steps(costs)
        with nullcontext() if costs is None else timed_inside(costs):
            fit(spec, job, Group.join(torch.device("cpu")), taken.tell, NoRequests())
        return taken.rows[WARM_UP:]

    def least(costs: Costs | None) -> list[dict[str, float]]:
        torch.manual_seed(SEED)
        loop, taken = Limit(spec, job.model(), case.mean_loss, *gathered_from(job, tensors)), Steps(costs)
        if costs is not None:
            for owner, name in OF_LIMIT.items():
                setattr(loop, name, costs.timed(owner, getattr(loop, name)))
        for _ in islice(loop, WARM_UP + steps):
            taken.ended()
        return taken.rows[WARM_UP:]

    inside = Costs()
    with determinism("strict", 1):
        found = [least(None), lockstep(None), least(Costs()), lockstep(inside)]
    return Profile(*found, {owner: count / (WARM_UP + steps) for owner, count in inside.calls.items()})


# --- in the driver ----------------------------------------------------------------------------------------


def quartile(rows: Sequence[Mapping[str, float]], owner: str) -> float:
    """The lower quartile of an owner's milliseconds in a step."""
    return 1e3 * quantiles([row.get(owner, 0.0) for row in rows], n=4)[0]


def mean(rows: Sequence[Mapping[str, float]], owner: str) -> float:
    return 1e3 * fmean(row.get(owner, 0.0) for row in rows)


def table(profile: Profile) -> Iterator[str]:
    """A row an owner, the dearest first by what it costs more than the limit."""
    limit, own = profile.limit_inside, profile.inside
    costs = {owner: (quartile(limit, owner), quartile(own, owner)) for owner in [*OWNERS, REST]}
    yield f"  {'':15} {'limit':>8} {'Lockstep':>9} {'more':>7} {'mean':>7} {'calls':>6}"
    for owner, (least, taken) in sorted(costs.items(), key=lambda item: item[1][0] - item[1][1]):
        calls = f"{profile.calls[owner]:6.1f}" if owner in profile.calls else ""
        yield f"  {owner:15} {least:8.3f} {taken:9.3f} {taken - least:7.3f} {mean(own, owner):7.3f} {calls}"
    least, taken = (sum(pair[side] for pair in costs.values()) for side in (0, 1))
    yield f"  {'together':15} {least:8.3f} {taken:9.3f} {taken - least:7.3f}"
    least, taken = quartile(profile.limit, WHOLE), quartile(profile.whole, WHOLE)
    yield f"  {'not timed inside':15} {least:7.3f} {taken:9.3f} {taken - least:7.3f}   {taken / least:.3f} of the limit"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--only", default="", help="only the works whose name begins with this, as in 'tiny W=1'"
    )
    parser.add_argument("--steps", type=int, help="in place of 1000, or 60 of the GPT")
    parser.add_argument("--json", type=Path, help="write the tables here as well")
    options = parser.parse_args()
    os.environ.update(WORKER_ENVIRONMENT, OMP_NUM_THREADS="1")  # before a worker starts
    chosen = [work for work in WORKS if str(work).startswith(options.only)]
    kept: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        os.environ[TABLE] = folder
        if any(work.case == "rows" for work in chosen):
            write_sample(Path(folder, "all"), TABLE_ROWS, FEATURES)
        for work in chosen:
            pool = Pool(work.workers)
            try:
                ranks = pool.run(
                    work.workers, profile, work, options.steps or (60 if work.case == "gpt" else 1000)
                )
            finally:
                pool.close()
            kept[str(work)] = list(table(ranks[0]))
            print(f"{work}, ms a step of rank 0, load {os.getloadavg()[0]:.1f}:")
            print("\n".join(kept[str(work)]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
