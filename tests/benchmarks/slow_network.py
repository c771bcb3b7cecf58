"""The exact reduction beside gloo's own all-reduce on a network that is slow on purpose. Run by `make bench`.

Network namespaces are machines, with two to four ranks each, joined by links of 200 Mbit/s. In each process one DDP has the hook of
`reduction: exact`, another one none: gloo's all-reduce. Both have the same buckets, and take their backwards in turn.
Time is that of the slowest rank, of the median round; processor time is that of all ranks. Bytes are what the busiest machine's interface has sent, read from its counters
and headers included, beside the least that an all-reduce over N machines of G ranks can send from each: 2 (N - 1) / N of the gradients.

    python -m tests.benchmarks.slow_network [--rounds 7] [--mbit 200] [--only SUBSTRING] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from jobs.stdlib_gpt.job import GPT
from lockstep.communication.group import Group
from lockstep.communication.waits import COLLECTIVE_TIMEOUT
from lockstep.job.interface import Loss
from lockstep.plan import Plan
from lockstep.training.step.phase_step import named_hook
from lockstep.training.step.reduction import TreeReduction
from lockstep.training.step.step_exchange import Exchange
from tests.forked import forking
from tests.network import WIRE, can_simulate, enter, sent_bytes, switched

PORT = 29411
DDP: dict[str, Any] = {"gradient_as_bucket_view": True, "forward_sync_buffers": False}
ANSWER_S = 600
MODELS = ("communication", "gpt")


@dataclass(frozen=True)
class Case:
    """Ranks on machines, and what they back-propagate: `communication` is gradients that cost nothing to compute."""

    machines: int
    ranks_each: int
    model: str

    @property
    def name(self) -> str:
        return f"{self.model} {self.machines}x{self.ranks_each}"


CASES = [Case(m, g, model) for m, g in ((2, 2), (2, 4), (4, 2), (4, 4)) for model in MODELS]


class Flat(nn.Module):
    """16 MB of parameters in four tensors, whose gradients cost next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(1 << 20) for _ in range(4))

    def forward(self) -> Tensor:
        return torch.stack([part.sum() for part in self.parts]).sum()


class Language(nn.Module):
    """The GPT of jobs/stdlib_gpt, over tokens of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(depth=4, heads=4, head_width=32, context=128, dropout=0.0)
        self.tokens = torch.arange(4 * 129).remainder(97).reshape(4, 129)

    def forward(self) -> Tensor:
        outputs = self.gpt(self.tokens[:, :-1])
        return F.cross_entropy(outputs.flatten(0, 1).float(), self.tokens[:, 1:].flatten())


class Round(NamedTuple):
    """What a backward took on one rank. A machine's bytes are those of all its ranks."""

    seconds: float
    cpu_s: float
    sent: int


# --- in the ranks -----------------------------------------------------------------------------------------


def serve(rank: int, case: Case, name: str, address: str, rounds: int, pipe: Connection) -> None:
    """One rank: its seconds and its machine's bytes of each round, by side."""
    enter(name)
    os.environ.update(GLOO_SOCKET_IFNAME=WIRE, MASTER_ADDR=address, MASTER_PORT=str(PORT))
    torch.set_num_threads(1)
    world = case.machines * case.ranks_each
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT)
    try:
        group = Group.join(torch.device("cpu"))
        sides = {"exact": exact(case, group), "native": native(case, group)}
        found: dict[str, list[Round]] = {side: [] for side in sides}
        for i in range(rounds + 2):  # DDP lays its buckets out anew after the first
            for side, backward in sides.items():
                dist.barrier(group.channel)
                sent, cpu, began = sent_bytes(), time.process_time(), time.perf_counter()
                backward()
                took, cpu = time.perf_counter() - began, time.process_time() - cpu
                dist.barrier(group.channel)
                if i >= 2:
                    found[side].append(Round(took, cpu, sent_bytes() - sent))
        size = sum(p.numel() * p.element_size() for p in made(case).parameters())
        pipe.send({"gradient_bytes": size, **found})
    finally:
        dist.destroy_process_group()


def made(case: Case) -> nn.Module:
    torch.manual_seed(1)
    return Flat() if case.model == "communication" else Language()


