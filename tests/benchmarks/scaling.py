"""What a run sends, writes and waits for on 8 … 4096 workers, on paper: the tables of docs/scaling.md.

The numbers of partial sums come from the plan's own ranges and nodes, the threshold of small buckets from the reduction,
the points of a step from the record's own code. What is sent follows `training.step.reduction`, and a test counts it there.

    python -m tests.benchmarks.scaling [--parameters 124e6] [--step-s 0.25] [--link-gbit 25] [--latency-us 20] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lockstep.data.order import SHARED_FROM, epoch_order
from lockstep.record.events.metrics import step_points
from lockstep.record.ledger.rows import StepRow
from lockstep.reduction_tree import SLICE, Stage, nodes, stages, worker_ranges
from lockstep.training.read_relay import PIECE, links
from lockstep.training.step.reduction import LATENCY_BYTES
from lockstep.training.step.step_exchange import message_length

WORKERS = (8, 16, 64, 256, 1024, 4096)
UNEVEN = ((8, 6), (64, 48), (256, 96), (1024, 1000), (4096, 3000))
"""(micro-batches, workers) that do not divide."""

RANKS_OF_A_NODE = 8

Kind = Literal["exact", "native"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the busiest rank sends in one step. `messages` go to single other ranks."""

    sums: int
    """k: partial sums of the rank that has the most."""
    bytes: int
    messages: int


@dataclass(frozen=True, slots=True)
class Link:
    """What joins two machines, and how much of a step's computation can hide what goes over it."""

    gbit_per_s: float
    latency_s: float
    hidden: float = 0.5
    """Buckets leave while the last micro-batch's backward goes on; this part of its time."""


