"""What an order costs before its first id: time and memory of the four orders and of torch's DistributedSampler.

Each is made in a process of its own, which then reads the ids of one micro-batch of 1024 in the middle of the epoch. The
time is the quickest of five for orders that take less than a second.

    python -m tests.benchmarks.orders [--quick]
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, DistributedSampler

from lockstep.data.order import epoch_order

ROW_GROUP = 1 << 20
"""Rows of a block: pyarrow's own default."""


class Sized(Dataset[int]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples


def order(shuffle: Any, samples: int) -> Callable[[int], object]:
    blocks = [min(ROW_GROUP, samples - start) for start in range(0, samples, ROW_GROUP)]

    def first(epoch: int) -> object:
        middle = samples // 2
        return epoch_order(17, epoch, samples, shuffle, blocks=blocks)[middle : middle + 8192 : 8]

    return first


def distributed_sampler(samples: int) -> Callable[[int], object]:
    sampler = DistributedSampler(Sized(samples), num_replicas=8, rank=0, seed=17)

    def first(epoch: int) -> object:
        sampler.set_epoch(epoch)
        return next(iter(sampler))

    return first


def memory_kib() -> int:
    """Memory now; the peak is counted from here on."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_kib() -> int:
    return _status("VmHWM")


def _status(field: str) -> int:
    return int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0])


def measure(which: str, samples: int, answer: Any) -> None:
    first = distributed_sampler(samples) if which == "DistributedSampler" else order(which, samples)
    if which in {"hashed", "blocks", "none"}:
        order(which, ROW_GROUP)(0)  # numpy's own first calls
    before, seconds = memory_kib(), []
    for epoch in range(5):
        began = time.perf_counter()
        ids = first(epoch)
        seconds.append(time.perf_counter() - began)
        del ids
        if seconds[0] > 1:
            break
    answer.put((min(seconds), max(0, peak_kib() - before)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="a hundredth of the samples where memory grows with them"
    )
    options = parser.parse_args()
    many = 10**6 if options.quick else 10**8
    context = multiprocessing.get_context("spawn")
    print(f"{'order':20} {'samples':>8} {'first ids':>12} {'memory':>12}")
    for which, samples in (
        ("hashed", 10**6), ("hashed", 10**9), ("hashed", 10**11), ("blocks", 10**6), ("blocks", 10**9), ("none", 10**9),
        ("full", many), ("DistributedSampler", many),
    ):  # fmt: skip
        answer = context.Queue()
        process = context.Process(target=measure, args=(which, samples, answer))
        process.start()
        seconds, kib = answer.get()
        process.join()
        shown = f"{1e3 * seconds:.2f} ms" if seconds < 1 else f"{seconds:.1f} s"
        print(f"{which:20} {samples:8.0e} {shown:>12} {kib / 1024:9.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