def exact(case: Case, group: Group) -> Callable[[], None]:
    """Forward and backward of a micro-batch under DDP with the hook of a step, with its exchange."""
    model, plan = made(case), Plan.of(group.size, group.size, 1, drop_last=True, steps=1)
    wrapped = DistributedDataParallel(model, process_group=group.channel, **DDP)
    exchange = Exchange(group, group.size, (), 0)
    reduction = TreeReduction(group, plan, list(model.parameters()), exchange)
    wrapped.register_comm_hook(None, named_hook(reduction))

    def backward() -> None:
        total = wrapped()
        reduction.begin(plan.position(0), [], [])
        exchange.put(Loss(total, 1.0))
        exchange.close()
        total.backward()
        exchange.read(group.size)

    return backward


def native(case: Case, group: Group) -> Callable[[], None]:
    """The same under DDP as it is, which ends with the loss reduced, as a loop that logs it does."""
    wrapped = DistributedDataParallel(made(case), process_group=group.channel, **DDP)

    def backward() -> None:
        total = wrapped()
        total.backward()
        dist.all_reduce(total.detach(), group=group.channel)

    return backward


# --- in the driver ----------------------------------------------------------------------------------------


def measure(case: Case, rounds: int, mbit_per_s: float) -> dict[str, Any]:
    """A contest on a network of its own. RuntimeError where a rank is lost."""
    with switched(case.machines, mbit_per_s) as machines:
        ranks, pipes = [], []
        try:
            for rank in range(case.machines * case.ranks_each):
                here, there = forking().Pipe()
                name, _ = machines[rank // case.ranks_each]
                process = forking().Process(
                    target=serve, args=(rank, case, name, machines[0][1], rounds, there)
                )
                process.start()
                there.close()
                ranks.append(process)
                pipes.append(here)
            return summed_up(case, [answer(pipe) for pipe in pipes])
        finally:
            for process in ranks:
                process.join(10)
                process.kill()


def answer(pipe: Connection) -> dict[str, Any]:
    if not wait([pipe], ANSWER_S):
        raise RuntimeError(f"a rank said nothing for {ANSWER_S} s")
    try:
        found: dict[str, Any] = pipe.recv()
    except EOFError:
        raise RuntimeError("a rank was lost; what it said is above") from None
    return found


def summed_up(case: Case, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each side the slowest rank's time in the median round, and the bytes of the busiest machine."""
    least = 2 * (case.machines - 1) / case.machines * ranks[0]["gradient_bytes"]
    rounds = range(len(ranks[0]["exact"]))
    found: dict[str, dict[str, float]] = {}
    for side in ("exact", "native"):
        taken: list[list[Round]] = [[rank[side][i] for rank in ranks] for i in rounds]
        found[side] = {
            "ms": 1e3 * median(max(one.seconds for one in every) for every in taken),
            "cpu_ms": 1e3 * median(sum(one.cpu_s for one in every) for every in taken),
            "mb": median(max(one.sent for one in every) for every in taken) / 1e6,
        }
    return {
        **asdict(case),
        **found,
        "least_mb": least / 1e6,
        "bytes_ratio": 1e6 * found["exact"]["mb"] / least,
    }


HEADER = (
    "| ranks | machines | backward of | gloo, ms | exact, ms | gloo, CPU ms | exact, CPU ms | gloo, MB | exact, MB | least, MB | exact / least |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def line(found: dict[str, Any]) -> str:
    ranks, gloo, exact = found["machines"] * found["ranks_each"], found["native"], found["exact"]
    return (
        f"| {ranks} | {found['machines']} | {found['model']} | {gloo['ms']:.0f} | {exact['ms']:.0f} | {gloo['cpu_ms']:.0f} | "
        f"{exact['cpu_ms']:.0f} | {gloo['mb']:.1f} | {exact['mb']:.1f} | {found['least_mb']:.1f} | {found['bytes_ratio']:.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mbit", type=float, default=200.0, help="of each machine's link, each way")
    parser.add_argument("--only", default="", help="only the cases whose name has this, as in 'gpt 2x'")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    options = parser.parse_args()
    why_not = can_simulate(slow=True)
    if why_not is not None:
        print(f"slow network: skipped, {why_not}")
        return
    print(HEADER, flush=True)
    results = []
    for case in CASES:
        if options.only in case.name:
            results.append(measure(case, options.rounds, options.mbit))
            print(line(results[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"mbit_per_s": options.mbit, "cases": results}, indent=1))


if __name__ == "__main__":
    main()