def bucket_sizes(parameters: int, bucket_bytes: int, itemsize: int) -> list[int]:
    """Numbers in each bucket: DDP's first bucket is at most 1 MiB, the others `bucket_bytes`."""
    first = min(parameters, min(1 << 20, bucket_bytes) // itemsize)
    rest, each = parameters - first, max(1, bucket_bytes // itemsize)
    return [first, *([each] * (rest // each)), *([rest % each] if rest % each else [])]


def step_traffic(
    kind: Kind,
    micro_batches: int,
    workers: int,
    buckets: Sequence[int],
    *,
    itemsize: int = 4,
    latency_bytes: int = LATENCY_BYTES,
) -> Traffic:
    """The gradients of a step, as `training.step.reduction` sends them; `buckets` in numbers."""
    if workers == 1:
        return Traffic(1, 0, 0)
    ranges = worker_ranges(micro_batches, workers)
    in_stages = stages(ranges, micro_batches)
    k = max(len(nodes(own, micro_batches)) for own in ranges) if kind == "exact" else 1
    others, sent, messages = workers - 1, [0] * workers, [0] * workers
    for numbers, times in Counter(buckets).items():
        whole = k * others * numbers * itemsize
        for rank in range(workers):
            if whole <= latency_bytes or (kind == "exact" and workers == 2 and k == 1):
                own = len(nodes(ranges[rank], micro_batches)) if kind == "exact" else 1
                found = own * others * numbers, others
            elif kind == "exact":
                found = _staged(numbers, rank, in_stages, itemsize, latency_bytes)
            else:
                # A ring: each of 2 (W - 1) rounds passes a slice on.
                found = 2 * others * math.ceil(numbers / workers), 2 * others
            sent[rank] += times * found[0] * itemsize
            messages[rank] += times * found[1]
    return Traffic(k, max(sent), max(messages))


def _staged(
    numbers: int, rank: int, every: Sequence[Stage], itemsize: int, latency_bytes: int
) -> tuple[int, int]:
    """Numbers and messages that a rank sends for one large bucket: its sums in each stage, then its slice of the result."""
    sent, messages, length, largest = 0, 0, numbers, numbers
    for stage in every:
        sums, others, place = len(stage.nodes[stage.block(rank)]), stage.ways - 1, stage.position(rank)
        if stage.sends_whole(largest * itemsize, latency_bytes):
            return sent + sums * others * length, messages + (others if sums and length else 0)
        width = _width(length, stage.ways)
        own = min(max(length - place * width, 0), width)
        filled = math.ceil(length / width) if length else 0
        sent += sums * (length - own) + others * own
        messages += (filled - (own > 0) if sums else 0) + (others if own else 0)
        length, largest = own, min(largest, _width(largest, stage.ways))
    return sent, messages


def _width(length: int, ways: int) -> int:
    return math.ceil(length / (ways * SLICE)) * SLICE


def exchange_traffic(micro_batches: int, workers: int, *, parts: int = 1, flags: int = 0) -> Traffic:
    """The step's one exchange where it goes by itself: what `training.step.step_exchange` sends to each other rank."""
    rows = max(map(len, worker_ranges(micro_batches, workers)))
    return Traffic(1, message_length(rows, parts, flags) * 8 * (workers - 1), workers - 1)


def efficiency(compute_s: float, traffic: Sequence[Traffic], link: Link) -> float:
    """Computation over the whole step. `compute_s`: the forward and backward passes of a worker's micro-batches."""
    sent_s = sum(t.bytes * 8 / (link.gbit_per_s * 1e9) + t.messages * link.latency_s for t in traffic)
    return compute_s / (compute_s + max(0.0, sent_s - link.hidden * compute_s))


def points_of_a_step() -> int:
    """Metric points that a step of a job with one part becomes."""
    row = StepRow(**_ROW)
    return len(list(step_points(row, None, scaled=False)))


_ROW: dict[str, Any] = {
    "step": 1, "epoch": 0, "loss": 1.0, "weight": 1.0, "lr": 0.1, "grad_norm": 1.0, "clipped_norm": 1.0, "scale": 1.0,
    "skipped": False, "samples": 8, "parts": {"accuracy": 0.5}, "step_s": 0.1, "data_wait_s": 0.0, "attempt": 1,
    "wall_clock": 0.0,
}  # fmt: skip


def resume_traffic(workers: int, state_bytes: float, link: Link) -> dict[str, Any]:
    """Who reads and sends what where so many workers, `RANKS_OF_A_NODE` on each, are handed a checkpoint. The time is that of the network alone."""
    nodes = [str(rank // RANKS_OF_A_NODE) for rank in range(workers)]
    tree = [links(nodes, rank) for rank in range(workers)]
    sent = Counter(
        nodes[rank]
        for rank, (_, targets) in enumerate(tree)
        for target in targets
        if nodes[target] != nodes[rank]
    )
    hops = [0] * workers
    for rank in range(1, workers):
        source = tree[rank][0]
        hops[rank] = 0 if source is None else hops[source] + 1
    most = max(sent.values(), default=0)
    pieces = most * (state_bytes + max(hops) * PIECE)
    return {
        "workers": workers,
        "nodes": len(set(nodes)),
        "read_gb": round(state_bytes / 1e9, 2),
        "read_by_each_gb": round(workers * state_bytes / 1e9, 1),
        "node_sends_gb": round(most * state_bytes / 1e9, 2),
        "hops": max(hops),
        "network_s": round(pieces * 8 / (link.gbit_per_s * 1e9), 2),
    }


def sampler_seconds(samples: int) -> float:
    """Time of an epoch's permutation, which every rank draws, or one of a node from `SHARED_FROM` samples on."""
    start = time.perf_counter()
    epoch_order(0, 0, samples, "full")
    return time.perf_counter() - start


def planning_seconds(micro_batches: int, workers: int) -> float:
    """Time to choose the ranges, once a run."""
    start = time.perf_counter()
    worker_ranges.__wrapped__(micro_batches, workers)
    return time.perf_counter() - start


def tables(parameters: int, step_s: float, link: Link) -> dict[str, list[dict[str, Any]]]:
    """All that the page shows."""
    buckets = bucket_sizes(parameters, 25 << 20, 4)
    pairs = [(w, w) for w in WORKERS] + list(UNEVEN)
    sent = []
    for micro_batches, workers in pairs:
        exact = step_traffic("exact", micro_batches, workers, buckets)
        native = step_traffic("native", micro_batches, workers, buckets)
        exchange = exchange_traffic(micro_batches, workers)
        # Weak scaling: every worker computes for step_s, whatever the number of workers.
        sent.append(
            {
                "workers": workers,
                "micro_batches": micro_batches,
                "k": exact.sums,
                "exact_mb": round(exact.bytes / 1e6, 1),
                "native_mb": round(native.bytes / 1e6, 1),
                "messages": exact.messages + exchange.messages,
                "exchange_kb": round(exchange.bytes / 1e3, 1),
                "exact_efficiency": round(efficiency(step_s, [exact, exchange], link), 3),
                "native_efficiency": round(efficiency(step_s, [native, exchange], link), 3),
            }
        )
    state = 3 * parameters * 4  # weights and Adam's two moments
    checkpoints = [
        {"every_s": every, "gb": round(state / 1e9, 2), "mb_per_s": round(state / 1e6 / every, 1)}
        for every in (60, 300, 1800)
    ]
    resume = [resume_traffic(workers, state, link) for workers in WORKERS]
    points = points_of_a_step()
    record = [{"steps_per_s": rate, "points_per_s": points * rate} for rate in (1, 10, 100, 1000)]
    sampler = [
        {
            "samples": n,
            "seconds": round(sampler_seconds(n), 4),
            "mb": n * 8 / 1e6,
            "held by": "each rank" if n < SHARED_FROM else "each node, once",
        }
        for n in (10**5, 10**6, 10**7)
    ]
    planning = [
        {"micro_batches": m, "workers": w, "ms": round(planning_seconds(m, w) * 1e3, 1)}
        for m, w in pairs
        if w >= 96
    ]
    return {
        "step": sent,
        "checkpoint": checkpoints,
        "resume": resume,
        "record": record,
        "sampler": sampler,
        "planning": planning,
    }


def as_markdown(found: dict[str, list[dict[str, Any]]]) -> str:
    """The tables as the page has them."""
    lines = []
    for name, rows in found.items():
        lines += [f"### {name}", "", "| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
        lines += ["| " + " | ".join(str(value) for value in row.values()) + " |" for row in rows]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--parameters", type=float, default=124e6)
    parser.add_argument(
        "--step-s", type=float, default=0.25, help="computation of a worker in a step, as measured"
    )
    parser.add_argument("--link-gbit", type=float, default=25.0)
    parser.add_argument("--latency-us", type=float, default=20.0, help="of one message to one other rank")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    link = Link(given.link_gbit, given.latency_us * 1e-6)
    found = tables(int(given.parameters), given.step_s, link)
    print(json.dumps({"link": asdict(link), **found}) if given.json else as_markdown(found))


if __name__ == "__main__":
    main()
